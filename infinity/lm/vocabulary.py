"""What tokens are: bytes, or what a tokenizer makes of text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from infinity.config import format_size
from infinity.errors import ConfigError
from infinity.lm.text import Text

_BYTES_PER_TOKEN = 6
"""First guess, rather too many: too few cost a second pass."""

_LONGEST_STRETCH = 16 << 20
"""Bytes that are searched for a window's tokens before giving up."""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""The bytes of UTF-8 that no character begins with."""


class Vocabulary(Protocol):
    """Tokens of text and text of tokens."""

    def window(self, text: Text, start: int, length: int) -> torch.Tensor:
        """int64 (length,): the tokens from byte position `start` on, or from further back where the part of
        the text that `start` is in (to train on, or held out) would end too soon: no window leaves its part.

        Raises ConfigError where the part has too few tokens, StorageError as Text.read does.
        """

    def encode(self, text: str) -> list[int]:
        """Its tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, with U+FFFD for what is no text."""


class Bytes:
    """256 tokens, the bytes."""

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
        """See Vocabulary. Tokens beyond the bytes, which a model may have, are no text."""
        return b"".join(bytes([each]) if each < 256 else b"\xff" for each in tokens).decode(
            "utf-8", errors="replace"
        )


class Tokens:
    """What a transformers tokenizer makes. Windows hold no special tokens: text goes on at both ends."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        """size: how many tokens the model knows."""
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
                # Where it had to begin further back, the text from `start` on is at the end.
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
    """The part that `start` is in."""
    return text.train if start in text.train else text.held_out


def too_short(part: range, length: int, found: int) -> ConfigError:
    """For a window that does not fit."""
    return ConfigError(
        f"A window of {length} tokens was asked for, and {format_size(len(part))} of text have {found}.",
        "Give more text with --data, or a smaller --seq.",
    )


def decode_stretch(data: bytes) -> str:
    """UTF-8 cut anywhere: half a character at either end is dropped, other broken ones are U+FFFD."""
    head = data[:3].lstrip(_CONTINUATION)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(head + data[3:])
