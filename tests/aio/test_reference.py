"""Tests of the libaio backend against another implementation: each reads what the other wrote.

The other one is the package `libaio` on PyPI, which binds the system's libaio.so.1.
"""

from __future__ import annotations

import mmap
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aio_backends import PAGE, make_file

from infinity import aio

try:
    import libaio as reference
except (ImportError, OSError) as missing:  # OSError: the package is there, the system library is not
    pytest.skip(f"needs the libaio package and libaio.so.1: {missing}", allow_module_level=True)

SIZE = 4 << 20
BLOCK = 64 << 10


def reference_transfer(mode: Any, path: Path, memory: mmap.mmap, pieces: list[tuple[int, int]]) -> None:
    """Transfer pieces of the file `path` through the package `libaio`, and wait until all have ended.

    mode: AIOBLOCK_MODE_READ or AIOBLOCK_MODE_WRITE. memory: as large as the file; each piece has the same
    offset in both. pieces: (offset, length) of each piece. O_DIRECT is used where the file system allows it.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError:
        descriptor = os.open(path, flags)
    whole = memoryview(memory)
    blocks = [
        reference.AIOBlock(mode, descriptor, [whole[offset : offset + length]], offset)
        for offset, length in pieces
    ]
    with reference.AIOContext(len(blocks)) as context:
        context.submit(blocks)
        done: list[Any] = []
        while len(done) < len(blocks):
            done += context.getEvents(min_nr=1)
    assert sorted(result for _, result, _ in done) == sorted(length for _, length in pieces)
    del blocks, done
    os.close(descriptor)


def pieces(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    cuts = [0, *sorted(rng.sample(range(PAGE, SIZE, PAGE), 40)), SIZE]
    parts = [(begin, end - begin) for begin, end in pairwise(cuts)]
    rng.shuffle(parts)
    return parts


@pytest.fixture
def file(tmp_path: Path) -> Any:
    path = make_file(tmp_path / "file", SIZE)
    if not next(report.ok for report in aio.probe(tmp_path).backends if report.name == "libaio"):
        pytest.skip("this kernel refuses native AIO")
    with (
        aio.Engine(tmp_path, backend="libaio", block_bytes=BLOCK) as engine,
        engine.open(str(path)) as opened,
    ):
        yield opened


def test_the_reference_reads_what_we_wrote(file: aio.File) -> None:
    content = mmap.mmap(-1, SIZE)
    content[:] = os.urandom(SIZE)
    whole = memoryview(content)
    aio.wait_all([file.write(whole[at : at + n], at) for at, n in pieces(1)])
    back = mmap.mmap(-1, SIZE)
    reference_transfer(reference.AIOBLOCK_MODE_READ, Path(file.path), back, pieces(2))
    assert back[:] == content[:]


def test_we_read_what_the_reference_wrote(file: aio.File) -> None:
    content = mmap.mmap(-1, SIZE)
    content[:] = os.urandom(SIZE)
    reference_transfer(reference.AIOBLOCK_MODE_WRITE, Path(file.path), content, pieces(3))
    back = mmap.mmap(-1, SIZE)
    whole = memoryview(back)
    aio.wait_all([file.read(whole[at : at + n], at) for at, n in pieces(4)])
    assert back[:] == content[:]


def test_both_at_once_on_neighbouring_places(file: aio.File) -> None:
    """Our engine and the package `libaio` each write every other piece of one file at the same time.

    Then each reads the pieces that the other one wrote, and all bytes must be right.
    """
    content = mmap.mmap(-1, SIZE)
    content[:] = os.urandom(SIZE)
    whole = memoryview(content)
    parts = pieces(5)
    ours = [file.write(whole[at : at + n], at) for at, n in parts[::2]]
    reference_transfer(reference.AIOBLOCK_MODE_WRITE, Path(file.path), content, parts[1::2])
    aio.wait_all(ours)
    back = mmap.mmap(-1, SIZE)
    view = memoryview(back)
    theirs = [file.read(view[at : at + n], at) for at, n in parts[1::2]]
    reference_transfer(reference.AIOBLOCK_MODE_READ, Path(file.path), back, parts[::2])
    aio.wait_all(theirs)
    assert back[:] == content[:]
