"""What is trained: a model with its loss and its tokens, by name."""

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
    """For people."""
    vocabulary: Vocabulary
    """Of the tokens that it takes."""
    parameters: int
    """How many; tied ones count once."""
    model: nn.Module
    """On the meta device until `infinity.offload` fills it."""
    weights: str | None
    """Directory of safetensors to fill the model from. None: its own initialisers do."""
    learning_rate: float
    """Where nobody gives one."""
    longest: int | None
    """Most tokens of context. None: no limit."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 (batch, seq + 1), on the model's device. The mean cross-entropy of each next token,
        in nats: a float32 scalar."""

    def example_inputs(
        self, batch: int, seq: int, device: torch.device | str
    ) -> tuple[Any, ...] | Mapping[str, Any]:
        """Arguments like those with which `loss` calls the model, for infinity.plan and infinity.offload."""

    def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """tokens: int64 (batch, seq). float32 (batch, vocabulary), for what comes after `position` (from 0);
        the model sees nothing of the tokens behind it."""


class PresetModel:
    """A preset's decoder, over bytes."""

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
    """A preset by its name, or a transformers model by its directory.

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
