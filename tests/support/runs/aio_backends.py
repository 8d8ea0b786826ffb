"""Helpers for tests of infinity.aio: backends that work on this machine, files, aligned memory, engines."""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinity import aio

each_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(report.name, marks=[] if report.ok else [pytest.mark.skip(reason=report.reason)])
        for report in aio.probe(tempfile.gettempdir()).backends
    ],
)

PAGE = 4096
BLOCK = 16384
"""Bytes of the blocks into which the engines under test cut each request.

The blocks are small, so that even a small request has several of them.
"""

WITHOUT_TORCH = """
import importlib.util, sys
spec = importlib.util.find_spec("infinity")
spec.loader = None
sys.modules["infinity"] = importlib.util.module_from_spec(spec)
"""
"""The first lines of a program that imports submodules of infinity and must not run infinity/__init__.py,
which takes 20 times as long as the rest of the program.
"""


def make_file(path: Path, content: bytes | int) -> Path:
    """Make a file with the bytes `content`, or with `content` zero bytes where it is a number."""
    with open(path, "wb") as file:
        if isinstance(content, int):
            file.truncate(content)
        else:
            file.write(content)
    return path


def memory(nbytes: int, shift: int = 0) -> memoryview:
    """Allocate `nbytes` bytes of writable memory that begin `shift` bytes after a page boundary."""
    return memoryview(mmap.mmap(-1, nbytes + shift + 1))[shift : shift + nbytes]


def filled(content: bytes, shift: int = 0) -> memoryview:
    view = memory(len(content), shift)
    view[:] = content
    return view


def file_bytes(stripes: aio.StripeMap, nbytes: int) -> list[int]:
    """Return the size in bytes that each file of a striped volume needs, for a volume of `nbytes` bytes."""
    ends = [0] * len(stripes.weights)
    for file, offset, length in stripes.extents(0, nbytes):
        ends[file] = max(ends[file], offset + length)
    return ends


def engine(path: Path, backend: str, **options: object) -> aio.Engine:
    """Make an I/O engine for the directory `path`, or for the directory of the file `path`.

    options: further arguments of aio.Engine. By default it cuts requests into blocks of BLOCK bytes, and has
    at most 8 blocks in flight.
    """
    directory = path if path.is_dir() else path.parent
    return aio.Engine(directory, backend=backend, **{"block_bytes": BLOCK, "depth": 8, **options})  # type: ignore[arg-type]


@contextmanager
def held(faults: aio.Faults, kind: str) -> Iterator[None]:
    """Keep the next transfer of `kind`, "read" or "write", from starting until the `with` statement ends."""
    faults.hold(kind, 1)
    try:
        yield
    finally:
        faults.release()


def wait_until_held(faults: aio.Faults) -> None:
    """Wait until the engine's thread has come to the transfer that `held` keeps from starting."""
    end = time.monotonic() + 60
    while not faults.fired:
        assert time.monotonic() < end
        time.sleep(0.001)
