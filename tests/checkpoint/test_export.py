"""Tests of `runtime.export`: the content of the files, and the little memory that an export takes."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import masters, out, paged, read, seen
from faulty import watchdog
from homes import HOMES, check_homes, each_device
from living_tensors import Living
from parity import copied, differences
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_runtime import files, opened, train_step
from torch import nn
from zoo import entry

import infinity
from infinity.checkpoint import tensor_files
from infinity.errors import ConfigError

__all__ = ["out", "watchdog"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")

COMPUTE = ("bf16", "fp16", "fp32")


def step(runtime: Any, model: nn.Module, of: Any, number: int) -> float:
    loss = of.loss(model, of.batch(number, 0))
    loss.backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return loss.item()


# --- what is in the files ----------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dtype", ["compute", "fp32"])
def test_every_home(home: str, dtype: str, out: Path) -> None:
    of = entry("tied")
    model = of.make()
    with paged(model, out, home=home) as runtime:
        check_homes(home, runtime.plan)
        step(runtime, model, of, 0)
        runtime.export(out, dtype=dtype)
        expected = seen(model, runtime) if dtype == "compute" else masters(model, runtime)
        assert differences(read(out), expected) == []
        step(runtime, model, of, 1)
        assert differences(read(out), seen(model, runtime)) != []
    assert files(out) == ["model.safetensors"]
    assert files(out.parent / "swap") == []


@pytest.mark.sweep
@each_device
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("dtype", ["compute", "fp32"])
@pytest.mark.parametrize("home", ["nvme", "device"])
def test_training_goes_on_from_an_export(home: str, dtype: str, compute: str, device: str, out: Path) -> None:
    """A model that is loaded from an export has the parameters of the exported model. If the export also
    holds the fp32 master weights, its training goes on with the bits of the exported model's training.

    The optimizer keeps no moments, so master weights are all of its state.
    """
    of = entry("transformer")
    model = of.make(device)
    with paged(model, out, home=home, compute=compute, keep=("norm.*",), device=device) as runtime:
        torch.manual_seed(0)
        step(runtime, model, of, 0)
        runtime.export(out, dtype=dtype, shard="64KiB")
        exported = seen(model, runtime), masters(model, runtime)
        torch.manual_seed(1)
        losses = [step(runtime, model, of, number) for number in (1, 2)]
        end = seen(model, runtime), masters(model, runtime)
    with torch.device("meta"):
        again = of.build()
    with paged(
        again, out, home=home, compute=compute, keep=("norm.*",), device=device, weights=out
    ) as runtime:
        assert differences(seen(again, runtime), exported[0]) == []
        same = differences(masters(again, runtime), exported[1]) == []
        assert same == (dtype == "fp32" or compute == "fp32")
        if same:
            torch.manual_seed(1)
            assert [step(runtime, again, of, number) for number in (1, 2)] == losses
            assert differences((seen(again, runtime), masters(again, runtime)), end) == []


def test_training_goes_on_after_an_export(tmp_path: Path, out: Path) -> None:
    plain, exported = entry("tied").make(), entry("tied").make()
    with opened(plain, tmp_path / "swap") as runtime:
        losses = [train_step(plain, runtime, number) for number in range(3)]
        end = copied(plain.state_dict())
    with opened(exported, tmp_path / "swap") as runtime:
        again = []
        for number in range(3):
            again.append(train_step(exported, runtime, number))
            runtime.export(out / str(number), dtype="fp32")
        assert again == losses
        assert differences(copied(exported.state_dict()), end) == []


@pytest.mark.sweep(most=5)
@pytest.mark.parametrize("name", ["tied", "channels_last", "convnet", "frozen", "custom", "mixture"])
@pytest.mark.parametrize("dtype", ["compute", "fp32"])
def test_models(name: str, dtype: str, out: Path) -> None:
    of = entry(name)
    model = of.make()
    with paged(model, out, keep=of.keep) as runtime:
        if name != "custom":
            step(runtime, model, of, 0)
        before = list(dict(model.named_parameters()))
        runtime.export(out, dtype=dtype)
        expected = seen(model, runtime)
        if dtype == "fp32":
            expected |= masters(model, runtime)
        assert differences(read(out), expected) == []
        assert list(dict(model.named_parameters())) == before
    if name == "channels_last":
        assert not model.layers[0].weight.is_contiguous()
    if name == "tied":
        assert "head.weight" not in expected


class Odd(nn.Module):
    """A module with parameters and buffers of unusual dtypes, shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(4, 0))
        self.turned = nn.Parameter(torch.randn(7, 11, 3).permute(2, 0, 1))
        self.counts = nn.Parameter(torch.arange(6), requires_grad=False)
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("wide", torch.randn(4, 6, dtype=torch.float64).t())
        self.register_buffer("spread", torch.randn(3, 1).expand(3, 4))
        self.register_buffer("conjugate", torch.randn(5, dtype=torch.complex64).conj())
        self.register_buffer("port", torch.arange(3, dtype=torch.int32).to(torch.uint16))
        self.register_buffer("empty", torch.zeros(0, 2, dtype=torch.int8))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("same", self.flags)

    def forward(self) -> torch.Tensor:
        return self.weight.sum() * self.scale + self.turned.sum()


@pytest.mark.parametrize("window", [4, 1 << 20])
@pytest.mark.parametrize("dtype", ["compute", "fp32"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, None])
def test_odd_tensors(
    optimizer: Any, dtype: str, window: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "WINDOW", window)
    model = Odd()
    with paged(model, out, compute="fp16", optimizer=optimizer) as runtime:
        runtime.export(out, dtype=dtype)
        expected = seen(model, runtime)
        if dtype == "fp32":
            values = masters(model, runtime) if optimizer else expected
            floating = ("weight", "scale", "nothing", "turned")
            expected |= {name: values[name].float() for name in floating}
    expected["conjugate"] = expected["conjugate"].resolve_conj()
    found = read(out)
    assert differences(found, expected) == []
    assert not {"passing", "same"} & found.keys()
    assert found["port"].dtype == torch.uint16


def test_edits_are_exported(out: Path) -> None:
    of = entry("tied")
    model = of.make()
    with paged(model, out) as runtime:
        step(runtime, model, of, 0)
        weight = model.blocks[0].mlp[0].weight
        with torch.no_grad():
            weight.mul_(3)
        model.norm.bias.data[0] = 42
        runtime.export(out)
        runtime.export(out.parent / "masters", dtype="fp32")
        expected = seen(model, runtime)
        assert expected["norm.bias"][0] == 42
        assert differences(read(out), expected) == []
        found = read(out.parent / "masters")
        assert differences(found["blocks.0.mlp.0.weight"], weight.detach().float()) == []
        assert differences(found, masters(model, runtime)) == []


def test_many_shards(out: Path) -> None:
    model = entry("convnet").make()
    with paged(model, out, keep=entry("convnet").keep) as runtime:
        runtime.export(out, shard=2000)
        expected = seen(model, runtime)
        order = [name for name in model.state_dict() if name in expected]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(each.nbytes for each in expected.values())}
    assert list(index["weight_map"]) == order
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards == [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    assert sorted(files(out)) == [*shards, "model.safetensors.index.json"]
    assert list(index["weight_map"].values()) == sorted(index["weight_map"].values())
    sizes = [[each.nbytes for each in load_file(out / shard).values()] for shard in shards]
    assert all(sum(each) <= 2000 or len(each) == 1 for each in sizes)
    assert differences(read(out), expected) == []


def test_shards_are_as_full_as_they_may_be(out: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(10)) for _ in range(5)])
    with paged(model, out, compute="fp32") as runtime:
        runtime.export(out, shard=80)
        runtime.export(out.parent / "one", shard=200)
        runtime.export(out.parent / "each", shard=1)
    counts = [len(load_file(each)) for each in sorted(out.glob("*.safetensors"))]
    assert counts == [2, 2, 1]
    assert files(out.parent / "one") == ["model.safetensors"]
    assert len(files(out.parent / "each")) == 6


def test_the_bytes_are_those_of_the_safetensors_library(out: Path) -> None:
    """An exported file has the bytes of the file that the safetensors library writes for the same tensors.

    The model's tensors all have one dtype, and their names are sorted as the library sorts them: otherwise
    the two could differ in the order of tensors.
    """
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(3, 5)) for name in "abcdä"})
    with paged(model, out, compute="fp32") as runtime:
        runtime.export(out)
        save_file(seen(model, runtime), out.parent / "theirs", metadata={"format": "pt"})
    assert (out / "model.safetensors").read_bytes() == (out.parent / "theirs").read_bytes()


def test_tensors_are_aligned_to_their_elements(out: Path) -> None:
    model = Odd()
    with paged(model, out, compute="bf16", keep=("scale",)) as runtime:
        runtime.export(out)
    content = (out / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for name, described in header.items():
        first, last = described["data_offsets"]
        assert first == end
        assert first % load_file(out / "model.safetensors")[name].itemsize == 0
        end = last
    assert 8 + length + end == len(content)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_transformers_reads_it(tied: bool, compute: str, out: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.max_new_tokens = 5
    ids = torch.arange(8)[None]
    with paged(model, out, compute=compute, optimizer=None) as runtime:
        runtime.export(out, shard="16KiB")
        expected = seen(model, runtime)
        with torch.no_grad():
            logits = model(ids).logits.clone()
        assert model.config is config
    assert config.architectures is None
    again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(again) is transformers.LlamaForCausalLM
    assert differences(dict(again.state_dict()) | expected, dict(again.state_dict())) == []
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert again.generation_config.max_new_tokens == 5
    with torch.no_grad():
        assert differences(again(ids).logits, logits) == []


# --- how little it takes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["compute", "fp32"])
@pytest.mark.parametrize("strided", [False, True])
def test_less_than_two_tensors_are_in_ram(
    dtype: str, strided: bool, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "WINDOW", 1 << 12)
    shape = (512, 256)
    values = [torch.randn(shape[::-1]).t() if strided else torch.randn(shape) for _ in range(4)]
    model = nn.ParameterList([nn.Parameter(each) for each in values])
    with paged(model, out) as runtime:
        whole = 512 * 256 * (4 if dtype == "fp32" else 2)
        with Living() as living:
            runtime.export(out, dtype=dtype)
        assert (
            differences(read(out), seen(model, runtime) if dtype == "compute" else masters(model, runtime))
            == []
        )
    limit = 24 * (1 << 12) * 4  # two parts, and what joining one of the parts takes in int64
    assert living.peak > 1 << 13, "it counts something"
    assert living.peak < (whole + limit if strided else limit) < 2 * whole + limit // 2


def test_the_measure_of_ram_sees_two_tensors() -> None:
    with Living() as living:
        one = torch.empty(1000)
        two = one + 1
        del one
        three = two.view(10, 100)
        assert (living.now, living.peak) == (4000, 8000)
        del two, three
        assert living.now == 0


def test_files_have_the_modes_of_any_other(out: Path) -> None:
    before = os.umask(0o027)
    try:
        with paged(entry("custom").make(), out, home="unified") as runtime:
            runtime.export(out / "a" / "b", shard=1000)
    finally:
        os.umask(before)
    for each in (out, out / "a", out / "a" / "b"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o750
    assert {stat.S_IMODE(each.stat().st_mode) for each in (out / "a" / "b").iterdir()} == {0o640}


def test_inside_of_a_running_event_loop(out: Path) -> None:
    model = entry("tied").make()

    async def main() -> None:
        runtime.export(out)
        await asyncio.sleep(0)

    with paged(model, out) as runtime:
        asyncio.run(main())
        assert differences(read(out), seen(model, runtime)) == []


def test_an_empty_directory_is_taken_over_also_through_a_link(out: Path) -> None:
    out.mkdir()
    link = out.parent / "link"
    link.symlink_to(out)
    with paged(entry("custom").make(), out, home="unified") as runtime:
        runtime.export(str(link))
    assert files(out) == ["model.safetensors"]
    assert link.is_symlink()


class BaseTunerLayer:
    """Has the name of the class that all layers of PEFT with adapters have."""


class TunedLinear(nn.Linear, BaseTunerLayer):
    pass


class Config:
    """Stands for a configuration of transformers."""

    def save_pretrained(self, directory: Path) -> None:
        (directory / "config.json").write_text("{}")


def with_peft_config() -> nn.Module:
    """A model like peft.PeftModel: it holds the given model as a child, and passes its attributes on."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.config, model.peft_config = Config(), {"default": None}
    return model


class PeftModel(nn.Sequential):
    """Has the name of PEFT's class, which keeps the configuration of prompt tuning under another name."""


def with_prompts() -> nn.Module:
    model = PeftModel(nn.Linear(4, 4))
    model.config = Config()
    return model


def with_tuned_layer() -> nn.Module:
    """A model like one of transformers after add_adapter()."""
    model = nn.Sequential(nn.Linear(4, 4), TunedLinear(4, 4))
    model.config = Config()
    return model


@pytest.mark.parametrize("made", [with_peft_config, with_prompts, with_tuned_layer])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_adapters_is_not_passed_off_as_one_of_transformers(
    compiled: bool, made: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model: Any = torch.compile(made(), backend="eager") if compiled else made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = infinity.Budget(host="8MiB")
    with infinity.offload(model, optimizer, budget=budget, device="cpu") as runtime:
        with pytest.raises(ConfigError, match=r"adapter.*model\.merge_and_unload.*save_pretrained"):
            runtime.export(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        runtime.save(tmp_path / "copy")  # for runtime.load, and without a configuration
        runtime.load(tmp_path / "copy")
    assert "commit-1" in files(tmp_path / "copy")
    assert "config.json" not in files(tmp_path / "copy")
