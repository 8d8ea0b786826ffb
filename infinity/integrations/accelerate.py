"""Accelerate configuration: a file or mapping for `accelerate launch`, as arguments of `infinity.offload`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infinity.config import Precision
from infinity.errors import ConfigError, storage_errors
from infinity.integrations.decisions import (
    ELSEWHERE,
    IGNORED,
    MISSING,
    REFUSED,
    SINGLE,
    TAKEN,
    ConvertedConfig,
    Directories,
    budget_of,
    decide,
    is_on,
    make_rules,
    one_of,
)
from infinity.integrations.deepspeed import from_deepspeed_config, read_json

_DEEPSPEED = "as in DeepSpeed's configuration, below"
_LOAD = "build the model on meta, and give weights=: parameters stream from safetensors"
_DIVIDED = "Ranks divide pages and take batches of their own: remove it."

RULES = make_rules(
    (TAKEN, "partition=, where ranks divide anything", "distributed_type"),
    (TAKEN, "precision=: compute; autocast is off, and keep= names what stays fp32", "mixed_precision"),
    (TAKEN, "device=", "use_cpu"),
    (TAKEN, "partition=, among all ranks", "fsdp_config. fsdp_sharding_strategy fsdp_reshard_after_forward"),
    (TAKEN, "says what the other fields mean", "fsdp_config. fsdp_version . compute_environment"),
    (TAKEN, "budget=: RAM has what the device has no room for", "fsdp_config. fsdp_offload_params"),
    (
        TAKEN,
        _DEEPSPEED,
        """deepspeed_config. deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
        offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping
        zero3_save_16bit_model""",
    ),
    (
        IGNORED,
        "the plan decides",
        """fsdp_config. fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params
        fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch fsdp_use_orig_params
        deepspeed_config. deepspeed_moe_layer_cls_names""",
    ),
    (IGNORED, "every rank begins with rank 0's values", "fsdp_config. fsdp_sync_module_states"),
    (ELSEWHERE, _LOAD, "fsdp_config. fsdp_cpu_ram_efficient_loading deepspeed_config. zero3_init_flag"),
    (ELSEWHERE, "runtime.export(directory), runtime.save()", "fsdp_config. fsdp_state_dict_type"),
    (
        ELSEWHERE,
        "checkpoint the model itself: model.gradient_checkpointing_enable(), torch.utils.checkpoint",
        "fsdp_config. fsdp_activation_checkpointing fsdp_activation_checkpointing_offload",
    ),
    (ELSEWHERE, "Precision(keep=): patterns of names that stay fp32", "fsdp_config. fsdp_ignored_modules"),
    (
        ELSEWHERE,
        "torchrun",
        """num_processes machine_rank num_machines gpu_ids main_process_ip main_process_port rdzv_backend
        same_network main_training_function enable_cpu_affinity mpirun_config
        deepspeed_config. deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter
        deepspeed_inclusion_filter""",
    ),
    (ELSEWHERE, "torch.compile of blocks of the model", "dynamo_config dynamo_backend"),
    (
        MISSING,
        "there are no TPUs here",
        "downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env",
    ),
    (MISSING, "errors have a cause and a cure", "debug"),
    (MISSING, "only fp8 needs it", "fp8_config"),
    (REFUSED, _DIVIDED, "megatron_lm_config"),
    (
        SINGLE,
        _DIVIDED,
        """parallelism_config. parallelism_config_tp_size parallelism_config_cp_size
        parallelism_config_sp_size""",
    ),
    (
        IGNORED,
        "the model is not divided",
        """parallelism_config. parallelism_config_dp_shard_size parallelism_config_dp_replicate_size
        parallelism_config_cp_comm_strategy
        parallelism_config_cp_backend parallelism_config_sp_backend parallelism_config_sp_seq_length
        parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation""",
    ),
)
"""What becomes of each field of accelerate 1.15."""

_KINDS = {"NO": "", "MULTI_CPU": "", "MULTI_GPU": "", "FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
"""Values of distributed_type that this package has, and the block that counts then."""
_COMPUTE = {"no": "fp32", False: "fp32", "fp16": "fp16", "bf16": "bf16"}
_STRATEGIES = {
    **dict.fromkeys(("FULL_SHARD", 1, "1", "HYBRID_SHARD", 4, "4"), "parameters"),
    **dict.fromkeys(("SHARD_GRAD_OP", 2, "2", "HYBRID_SHARD_ZERO2", 5, "5"), "gradients"),
    **dict.fromkeys(("NO_SHARD", 3, "3"), None),
}
_PREFIX = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}
"""Prefixes of names that accelerate adds where a configuration leaves them out."""


def from_accelerate_config(
    config: str | os.PathLike[str] | Mapping[str, Any], *, nvme: Directories | None = None
) -> ConvertedConfig:
    """Convert a configuration for accelerate. Neither needs nor imports accelerate.

    config: a YAML or JSON file, or what it holds. A file in YAML needs the package pyyaml. nvme: as in
    `from_deepspeed_config`.

    With a block for DeepSpeed the result is that of `from_deepspeed_config`, and its decisions come after
    accelerate's. Raises the errors of `from_deepspeed_config`, for fields of accelerate.
    """
    values = dict(config) if isinstance(config, Mapping) else _read(config)
    for block, prefix in _PREFIX.items():
        if isinstance(values.get(block), Mapping):
            named = values[block].items()
            values[block] = {n if n.startswith(prefix) else prefix + n: value for n, value in named}
    decisions = list(decide(values, RULES, "accelerate"))
    one_of("compute_environment", values.get("compute_environment", "LOCAL_MACHINE"), {"LOCAL_MACHINE": None})
    kind = values.get("distributed_type")
    block = one_of("distributed_type", kind, _KINDS)
    for index, each in enumerate(decisions):
        if each.field.partition(".")[0] in {"fsdp_config", "deepspeed_config"} - {block}:
            decisions[index] = replace(each, decision=IGNORED, why=f"distributed_type is {kind}")
    mixed = values.get("mixed_precision") or "no"
    compute = one_of("mixed_precision", mixed, _COMPUTE)
    device = {"device": "cpu"} if is_on(values.get("use_cpu")) or kind == "MULTI_CPU" else {}
    if kind == "DEEPSPEED":
        found = from_deepspeed_config(_for_deepspeed(values.get(block) or {}, mixed), nvme=nvme)
        return replace(found, offload={**found.offload, **device}, decisions=(*decisions, *found.decisions))
    offload: dict[str, Any] = {
        "budget": budget_of((), nvme),
        "precision": Precision(compute=compute),
        **device,
    }
    if kind == "FSDP":
        offload["partition"] = _partition(values.get(block) or {})
        offload["precision"] = Precision(compute=compute, inputs="cast")
    elif kind != "NO":
        offload["partition"] = None
    return ConvertedConfig(offload, None, None, tuple(decisions))


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a JSON or YAML file. Raises StorageError and ConfigError."""
    if os.fspath(path).endswith(".json"):
        return read_json(path)
    try:
        yaml = importlib.import_module("yaml")  # the package has no types
    except ImportError as error:
        raise ConfigError(
            f"{os.fspath(path)} is YAML, and the package pyyaml is not installed.",
            "Run `pip install pyyaml`, or give a JSON file or a mapping.",
        ) from error
    try:
        with storage_errors("read", path), open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{os.fspath(path)} is not YAML: {error}.", "Give accelerate's own file."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{os.fspath(path)} holds no configuration.", "Give accelerate's own file.")
    return values


def _partition(fsdp: Mapping[str, Any]) -> str | None:
    """What ranks divide, by the block fsdp_config. Raises ConfigError."""
    version = one_of("fsdp_config.fsdp_version", fsdp.get("fsdp_version", 1), {1: 1, 2: 2, "1": 1, "2": 2})
    reshard = fsdp.get("fsdp_reshard_after_forward")
    if version == 2:
        path = "fsdp_config.fsdp_reshard_after_forward"
        kept = {True: "parameters", "true": "parameters", False: "gradients", "false": "gradients"}
        value = True if reshard is None else reshard
        found: str | None = one_of(path, value.lower() if isinstance(value, str) else value, kept)
        return found
    strategy = fsdp.get("fsdp_sharding_strategy")
    value = next((each for each in (strategy, reshard) if each is not None), "FULL_SHARD")
    found = one_of(
        "fsdp_config.fsdp_sharding_strategy", value.upper() if isinstance(value, str) else value, _STRATEGIES
    )
    return found


def _for_deepspeed(block: Mapping[str, Any], mixed: Any) -> dict[str, Any]:
    """DeepSpeed's own configuration, as accelerate makes it of its block. mixed: mixed_precision."""
    path = block.get("deepspeed_config_file")
    if path is not None and is_on(path):
        values = read_json(path)
        both = [name for name in block if RULES[f"deepspeed_config.{name}"].why == _DEEPSPEED]
        if len(both) > 1:
            other = next(name for name in both if name != "deepspeed_config_file")
            raise ConfigError(
                f"The configuration has deepspeed_config_file and {other}, which that file says.",
                f"Remove {other}.",
            )
    else:
        values = {
            "zero_optimization": {
                "stage": block.get("zero_stage", 2),
                **{
                    name: {
                        field: block[f"{name}_{field}"]
                        for field in ("device", "nvme_path")
                        if f"{name}_{field}" in block
                    }
                    for name in ("offload_optimizer", "offload_param")
                },
                "stage3_gather_16bit_weights_on_model_save": block.get("zero3_save_16bit_model", False),
            },
            "gradient_accumulation_steps": block.get("gradient_accumulation_steps", "auto"),
            "gradient_clipping": block.get("gradient_clipping", "auto"),
        }
    for name in ("fp16", "bf16"):
        usual = {"enabled": "auto", **({"auto_cast": True} if name == mixed == "fp16" else {})}
        switched = dict(values.get(name) or usual)
        if switched.get("enabled") == "auto":
            switched["enabled"] = name == mixed
        values[name] = switched
    return values
