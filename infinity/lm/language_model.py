"""Language model: a model with its loss and its vocabulary, looked up by name."""

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
    """Name of the model in printed text."""
    vocabulary: Vocabulary
    """The vocabulary of the model's tokens."""
    parameters: int
    """Number of parameters; a tied parameter counts once."""
    model: nn.Module
    """The module, on the meta device until `infinity.offload` fills it."""
    weights: str | None
    """Directory of the safetensors files that fill the model; None if the model's initialisers fill it."""
    learning_rate: float
    """Learning rate that a run takes by default."""
    longest: int | None
    """Greatest number of tokens that the model takes as context; None if there is no limit."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the mean cross-entropy of predicting the next token, in nats per token: a float32 scalar.

        tokens: int64 (batch, seq + 1), on the model's device.
        """

    def example_inputs(
        self, batch: int, seq: int, device: torch.device | str
    ) -> tuple[Any, ...] | Mapping[str, Any]:
        """Make arguments for a call of `model`, for `example_inputs` of infinity.plan and infinity.offload.

        They are a tuple of positional arguments or a mapping of keyword arguments, with the shapes and dtypes
        of the arguments with which `loss` calls the model. batch: number of sequences. seq: number of
        tokens predicted in a sequence. device: where the tensors are made.
        """

    def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Compute the logits of the token after `position` (from 0): float32 (batch, vocabulary).

        tokens: int64 (batch, seq); tokens after `position` do not affect the result.
        """


class PresetModel:
    """A LanguageModel made of the decoder of a preset. Its tokens are bytes."""

    def __init__(self, name: str) -> None:
        """Build the decoder on the meta device. name: a key of `infinity.lm.presets.PRESETS`."""
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
        """Compute the mean cross-entropy of predicting the next token; see LanguageModel.loss."""
        found: torch.Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
        return found

    def example_inputs(self, batch: int, seq: int, device: torch.device | str) -> tuple[Any, ...]:
        """Make arguments for a call of the decoder; see LanguageModel.example_inputs."""
        tokens = torch.zeros(batch, seq, dtype=torch.int64, device=device)
        return tokens, tokens

    def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Compute the logits of the token after `position`; see LanguageModel.next_token_logits."""
        logits: torch.Tensor = self.model(tokens)
        return logits[:, position].float()


def language_model(name: str) -> LanguageModel:
    """Make the language model `name`: the name of a preset, or a directory of a transformers model.

    Raises ConfigError if `name` is neither, and if the directory cannot be used.
    """
    if name in PRESETS:
        return PresetModel(name)
    if os.path.isdir(name):
        return HuggingFaceModel(name)
    raise ConfigError(
        f"There is no model {name!r}.",
        f"Give one of {', '.join(PRESETS)}, or a directory with a config.json of transformers.",
    )
