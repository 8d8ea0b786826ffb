"""Tests of infinity.checksum: known checksums, every implementation against the definition of CRC32C, blocks,
threads and forks, and errors for bad input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity import checksum
from infinity.errors import ConfigError

each_implementation = pytest.mark.parametrize("implementation", checksum.implementations())


def by_definition(data: bytes, value: int = 0) -> int:
    """The CRC32C of `data` after bytes whose CRC32C is `value`, bit by bit."""
    crc = value ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def rows(*segments: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    return np.array(segments, dtype=np.int64).reshape(-1, 3)


def blocks_by_definition(data: bytes, segments: npt.NDArray[np.int64]) -> list[int]:
    """The CRC32C of each block of the segments of `data`."""
    return [
        by_definition(data[start : min(start + block, offset + nbytes)])
        for offset, nbytes, block in segments.tolist()
        for start in range(offset, offset + nbytes, block)
    ]


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@st.composite
def memories(draw: st.DrawFn) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Random bytes, and up to 6 segments of them."""
    data = draw(st.binary(max_size=300))
    segments = []
    for _ in range(draw(st.integers(0, 6))):
        offset = draw(st.integers(0, len(data)))
        segments.append((offset, draw(st.integers(0, len(data) - offset)), draw(st.integers(1, 400))))
    return data, rows(*segments)


def test_the_first_implementation_is_used_and_a_table_is_always_there() -> None:
    assert checksum.implementation() == checksum.implementations()[0]
    assert checksum.implementations()[-1] == "table"
    assert set(checksum.implementations()) <= {"sse4.2", "armv8", "table"}


@each_implementation
def test_known_checksums(implementation: str) -> None:
    """The values of RFC 3720, B.4, and the value by which catalogues of CRCs name this one."""
    known = {
        b"": 0,
        b"123456789": 0xE3069283,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
    }
    found = {data: checksum.crc32c(data, implementation=implementation) for data in known}
    assert found == known


@given(data=st.binary(max_size=200), skipped=st.integers(0, 16), cut=st.integers(0, 200))
@each_implementation
def test_any_alignment_and_any_split(implementation: str, data: bytes, skipped: int, cut: int) -> None:
    view = memoryview(data)[skipped:]
    whole = checksum.crc32c(view, implementation=implementation)
    assert whole == by_definition(bytes(view))
    first = checksum.crc32c(view[:cut], implementation=implementation)
    assert checksum.crc32c(view[cut:], first, implementation=implementation) == whole


def test_every_kind_of_memory_has_the_checksum_of_its_bytes() -> None:
    data = bytes(range(240))
    expected = by_definition(data)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.float32)
    assert tensor.shape == (60,)
    for kind in (bytearray(data), memoryview(data), np.frombuffer(data, np.int16).reshape(4, 30), tensor):
        assert checksum.crc32c(kind) == expected
    assert checksum.crc32c(tensor[3:].reshape(3, 19)) == by_definition(data[12:])
    assert checksum.crc32c(torch.empty(0), 17) == checksum.crc32c(b"", np.uint32(17)) == 17  # type: ignore[arg-type]


@given(memory=memories(), threads=st.integers(1, 4))
@each_implementation
def test_blocks(implementation: str, memory: tuple[bytes, npt.NDArray[np.int64]], threads: int) -> None:
    data, segments = memory
    found = checksum.crc32c_blocks(tensor_of(data), segments, threads=threads, implementation=implementation)
    assert found.dtype == np.uint32 and found.shape == (checksum.block_count(segments),)
    assert found.tolist() == blocks_by_definition(data, segments)


def many_blocks() -> tuple[torch.Tensor, npt.NDArray[np.int64], list[int]]:
    """A memory, segments with work for several threads, and the checksums of their blocks."""
    memory = torch.randint(0, 256, (5 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    segments = rows((0, 5 << 20, 4096), (3, 2_000_001, 65536), (7, 3_000_000, 1 << 40), (9, 0, 1))
    data = memory.numpy().tobytes()
    expected = [
        checksum.crc32c(data[start : min(start + block, offset + nbytes)], implementation="table")
        for offset, nbytes, block in segments.tolist()
        for start in range(offset, offset + nbytes, block)
    ]
    assert len(expected) == 1280 + 31 + 1
    return memory, segments, expected


@each_implementation
def test_threads_change_nothing(implementation: str) -> None:
    memory, segments, expected = many_blocks()
    for threads in (1, 2, 3, 8):
        found = checksum.crc32c_blocks(memory, segments, threads=threads, implementation=implementation)
        assert found.tolist() == expected


def test_several_callers_at_once() -> None:
    memory, segments, expected = many_blocks()
    equal = []

    def call() -> None:
        for _ in range(10):
            equal.append(checksum.crc32c_blocks(memory, segments, threads=3).tolist() == expected)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert equal == [True] * 30


FORK = """
import os, signal
import numpy as np, torch
from infinity.checksum import crc32c_blocks
memory = torch.zeros(8 << 20, dtype=torch.uint8)
segments = np.array([[0, 8 << 20, 4096]], dtype=np.int64)

def threads():
    return len(os.listdir("/proc/self/task"))

def check():
    assert set(crc32c_blocks(memory, segments, threads=3).tolist()) == {0x98F94189}

before = threads()
check()
assert threads() == before + 2
check()
assert threads() == before + 2, "threads stay"
child = os.fork()
if child == 0:
    signal.alarm(60)
    assert threads() == 1
    check()
    assert threads() == 3
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
check()
assert threads() == before + 2
print("done")
"""


@pytest.mark.usefixtures("warm")
def test_a_forked_child_has_threads_of_its_own_and_the_process_ends_with_them() -> None:
    assert checksum.crc32c(bytes(4096)) == 0x98F94189
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_block_count() -> None:
    assert checksum.block_count(rows()) == 0
    assert checksum.block_count(rows((0, 10, 3), (50, 0, 1), (5, 9, 3), (0, 1, 1 << 62))) == 4 + 0 + 3 + 1
    assert checksum.block_count(rows((0, 2**63 - 1, 1))) == 2**63 - 1


MEMORY = torch.zeros(100, dtype=torch.uint8)
GOOD = rows((0, 100, 10))
BAD_SEGMENTS = {
    "past the end": rows((0, 100, 10), (1, 100, 10)),
    "begins past the end": rows((101, 0, 1)),
    "negative offset": rows((-1, 1, 1)),
    "negative bytes": rows((0, -1, 1)),
    "sum overflows": rows((2**63 - 1, 2**63 - 1, 1)),
    "no block": rows((0, 10, 0)),
    "no block of nothing": rows((0, 0, 0)),
    "negative block": rows((0, 10, -5)),
    "int32": GOOD.astype(np.int32),
    "other byte order": GOOD.astype(">i8"),
    "one row": GOOD[0],
    "two columns": GOOD[:, :2],
    "columns first": np.asfortranarray(np.repeat(GOOD, 2, axis=0)),
    "every other row": np.repeat(GOOD, 4, axis=0)[::2],
    "list": GOOD.tolist(),
    "tensor": torch.from_numpy(GOOD),
}
OUTSIDE = ("past the end", "begins past the end")
"""Bad for a memory, but not for `block_count`, which is given none."""
BAD_CALLS: dict[str, Callable[[], Any]] = {
    "memory of int8": lambda: checksum.crc32c_blocks(MEMORY.view(torch.int8), GOOD),
    "memory with gaps": lambda: checksum.crc32c_blocks(torch.zeros(200, dtype=torch.uint8)[::2], GOOD),
    "memory elsewhere": lambda: checksum.crc32c_blocks(MEMORY.to("meta"), GOOD),
    "memory of bytes": lambda: checksum.crc32c_blocks(bytes(100), GOOD),  # type: ignore[arg-type]
    "no threads": lambda: checksum.crc32c_blocks(MEMORY, GOOD, threads=0),
    "threads": lambda: checksum.crc32c_blocks(MEMORY, GOOD, threads=checksum.MOST_THREADS + 1),
    "implementation": lambda: checksum.crc32c_blocks(MEMORY, GOOD, implementation="abacus"),
    "implementation for bytes": lambda: checksum.crc32c(b"1", implementation=""),
    "more blocks than can be counted": lambda: checksum.block_count(rows((0, 2**63 - 1, 1), (0, 1, 1))),
    "negative checksum": lambda: checksum.crc32c(b"1", -1),
    "large checksum": lambda: checksum.crc32c(MEMORY, 1 << 32),
    "text": lambda: checksum.crc32c("text"),  # type: ignore[arg-type]
    "buffer with gaps": lambda: checksum.crc32c(memoryview(b"123456")[::2]),
    "array with gaps": lambda: checksum.crc32c(np.zeros((4, 4))[:, 0]),
    "tensor with gaps": lambda: checksum.crc32c(torch.zeros(4, 4).t()[1:]),
    "sparse tensor": lambda: checksum.crc32c(torch.zeros(4, 4).to_sparse()),
}


@pytest.mark.parametrize("bad", BAD_SEGMENTS)
def test_bad_segments(bad: str) -> None:
    segments: Any = BAD_SEGMENTS[bad]
    with pytest.raises(ConfigError):
        checksum.crc32c_blocks(MEMORY, segments)
    if bad in OUTSIDE:
        assert checksum.block_count(segments) >= 0
    else:
        with pytest.raises(ConfigError):
            checksum.block_count(segments)


def test_an_error_names_the_first_bad_row() -> None:
    with pytest.raises(ConfigError, match=r"Row 1 of the segments \(100 bytes from offset 1\)"):
        checksum.crc32c_blocks(MEMORY, BAD_SEGMENTS["past the end"])


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_bad_calls(bad: str) -> None:
    assert checksum.crc32c_blocks(MEMORY, GOOD).shape == (10,)
    with pytest.raises(ConfigError) as caught:
        BAD_CALLS[bad]()
    assert caught.value.cause and caught.value.cure
