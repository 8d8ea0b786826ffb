"""Decoder: a decoder-only transformer with RMSNorm before each half of a block, rotary positions, SwiGLU."""

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
    """Elements of a token's vector."""
    layers: int
    heads: int
    """Attention heads; `width` is an even multiple of their number."""
    hidden: int
    """Elements inside the feed-forward half."""
    vocabulary: int = 256
    """Number of distinct tokens; 256 for bytes."""

    @property
    def parameters(self) -> int:
        """Number of the decoder's parameters."""
        layer = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + 2 * self.vocabulary * self.width + self.width


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: (batch, seq, width); rotation: see Decoder.rotation."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., width)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.out(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: (batch, seq, width)."""
        x = x + self.attention(self.attention_norm(x), rotation)
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    """The whole model. A call returns the loss, or logits without targets."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw normal weights; as in GPT-2, those that add to the residual stream are scaled by the depth."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=_INIT_STD)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, (Attention, FeedForward)):
            nn.init.normal_(module.out.weight, std=_INIT_STD / math.sqrt(2 * self.config.layers))

    def rotation(self, seq: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each (seq, width / heads / 2), of rotary positions (arXiv 2104.09864)."""
        half = self.config.width // self.config.heads // 2
        exponents = torch.arange(half, dtype=torch.float32, device=like.device) / half
        positions = torch.arange(seq, dtype=torch.float32, device=like.device)
        angles = torch.outer(positions, torch.pow(_ROTARY_BASE, -exponents))
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The mean cross-entropy (float32 scalar, in nats per token); without targets, the logits, which are
        (batch, seq, vocabulary). tokens, targets: int64 (batch, seq)."""
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
