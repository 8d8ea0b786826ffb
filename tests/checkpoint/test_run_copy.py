"""Tests of copies of runs: what is in the files, disks that are full, and files that are wrong."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import watchdog
from living_tensors import Living
from parity import differences
from run_copies import (
    STATE,
    bits_of,
    changed,
    copy,
    copy_to,
    load_into,
    offloaded,
    opened,
    raw,
    slab_of,
    swap,
    train,
)
from small_runtime import files
from torch import nn
from zoo import entry

from infinity.checkpoint import restore as restoring
from infinity.checkpoint import tensor_files
from infinity.checkpoint.commit_files import manifest_bytes
from infinity.cli import main
from infinity.errors import (
    ConfigError,
    CorruptState,
    IncompatibleCheckpoint,
    InfinityError,
    StorageError,
)
from infinity.pages.store import Store

__all__ = ["copy", "swap", "watchdog"]


# --- what is in the files ----------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_the_bits_of_pages_are_in_the_files(compute: str, states: str, tmp_path: Path, swap: Path) -> None:
    of = entry("frozen")
    model = of.make()
    with offloaded(model, swap, compute=compute, states=states) as runtime:
        train(model, runtime, of, range(2))
        copy_to(tmp_path / "copy", runtime)
        expected = raw(runtime, model)
    slab = slab_of(tmp_path / "copy").name
    assert sorted(files(tmp_path / "copy")) == ["commit-1", "commit-1.safetensors", slab]
    arrays = {
        f"{name}|{array}": tensor
        for name, each in expected.items()
        for array, tensor in each.items()
        if isinstance(tensor, torch.Tensor)
    }
    assert differences(bits_of(tmp_path / "copy"), arrays) == []
    found = {name.partition("|")[2] for name in arrays}
    masters = {"bf16": {"remainder"}, "fp16": {"master"}, "fp32": set()}[compute]
    scales = {"exp_avg.scale", "exp_avg_sq.scale"} if states == "int8" else set()
    assert found == {"values", "exp_avg", "exp_avg_sq"} | masters | scales
    assert ("unused|remainder" in arrays, "unused|exp_avg" in arrays) == (compute == "bf16", False)


def test_what_the_manifest_says(copy: Path) -> None:
    saved, source = opened(copy)
    manifest = saved.manifest
    assert manifest.rule == source.rule
    assert (manifest.rule.name, manifest.rule.states) == ("AdamW", "int8")
    assert (manifest.generation, manifest.rank, manifest.world_size) == (1, 0, 1)
    assert saved.run.user_state == STATE
    bias, unused = source.parameters()["head.bias"], source.parameters()["unused"]
    assert bias.shape == tuple(entry("frozen").make().head.bias.shape)
    assert (bias.trainable, bias.step, bias.moments, bias.edited) == (True, 1, True, False)
    assert (unused.step, unused.moments) == (0, False)
    assert not source.parameters()["embedding.weight"].trainable


def test_without_an_optimizer_there_are_values_alone(tmp_path: Path, swap: Path) -> None:
    model = entry("convnet").make()
    with offloaded(model, swap, optimizer=None) as runtime:
        copy_to(tmp_path / "copy", runtime)
        names = {name for name, _ in model.named_parameters()}
    assert set(bits_of(tmp_path / "copy")) == {f"{name}|values" for name in names}
    assert opened(tmp_path / "copy")[1].rule is None
    assert main(["checkpoint", "ls", str(tmp_path / "copy")]) == 0


def test_only_this_user_may_read_it(copy: Path) -> None:
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in copy.iterdir()} == {0o600}


def test_less_than_two_parts_are_in_ram(tmp_path: Path, swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensor_files, restoring):
        monkeypatch.setattr(module, "WINDOW", 1 << 12)
    model = nn.ParameterList([nn.Parameter(torch.randn(512, 256)) for _ in range(3)])
    with offloaded(model, swap) as runtime:
        sum(each.sum() for each in model).backward()
        runtime.optimizer.step()
        kept, submit = [], ThreadPoolExecutor.submit
        monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *call: (kept.append(call), submit(*call))[1])
        with Living() as living:  # even if the pool's threads keep their arguments, as they do for a while
            copy_to(tmp_path / "copy", runtime)
        assert kept
        assert 1 << 13 < living.peak < 4 * (1 << 12) * 4
        tracemalloc.start()  # what is read lies in Python's bytes
        try:
            load_into(runtime, tmp_path / "copy")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert 1 << 14 < peak < 1 << 17 < model[0].nbytes


# --- what fails while it is written ------------------------------------------------------------------------


def test_a_page_that_cannot_be_read(tmp_path: Path, swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = entry("custom")
    model = of.make()
    real = Store.fetch
    calls: list[int] = []
    failing = [0]

    def fetch(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) in failing:
            raise StorageError("It broke.", "Mend it.", path="x", errno=errno.EIO)
        return real(*arguments)

    monkeypatch.setattr(Store, "fetch", fetch)
    with offloaded(model, swap) as runtime:
        train(model, runtime, of, range(1))
        copy_to(tmp_path / "well", runtime)
        for nth in (1, len(calls) // 2, len(calls)):
            calls.clear()
            failing[:] = [nth]
            with pytest.raises(StorageError, match="It broke"):
                copy_to(tmp_path / "copy", runtime)
            assert sorted(files(tmp_path)) == ["swap", "well"]


def test_what_is_refused(tmp_path: Path, swap: Path) -> None:
    model = entry("custom").make()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    with offloaded(model, swap) as runtime:
        for path, what in ((tmp_path / "full", "is not empty"), ("", "path to save to")):
            with pytest.raises(ConfigError, match=what):
                copy_to(path, runtime)  # type: ignore[arg-type]
        model.other = model.last
        del model.last
        with pytest.raises(ConfigError, match=r"last\.weight was renamed or removed after"):
            copy_to(tmp_path / "copy", runtime)
    assert sorted(files(tmp_path)) == ["full", "swap"]


# --- files that are not what they should be ----------------------------------------------------------------


def replaced_by_link(path: Path) -> None:
    """Move a file of the copy away, and put a link to it in its place."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def flipped(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def of_a_rank(path: Path) -> None:
    """Have a copy's manifest say that it is a rank commit."""
    saved, _ = opened(path)
    data = (path / "commit-1.safetensors").read_bytes()
    (path / "commit-1").write_bytes(manifest_bytes(replace(saved.manifest, world_size=2), data))


WRONG: dict[str, tuple[Callable[[Path], Any], type[InfinityError], str]] = {
    "no manifest": (lambda path: (path / "commit-1").unlink(), ConfigError, "holds no copy"),
    "no slab": (lambda path: slab_of(path).unlink(), CorruptState, "missing"),
    "a link to the slab": (lambda path: replaced_by_link(slab_of(path)), CorruptState, "cannot be used"),
    "a rank commit": (of_a_rank, IncompatibleCheckpoint, "no copy of a run"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_copy_that_is_wrong(wrong: str, copy: Path) -> None:
    change, error, what = WRONG[wrong]
    opened(copy)
    change(copy)
    with pytest.raises(error, match=what) as caught:
        opened(copy)
    assert type(caught.value) is error


def test_a_flipped_bit_is_found(copy: Path) -> None:
    """By who loads the copy, and by `infinity checkpoint`."""
    slab = slab_of(copy)
    base = slab.stat().st_size - opened(copy)[0].manifest.volume.nbytes
    bits_of(copy)
    assert main(["checkpoint", "verify", str(copy)]) == 0
    flipped(slab, base)
    with pytest.raises(CorruptState, match=r"for its elements"):
        bits_of(copy)
    assert main(["checkpoint", "verify", str(copy)]) == 1


def test_a_slab_that_is_cut_while_it_is_open(copy: Path) -> None:
    _, source = opened(copy)
    os.truncate(slab_of(copy), 5000)
    with pytest.raises(CorruptState, match="ends before"):
        source.read("head.weight", "values", 0, source.parameters()["head.weight"].numel)


def test_a_copy_of_another_model(copy: Path, swap: Path) -> None:
    of = entry("tied")
    model = changed(of.make())
    with offloaded(model, swap) as runtime:
        before = raw(runtime, model)
        with pytest.raises(IncompatibleCheckpoint, match="are one parameter here, and 2 in"):
            load_into(runtime, copy)
        assert differences(raw(runtime, model), before) == []
