"""Tests of models of transformers whose files have other tensors than the model: what save_pretrained wrote
is loaded, and what export writes is what save_pretrained would have written.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import masters, out, paged, read
from living_tensors import Living
from meta_models import on_meta
from parity import differences
from safetensors.torch import load_file, save_file
from torch import nn
from warm_python import Popen

from infinity.checkpoint.initial_pages import weights_for
from infinity.checkpoint.safetensors_files import Assignment, load
from infinity.errors import ConfigError

pytest.importorskip("transformers", minversion="5.22", reason="needs transformers' conversion table")

from architectures import ARCHITECTURES, MIXTURES
from transformers import MixtralForCausalLM, core_model_loading

__all__ = ["out"]

ALL = {**ARCHITECTURES, **MIXTURES}
DEFAULT = ("llama", "mixtral", "gpt_neox", "vit")
CASES = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in ALL]
CPU = torch.device("cpu")


def outputs(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    inputs = ALL[name].inputs(0)
    model.eval()
    with torch.no_grad():
        found = model(**inputs)
    return {key: each.clone() for key, each in found.items() if isinstance(each, torch.Tensor)}


def meta(name: str) -> Any:
    return on_meta(ALL[name].build)


@pytest.mark.parametrize("name", CASES)
def test_what_save_pretrained_writes_is_loaded_and_exported(name: str, out: Path) -> None:
    hub = out.parent / "hub"
    saved: Any = ALL[name].build()
    saved.save_pretrained(hub)
    expected = outputs(type(saved).from_pretrained(hub), name)
    model = meta(name)
    with paged(model, out, home="device", compute="fp32", optimizer=None, weights=hub) as runtime:
        assert differences(outputs(model, name), expected) == []
        runtime.export(out)
    assert differences(read(out), load_file(hub / "model.safetensors")) == []
    again, told = type(saved).from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    assert differences(outputs(again, name), expected) == []


def test_masters_are_exported_in_the_format_of_the_files(out: Path) -> None:
    hub = out.parent / "hub"
    ALL["mixtral"].build().save_pretrained(hub)
    model = meta("mixtral")
    with paged(model, out, weights=hub) as runtime:
        model(**ALL["mixtral"].inputs(0)).loss.backward()
        runtime.optimizer.step()
        runtime.export(out, dtype="fp32")
        expected = masters(model, runtime)
    assert load_file(hub / "model.safetensors").keys() == read(out).keys()
    again = MixtralForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert differences(dict(again.named_parameters()), expected) == []


def test_the_models_own_format_stays_the_format(out: Path) -> None:
    hub = out.parent / "hub"
    saved: Any = ALL["mixtral"].build()
    saved.save_pretrained(hub, save_original_format=False)
    model = meta("mixtral")
    with paged(model, out, compute="fp32", weights=hub) as runtime:
        runtime.export(out)
    assert differences(read(out), dict(saved.state_dict())) == []
    MixtralForCausalLM.from_pretrained(hub).save_pretrained(out.parent / "theirs")
    assert read(out).keys() == read(out.parent / "theirs").keys()


def filled(model: nn.Module, path: Path) -> tuple[dict[str, torch.Tensor], Assignment]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, torch.Tensor] = {}

    def fill(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        values[names[id(parameter)]] = tensor.clone()

    return values, load(model, weights_for(model, path), fill, CPU)


def test_a_base_model_and_a_module_around_it(tmp_path: Path) -> None:
    saved: Any = ALL["mixtral"].build()
    saved.save_pretrained(tmp_path)
    expected = dict(saved.model.named_parameters())
    values, assignment = filled(meta("mixtral").model, tmp_path)
    assert differences(values, expected) == []
    assert assignment.unexpected == ("lm_head.weight",)
    values, _ = filled(nn.ModuleDict({"backbone": meta("mixtral").model}), tmp_path)
    assert (
        differences({name.removeprefix("backbone."): each for name, each in values.items()}, expected) == []
    )


def test_one_group_of_tensors_is_in_ram(tmp_path: Path, out: Path) -> None:
    """One group has 192 KiB: the gates of four experts. Beside the group's tensors there are the converted
    ones, and while experts are merged one more half. The whole model has 1.2 MiB.
    """
    of = copy.deepcopy(ALL["mixtral"])
    of.sizes["intermediate_size"] = 192
    group = 4 * 2 * 192 * 32 * 4
    of.build().save_pretrained(tmp_path / "hub")
    model = on_meta(of.build)
    size = sum(each.numel() * 4 for each in model.parameters())
    with Living() as living:
        load(model, weights_for(model, tmp_path / "hub"), lambda parameter, values: None, CPU)
    assert group < living.peak <= 2.1 * group < size
    with paged(of.build(), out, compute="fp32", optimizer=None) as runtime, Living() as living:
        runtime.export(out, shard="64KiB")
    assert group < living.peak <= 2.2 * group < size


def damaged(path: Path, change: str) -> None:
    tensors = load_file(path / "model.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    if change == "shape":
        tensors[expert] = tensors[expert][:-1].contiguous()
    elif change == "all":
        tensors = {name: each for name, each in tensors.items() if ".w3." not in name}
    elif change == "expert":
        tensors = {name: each for name, each in tensors.items() if "experts.2" not in name}
    elif change == "layer":
        tensors = {name: each for name, each in tensors.items() if "1.block_sparse_moe.exp" not in name}
    else:
        del tensors[expert]
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "one",
            r"convert .*layers\.1\..*experts\.0\.w1.* \(4 of \S*w1\.weight, 3 of \S*w3\.weight\) to .*Merge",
        ),
        ("shape", r"layers\.1\.block_sparse_moe\.experts.*(RuntimeError|AssertionError): stack"),
        ("all", r"\(4 of \S*w1\.weight, 0 of \S*w3\.weight\)"),
        ("expert", r"gate_up_proj, made from .*w3\.weight\) \(\[3, 96, 32\].*has \[4, 96, 32\]"),
        ("layer", r"no weights for model\.layers\.1\.mlp\.experts\.gate_up_proj, .*down_proj\."),
    ],
)
def test_experts_that_are_missing_or_do_not_fit_are_named(tmp_path: Path, change: str, said: str) -> None:
    ALL["mixtral"].build().save_pretrained(tmp_path)
    damaged(tmp_path, change)
    model, given = meta("mixtral"), []
    with pytest.raises(ConfigError, match=said) as caught:
        load(model, weights_for(model, tmp_path), lambda parameter, values: given.append(parameter), CPU)
    assert caught.value.cure
    assert given == []
    assert not hasattr(model, "_weight_conversions")


def test_an_operation_that_fails_is_named(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ALL["mixtral"].build().save_pretrained(tmp_path / "hub")

    def convert(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("later")

    with monkeypatch.context() as patch:
        patch.setattr(core_model_loading.MergeModulelist, "convert", convert)
        with pytest.raises(ConfigError, match=r"by \[MergeModulelist\(dim=0\).*NotImplementedError: later"):
            weights_for(meta("mixtral"), tmp_path / "hub")
    with paged(meta("mixtral"), out, weights=tmp_path / "hub") as runtime:
        monkeypatch.delattr(core_model_loading.MergeModulelist, "reverse_op")
        with pytest.raises(
            ConfigError, match=r"no way back .*w2.*MergeModulelist.*NotImplementedError"
        ) as caught:
            runtime.export(out)
    assert "save_original_format=False" in caught.value.cure
    assert not out.exists()


def test_transformers_is_not_imported_without_a_model_of_it(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, tmp_path / "model.safetensors")
    program = (
        "import sys, torch, infinity\n"
        "with torch.device('meta'): model = torch.nn.Linear(2, 1)\n"
        "options = dict(budget=infinity.Budget(host='8MiB'), device='cpu')\n"
        f"with infinity.offload(model, None, weights={str(tmp_path)!r}, **options) as runtime:\n"
        f"    runtime.export({str(tmp_path / 'out')!r})\n"
        "sys.exit(any(each.split('.')[0] in ('transformers', 'peft') for each in sys.modules))"
    )
    assert Popen([sys.executable, "-c", program]).wait() == 0
