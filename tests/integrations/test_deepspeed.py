"""Tests of DeepSpeed's configurations as arguments: each field has a decision, nothing is lost in silence."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from other_optimizers import Lion
from torch import nn

import infinity
from infinity import Budget, ConfigError, Precision, StorageError, from_deepspeed_config
from infinity.integrations import accelerate, deepspeed

FIELDS = json.loads(Path(__file__).with_name("deepspeed_fields.json").read_text())

AUTO: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
}
"""The file that transformers' documentation gives for stage 3."""


def decision_on(field: str, config: dict[str, Any]) -> tuple[str, str]:
    """(decision, why) of one field."""
    found = {each.field: each for each in from_deepspeed_config(config).decisions}
    return found[field].decision, found[field].why


def undecided(fields: dict[str, list[str]]) -> list[str]:
    """The fields without a rule of their own, of a block around them, or of fields in them."""
    paths = {f"{block}.{name}".lstrip(".") for block, names in fields.items() for name in names}
    paths.discard("bfloat16")  # the old name of bf16

    def decided(path: str) -> bool:
        return any(
            f"{path}.".startswith(f"{each}.") or each.startswith(f"{path}.") for each in deepspeed.RULES
        )

    return sorted(path for path in paths if not decided(path))


def test_every_field_of_deepspeed_has_a_decision() -> None:
    assert sum(map(len, FIELDS["fields"].values())) > 200
    assert undecided(FIELDS["fields"]) == []
    assert undecided({"": ["new"], "zero_optimization": ["newer"]}) == ["new", "zero_optimization.newer"]
    words = {"taken", "ignored", "said otherwise", "not there", "refused"}
    assert {each for each, _ in (*deepspeed.RULES.values(), *accelerate.RULES.values())} == words


def test_the_recorded_fields_are_those_of_the_installed_deepspeed() -> None:
    installed = pytest.importorskip("deepspeed")
    from integrations.deepspeed_fields import read_fields

    found = read_fields()
    assert undecided(found) == []
    if installed.__version__ == FIELDS["deepspeed"]:
        assert found == FIELDS["fields"]


def imported_at_once(file: Path) -> set[str]:
    """The packages that importing a file imports, by their first name, and "integrations" for this one."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return {"integrations" if "integrations" in name else name.partition(".")[0] for name in found}


def test_importing_the_package_and_the_converters_imports_no_other_library() -> None:
    package = Path(str(infinity.__file__)).parent
    assert "integrations" not in imported_at_once(package / "__init__.py")
    own = {*sys.stdlib_module_names, "infinity", "integrations", "torch"}
    for file in (package / "integrations").glob("*.py"):
        assert imported_at_once(file) <= own | {file.stem}, "only the library of its name"
    assert infinity.from_deepspeed_config is deepspeed.from_deepspeed_config
    with pytest.raises(AttributeError, match="from_nothing"):
        _ = infinity.from_nothing


def test_auto_stays_open() -> None:
    found = from_deepspeed_config(AUTO)
    assert found.offload == {"budget": Budget(), "partition": "parameters"}
    assert found.clip is None and found.optimizer == ("AdamW", {})
    assert found.open == (
        "bf16.enabled",
        *(f"optimizer.params.{each}" for each in ("lr", "betas", "eps", "weight_decay")),
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    assert "auto: comes from your trainer" in str(found)


@pytest.mark.parametrize(
    ("stage", "partition"), [(0, None), (1, "optimizer"), (2, "gradients"), (3, "parameters")]
)
def test_the_stage_is_the_partition(stage: int, partition: str | None) -> None:
    assert from_deepspeed_config({"zero_optimization": {"stage": stage}}).offload["partition"] == partition


def test_the_deprecated_switch_is_stage_1() -> None:
    assert from_deepspeed_config({"zero_optimization": True}).offload["partition"] == "optimizer"


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, Precision(compute="fp32")),
        ({"bf16": {"enabled": True}}, Precision(compute="bf16")),
        ({"bfloat16": {"enabled": True}}, Precision(compute="bf16")),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, Precision(compute="fp16")),
        ({"fp16": {"enabled": True, "auto_cast": True}}, Precision(compute="fp16", inputs="cast")),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            Precision(compute="bf16", accumulate="compute"),
        ),
        (
            {
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "bfloat16"},
            },
            Precision(compute="bf16"),
        ),
    ],
)
def test_dtypes_are_the_precision(config: dict[str, Any], precision: Precision) -> None:
    assert from_deepspeed_config(config).offload["precision"] == precision


def test_directories_get_90_percent_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "free_bytes", lambda path: 1000)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    block = {"offload_param": {"device": "nvme", "nvme_path": str(one)}}
    same = {**block, "offload_optimizer": block["offload_param"]}
    other = {**block, "offload_optimizer": {"device": "nvme", "nvme_path": str(two)}}
    unused = {"offload_param": {"device": "cpu", "nvme_path": str(one)}}
    for zero, sizes in ((block, {one: 900}), (same, {one: 900}), (other, {one: 450, two: 450}), (unused, {})):
        budget = from_deepspeed_config({"zero_optimization": zero}).offload["budget"]
        assert budget.nvme_bytes == {os.path.realpath(path): size for path, size in sizes.items()}
    given = from_deepspeed_config({"zero_optimization": other}, nvme={two: "1MiB"}).offload["budget"]
    assert given.nvme_bytes == {os.path.realpath(two): 1 << 20}
    one.rmdir()
    with pytest.raises(StorageError, match=r"give nvme="):
        from_deepspeed_config({"zero_optimization": block})


def test_accumulation_and_clipping() -> None:
    found = from_deepspeed_config({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5})
    assert found.offload["accumulation"] == 4 and found.clip == 0.5
    assert (
        "divide each loss"
        in decision_on("gradient_accumulation_steps", {"gradient_accumulation_steps": 4})[1]
    )
    assert from_deepspeed_config({"gradient_clipping": 0.0}).clip is None
    own = {"gradient_accumulation_steps": 4, "managed_gradient_accumulation": False}
    assert "accumulation" not in from_deepspeed_config(own).offload
    assert decision_on("gradient_accumulation_steps", own)[0] == "said otherwise"


def test_clipping_that_is_not_mentioned_is_deepspeeds_default() -> None:
    assert from_deepspeed_config({}).clip == 1.0
    assert decision_on("gradient_clipping", {}) == (
        "taken",
        "clip: DeepSpeed 0.19.8 clips where nothing is said; earlier versions did not",
    )


@pytest.mark.parametrize(
    ("kind", "params", "name", "options"),
    [
        ("AdamW", {"lr": 1e-4, "betas": [0.8, 0.9]}, "AdamW", {"lr": 1e-4, "betas": (0.8, 0.9)}),
        ("Adam", {"lr": 1e-4}, "AdamW", {"lr": 1e-4}),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, "Adam", {"weight_decay": 0.1}),
        ("adamw", {"torch_adam": True}, "AdamW", {"weight_decay": 0.01}),
        ("Adagrad", {"eps": 1e-9}, "Adagrad", {"eps": 1e-9}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, "SGD", {"momentum": 0.9}),
        ("Lion", {}, "Lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        (
            "lion",
            {"betas": [0.8, 0.9], "weight_decay": 0.1},
            "Lion",
            {"betas": (0.8, 0.9), "weight_decay": 0.1},
        ),
    ],
)
def test_optimizers_are_built_with_deepspeeds_defaults(
    kind: str,
    params: dict[str, Any],
    name: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lion_pytorch", SimpleNamespace(Lion=Lion))
    found = from_deepspeed_config({"optimizer": {"type": kind, "params": params}})
    built = found.build_optimizer(nn.Linear(2, 2).parameters())
    assert type(built) is (Lion if name == "Lion" else getattr(torch.optim, name))
    usual = {} if kind == "SGD" else {"weight_decay": 0.0}
    assert {**usual, **options}.items() <= built.param_groups[0].items()


def test_lion_trains_as_deepspeed_updates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = from_deepspeed_config({"optimizer": {"type": "Lion", "params": {"lr": 0.1, "weight_decay": 0.5}}})
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(ConfigError, match="lion-pytorch is not installed"):
        found.build_optimizer(nn.Linear(2, 2).parameters())
    monkeypatch.setitem(sys.modules, "lion_pytorch", SimpleNamespace(Lion=Lion))
    model = nn.Linear(8, 8)
    weight, mean = model.weight.detach().clone(), torch.zeros(8, 8)
    x = torch.arange(8.0).repeat(2, 1)
    optimizer = found.build_optimizer(model.parameters())
    with infinity.offload(model, optimizer, device="cpu", **found.offload) as runtime:
        for sign in (1.0, -3.0, 2.0):
            (model(x).sum() * sign).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            gradient = (2 * sign * x[0]).expand(8, 8)
            # As csrc/lion/cpu_lion_impl.cpp of DeepSpeed 0.19.8, but for the column whose gradient is 0:
            # DeepSpeed's sign of +0 is 1.
            direction = torch.sign(mean * 0.9 + gradient * (1 - 0.9))
            weight = weight * (1 - 0.1 * 0.5) - 0.1 * direction
            mean = mean * 0.999 + gradient * (1 - 0.999)
        with runtime.full_parameters(model):
            torch.testing.assert_close(model.weight.detach(), weight)


def test_muon_is_refused_with_the_two_optimizers_that_it_is() -> None:
    params = {"lr": 0.02, "adam_lr": 1e-3, "momentum": 0.95}
    with pytest.raises(ConfigError, match="Adam for all other parameters") as caught:
        from_deepspeed_config({"optimizer": {"type": "Muon", "params": params}})
    assert "torch.optim.Muon of the matrices" in caught.value.cure
    assert "Precision(keep=...)" in caught.value.cure


def test_options_that_are_open_must_be_given() -> None:
    found = from_deepspeed_config(AUTO)
    with pytest.raises(ConfigError, match=re.escape("lr=..., betas=..., eps=...")):
        found.build_optimizer(nn.Linear(2, 2).parameters())
    given = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    built = found.build_optimizer(nn.Linear(2, 2).parameters(), **given)
    assert given.items() <= built.param_groups[0].items()
    with pytest.raises(ConfigError, match="no optimizer"):
        from_deepspeed_config({}).build_optimizer([])


def test_a_model_trains_as_the_file_says(tmp_path: Path) -> None:
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_accumulation_steps": 1,
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    found = from_deepspeed_config(file, nvme={tmp_path: "64MiB"})
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    optimizer = found.build_optimizer(model.parameters())
    with infinity.offload(model, optimizer, device="cpu", **found.offload) as runtime:
        model(torch.ones(2, 8)).sum().backward()
        assert found.clip is not None
        runtime.clip_grad_norm_(found.clip)
        runtime.optimizer.step()
        with runtime.full_parameters(model):
            assert torch.allclose(model.weight.float(), before - 1e-2, atol=1e-2)
            assert not torch.equal(model.weight.float(), before.bfloat16().float())


OFF: list[tuple[str, Any, Any]] = [
    ("zero_optimization.zero_quantized_weights", True, False),
    ("zero_optimization.zero_quantized_gradients", True, False),
    ("zero_optimization.zero_quantized_nontrainable_weights", True, False),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, None),
    ("progressive_layer_drop", {"enabled": True, "theta": 0.5}, {"enabled": False, "theta": 0.5}),
    ("curriculum_learning", {"enabled": True}, {"enabled": False}),
    ("data_efficiency", {"enabled": True}, {"enabled": False, "data_sampling": {"num_epochs": 3}}),
    ("sparse_attention", {"mode": "fixed"}, {}),
    (
        "compression_training",
        {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {"a": 8}}},
    ),
    ("amp", {"enabled": True}, {"enabled": False}),
    ("elasticity", {"enabled": True}, {"enabled": False}),
    ("sequence_parallel_size", 2, 1),
    ("tensor_parallel.autotp_size", 4, 0),
    ("pipeline", {"stages": 2}, {}),
    ("data_types.buffer_dtype", "bf16", None),
]


@pytest.mark.parametrize(("field", "on", "off"), OFF, ids=[field for field, *_ in OFF])
def test_what_changes_training_is_refused_unless_it_is_off(field: str, on: Any, off: Any) -> None:
    block, _, name = field.rpartition(".")

    def config(value: Any) -> dict[str, Any]:
        return {block: {name: value}} if block else {name: value}

    with pytest.raises(ConfigError, match=re.escape(f"asks for {field}")) as caught:
        from_deepspeed_config(config(on))
    assert len(caught.value.cure) > 10
    assert decision_on(field, config(off)) == ("not there", "it is off")


@pytest.mark.parametrize("field", ["loss_scale", "fp16_master_weights_and_grads"])
def test_a_fixed_loss_scale_and_rough_masters_are_refused_where_fp16_is_on(field: str) -> None:
    for enabled in (True, "auto"):
        with pytest.raises(ConfigError, match=f"asks for fp16.{field}"):
            from_deepspeed_config({"fp16": {"enabled": enabled, field: 1}})
    off = {"fp16": {"enabled": False, field: 1}}
    assert decision_on(f"fp16.{field}", off) == ("ignored", "fp16 is off")


@pytest.mark.parametrize(
    "name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lamb", "FusedLion", "RMSprop", "MuAdam"]
)
def test_other_optimizers_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"is {name}, which infinity does not have"):
        from_deepspeed_config({"optimizer": {"type": name, "params": {"lr": 1e-3}}})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"gradient_cliping": 1.0}, "nearest is gradient_clipping"),
        ({"zero_optimization": {"stag": 3}}, r"nearest is zero_optimization\.stage"),
        ({"optimizer": {"type": "AdamW", "params": {"learning": 1}}}, r"optimizer\.params\.learning"),
        ({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}}, "bias_correction"),
        (
            {"optimizer": {"type": "Lion", "params": {"fp32_optimizer_states": False}}},
            "fp32_optimizer_states",
        ),
        ({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, r"optimizer\.params\.eps"),
        ({"optimizer": "AdamW"}, "Give its block"),
        ({"zero_optimization": {"stage": 4}}, "Give one of 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": [3]}}, "Give one of 0, 1, 2, 3"),
        ({"zero_optimization": 3}, "Give its block"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "none, cpu, nvme"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "nvme_path is None"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both bf16 and fp16"),
        ({"bf16": {"enabled": "yes"}}, r"bf16\.enabled"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "computes in fp32"),
        ({"data_types": {"param_dtype": "int8"}}, "param_dtype"),
        ({"gradient_accumulation_steps": 0}, "from 1 on"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
    ],
)
def test_what_cannot_be_meant_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_deepspeed_config(config)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not JSON"), ("[1]", "holds no configuration"), ('{"a": 1, "a": 2}', "the field a twice")],
)
def test_files_that_are_none(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    with pytest.raises(StorageError):
        from_deepspeed_config(file)
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        from_deepspeed_config(file)


def test_the_table_shows_every_field_and_no_secret() -> None:
    config = {**AUTO, "comet": {"enabled": True, "api_key": "secret"}}
    found = from_deepspeed_config(config)
    text = str(found)
    assert all(each.field.rpartition(".")[2] in text for each in found.decisions)
    assert "secret" not in text
    assert max(map(len, text.splitlines())) <= 110
    assert {each.decision for each in found.decisions} == {"taken", "ignored", "said otherwise"}


@pytest.mark.parametrize(
    ("field", "value", "decision", "says"),
    [
        ("scheduler", {"type": "WarmupLR"}, "said otherwise", "lr_scheduler"),
        ("activation_checkpointing", {"partition_activations": True}, "said otherwise", "checkpoint"),
        ("aio", {"block_size": 1}, "ignored", "infinity tune"),
        ("train_micro_batch_size_per_gpu", 8, "said otherwise", "DataLoader"),
        ("checkpoint", {"load_universal": True}, "said otherwise", "runtime.save"),
        ("wall_clock_breakdown", True, "said otherwise", "runtime.stats"),
        ("hybrid_engine", {"enabled": True}, "not there", "generate"),
    ],
)
def test_what_is_said_otherwise_names_the_call(field: str, value: Any, decision: str, says: str) -> None:
    found = decision_on("scheduler.type" if field == "scheduler" else field, {field: value})
    assert found[0] == decision and says in found[1]
