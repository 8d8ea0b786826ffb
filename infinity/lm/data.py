"""Data: the bytes of text files, the tokens that a vocabulary cuts out of them, and the batches of a run.

A batch is a pure function of the seed, the step and the micro-batch, so that a resumed run needs no saved
state for its data. Bytes are read from the files on demand.
"""

from __future__ import annotations

import bisect
import codecs
import contextlib
import hashlib
import os
import sysconfig
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.config import format_size
from infinity.errors import ConfigError, StorageError, storage_errors

if TYPE_CHECKING:
    from infinity.lm.model import LanguageModel

SEPARATOR = b"\n"
"""Bytes between the contents of two files."""

_SNIFFED = 8 << 10
"""Number of first bytes of a file; if there is no NUL among them, the file is text."""

_HELD_OUT, _LEAST_HELD_OUT = 20, 2 << 10
"""The last 1 / _HELD_OUT of the text's bytes, at least _LEAST_HELD_OUT of them, is never trained on."""
_HELD_OUT_BATCHES = 8
_HELD_OUT_TOKENS = 16 << 10

_STRETCHES, _STRETCH = 64, 4 << 10
"""Number of the stretches of a text that its digest covers, and the bytes of one."""

_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders in the standard library's folder that are skipped: they have third-party code, tests or no text."""

_BYTES_PER_TOKEN, _LONGEST_STRETCH = 6, 16 << 20
"""Bytes that `Tokens.window` reads for each token at first, and the most bytes that it reads in total. The
former is a high guess, because a stretch with too few tokens has to be read and split again.
"""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""The continuation bytes of UTF-8, with which no character begins."""

_OTHER_DATA = "Give files or folders of text with --data."


# --- text -------------------------------------------------------------------------------------------------


class Text:
    """The bytes of several files as one sequence. Only the names and sizes of the files are in memory."""

    def __init__(self, paths: Sequence[str], sizes: Sequence[int]) -> None:
        """paths: regular files, none of them empty. sizes: bytes of each."""
        self._paths = paths
        self._starts = array("q", [0])
        for size in sizes:
            self._starts.append(self._starts[-1] + size + len(SEPARATOR))
        self.nbytes = max(0, self._starts[-1] - len(SEPARATOR))
        split = self.nbytes - self.nbytes // _HELD_OUT
        self.train = range(split)
        self.held_out = range(split, self.nbytes)
        """Byte positions of the text to train on (`train`), and of the last twentieth, which is never trained
        on.
        """

    @property
    def files(self) -> int:
        return len(self._paths)

    def part(self, start: int) -> range:
        """`train` or `held_out`, whichever contains the byte position `start`."""
        return self.train if start in self.train else self.held_out

    def digest(self) -> str:
        """A hash of the files' sizes and of 64 stretches of 4 KiB. Raises StorageError as `read` does."""
        found = hashlib.blake2b(self._starts.tobytes(), digest_size=16)
        count = min(_STRETCH, self.nbytes)
        for number in range(_STRETCHES):
            found.update(self.read((self.nbytes - count) * number // (_STRETCHES - 1), count))
        return found.hexdigest()

    def read(self, start: int, count: int) -> bytes:
        """Read `count` bytes of the sequence from position `start` on, across the ends of files.

        Raises StorageError if a file cannot be read any more or has become shorter.
        """
        assert 0 <= start <= start + count <= self.nbytes
        found = bytearray()
        index = bisect.bisect_right(self._starts, start) - 1
        while len(found) < count:
            offset = start + len(found) - self._starts[index]
            size = self._starts[index + 1] - self._starts[index] - len(SEPARATOR)
            wanted = min(size - offset, count - len(found))
            if wanted > 0:
                found += _read(self._paths[index], offset, wanted)
            if len(found) < count:
                found += SEPARATOR
            index += 1
        return bytes(found)


def find_text(paths: Sequence[str] | None) -> Text:
    """Find the text in `paths`, or in the modules of this Python's standard library if `paths` is None.

    A given file is always used; of a given folder, all text files except hidden ones. Empty files, and files
    already found under another name, are skipped. Links are followed. Files are sorted by a hash of their
    names relative to the given path, so that the order is the same on every machine and the held-out text has
    files of each folder.

    Raises ConfigError if a path does not exist or is neither a file nor a folder, and if less than 40 KiB of
    text are found. Raises StorageError (with errno) if a file or folder cannot be read.
    """
    library = sysconfig.get_path("stdlib")
    if paths is None and not os.path.isdir(library or ""):
        raise ConfigError(f"This Python's standard library is not in a folder ({library}).", _OTHER_DATA)
    roots = [library] if paths is None else [os.fspath(path) for path in paths]
    seen: set[tuple[int, int]] = set()  # a file with two names would be both trained on and held out
    found = [each for root in roots for each in _files(root, seen, library=paths is None)]
    found.sort(key=lambda each: (hashlib.blake2b(os.fsencode(each[0]), digest_size=8).digest(), each[0]))
    text = Text([path for _, path, _ in found], [size for _, _, size in found])
    if len(text.held_out) < _LEAST_HELD_OUT:
        raise ConfigError(
            f"{', '.join(roots) or 'Nothing'} holds {format_size(text.nbytes)} of text in {text.files} "
            f"files; {format_size(_LEAST_HELD_OUT * _HELD_OUT)} are the least that can be trained on.",
            _OTHER_DATA,
        )
    return text


def _files(root: str, seen: set[tuple[int, int]], *, library: bool) -> Iterator[tuple[str, str, int]]:
    """Yield (name within `root`, path, bytes) of the file `root`, or of each text file in the folder `root`.

    seen: (device, inode) of files and folders found so far, which are skipped; new ones are added.
    """
    if not os.path.exists(root):
        raise ConfigError(f"There is no {root}.", "Give a file or folder that exists.")
    if os.path.isfile(root):
        found = os.stat(root)
        if found.st_size > 0 and _is_new(found, seen):
            yield os.path.basename(root), root, found.st_size
        return
    if not os.path.isdir(root):
        raise ConfigError(f"{root} is neither a file nor a folder.", _OTHER_DATA)

    def fail(error: OSError) -> None:
        with _reading(error.filename):
            raise error

    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        if not _is_new(os.stat(folder), seen):
            folders.clear()
            continue
        left_out = _NOT_THE_LIBRARY if library else ()
        # Names are sorted, because a file with several names is known by the first of them.
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in left_out)
        for path in (os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")):
            if not os.path.isfile(path) or (library and not path.endswith(".py")):
                continue
            found = os.stat(path)
            text = library or b"\0" not in _read(path, 0, min(_SNIFFED, found.st_size))
            if found.st_size > 0 and text and _is_new(found, seen):
                yield Path(os.path.relpath(path, root)).as_posix(), path, found.st_size


def _is_new(found: os.stat_result, seen: set[tuple[int, int]]) -> bool:
    key = found.st_dev, found.st_ino
    new = key not in seen
    seen.add(key)
    return new


def _read(path: str, offset: int, count: int) -> bytes:
    """Read `count` bytes of a file from `offset` on. Raises StorageError if the file ends earlier."""
    found = bytearray()
    # The file is opened for each read (some 10 us): there may be more files than a process can have open.
    with _reading(path, offset), open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while len(found) < count and (piece := file.read(count - len(found))):
            found += piece
    if len(found) < count:
        raise StorageError(
            f"{path} ends at byte {offset + len(found)}: it has become shorter since it was found.",
            "Leave the files as they are while they are trained on, and start again.",
            path=path,
            offset=offset + len(found),
        )
    return bytes(found)


def _reading(path: str, offset: int | None = None) -> contextlib.AbstractContextManager[None]:
    cure = "Put it back or make it readable, or leave it out of --data."
    return storage_errors("read", path, offset=offset, cure=cure)


# --- vocabularies -----------------------------------------------------------------------------------------


class Bytes:
    """The vocabulary whose 256 tokens are the bytes of UTF-8."""

    def window(self, text: Text, start: int, length: int) -> torch.Tensor:
        """Read `length` tokens from byte position `start` on: int64 (length,).

        `start` lies in the training text or in the held-out text. If fewer than `length` tokens follow in
        this text, its last `length` tokens are read. Raises ConfigError if this text has fewer than `length`
        tokens in total, and StorageError as `Text.read` does.
        """
        part = text.part(start)
        if length > len(part):
            raise _too_short(len(part), length, len(part))
        found = bytearray(text.read(min(start, part.stop - length), length))
        return torch.frombuffer(found, dtype=torch.uint8).long()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text. U+FFFD stands for what is not valid text, and for tokens above 255."""
        found = b"".join(bytes([each]) if each < 256 else b"\xff" for each in tokens)
        return found.decode("utf-8", errors="replace")

    def save(self, directory: str) -> None:
        """Write nothing: a byte is its own token."""


class Tokens:
    """The vocabulary of a transformers tokenizer. Special tokens are not used, because a window begins and
    ends within a text.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        """size: number of tokens that the model knows."""
        self._tokenizer = tokenizer
        self._size = size

    def window(self, text: Text, start: int, length: int) -> torch.Tensor:
        """Read a window of `length` tokens; see Bytes.window."""
        part = text.part(start)
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
                raise _too_short(most, length, len(tokens))
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
        text: str = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        return text

    def save(self, directory: str) -> None:
        """Write the tokenizer's files, the chat template too. Raises StorageError."""
        with storage_errors("write the tokenizer to", directory):
            self._tokenizer.save_pretrained(directory)


Vocabulary = Bytes | Tokens


def _too_short(nbytes: int, length: int, found: int) -> ConfigError:
    return ConfigError(
        f"A window of {length} tokens was asked for, and {format_size(nbytes)} of text have {found} only.",
        "Give more text with --data, or a smaller --seq.",
    )


def decode_stretch(data: bytes) -> str:
    """Decode UTF-8 bytes that were cut out of a text anywhere. An incomplete character at either end is
    dropped; other invalid bytes become U+FFFD.
    """
    head = data[:3].lstrip(_CONTINUATION)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(head + data[3:])


# --- batches ----------------------------------------------------------------------------------------------


class Batches:
    """Makes batches of token windows from a text: int64 (batch, seq + 1), on the CPU."""

    def __init__(self, text: Text, language_model: LanguageModel, *, batch: int, seq: int, seed: int) -> None:
        """seed: determines the positions of the training windows. Raises ConfigError if `seq` is more than
        the model's longest context, or if the held-out part of the text is shorter than a window.
        """
        longest = language_model.longest
        if longest is not None and seq > longest:
            raise ConfigError(
                f"{language_model.name} takes {longest} tokens at most, and {seq} were asked for.",
                f"Give --seq {longest} or less.",
            )
        self.tokens = batch * seq
        """Number of tokens that a batch predicts."""
        self._text, self._vocabulary = text, language_model.vocabulary
        self._batch, self._length, self._seed = batch, seq + 1, seed
        # Raises if a window does not fit the held-out part, which is the smaller part.
        self._vocabulary.window(text, text.held_out.start, self._length)

    def training(self, step: int, micro: int) -> torch.Tensor:
        """Make the batch of a step and micro-batch: windows at pseudo-random positions of the training text,
        which are the same on every machine. Raises StorageError if a file of the text cannot be read any
        more.
        """
        part = self._text.train
        # A token may have any number of bytes; `window` begins earlier if too few bytes follow.
        room = max(1, len(part) - self._length + 1)
        keys = [(self._seed, step, micro, row) for row in range(self._batch)]
        hashes = [hashlib.blake2b(repr(key).encode(), digest_size=8).digest() for key in keys]
        return self._windows([part.start + int.from_bytes(each, "little") % room for each in hashes])

    def held_out(self) -> list[torch.Tensor]:
        """Make 1 to 8 batches of windows that are spread evenly over the held-out text, with 16 Ki tokens in
        total if possible. They are the same for every seed.
        """
        part = self._text.held_out
        rows = self._batch * max(1, min(_HELD_OUT_BATCHES, _HELD_OUT_TOKENS // self.tokens))
        room = max(0, len(part) - self._length)
        starts = [part.start + room * row // max(1, rows - 1) for row in range(rows)]
        return [self._windows(starts[row : row + self._batch]) for row in range(0, rows, self._batch)]

    def _windows(self, starts: list[int]) -> torch.Tensor:
        return torch.stack([self._vocabulary.window(self._text, start, self._length) for start in starts])
