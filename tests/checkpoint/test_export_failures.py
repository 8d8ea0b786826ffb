"""Tests that a refused or failed `runtime.export` raises a typed error and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiofiles
import process_resources
import pytest
import torch
from exports import out, paged, read, seen
from faulty import check_error, start_torch_threads, watchdog
from parity import differences
from small_runtime import files
from torch import nn
from zoo import entry

from infinity.aio import Faults
from infinity.checkpoint import export as exporting
from infinity.errors import ConfigError, StorageError, StorageFull
from infinity.pages.store import Store

__all__ = ["out", "watchdog"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextlib.contextmanager
def nothing_left(out: Path) -> Iterator[None]:
    """Check that the body of the `with` statement leaves no new file in the parent directory of `out`, and
    no new descriptor or thread in this process.
    """
    start_torch_threads()
    before = sorted(files(out.parent))
    with process_resources.nothing_left(garbage=True):
        yield
    assert sorted(files(out.parent)) == before


# --- what is refused ---------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "bf16"}, "export dtype is 'bf16'"),
    ({"dtype": None}, "export dtype is None"),
    ({"shard": 0}, "shard size is zero"),
    ({"shard": "0GiB"}, "shard size is zero"),
    ({"shard": "4GB"}, "shard size '4GB'"),
    ({"shard": -1}, "negative"),
    ({"path": ""}, "path to export to"),
    ({"path": None}, "path to export to"),
    ({"path": "a\0b"}, "path to export to"),
    ({"path": "/proc"}, "/proc is not empty"),
]


def test_arguments_that_are_none(out: Path) -> None:
    with paged(entry("custom").make(), out) as runtime, nothing_left(out):
        for options, said in REFUSED:
            with pytest.raises(ConfigError, match=said) as caught:
                runtime.export(**({"path": out} | options))
            assert caught.value.cure


def test_a_target_that_exists(out: Path) -> None:
    out.mkdir()
    (out / "notes").write_text("mine")
    with paged(entry("custom").make(), out) as runtime:
        with pytest.raises(ConfigError, match="is not empty"):
            runtime.export(out)
        with pytest.raises(ConfigError, match="is no directory"):
            runtime.export(out / "notes")
        with pytest.raises(StorageError) as caught:
            runtime.export(out / "notes" / "below")
        assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert files(out) == ["notes"]
    assert (out / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "buffer", "said"),
    [
        ("fine", torch.zeros(2, dtype=torch.complex128), "fine is of torch.complex128"),
        ("sparse", torch.eye(2).to_sparse(), "sparse is torch.sparse_coo"),
        ("__metadata__", torch.zeros(2), "called '__metadata__'"),
        ("half\ud800", torch.zeros(2), "which safetensors cannot store"),
    ],
    ids=["complex128", "sparse", "metadata", "surrogate"],
)
def test_tensors_that_safetensors_cannot_hold(name: str, buffer: torch.Tensor, said: str, out: Path) -> None:
    model = entry("custom").make()
    with paged(model, out) as runtime, nothing_left(out), pytest.raises(ConfigError, match=said):
        model.register_buffer(name, buffer)
        runtime.export(out)


def test_a_config_that_cannot_be_saved(out: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = -3
    with paged(model, out) as runtime, pytest.raises(ConfigError, match="GenerationConfig"):
        runtime.export(out)
    assert files(out.parent) == ["swap"]


def test_a_parameter_that_came_later(out: Path) -> None:
    model = entry("custom").make()
    with paged(model, out) as runtime, nothing_left(out):
        model.late = nn.Parameter(torch.ones(3))
        with pytest.raises(ConfigError, match="late was added or replaced after"):
            runtime.export(out)


def test_a_closed_runtime(out: Path) -> None:
    with paged(entry("custom").make(), out) as runtime:
        pass
    with pytest.raises(ConfigError, match="closed"):
        runtime.export(out)
    assert files(out.parent) == ["swap"]


# --- what fails --------------------------------------------------------------------------------------------


def shards(out: Path) -> dict[str, Any]:
    """Return keyword arguments with which `runtime.export` writes several small files to the directory
    `out`/a/b. Neither this directory nor its parent `out`/a exists.
    """
    return {"path": out / "a" / "b", "shard": "8KiB"}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_files_that_cannot_be_written(code: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    model = entry("tied").make()
    with paged(model, out) as runtime:
        calls: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: (calls.append(descriptor), real(descriptor))[1])
            runtime.export(out.parent / "well", shard="8KiB")
        count = len(calls)
        assert count > len(files(out.parent / "well")) > 4
        for failing in {1, 2, count - 2, count - 1, count} if code == errno.EIO else {2}:
            calls.clear()

            def fsync(descriptor: int, failing: int = failing) -> None:
                calls.append(descriptor)
                if len(calls) == failing:
                    raise OSError(code, os.strerror(code))
                real(descriptor)

            with monkeypatch.context() as patch, nothing_left(out):
                patch.setattr(os, "fsync", fsync)
                with pytest.raises(StorageError) as caught:
                    runtime.export(**shards(out))
                assert caught.value.errno == code
                assert isinstance(caught.value, StorageFull) == (code != errno.EIO)
                assert caught.value.path.startswith(str(out / "a" / "b"))
                assert "budget" not in caught.value.cure
                del caught
        runtime.export(**shards(out))
        assert differences(read(out / "a" / "b"), seen(model, runtime)) == []


def test_a_disk_that_is_full(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = aiofiles.open
    with paged(entry("tied").make(), out) as runtime, monkeypatch.context() as patch, nothing_left(out):
        patch.setattr(aiofiles, "open", lambda path, mode: real("/dev/full", "wb"))
        with pytest.raises(StorageFull) as caught:
            runtime.export(out)
        assert caught.value.path == str(out / "model.safetensors")
        assert caught.value.errno == errno.ENOSPC
        del caught


def test_every_write_is_asked_for_its_result(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export fails if its first or its last write fails, so no write's result is ignored."""
    real = aiofiles.open
    calls: list[int] = []
    failing: list[int] = []

    async def failing_open(path: Path, mode: str) -> Any:
        file = await real(path, mode)
        write = file.write

        async def counted(data: Any) -> int:
            calls.append(1)
            if len(calls) in failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return await write(data)

        file.write = counted
        return file

    monkeypatch.setattr(aiofiles, "open", failing_open)
    with paged(entry("custom").make(), out) as runtime:
        runtime.export(out.parent / "well")
        for nth in (1, len(calls)):
            failing[:] = [nth]
            calls.clear()
            with nothing_left(out):
                with pytest.raises(StorageError) as caught:
                    runtime.export(out)
                assert caught.value.errno == errno.EIO
                del caught


def test_a_disk_that_is_full_for_real(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = out.parent / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        with paged(entry("tied").make(), out) as runtime, nothing_left(out):
            with pytest.raises(ConfigError, match="file system is mounted"):
                runtime.export(mounted)
            with pytest.raises(StorageFull, match="has 64 KiB free"):
                runtime.export(mounted / "a" / "b", shard="16KiB")
            monkeypatch.setattr(exporting, "check_room", lambda *_: None)  # as if others took it meanwhile
            with pytest.raises(StorageFull) as caught:
                runtime.export(mounted / "a" / "b", shard="16KiB")
            assert caught.value.path.startswith(str(mounted / "a" / "b" / "model-0000"))
            del caught
            assert files(mounted) == []
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=False)


@pytest.mark.parametrize("dtype", ["compute", "fp32"])
def test_pages_that_cannot_be_read(dtype: str, out: Path) -> None:
    faults = Faults()
    model = entry("tied").make()
    with paged(model, out, faults=faults) as runtime:
        before = faults.calls["read"]
        runtime.export(out, dtype=dtype)
        count = faults.calls["read"] - before
        assert count > 10
        for nth in (1, count // 2, count):
            faults.fail("read", nth, errno.EIO)
            with nothing_left(out):
                with pytest.raises(StorageError) as caught:
                    runtime.export(out.parent / "again", dtype=dtype)
                check_error(caught.value, errno.EIO, out.parent / "swap")
                del caught
            faults.clear()
        runtime.export(out.parent / "again", dtype=dtype)
        assert differences(read(out.parent / "again"), read(out)) == []


def test_an_interrupt_between_tensors(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Store.fetch
    model = entry("tied").make()
    with paged(model, out) as runtime:
        for nth in (1, 7):
            calls: list[int] = []

            def fetch(*args: Any, nth: int = nth, calls: list[int] = calls) -> torch.Tensor:
                calls.append(1)
                if len(calls) == nth:
                    signal.raise_signal(signal.SIGINT)
                return real(*args)

            with monkeypatch.context() as patch, nothing_left(out):
                patch.setattr(Store, "fetch", fetch)
                with pytest.raises(KeyboardInterrupt):
                    runtime.export(**shards(out))
        runtime.export(**shards(out))
        assert differences(read(out / "a" / "b"), seen(model, runtime)) == []


def test_an_interrupt_while_a_file_is_written(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a file is written raises KeyboardInterrupt in export(), and nothing is left behind.

    The writing thread sends the signal to the caller, which waits for the write or is about to wait.
    """
    real = os.fsync
    caller = threading.get_ident()
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            assert threading.get_ident() != caller
            signal.pthread_kill(caller, signal.SIGINT)
        real(descriptor)

    with paged(entry("tied").make(), out) as runtime, monkeypatch.context() as patch, nothing_left(out):
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(KeyboardInterrupt):
            runtime.export(**shards(out))
