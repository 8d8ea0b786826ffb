"""Vocabulary: the tokens of a model, which are bytes or those of a tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from infinity.config import format_size
from infinity.errors import ConfigError
from infinity.lm.text import Text

_BYTES_PER_TOKEN = 6
"""First guess of the bytes to read for a token; rather too many, because too few cost a second pass."""

_LONGEST_STRETCH = 16 << 20
"""Most bytes that are searched for a window's tokens."""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""The bytes with which no character of UTF-8 begins."""


class Vocabulary(Protocol):
    """Conversion of text to tokens and back."""

    def window(self, text: Text, start: int, length: int) -> torch.Tensor:
        """`length` tokens from byte position `start` on: int64 (length,).

        No window leaves the part of the text (to train on, or held out) that `start` is in: a window begins
        earlier if its part would end too soon. Raises ConfigError if the part has too few tokens,
        StorageError as Text.read does.
        """

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with U+FFFD for those that are not valid text."""


class Bytes:
    """The vocabulary of 256 tokens, the bytes."""

    def window(self, text: Text, start: int, length: int) -> torch.Tensor:
        """See Vocabulary."""
        part = part_of(text, start)
        if length > len(part):
            raise too_short(part, length, len(part))
        found = bytearray(text.read(min(start, part.stop - length), length))
        return torch.frombuffer(found, dtype=torch.uint8).long()

    def encode(self, text: str) -> list[int]:
        """See Vocabulary."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """See Vocabulary. Tokens above 255, which a model may have, are not valid text."""
        return b"".join(bytes([each]) if each < 256 else b"\xff" for each in tokens).decode(
            "utf-8", errors="replace"
        )


class Tokens:
    """The vocabulary of a transformers tokenizer.

    Windows have no special tokens, because the text goes on at both ends.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        """size: number of tokens that the model knows."""
        self._tokenizer = tokenizer
        self._size = size

    def window(self, text: Text, start: int, length: int) -> torch.Tensor:
        """See Vocabulary."""
        part = part_of(text, start)
        most = min(len(part), _LONGEST_STRETCH)
        stretch = min(most, _BYTES_PER_TOKEN * length)
        while True:
            begin = min(start, part.stop - stretch)
            tokens = self.encode(decode_stretch(text.read(begin, stretch)))
            if len(tokens) >= length:
                # If the stretch had to begin before `start`, the text from `start` on is at its end.
                found = tokens[:length] if begin == start else tokens[-length:]
                return torch.tensor(found, dtype=torch.int64)
            if stretch == most:
                raise too_short(range(most), length, len(tokens))
            stretch = min(most, 2 * stretch)

    def encode(self, text: str) -> list[int]:
        """See Vocabulary. Raises ConfigError for a token that the model does not know."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if tokens and max(tokens) >= self._size:
            raise ConfigError(
                f"The tokenizer gives token {max(tokens)}, and the model knows {self._size}.",
                "Give the tokenizer that belongs to the model.",
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """See Vocabulary."""
        text: str = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        return text


def part_of(text: Text, start: int) -> range:
    """The part of the text, to train on or held out, that byte `start` is in."""
    return text.train if start in text.train else text.held_out


def too_short(part: range, length: int, found: int) -> ConfigError:
    """The error for a window that does not fit its part."""
    return ConfigError(
        f"A window of {length} tokens was asked for, and {format_size(len(part))} of text have {found}.",
        "Give more text with --data, or a smaller --seq.",
    )


def decode_stretch(data: bytes) -> str:
    """The text of UTF-8 bytes cut anywhere.

    An incomplete character at either end is dropped; other invalid bytes become U+FFFD.
    """
    head = data[:3].lstrip(_CONTINUATION)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(head + data[3:])
