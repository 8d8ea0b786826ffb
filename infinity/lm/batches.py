"""Batches: the data of a run, a pure function of (seed, step, micro-batch), so resuming needs no state."""

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
    """Batches of windows of a text, for training and for held-out loss."""

    def __init__(self, text: Text, language_model: LanguageModel, *, batch: int, seq: int, seed: int) -> None:
        """batch: windows in a batch. seq: tokens that each window predicts.

        Raises ConfigError for numbers below 1, and for a window that is longer than the model's context, or
        than the held-out part of the text.
        """
        if batch < 1 or seq < 1:
            raise ConfigError(f"A batch of {batch} x {seq} tokens was asked for.", "Give numbers from 1 on.")
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
        # Raises if the held-out part, the smaller one, is too small.
        self._vocabulary.window(text, text.held_out.start, self._length)

    def training(self, step: int, micro: int) -> torch.Tensor:
        """Windows that begin at random positions of `text.train`: int64 (batch, seq + 1), on the CPU.

        They are the same on every machine with the same text. Raises StorageError as Text.read does.
        """
        part = self._text.train
        # A tokenizer's token may have any number of bytes; `window` begins earlier if it must.
        room = max(1, len(part) - self._length + 1)
        return self._windows(
            [part.start + _draw(self._seed, step, micro, row) % room for row in range(self._batch)]
        )

    def held_out(self) -> list[torch.Tensor]:
        """Batches like `training`'s, spread evenly over `text.held_out`, independent of the seed.

        At most 8 batches with at most 16 Ki tokens in all, but at least one.
        """
        part = self._text.held_out
        tokens = self._batch * (self._length - 1)
        count = max(1, min(_HELD_OUT_BATCHES, _HELD_OUT_TOKENS // tokens))
        rows = count * self._batch
        room = max(0, len(part) - self._length)
        starts = [part.start + room * row // max(1, rows - 1) for row in range(rows)]
        return [self._windows(starts[row : row + self._batch]) for row in range(0, rows, self._batch)]

    def _windows(self, starts: list[int]) -> torch.Tensor:
        return torch.stack([self._vocabulary.window(self._text, start, self._length) for start in starts])


def _draw(*key: int) -> int:
    """64 random bits that depend on `key` alone, not on a generator's state or version."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
