"""Decoder: a decoder-only transformer with RMSNorm before every layer, rotary positions and SwiGLU, and its
presets.

The benchmarks load this file without the package, to train the same model by other means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

_ROTARY_BASE = 10_000.0
_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes of a decoder."""

    width: int
    """Number of elements in a token's vector, the dimension of the residual stream."""
    layers: int
    heads: int
    """Number of attention heads. Each head has width / heads elements, which must be an even integer."""
    hidden: int
    """Number of elements in the hidden vector of a feed-forward layer."""
    vocabulary: int = 256
    """Number of distinct tokens; 256 for bytes."""

    @property
    def parameters(self) -> int:
        """Number of parameters of a decoder of these sizes."""
        layer = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + 2 * self.vocabulary * self.width + self.width


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Apply the layer to `x`, (batch, seq, width). rotation: the result of Decoder.rotation."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class FeedForward(nn.Module):
    """Feed-forward layer: SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `x`, (..., width)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.out(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """Transformer block: adds the output of attention and then of a feed-forward layer to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Apply the block to `x`, (batch, seq, width). rotation: the result of Decoder.rotation."""
        x = x + self.attention(self.attention_norm(x), rotation)
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    """A decoder-only transformer. A call with targets returns the loss; a call without targets returns the
    logits.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module. As in GPT-2, the deeper the model, the smaller the weights of output layers,
        because their outputs are added to the residual stream.
        """
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=_INIT_STD)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, (Attention, FeedForward)):
            nn.init.normal_(module.out.weight, std=_INIT_STD / math.sqrt(2 * self.config.layers))

    def rotation(self, seq: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cosines, sines) of rotary positions (arXiv 2104.09864), each (seq, width / heads / 2).

        like: a tensor of the wanted dtype, on the wanted device.
        """
        half = self.config.width // self.config.heads // 2
        exponents = torch.arange(half, dtype=torch.float32, device=like.device) / half
        positions = torch.arange(seq, dtype=torch.float32, device=like.device)
        angles = torch.outer(positions, torch.pow(_ROTARY_BASE, -exponents))
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean cross-entropy, a float32 scalar in nats per token, if `targets` are given.

        Without targets the result is the logits, (batch, seq, vocabulary). tokens: int64 (batch, seq).
        targets: the token that follows each token, int64 (batch, seq).
        """
        x = self.embedding(tokens)
        rotation = self.rotation(tokens.shape[1], x)
        for block in self.blocks:
            x = block(x, rotation)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


@dataclass(frozen=True)
class Preset:
    """A decoder over bytes, and its default learning rate."""

    decoder: DecoderConfig
    learning_rate: float


def _preset(width: int, layers: int, heads: int, hidden: int, learning_rate: float) -> Preset:
    return Preset(DecoderConfig(width=width, layers=layers, heads=heads, hidden=hidden), learning_rate)


PRESETS = {
    "10m": _preset(384, 6, 6, 896, 2e-3),
    "30m": _preset(512, 9, 8, 1472, 1.5e-3),
    "124m": _preset(768, 18, 12, 1952, 6e-4),
    "309m": _preset(1024, 24, 16, 2816, 4e-4),
    "926m": _preset(2048, 18, 16, 5632, 3e-4),
    "4b": _preset(3072, 36, 24, 7936, 2e-4),
    "7b": _preset(4096, 34, 32, 11008, 1.5e-4),
    "14b": _preset(5120, 44, 40, 13824, 1e-4),
}
"""Presets by name. 309m and 926m have the shapes of the models with which DeepSpeed was measured."""
