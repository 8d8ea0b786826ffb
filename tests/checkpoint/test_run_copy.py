"""Tests of copies of runs: what is in the files, and disks that are full."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import process_resources
import pytest
import torch
from exports import persistent, read, seen
from failing_disk import FailingDisk
from faulty import start_torch_threads, watchdog
from living_tensors import Living
from parity import differences
from run_copies import RECORD, copy, copy_to, load_into, offloaded, raw, said, swap, train
from safetensors.torch import load_file
from small_runtime import files
from torch import nn
from zoo import entry

from infinity.checkpoint import restore as restoring
from infinity.checkpoint import tensor_files
from infinity.checkpoint.copy_source import CopySource
from infinity.checkpoint.safetensors_files import open_weights
from infinity.errors import (
    ConfigError,
    StorageError,
    StorageFull,
)
from infinity.pages.store import Store

__all__ = ["copy", "swap", "watchdog"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")


# --- what is in the files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_the_bits_of_pages_are_in_the_files(compute: str, states: str, tmp_path: Path, swap: Path) -> None:
    of = entry("frozen")
    model = of.make()
    with offloaded(model, swap, compute=compute, states=states) as runtime:
        train(model, runtime, of, range(2))
        copy_to(tmp_path / "copy", runtime)
        expected, values = raw(runtime, model), seen(model, runtime)
    names = ["model.safetensors", "run.json", "states-00001-of-00001.safetensors"]
    assert sorted(files(tmp_path / "copy")) == names
    assert differences(read(tmp_path / "copy"), values) == []
    arrays = {
        f"{name}|{array}": tensor
        for name, each in expected.items()
        for array, tensor in each.items()
        if isinstance(tensor, torch.Tensor) and array != "values"
    }
    assert differences(load_file(tmp_path / "copy" / names[2]), arrays) == []
    found = {name.partition("|")[2] for name in arrays}
    masters = {"bf16": {"remainder"}, "fp16": {"master"}, "fp32": set()}[compute]
    scales = {"exp_avg.scale", "exp_avg_sq.scale"} if states == "int8" else set()
    assert found == {"exp_avg", "exp_avg_sq"} | masters | scales
    assert ("unused|remainder" in arrays, "unused|exp_avg" in arrays) == (compute == "bf16", False)
    assert not any(name.startswith("embedding") for name in arrays)


def test_what_the_record_says(copy: Path) -> None:
    content = said(copy)
    assert (content["format"], content["version"]) == ("infinity run", 2)
    assert content["optimizer"] == {"name": "AdamW", "states": "int8", "moments": ["exp_avg", "exp_avg_sq"]}
    assert content["record"] == RECORD
    by_name = {each["names"][0]: each for each in content["parameters"]}
    assert by_name["head.bias"] == {
        "names": ["head.bias"],
        "shape": list(entry("frozen").make().head.bias.shape),
        "stride": [1],
        "dtype": "BF16",
        "trainable": True,
        "step": 1,
        "has_moments": True,
        "edited": False,
    }
    assert (by_name["unused"]["step"], by_name["unused"]["has_moments"]) == (0, False)
    assert not by_name["embedding.weight"]["trainable"]
    source = CopySource(copy)
    assert (source.record, source.data()) == (RECORD, b"some bytes")
    assert {"model.safetensors.index.json", "run.safetensors"} < set(files(copy))


def test_without_an_optimizer_there_are_no_states(tmp_path: Path, swap: Path) -> None:
    model = entry("convnet").make()
    with offloaded(model, swap, optimizer=None) as runtime:
        copy_to(tmp_path / "copy", runtime)
        buffers = set(persistent(model))
    assert sorted(files(tmp_path / "copy")) == ["model.safetensors", "run.json"]
    source = CopySource(tmp_path / "copy")
    assert (source.optimizer, source.data()) == (None, None)
    assert set(said(tmp_path / "copy")["buffers"]) == buffers != set()


def test_only_this_user_may_read_it(copy: Path) -> None:
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in copy.iterdir()} == {0o600}


def test_other_loaders_read_the_model(copy: Path) -> None:
    weights = open_weights(copy)
    assert set(weights.names) == {each["names"][0] for each in said(copy)["parameters"]}


def test_transformers_loads_it(tmp_path: Path, swap: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    with offloaded(model, swap) as runtime:
        copy_to(tmp_path / "copy", runtime)
        expected = seen(model, runtime)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert differences(dict(again.state_dict()), expected) == []
    assert stat.S_IMODE((tmp_path / "copy" / "config.json").stat().st_mode) == 0o600


def test_names_that_look_like_states(tmp_path: Path, swap: Path) -> None:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.ones(3)))
    model.register_parameter("w|x", nn.Parameter(torch.ones(5)))
    model.register_buffer("w|remainder", torch.ones(4))
    with offloaded(model, swap) as runtime:
        copy_to(tmp_path / "copy", runtime)
        load_into(runtime, tmp_path / "copy")


def test_less_than_two_parts_are_in_ram(tmp_path: Path, swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensor_files, restoring):
        monkeypatch.setattr(module, "WINDOW", 1 << 12)
    model = nn.ParameterList([nn.Parameter(torch.randn(512, 256)) for _ in range(3)])
    with offloaded(model, swap) as runtime:
        sum(each.sum() for each in model).backward()
        runtime.optimizer.step()
        with Living() as living:
            copy_to(tmp_path / "copy", runtime)
        assert 1 << 13 < living.peak < 4 * (1 << 12) * 4
        tracemalloc.start()  # what is read lies in Python's bytes
        try:
            load_into(runtime, tmp_path / "copy")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert 1 << 14 < peak < 1 << 17 < model[0].nbytes


# --- what fails while it is written ------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["nvme", "unified"])
def test_a_disk_that_is_full_at_every_write(
    home: str, tmp_path: Path, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left behind, and the run goes on with the bits of a run that was never copied."""
    of = entry("custom")
    model, plain = of.make(), of.make()
    target = tmp_path / "a" / "b"
    options = {"shard": "48KiB", "data": b"x" * 100}
    with offloaded(plain, swap, home=home) as runtime:
        losses = train(plain, runtime, of, range(3))
        end = raw(runtime, plain)
    with offloaded(model, swap, home=home) as runtime:
        again = train(model, runtime, of, range(1))
        start_torch_threads()
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch)
            copy_to(tmp_path / "well", runtime, **options)
            count, well = disk.calls, {each.name for each in (tmp_path / "well").iterdir()}
            assert count > 5 * len(well) > 20
            with process_resources.nothing_left(garbage=True):
                for nth in range(1, count + 1):
                    code = (errno.ENOSPC, errno.EDQUOT)[nth % 2]
                    disk.calls, disk.failing = 0, (nth, code)
                    with pytest.raises(StorageFull) as caught:
                        copy_to(target, runtime, **options)
                    assert caught.value.errno == code
                    assert caught.value.path.startswith(str(tmp_path / "a"))
                    assert "budget" not in caught.value.cure
                    del caught
                    assert sorted(files(tmp_path)) == ["swap", "well"]
            disk.failing = None
            copy_to(target, runtime, **options)
            assert {each.name: each.read_bytes() for each in target.iterdir()} == {
                each.name: each.read_bytes() for each in (tmp_path / "well").iterdir()
            }
        again += train(model, runtime, of, range(1, 3))
        assert again == losses
        assert differences(raw(runtime, model), end) == []


def test_a_disk_that_is_full_at_the_config(tmp_path: Path, swap: Path) -> None:
    class Config:
        def save_pretrained(self, directory: Path) -> None:
            (directory / "config.json").touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = entry("custom").make()
    model.config = Config()
    with offloaded(model, swap) as runtime:
        with pytest.raises(StorageFull) as caught:
            copy_to(tmp_path / "copy", runtime)
        assert caught.value.path == str(tmp_path / "copy")
        assert sorted(files(tmp_path)) == ["swap"]


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
        for path, options, what in (
            (tmp_path / "copy", {"shard": 0}, "shard size is zero"),
            (tmp_path / "full", {}, "is not empty"),
            ("", {}, "path to save to"),
        ):
            with pytest.raises(ConfigError, match=what):
                copy_to(path, runtime, **options)  # type: ignore[arg-type]
        model.other = model.last
        del model.last
        with pytest.raises(ConfigError, match=r"last\.weight was renamed or removed after"):
            copy_to(tmp_path / "copy", runtime)
    assert sorted(files(tmp_path)) == ["full", "swap"]
