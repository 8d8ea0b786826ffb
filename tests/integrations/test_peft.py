"""Tests of models with adapters of PEFT: over a base on the meta device, in training, and in exports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.planning.placement import Kind
from infinity.planning.slab_layout import trainable_bytes
from infinity.tiers import Tier

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("peft", reason="needs the peft package")
pytest.importorskip("transformers", minversion="5.22", reason="needs transformers' conversion table")

import peft
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
LLAMA = LlamaConfig(**_SIZES)
TIED = LlamaConfig(**_SIZES, tie_word_embeddings=True)
MIXTRAL = MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)
IDS = torch.arange(16).view(2, 8)
ATTENTION = ["q_proj", "v_proj"]

Wrap = Callable[[Any], Any]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"target_modules": ATTENTION, "r": 4, **options})


def adapted(*configs: Any) -> Wrap:
    """A function that adds adapters to a model: "default", then "second"."""

    def wrap(base: Any) -> Any:
        torch.manual_seed(7)
        model = peft.get_peft_model(base, configs[0])
        for config in configs[1:]:
            model.add_adapter("second", config)
        return model

    return wrap


def saved(config: Any, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a base with random weights as save_pretrained does, and return its directory."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory / "base")
    return directory / "base"


class Pair:
    """A model in pages, whose base was on the meta device, and the same model in RAM, of PEFT alone."""

    def __init__(
        self, wrap: Wrap, directory: Path, config: Any = LLAMA, compute: str = "fp32", **options: Any
    ) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[compute]
        base = saved(config, directory, dtype)
        self.plain = wrap(AutoModelForCausalLM.from_pretrained(base, dtype=dtype))
        with torch.device("meta"):
            on_meta = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.model = wrap(on_meta)
        torch.manual_seed(7)
        self.runtime = infinity.offload(
            self.model,
            torch.optim.AdamW(self.model.parameters(), lr=1e-2),
            weights=base,
            precision=infinity.Precision(compute=compute),
            device="cpu",
            **{"budget": infinity.Budget(host="64MiB"), **options},
        )
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-2)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close()

    def losses(self, step: int) -> tuple[float, float]:
        """Train a step on both, and return the losses of the pages and of the plain model."""
        found = []
        for model, optimizer in ((self.model, self.runtime.optimizer), (self.plain, self.optimizer)):
            torch.manual_seed(step)
            loss = model(IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found[0], found[1]


def differences(model: nn.Module, plain: nn.Module) -> list[str]:
    """Names of parameters that differ in dtype or bits."""
    found = dict(model.named_parameters())
    assert found.keys() == dict(plain.named_parameters()).keys()
    return [
        name
        for name, each in plain.named_parameters()
        if found[name].dtype != each.dtype or not torch.equal(found[name].detach(), each.detach())
    ]


@pytest.mark.parametrize(
    "configs, base, compute",
    [
        pytest.param([{}], LLAMA, "fp32", id="lora", marks=pytest.mark.slow),
        pytest.param([{}], LLAMA, "bf16", id="lora in bf16"),
        pytest.param(
            [{"lora_dropout": 0.1, "init_lora_weights": "gaussian", "use_rslora": True}],
            LLAMA,
            "fp32",
            id="rslora",
            marks=pytest.mark.slow,
        ),
        pytest.param([{"use_dora": True}], LLAMA, "fp32", id="dora", marks=pytest.mark.slow),
        pytest.param([{"use_dora": True}], LLAMA, "bf16", id="dora in bf16"),
        pytest.param([{"modules_to_save": ["lm_head"]}], LLAMA, "fp32", id="modules_to_save"),
        pytest.param(
            [{}, {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}],
            LLAMA,
            "fp32",
            id="two",
        ),
        pytest.param(
            [{"target_modules": ["embed_tokens"], "use_dora": True}],
            LLAMA,
            "fp32",
            id="embedding",
            marks=pytest.mark.slow,
        ),
        pytest.param([{"target_modules": ["w1", "w2", "w3", "q_proj"]}], MIXTRAL, "fp32", id="experts"),
    ],
)
def test_adapters_over_a_base_on_meta_begin_and_learn_as_in_ram(
    configs: Sequence[dict[str, Any]], base: Any, compute: str, tmp_path: Path
) -> None:
    with Pair(adapted(*(lora(**each) for each in configs)), tmp_path, base, compute) as pair:
        assert differences(pair.model, pair.plain) == []
        first = pair.losses(0)
        assert first[0] == first[1]
        for step in (1, 2):  # torch rounds its updates in another order
            mine, theirs = pair.losses(step)
            assert mine == pytest.approx(theirs, rel=1e-6)
        adapters = [each for name, each in pair.model.named_parameters() if ".lora_" in name]
        assert {each.dtype for each in adapters} == {torch.float32}


def test_another_adapter_is_trained_later_as_in_ram(tmp_path: Path) -> None:
    wrap = adapted(lora(), lora(modules_to_save=["lm_head"], r=2))
    with Pair(wrap, tmp_path) as pair:
        for step, adapter in enumerate(("default", "second", "second", "default")):
            pair.model.set_adapter(adapter)
            pair.plain.set_adapter(adapter)
            mine, theirs = pair.losses(step)
            assert mine == pytest.approx(theirs, rel=1e-6)
        for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach())


@pytest.mark.parametrize(
    "start",
    ["pissa", *(pytest.param(each, marks=pytest.mark.slow) for each in ("olora", "eva", "corda", "loftq"))],
)
def test_adapters_made_from_the_whole_base_are_refused(start: str, tmp_path: Path) -> None:
    base = saved(LLAMA, tmp_path)
    with torch.device("meta"):
        on_meta = AutoModelForCausalLM.from_config(LLAMA)
    model = peft.get_peft_model(on_meta, lora())
    model.peft_config["default"].init_lora_weights = start  # PEFT itself fails earlier, with other words
    with pytest.raises(ConfigError, match=rf"lora_A.*init_lora_weights='{start}'.*from_pretrained"):
        infinity.offload(model, None, weights=base, device="cpu")


def test_adapters_of_another_kind_are_refused_on_meta(tmp_path: Path) -> None:
    base = saved(LLAMA, tmp_path)
    with torch.device("meta"):
        on_meta = AutoModelForCausalLM.from_config(LLAMA)
    config = peft.IA3Config(target_modules=ATTENTION, feedforward_modules=[])
    with pytest.raises(ConfigError, match=r"ia3_l.*PEFT alone knows their values.*from_pretrained"):
        infinity.offload(peft.get_peft_model(on_meta, config), None, weights=base, device="cpu")


@pytest.mark.parametrize(
    "options", [{}, {"low_cpu_mem_usage": True}, {"is_trainable": True, "low_cpu_mem_usage": True}]
)
def test_saved_adapters_without_their_values_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    base = saved(LLAMA, tmp_path)
    plain = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    plain.save_pretrained(tmp_path / "adapter")
    with torch.device("meta"):
        on_meta = AutoModelForCausalLM.from_config(LLAMA)
    model = peft.PeftModel.from_pretrained(on_meta, tmp_path / "adapter", **options)
    with pytest.raises(ConfigError, match=r"lora_A.*were in a file.*set_peft_model_state_dict"):
        infinity.offload(model, None, weights=base, device="cpu")


def test_saved_adapters_are_read_after_the_offload(tmp_path: Path) -> None:
    base = saved(LLAMA, tmp_path)
    plain = adapted(lora(init_lora_weights=False))(AutoModelForCausalLM.from_pretrained(base))
    plain.save_pretrained(tmp_path / "adapter")
    with torch.device("meta"):
        on_meta = AutoModelForCausalLM.from_config(LLAMA)
    model = peft.get_peft_model(on_meta, lora())
    budget, precision = infinity.Budget(host="64MiB"), infinity.Precision(compute="fp32")
    with (
        infinity.offload(model, None, weights=base, budget=budget, precision=precision, device="cpu"),
        torch.no_grad(),
    ):
        peft.set_peft_model_state_dict(model, peft.load_peft_weights(tmp_path / "adapter"))
        assert torch.equal(model.eval()(IDS).logits, plain.eval()(IDS).logits)


def test_a_run_over_a_base_on_meta_is_resumed_without_its_directory(tmp_path: Path) -> None:
    base = saved(LLAMA, tmp_path)
    options: dict[str, Any] = {"budget": infinity.Budget(host="64MiB"), "device": "cpu"}

    def losses(steps: int, **way: Any) -> list[float]:
        with torch.device("meta"):
            on_meta = AutoModelForCausalLM.from_config(LLAMA)
        model = peft.get_peft_model(on_meta, lora(use_dora=True, modules_to_save=["lm_head"]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        with infinity.offload(model, optimizer, **options, **way) as runtime:
            for step in range(steps):
                if step == 1:
                    runtime.save().wait()
                loss = model(IDS, labels=IDS).loss
                loss.backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
                found.append(loss.item())
        return found

    expected = losses(2, weights=base, checkpoint=tmp_path / "commits")
    assert losses(1, resume=tmp_path / "commits") == expected[1:]


def test_a_step_writes_the_adapters_and_their_states_alone(tmp_path: Path) -> None:
    config = LlamaConfig(**{**_SIZES, "hidden_size": 64, "intermediate_size": 512})
    base = saved(config, tmp_path)
    with torch.device("meta"):
        model = peft.get_peft_model(AutoModelForCausalLM.from_config(config), lora())
    options: dict[str, Any] = {"precision": infinity.Precision(compute="bf16"), "device": "cpu"}
    nvme = {str(tmp_path): "64MiB"}
    optimizer = torch.optim.AdamW(model.parameters())
    roomy = infinity.Budget(device="64MiB", host="64MiB", nvme=nvme)
    smallest = infinity.plan(model, optimizer, budget=roomy, **options).smallest
    tight = infinity.Budget(device=smallest[Tier.DEVICE], host=smallest[Tier.HOST], nvme=nvme)
    with infinity.offload(model, optimizer, weights=base, budget=tight, **options) as runtime:
        for _ in range(3):
            model(IDS, labels=IDS).loss.backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        plan, written = runtime.plan, runtime.stats.written_per_step
        units = range(len(plan.layout.units))
        assert {tier for each in plan.homes for tier in each.values()} <= {Tier.NVME, None}
        adapters = sum(trainable_bytes(each) for each in plan.layout.units) + sum(
            plan.page_bytes(unit, kind) for unit in units for kind in (Kind.GRADIENT, Kind.OPTIMIZER)
        )
        assert written is not None and 0 < written <= adapters
        assert 3 * adapters < sum(plan.page_bytes(unit, Kind.PARAMETER) for unit in units)


@pytest.mark.parametrize(
    "configs, base, compute",
    [
        pytest.param([{}], LLAMA, "fp32", id="lora", marks=pytest.mark.slow),
        pytest.param([{"use_rslora": True, "use_dora": True}], LLAMA, "fp32", id="dora and rslora"),
        pytest.param([{"modules_to_save": ["lm_head"]}], LLAMA, "bf16", id="modules_to_save in bf16"),
        pytest.param([{}, {"target_modules": ["o_proj"]}], LLAMA, "fp32", id="second of two"),
        pytest.param([{"target_modules": ["w1", "w2", "w3", "q_proj"]}], MIXTRAL, "fp32", id="experts"),
    ],
)
def test_exports_are_those_of_peft(
    configs: Sequence[dict[str, Any]], base: Any, compute: str, tmp_path: Path
) -> None:
    with Pair(adapted(*(lora(**each) for each in configs)), tmp_path, base, compute) as pair:
        for model in (pair.model, pair.plain):
            model.set_adapter("second" if len(configs) > 1 else "default")
        pair.losses(0)
        with torch.no_grad():  # in bf16 the plain model has no masters
            for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
                theirs.copy_(mine.detach())
        pair.runtime.export(tmp_path / "adapters")
        pair.runtime.export(tmp_path / "merged", merge=True)
    pair.plain.save_pretrained(tmp_path / "theirs")
    for file in (tmp_path / "theirs").rglob("adapter_*"):
        mine = tmp_path / "adapters" / file.relative_to(tmp_path / "theirs")
        if file.suffix == ".json":
            assert json.loads(mine.read_text()) == json.loads(file.read_text())
        else:
            same(load_file(mine), load_file(file))
    merged = pair.plain.merge_and_unload()
    merged.save_pretrained(tmp_path / "whole")
    same(
        load_file(tmp_path / "merged" / "model.safetensors"),
        load_file(tmp_path / "whole" / "model.safetensors"),
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert again.dtype == merged.dtype
        assert torch.equal(again.eval()(IDS).logits, merged.eval()(IDS).logits)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each), name


def test_masters_of_a_merge_are_exact(tmp_path: Path) -> None:
    with Pair(adapted(lora(modules_to_save=["lm_head"])), tmp_path, compute="bf16") as pair:
        pair.losses(0)
        name = "base_model.model.lm_head.modules_to_save.default.weight"
        master = pair.runtime.optimizer.state[dict(pair.model.named_parameters())[name]]["master"]
        pair.runtime.export(tmp_path / "merged", merge=True, dtype="fp32")
        found = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], master)
    assert {each.dtype for each in found.values()} == {torch.float32}


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    tied = r"embed_tokens\.weight and lm_head\.weight are one tensor"
    with (
        Pair(adapted(lora(modules_to_save=["lm_head"])), tmp_path, TIED) as pair,
        pytest.raises(ConfigError, match=tied),
    ):
        pair.runtime.export(tmp_path / "merged", merge=True)
    with (
        infinity.offload(
            nn.Linear(4, 4), None, budget=infinity.Budget(host="64MiB"), device="cpu"
        ) as runtime,
        pytest.raises(ConfigError, match=r"no layers with adapters.*Leave merge=True out"),
    ):
        runtime.export(tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


def test_adapters_of_any_module_are_exported(tmp_path: Path) -> None:
    def wrap() -> Any:
        torch.manual_seed(3)
        base = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        return peft.get_peft_model(base, lora(target_modules=["0"], init_lora_weights=False))

    model, plain = wrap(), wrap()
    precision = infinity.Precision(compute="fp32")
    budget = infinity.Budget(host="64MiB")
    with infinity.offload(model, None, budget=budget, precision=precision, device="cpu") as runtime:
        runtime.export(tmp_path / "adapter")
        runtime.export(tmp_path / "merged", merge=True)
    plain.save_pretrained(tmp_path / "theirs")
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert [(tmp_path / "adapter" / each).exists() for each in names] == [True, True]
    assert [(tmp_path / "adapter" / each).read_bytes() for each in names] == [
        (tmp_path / "theirs" / each).read_bytes() for each in names
    ]
    same(load_file(tmp_path / "merged" / "model.safetensors"), plain.merge_and_unload().state_dict())
