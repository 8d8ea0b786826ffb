"""Tests of reads and writes by infinity.aio on every backend, where the kernel reports no error.

They cover the bytes themselves, buffers, the page cache, wrong use, and what closing leaves behind.
"""

from __future__ import annotations

import errno
import os
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from aio_backends import (
    BLOCK,
    PAGE,
    each_backend,
    engine,
    filled,
    make_file,
    memory,
)
from process_resources import check_nothing_left, nothing_left, resources

from infinity import aio
from infinity.errors import ConfigError, StorageError

SIZES = [1, 511, 512, PAGE - 1, PAGE, PAGE + 1, BLOCK, BLOCK + 1, 3 * BLOCK - 7, 40 * BLOCK + 13]
OFFSETS = [0, 1, 512, PAGE, PAGE + 511, BLOCK - 1]


@each_backend
@pytest.mark.parametrize("shift", [0, 1, 64, 512])
def test_any_size_offset_and_address(backend: str, shift: int, tmp_path: Path) -> None:
    rng = random.Random(shift)
    model = bytearray(rng.randbytes(max(SIZES) + max(OFFSETS) + 2 * PAGE))
    path = make_file(tmp_path / "file", bytes(model))
    with engine(path, backend) as e, e.open(str(path)) as file:
        for size in SIZES:
            for offset in OFFSETS:
                content = rng.randbytes(size)
                assert file.write(filled(content, shift), offset).result() == size
                model[offset : offset + size] = content
                back = memory(size, shift)
                assert file.read(back, offset).result() == size
                assert back == content
        assert path.read_bytes() == model
        assert file.size == len(model)


@each_backend
def test_neighbours_in_flight_share_pages(backend: str, tmp_path: Path) -> None:
    """Writes in flight to adjacent ranges that share a 4 KiB page of the file undo no bytes of each other."""
    rng = random.Random(5)
    size = 64 * PAGE + 100
    path = make_file(tmp_path / "file", size)
    with engine(path, backend, depth=64) as e, e.open(str(path)) as file:
        for _ in range(20):
            content = rng.randbytes(size)
            source = filled(content)
            cuts = [0, *sorted(rng.sample(range(1, size), 60)), size]
            parts = list(pairwise(cuts))
            rng.shuffle(parts)
            aio.wait_all([file.write(source[begin:end], begin) for begin, end in parts])
            back = memory(size)
            aio.wait_all([file.read(back[begin:end], begin) for begin, end in parts])
            assert back == content
            assert path.read_bytes() == content


@each_backend
def test_aligned_requests_avoid_the_page_cache(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 8 * BLOCK)
    with engine(path, backend) as e, e.open(str(path)) as file:
        if not file.direct:
            pytest.skip("no O_DIRECT in the temporary directory")
        aio.wait_all([file.write(memory(4 * BLOCK), 0), file.read(memory(2 * BLOCK), 4 * BLOCK)])
        assert e.stats.buffered_bytes == 0
        file.write(memory(PAGE + 20), PAGE).wait()
        assert e.stats.buffered_bytes == 20
        assert e.stats.write_bytes == 4 * BLOCK + PAGE + 20
        assert e.stats.read_requests == 1
        assert e.stats.read_transfers == 2
        assert e.stats.read_busy_seconds > 0
        assert e.stats.sync_requests == 0


def test_memory_file_system_is_buffered_and_says_so() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    report = aio.probe(shm)
    assert not report.direct
    for backend in report.backends:
        assert not backend.direct
        assert backend.reason
        if not backend.ok:
            continue
        path = make_file(shm / f"infinity-test-{os.getpid()}", 3 * BLOCK)
        try:
            with aio.Engine(shm, backend=backend.name) as e, e.open(str(path)) as file:
                assert not file.direct
                assert not e.facts.chosen.direct
                content = os.urandom(2 * BLOCK + 5)
                file.write(content, 7).wait()
                back = bytearray(len(content))
                file.read(back, 7).wait()
                assert back == content
                assert e.stats.buffered_bytes == 2 * len(content)
        finally:
            path.unlink()


@each_backend
def test_buffers_of_every_kind(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 1 << 20)
    rng = np.random.default_rng(1)
    with engine(path, backend) as e, e.open(str(path)) as file:
        array = rng.standard_normal((37, 53))
        back = np.empty_like(array)
        file.write(array, 64).wait()
        file.read(back, 64).wait()
        assert (array == back).all()
        for dtype in (torch.bfloat16, torch.float32, torch.uint8):
            tensor = torch.from_numpy(array).to(dtype)
            other = torch.zeros_like(tensor)
            assert file.write(tensor, 4096).result() == tensor.nbytes
            file.read(other, 4096).wait()
            assert torch.equal(tensor, other)
        parameter = torch.nn.Parameter(torch.ones(100))
        file.read(parameter.untyped_storage(), 1 << 19).wait()
        assert (parameter == 0).all()
        file.write(b"read-only memory may be written from", 5).wait()
        target = torch.zeros(100, dtype=torch.uint8)
        file.read((target.data_ptr() + 10, 9, target), 5).wait()
        assert bytes(target[10:19].tolist()) == b"read-only"
        assert target[:10].sum() == 0
        assert target[19:].sum() == 0


@each_backend
def test_bad_buffers(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", PAGE)
    with engine(path, backend) as e, e.open(str(path)) as file:
        for bad in (
            b"read-only",
            np.zeros((4, 4))[:, 1],
            torch.zeros(4, 4).t()[1:],
            torch.zeros(4, device="meta"),
            (1, 2),
            ("address", 2, None),
            (0, 10, None),
            (4096, -1, None),
            17,
            None,
            "text",
        ):
            with pytest.raises(ConfigError):
                file.read(bad, 0)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="offset is -1"):
            file.write(b"x", -1)
        with pytest.raises(ConfigError, match="2\\^63"):
            file.write(b"xy", 2**63 - 2)
        assert e.stats.read_requests == e.stats.write_requests == 0


@each_backend
def test_no_bytes_are_done_at_once(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 0)
    with engine(path, backend) as e, e.open(str(path)) as file:
        assert file.read(bytearray(), 10**6).result() == 0
        assert file.write(b"", 3).done()
        assert path.stat().st_size == 0


@each_backend
def test_closed_and_missing(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", PAGE)
    e = engine(path, backend)
    with pytest.raises(StorageError) as missing:
        e.open(str(tmp_path / "missing"))
    assert missing.value.errno == errno.ENOENT
    assert missing.value.path == str(tmp_path / "missing")
    with pytest.raises(StorageError) as directory:
        e.open(str(tmp_path))
    assert directory.value.errno == errno.EISDIR
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="neither a regular file"):
        e.open(str(tmp_path / "pipe"))
    reader = e.open(path, write=False)
    assert reader.read(bytearray(10), 0).result() == 10
    with pytest.raises(ConfigError, match="reading only"):
        reader.write(b"x", 0)
    file = e.open(str(path))
    assert not file.closed
    file.close()
    file.close()
    assert file.closed
    assert file.path == str(path)
    for use in (
        lambda: file.read(bytearray(1), 0),
        lambda: file.write(b"x", 0),
        file.sync,
        lambda: file.size,
    ):
        with pytest.raises(ConfigError, match="is closed"):
            use()
    e.close()
    e.close()
    assert e.closed
    with pytest.raises(ConfigError, match=r"engine .* is closed"):
        reader.read(bytearray(1), 0)
    with pytest.raises(ConfigError, match="closed"):
        e.open(str(path))
    reader.close()


@each_backend
def test_end_of_file(backend: str, tmp_path: Path) -> None:
    content = os.urandom(2 * BLOCK + 100)
    path = make_file(tmp_path / "file", content)
    with engine(path, backend) as e, e.open(str(path)) as file:
        for offset, size in ((len(content), 1), (0, len(content) + 1), (BLOCK, 5 * BLOCK), (10**9, PAGE)):
            future = file.read(memory(size), offset)
            with pytest.raises(StorageError, match="shorter than expected") as short:
                future.wait()
            assert short.value.path == str(path)
            assert short.value.offset is not None
            assert short.value.offset >= len(content)
            assert isinstance(future.exception(), StorageError)
        back = memory(len(content))
        file.read(back, 0).wait()
        assert back == content
        file.write(b"behind the end", len(content) + PAGE).wait()
        assert path.stat().st_size == len(content) + PAGE + 14


@each_backend
def test_nothing_leaks(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * BLOCK)

    def once() -> None:
        e = engine(path, backend)
        file = e.open(str(path))
        aio.wait_all([file.read(memory(4 * BLOCK), 0), file.write(b"x", 1), file.sync()])
        with pytest.raises(StorageError):
            e.open(str(tmp_path / "missing"))
        e.close()
        with pytest.raises(ConfigError):
            engine(path, backend, depth=0)

    once()
    with nothing_left(garbage=True):
        for _ in range(20):
            once()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"], "a probe left its file"


@each_backend
def test_close_of_a_file_frees_its_descriptors(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * BLOCK)
    with engine(path, backend) as e:
        before = resources()  # the engine starts threads when it needs them
        for _ in range(300):  # more files than there are slots for registration
            with e.open(str(path)) as file:
                file.read(memory(PAGE), 0).wait()
        check_nothing_left(before, threads=False)
        files = [e.open(str(path)) for _ in range(200)]
        aio.wait_all([file.read(memory(PAGE), 0) for file in files])
        for file in files:
            file.close()
        check_nothing_left(before, threads=False)
