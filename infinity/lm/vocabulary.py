"""Vocabulary: the tokens of a model, which are bytes or the tokens of a tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from infinity.config import format_size
from infinity.errors import ConfigError, storage_errors
from infinity.lm.text import Text

_BYTES_PER_TOKEN = 6
"""Bytes of text that `Tokens.window` reads first for each token of a window: a guess of a token's length.

The guess is high on purpose. If the bytes have too few tokens, twice as many bytes are read, and all of them
are split into tokens again.
"""

_LONGEST_STRETCH = 16 << 20
"""Greatest number of bytes of text that one call of `Tokens.window` reads."""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""The continuation bytes of UTF-8, with which no character begins."""


class Vocabulary(Protocol):
    """Conversion of text to tokens and back."""

    def window(self, text: Text, start: int, length: int) -> torch.Tensor:
        """Read `length` tokens of the text from byte position `start` on, and return them: int64 (length,).

        `start` lies in one part of the text, the training part or the held-out part. All tokens are taken
        from this part. Near the end of the part, the last `length` tokens of the part are returned. Raises
        ConfigError if the part has fewer than `length` tokens, and StorageError if a file of the text cannot
        be read any more.
        """

    def encode(self, text: str) -> list[int]:
        """Convert `text` to tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text. U+FFFD stands for tokens that are not valid text."""

    def save(self, directory: str) -> None:
        """Write the tokenizer's files, if there are any, beside an exported model. Raises StorageError."""


class Bytes:
    """The vocabulary whose 256 tokens are the bytes."""

    def window(self, text: Text, start: int, length: int) -> torch.Tensor:
        """Read a window of `length` bytes; see Vocabulary.window."""
        part = part_of(text, start)
        if length > len(part):
            raise too_short(part, length, len(part))
        found = bytearray(text.read(min(start, part.stop - length), length))
        return torch.frombuffer(found, dtype=torch.uint8).long()

    def encode(self, text: str) -> list[int]:
        """Convert `text` to tokens, the bytes of its UTF-8."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, the bytes of a text in UTF-8. Invalid bytes become U+FFFD.

        So do tokens above 255, which a model with a larger vocabulary may produce.
        """
        return b"".join(bytes([each]) if each < 256 else b"\xff" for each in tokens).decode(
            "utf-8", errors="replace"
        )

    def save(self, directory: str) -> None:
        """Write nothing: a byte is its own token."""


class Tokens:
    """The vocabulary of a transformers tokenizer.

    No special tokens are added to a window, because the text continues before and after the window.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        """tokenizer: a tokenizer of the library transformers. size: number of tokens that the model knows."""
        self._tokenizer = tokenizer
        self._size = size

    def window(self, text: Text, start: int, length: int) -> torch.Tensor:
        """Read a window of `length` tokens; see Vocabulary.window."""
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
        """Convert `text` to tokens. Raises ConfigError if the model does not know one of them."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if tokens and max(tokens) >= self._size:
            raise ConfigError(
                f"The tokenizer gives token {max(tokens)}, and the model knows {self._size} tokens only.",
                "Give the tokenizer that belongs to the model.",
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text; see Vocabulary.decode."""
        text: str = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        return text

    def save(self, directory: str) -> None:
        """Write the tokenizer's files, the chat template too; see Vocabulary.save."""
        with storage_errors("write the tokenizer to", directory):
            self._tokenizer.save_pretrained(directory)


def part_of(text: Text, start: int) -> range:
    """Return the part of the text in which byte position `start` lies: `text.train` or `text.held_out`."""
    return text.train if start in text.train else text.held_out


def too_short(part: range, length: int, found: int) -> ConfigError:
    """Make the error that a window of `length` tokens was asked for, but that `part` has only `found` tokens.

    part: a range of byte positions in the text.
    """
    return ConfigError(
        f"A window of {length} tokens was asked for, and {format_size(len(part))} of text have {found} only.",
        "Give more text with --data, or a smaller --seq.",
    )


def decode_stretch(data: bytes) -> str:
    """Decode UTF-8 bytes that were cut out of a text at any position.

    An incomplete character at either end is dropped; other invalid bytes become U+FFFD.
    """
    head = data[:3].lstrip(_CONTINUATION)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(head + data[3:])
