"""Tests of every I/O backend when system calls fail, transfer too few bytes or are late.

Transient errors and short transfers must be hidden by retries. Other errors must reach the future of the one
request, and the engine must go on working. An engine cuts a request into blocks, and a test can inject a
fault into the transfer of any block.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from aio_backends import BLOCK, PAGE, each_backend, engine, filled, held, make_file, memory

from infinity import aio
from infinity.errors import ConfigError, StorageError, StorageFull

BLOCKS = 12  # more than an engine has in flight
SIZE = BLOCKS * BLOCK
KINDS = ("read", "write", "sync")
NTH = (1, 2, BLOCKS - 1, BLOCKS)
TRANSIENT = (errno.EAGAIN, errno.EINTR)
LASTING = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EOPNOTSUPP)
GIVES_UP_AFTER = 12  # tries, as in csrc/aio/loop.cpp


class Setup:
    """An engine that is open on a file of random bytes, and the Faults object that injects faults into it."""

    def __init__(self, tmp_path: Path, backend: str, **options: object) -> None:
        self.content = os.urandom(SIZE)
        self.path = make_file(tmp_path / "file", self.content)
        self.faults = aio.Faults()
        self.engine = engine(self.path, backend, faults=self.faults, **options)
        self.file = self.engine.open(str(self.path))
        self.source = filled(os.urandom(SIZE))
        self.target = memory(SIZE)

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def start(self, kind: str) -> aio.Future:
        if kind == "read":
            return self.file.read(self.target, 0)
        return self.file.write(self.source, 0) if kind == "write" else self.file.sync()

    def check_works(self) -> None:
        """Clear all faults, and assert that the engine then writes and reads the file correctly."""
        self.faults.clear()
        self.file.write(self.source, 0).wait()
        self.file.sync().wait()
        self.target[:] = bytes(SIZE)
        self.file.read(self.target, 0).wait()
        assert self.target == self.source
        assert self.path.read_bytes() == self.source


def nths(kind: str) -> tuple[int, ...]:
    return (1,) if kind == "sync" else NTH


@each_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", LASTING, ids=errno.errorcode.get)
def test_lasting_errors_fail_their_request_only(backend: str, kind: str, code: int, tmp_path: Path) -> None:
    with Setup(tmp_path, backend) as setup:
        for nth in nths(kind):
            setup.faults.clear()
            setup.faults.fail(kind, nth, code)
            before = setup.engine.stats
            failing, other = setup.start(kind), setup.file.read(memory(PAGE), SIZE - PAGE)
            with pytest.raises(StorageError) as caught:
                failing.result()
            with pytest.raises(StorageError):
                failing.wait()
            error = caught.value
            assert error.errno == code
            assert error.path == str(setup.path)
            assert isinstance(error, StorageFull) == (code in (errno.ENOSPC, errno.EDQUOT))
            assert errno.errorcode[code] in error.cause
            assert kind in error.cause
            if kind == "sync":
                assert error.offset is None
            else:
                assert error.offset is not None
                assert error.offset % BLOCK == 0
            assert setup.engine.stats.failures == before.failures + 1 + (other.exception() is not None)
            assert setup.faults.fired >= 1
        setup.check_works()


@each_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", TRANSIENT, ids=errno.errorcode.get)
def test_transient_errors_are_retried(backend: str, kind: str, code: int, tmp_path: Path) -> None:
    with Setup(tmp_path, backend) as setup:
        for nth in nths(kind):
            setup.faults.clear()
            before = setup.engine.stats.retries
            setup.faults.fail(kind, nth, code, times=3)
            setup.start(kind).wait()
            assert setup.engine.stats.retries == before + 3
        if kind == "read":
            assert setup.target == setup.content
        if kind == "write":
            assert setup.path.read_bytes() == setup.source
        assert setup.engine.stats.failures == 0
        setup.check_works()


@each_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", TRANSIENT, ids=errno.errorcode.get)
def test_retries_end(backend: str, kind: str, code: int, tmp_path: Path) -> None:
    with Setup(tmp_path, backend, depth=1) as setup:
        setup.faults.fail(kind, 1, code, times=None)
        with pytest.raises(StorageError) as caught:
            setup.start(kind).wait()
        assert caught.value.errno == code
        assert setup.faults.calls[kind] == GIVES_UP_AFTER
        setup.check_works()


@each_backend
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("moved", [1, 511, 512, PAGE, PAGE + 1, BLOCK - PAGE, BLOCK - 1])
def test_short_transfers_go_on(backend: str, kind: str, moved: int, tmp_path: Path) -> None:
    with Setup(tmp_path, backend) as setup:
        for nth in NTH:
            setup.faults.clear()
            setup.target[:] = bytes(SIZE)
            before = setup.engine.stats.short_transfers
            setup.faults.shorten(kind, nth, moved, times=2)
            assert setup.start(kind).result() == SIZE
            assert setup.engine.stats.short_transfers > before
            if kind == "read":
                assert setup.target == setup.content
            else:
                assert setup.path.read_bytes() == setup.source
        stats = setup.engine.stats
        assert (stats.read_bytes if kind == "read" else stats.write_bytes) == SIZE * len(NTH)
        setup.check_works()


@each_backend
def test_all_transfers_short(backend: str, tmp_path: Path) -> None:
    with Setup(tmp_path, backend) as setup:
        setup.faults.shorten("any", 1, 1000, times=None)
        setup.start("write").wait()
        setup.start("read").wait()
        assert setup.target == setup.source
        setup.check_works()


@each_backend
def test_nothing_moves(backend: str, tmp_path: Path) -> None:
    """A read for which the kernel transfers 0 bytes raises the StorageError of a file that is too short.

    A write for which the kernel transfers 0 bytes is tried again. It fails with EIO if every try transfers
    nothing.
    """
    with Setup(tmp_path, backend) as setup:
        setup.faults.shorten("read", 3, 0)
        with pytest.raises(StorageError, match="shorter than expected"):
            setup.start("read").wait()
        setup.faults.shorten("write", 3, 0)
        setup.start("write").wait()
        assert setup.path.read_bytes() == setup.source
        setup.faults.shorten("write", 1, 0, times=None)
        with pytest.raises(StorageError) as caught:
            setup.file.write(memory(PAGE), 0).wait()
        assert caught.value.errno == errno.EIO
        setup.check_works()


@each_backend
def test_file_that_wants_more_alignment_than_it_says(backend: str, tmp_path: Path) -> None:
    """A transfer with O_DIRECT that fails with EINVAL is repeated through the page cache.

    Its bytes are counted in `stats.buffered_bytes`. If the repetition fails too, the request fails.
    """
    with Setup(tmp_path, backend) as setup:
        if not setup.file.direct:
            pytest.skip("no O_DIRECT in the temporary directory")
        setup.faults.fail("any", 2, errno.EINVAL, times=3)
        setup.start("write").wait()
        assert setup.engine.stats.buffered_bytes == 3 * BLOCK
        setup.faults.fail("write", 1, errno.EINVAL, times=None)
        with pytest.raises(StorageError) as caught:
            setup.start("write").wait()
        assert caught.value.errno == errno.EINVAL
        setup.check_works()


@each_backend
@pytest.mark.parametrize("kind", KINDS)
def test_delays_change_nothing_but_time(backend: str, kind: str, tmp_path: Path) -> None:
    with Setup(tmp_path, backend) as setup:
        for nth in nths(kind):
            setup.faults.delay(kind, nth, 0.02)
            setup.start(kind).wait()
        setup.faults.delay("any", 1, 0.001, times=None)
        setup.start("write").wait()
        setup.start("read").wait()
        assert setup.target == setup.source
        setup.check_works()


@each_backend
def test_a_request_fails_after_all_its_blocks_have_landed(backend: str, tmp_path: Path) -> None:
    """A read whose first block fails is done only when its other blocks have ended too.

    After that, its target memory is never written again.
    """
    with Setup(tmp_path, backend) as setup:
        setup.faults.fail("read", 1, errno.EIO)
        setup.faults.delay("read", 3, 0.1, times=2)
        with pytest.raises(StorageError):
            setup.start("read").wait()
        setup.target[:] = bytes(SIZE)
        calls = setup.faults.calls["read"]
        setup.file.sync().wait()
        setup.faults.delay("sync", 1, 0.2)
        setup.file.sync().wait()
        assert setup.faults.calls["read"] == calls, "a failed request must not go on"
        assert setup.target == bytes(SIZE)
        setup.check_works()


@each_backend
def test_two_failures_are_one_error(backend: str, tmp_path: Path) -> None:
    with Setup(tmp_path, backend) as setup:
        setup.faults.fail("write", 2, errno.EIO)
        setup.faults.fail("write", 3, errno.ENOSPC)
        with pytest.raises(StorageError):
            setup.start("write").wait()
        assert setup.engine.stats.failures == 1
        setup.check_works()


@each_backend
def test_rules_combine(backend: str, tmp_path: Path) -> None:
    with Setup(tmp_path, backend) as setup:
        setup.faults.fail("write", 1, errno.EIO)
        with held(setup.faults, "write"):
            future = setup.file.write(setup.source[:PAGE], 0)
            assert not future.done()
        with pytest.raises(StorageError):
            future.wait()
        assert setup.faults.calls == {"read": 0, "write": 1, "sync": 0}
        setup.check_works()


def test_bad_rules() -> None:
    faults = aio.Faults()
    for call in (
        lambda: faults.fail("seek", 1, errno.EIO),
        lambda: faults.fail("read", 0, errno.EIO),
        lambda: faults.fail("read", 1, 0),
        lambda: faults.shorten("nothing", 1, 0),
        lambda: faults.delay("read", 0, 1.0),
    ):
        with pytest.raises(ConfigError):
            call()
    assert faults.fired == 0


@each_backend
def test_volume_fails_once_and_stays_usable(backend: str, tmp_path: Path) -> None:
    paths = [make_file(tmp_path / name, SIZE) for name in ("a", "b")]
    faults = [aio.Faults(), aio.Faults()]
    engines = [engine(path, backend, faults=fault) for path, fault in zip(paths, faults, strict=True)]
    files = [e.open(str(path)) for e, path in zip(engines, paths, strict=True)]
    volume = aio.Volume(list(zip(files, (2, 1), strict=True)), stripe_bytes=PAGE)
    content = filled(os.urandom(SIZE))
    faults[1].fail("write", 2, errno.ENOSPC)
    with pytest.raises(StorageFull) as caught:
        volume.write(content, 0).wait()
    assert caught.value.path == str(paths[1])
    faults[0].fail("sync", 1, errno.EIO)
    with pytest.raises(StorageError):
        volume.sync().wait()
    volume.write(content, 0).wait()
    volume.sync().wait()
    back = memory(SIZE)
    volume.read(back, 0).wait()
    assert back == content
    for e in engines:
        e.close()
    with pytest.raises(ConfigError, match="closed"):
        volume.read(back, 0)


@each_backend
def test_disk_full_for_real(backend: str) -> None:
    """On a file system that is really full, a write raises StorageFull, and so does opening an engine.

    The file system is a tiny tmpfs, which only root can mount.
    """
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", directory]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        try:
            path = make_file(Path(directory) / "file", 1 << 20)
            with engine(path, backend) as e, e.open(str(path)) as file:
                with pytest.raises(StorageFull) as caught:
                    file.write(memory(1 << 20), 0).wait()
                assert caught.value.errno == errno.ENOSPC
                file.read(memory(PAGE), 0).wait()
                with pytest.raises(StorageFull):
                    aio.Engine(directory, backend=backend)
        finally:
            subprocess.run(["umount", "--lazy", directory], check=False)
