"""Batches: the data of a training run, a pure function of the seed, the step and the micro-batch.

A run that is resumed therefore needs no saved state for its data.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from infinity.errors import ConfigError
from infinity.lm.text import Text

if TYPE_CHECKING:
    from infinity.lm.language_model import LanguageModel

_HELD_OUT_BATCHES = 8
_HELD_OUT_TOKENS = 16 << 10


class Batches:
    """Makes batches of token windows from a text, for training and for the loss on held-out text."""

    def __init__(self, text: Text, language_model: LanguageModel, *, batch: int, seq: int, seed: int) -> None:
        """text: where the windows are taken from. language_model: its vocabulary splits the text into tokens.

        batch: number of windows in a batch. seq: number of tokens that are predicted in a window; a window
        has seq + 1 tokens. seed: seed of the positions of the training windows.

        Raises ConfigError if `batch` or `seq` is below 1, if `seq` is more than the model's longest context,
        or if the held-out part of the text is shorter than a window.
        """
        if batch < 1 or seq < 1:
            raise ConfigError(
                f"A batch of {batch} x {seq} tokens was asked for.", "Give at least 1 for both."
            )
        if language_model.longest is not None and seq > language_model.longest:
            raise ConfigError(
                f"{language_model.name} takes {language_model.longest} tokens at most, and {seq} were asked "
                "for.",
                f"Give --seq {language_model.longest} or less.",
            )
        self._text = text
        self._vocabulary = language_model.vocabulary
        self._batch = batch
        self._length = seq + 1
        self._seed = seed
        # Raises if a window does not fit the held-out part, which is the smaller part.
        self._vocabulary.window(text, text.held_out.start, self._length)

    @property
    def tokens(self) -> int:
        """Number of tokens that a batch predicts."""
        return self._batch * (self._length - 1)

    def training(self, step: int, micro: int) -> torch.Tensor:
        """Read the training batch of a step and micro-batch: int64 (batch, seq + 1), on the CPU.

        The windows begin at random positions in the training part of the text. The same text, seed, step and
        micro-batch give the same batch on every machine. Raises StorageError if a file of the text cannot be
        read any more.
        """
        part = self._text.train
        # A token may have any number of bytes; `window` begins earlier if too few bytes follow.
        room = max(1, len(part) - self._length + 1)
        return self._windows(
            [part.start + _draw(self._seed, step, micro, row) % room for row in range(self._batch)]
        )

    def held_out(self) -> list[torch.Tensor]:
        """Read batches of windows spread evenly over the held-out part of the text, the same for every seed.

        A batch is int64 (batch, seq + 1), on the CPU. There are at most 8 batches, which predict at most
        16 Ki tokens together. There is at least one batch, even if it predicts more tokens.
        """
        part = self._text.held_out
        count = max(1, min(_HELD_OUT_BATCHES, _HELD_OUT_TOKENS // self.tokens))
        rows = count * self._batch
        room = max(0, len(part) - self._length)
        starts = [part.start + room * row // max(1, rows - 1) for row in range(rows)]
        return [self._windows(starts[row : row + self._batch]) for row in range(0, rows, self._batch)]

    def _windows(self, starts: list[int]) -> torch.Tensor:
        return torch.stack([self._vocabulary.window(self._text, start, self._length) for start in starts])


def _draw(*key: int) -> int:
    """A pseudo-random 64-bit number that depends on `key` alone: a hash of its numbers."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
