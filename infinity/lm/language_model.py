"""Language model: a model with its loss and its vocabulary, found by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.lm.decoder import Decoder
from infinity.lm.huggingface import HuggingFaceModel
from infinity.lm.presets import PRESETS
from infinity.lm.vocabulary import Bytes, Vocabulary


class LanguageModel(Protocol):
    """A language model to be trained, with its vocabulary."""

    name: str
    """The name that is printed."""
    vocabulary: Vocabulary
    """The vocabulary of the model's tokens."""
    parameters: int
    """Number of parameters; tied ones count once."""
    model: nn.Module
    """The module, on the meta device until `infinity.offload` fills it."""
    weights: str | None
    """Directory of safetensors files that fill the model. None: its own initialisers fill it."""
    learning_rate: float
    """The default learning rate."""
    longest: int | None
    """Most tokens of context. None: no limit."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the next tokens, in nats: a float32 scalar.

        tokens: int64 (batch, seq + 1), on the model's device.
        """

    def example_inputs(
        self, batch: int, seq: int, device: torch.device | str
    ) -> tuple[Any, ...] | Mapping[str, Any]:
        """Example arguments of the model's call in `loss`, for infinity.plan and infinity.offload."""

    def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Logits of the token after `position` (from 0): float32 (batch, vocabulary).

        tokens: int64 (batch, seq); those after `position` do not affect the result.
        """


class PresetModel:
    """The decoder of a preset, over bytes."""

    def __init__(self, name: str) -> None:
        """name: one of PRESETS."""
        preset = PRESETS[name]
        self.name = name
        self.parameters = preset.decoder.parameters
        with torch.device("meta"):
            self.model: nn.Module = Decoder(preset.decoder)
        self.weights: str | None = None
        self.learning_rate = preset.learning_rate
        self.longest: int | None = None
        self.vocabulary: Vocabulary = Bytes()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """See LanguageModel."""
        found: torch.Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
        return found

    def example_inputs(self, batch: int, seq: int, device: torch.device | str) -> tuple[Any, ...]:
        """See LanguageModel."""
        tokens = torch.zeros(batch, seq, dtype=torch.int64, device=device)
        return tokens, tokens

    def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """See LanguageModel."""
        logits: torch.Tensor = self.model(tokens)
        return logits[:, position].float()


def language_model(name: str) -> LanguageModel:
    """The language model of a preset's name, or of a transformers model's directory.

    Raises ConfigError for a name that is neither, and for a directory that cannot be used.
    """
    if name in PRESETS:
        return PresetModel(name)
    if os.path.isdir(name):
        return HuggingFaceModel(name)
    raise ConfigError(
        f"There is no model {name!r}.",
        f"Give one of {', '.join(PRESETS)}, or a directory with a config.json of transformers.",
    )
