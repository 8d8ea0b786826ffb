"""Tests of accelerate's configurations as arguments, with FSDP and with DeepSpeed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity import Budget, ConfigError, Precision, from_accelerate_config

FSDP1 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""The file that `accelerate config` writes for FSDP."""

DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: nvme
  offload_param_nvme_path: {path}
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
mixed_precision: fp16
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "accelerate.yaml"
    file.write_text(text)
    return file


def fsdp(mixed: Any = "bf16", **fields: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "mixed_precision": mixed, "fsdp_config": fields}


def test_a_file_of_fsdp(tmp_path: Path) -> None:
    found = from_accelerate_config(write(tmp_path, FSDP1))
    assert found.offload == {
        "budget": Budget(),
        "precision": Precision(compute="bf16", inputs="cast"),
        "partition": "parameters",
    }
    assert found.clip is None and found.optimizer is None and found.open == ()
    rows = {each.field: each.decision for each in found.decisions}
    assert rows["fsdp_config.fsdp_offload_params"] == "taken"
    assert rows["fsdp_config.fsdp_auto_wrap_policy"] == "ignored"
    assert rows["fsdp_config.fsdp_state_dict_type"] == rows["num_processes"] == "said otherwise"
    assert "fsdp_use_orig_params" in str(found)


@pytest.mark.parametrize(
    ("fields", "partition"),
    [
        ({}, "parameters"),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "gradients"),
        ({"sharding_strategy": 2}, "gradients"),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, None),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "parameters"),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "gradients"),
        ({"fsdp_version": 2}, "parameters"),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, "parameters"),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, "gradients"),
    ],
)
def test_sharding_is_the_partition(fields: dict[str, Any], partition: str | None) -> None:
    assert from_accelerate_config(fsdp(**fields)).offload["partition"] == partition


@pytest.mark.parametrize(
    ("mixed", "compute"),
    [("no", "fp32"), (False, "fp32"), (None, "fp32"), ("bf16", "bf16"), ("fp16", "fp16")],
)
def test_mixed_precision_is_the_precision(mixed: Any, compute: str) -> None:
    assert from_accelerate_config(fsdp(mixed)).offload["precision"] == Precision(
        compute=compute, inputs="cast"
    )
    plain = {"distributed_type": "MULTI_GPU", "mixed_precision": mixed}
    assert from_accelerate_config(plain).offload == {
        "budget": Budget(),
        "precision": Precision(compute=compute),
        "partition": None,
    }


def test_one_process_on_the_cpu() -> None:
    found = from_accelerate_config({"distributed_type": "NO", "use_cpu": True})
    assert found.offload == {"budget": Budget(), "precision": Precision(compute="fp32"), "device": "cpu"}


def test_activation_checkpointing_is_the_models(tmp_path: Path) -> None:
    found = from_accelerate_config(fsdp(fsdp_activation_checkpointing=True))
    row = next(each for each in found.decisions if each.field.endswith("activation_checkpointing"))
    assert row.decision == "said otherwise" and "gradient_checkpointing_enable" in row.why


def test_a_file_with_a_block_for_deepspeed(tmp_path: Path) -> None:
    found = from_accelerate_config(write(tmp_path, DEEPSPEED.format(path=tmp_path)), nvme={tmp_path: "1GiB"})
    assert found.offload == {
        "budget": Budget(nvme={tmp_path: "1GiB"}),
        "precision": Precision(compute="fp16", inputs="cast"),
        "partition": "parameters",
        "accumulation": 4,
    }
    assert found.clip == 1.0
    fields = [each.field for each in found.decisions]
    assert {"deepspeed_config.zero_stage", "zero_optimization.stage"} <= set(fields)


def test_a_block_that_names_deepspeeds_own_file(tmp_path: Path) -> None:
    own = tmp_path / "ds.json"
    own.write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}))
    block = {"deepspeed_config_file": os.fspath(own), "zero3_init_flag": False}
    config = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": block}
    found = from_accelerate_config(config)
    assert found.offload["partition"] == "optimizer" and found.open == ()
    assert found.offload["precision"] == Precision(compute="bf16")
    with pytest.raises(ConfigError, match="deepspeed_config_file and zero_stage"):
        from_accelerate_config({**config, "deepspeed_config": {**block, "zero_stage": 2}})
    with pytest.raises(ConfigError, match="both bf16 and fp16"):
        own.write_text(json.dumps({"bf16": {"enabled": True}}))
        from_accelerate_config({**config, "mixed_precision": "fp16"})


def test_blocks_of_another_kind_do_not_count() -> None:
    config = {**fsdp(fsdp_sharding_strategy="FULL_SHARD"), "distributed_type": "MULTI_GPU"}
    found = from_accelerate_config(config)
    assert found.offload["partition"] is None
    row = next(each for each in found.decisions if each.field == "fsdp_config.fsdp_sharding_strategy")
    assert (row.decision, row.why) == ("ignored", "distributed_type is MULTI_GPU")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "distributed_type is None"),
        ({"distributed_type": "MEGATRON_LM"}, "Give one of NO"),
        ({"distributed_type": "NO", "mixed_precision": "fp8"}, "mixed_precision is 'fp8'"),
        ({"distributed_type": "NO", "compute_environment": "AMAZON_SAGEMAKER"}, "LOCAL_MACHINE"),
        ({"distributed_type": "NO", "num_proceses": 2}, "nearest is num_processes"),
        (fsdp(fsdp_shading_strategy="FULL_SHARD"), "nearest is fsdp_config.fsdp_sharding_strategy"),
        (fsdp(fsdp_sharding_strategy="HALF"), "FULL_SHARD"),
        (fsdp(fsdp_version=2, fsdp_reshard_after_forward="FULL_SHARD"), "reshard_after_forward"),
        (fsdp(fsdp_version=3), "fsdp_version"),
        ({"distributed_type": "FSDP", "parallelism_config": {"tp_size": 2}}, "tp_size"),
        ({"distributed_type": "NO", "megatron_lm_config": {"tp_degree": 2}}, "megatron_lm_config"),
    ],
)
def test_what_cannot_be_had_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_accelerate_config(config)


@pytest.mark.parametrize(("text", "says"), [("a: [", "is not YAML"), ("- 1", "holds no configuration")])
def test_files_that_are_none(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        from_accelerate_config(write(tmp_path, text))


def test_json_needs_no_yaml_and_yaml_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        from_accelerate_config(write(tmp_path, FSDP1))
    file = tmp_path / "accelerate.json"
    file.write_text(json.dumps(fsdp()))
    assert from_accelerate_config(file).offload["partition"] == "parameters"
