"""Accelerate configuration: a file or mapping for `accelerate launch`, as arguments of `infinity.offload`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infinity.config import Budget, Precision, Size
from infinity.errors import ConfigError
from infinity.integrations import decisions
from infinity.integrations.decisions import IGNORED, TAKEN, ConvertedConfig, is_on, one_of, read_mapping
from infinity.integrations.deepspeed import from_deepspeed_config

RULES = decisions.read_rules("accelerate_fields.txt")
"""The decision on each field of accelerate 1.15."""

_KINDS = {"NO": "", "MULTI_CPU": "", "MULTI_GPU": "", "FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
"""Supported values of distributed_type, and the block of the configuration that is used with each."""
_COMPUTE = {"no": "fp32", False: "fp32", "fp16": "fp16", "bf16": "bf16"}
_PARTITIONS = {
    "1": {
        **dict.fromkeys(("FULL_SHARD", "1", "HYBRID_SHARD", "4"), "parameters"),
        **dict.fromkeys(("SHARD_GRAD_OP", "2", "HYBRID_SHARD_ZERO2", "5"), "gradients"),
        **dict.fromkeys(("NO_SHARD", "3"), None),
    },
    "2": {"TRUE": "parameters", "FALSE": "gradients"},
}
"""Version of FSDP -> its word for a way of sharding -> `partition`. The first word is the default."""
_PREFIXES = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}
"""Block -> the prefix of its fields' names, which accelerate adds if a configuration leaves it out."""


def from_accelerate_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    nvme: Mapping[str | os.PathLike[str], Size] | None = None,
) -> ConvertedConfig:
    """Convert a configuration for accelerate, without importing accelerate.

    config: a YAML or JSON file, or its content. A file in YAML needs the package pyyaml. nvme: as in
    `from_deepspeed_config`.

    If `distributed_type` is DEEPSPEED, the result is that of `from_deepspeed_config` for the block for
    DeepSpeed, with the device "cpu" if `use_cpu` is on. The decisions on accelerate's fields come first.

    Raises the errors of `from_deepspeed_config`, also for fields of accelerate.
    """
    if not isinstance(config, Mapping):
        config = read_mapping(config, "JSON" if os.fspath(config).endswith(".json") else "YAML")
    values = dict(config)
    for block, prefix in _PREFIXES.items():
        if isinstance(values.get(block), Mapping):
            named = values[block].items()
            values[block] = {n if n.startswith(prefix) else prefix + n: value for n, value in named}
    kind = values.get("distributed_type")
    block = one_of("distributed_type", kind, _KINDS)
    others = tuple(f"{each}." for each in _KINDS.values() if each not in ("", block))
    idle = {path: (IGNORED, f"distributed_type is {kind}") for path in RULES if path.startswith(others)}
    found = tuple(decisions.decide(values, {**RULES, **idle}, "accelerate"))
    one_of("compute_environment", values.get("compute_environment", "LOCAL_MACHINE"), {"LOCAL_MACHINE": None})
    mixed = values.get("mixed_precision") or "no"
    compute = one_of("mixed_precision", mixed, _COMPUTE)
    device = {"device": "cpu"} if is_on(values.get("use_cpu")) or kind == "MULTI_CPU" else {}
    if kind == "DEEPSPEED":
        own = from_deepspeed_config(_for_deepspeed(values.get(block) or {}, mixed), nvme=nvme)
        return replace(own, offload={**own.offload, **device}, decisions=(*found, *own.decisions))
    inputs = "cast" if kind == "FSDP" else "keep"
    offload: dict[str, Any] = {"precision": Precision(compute=compute, inputs=inputs), **device}
    if kind != "NO":
        offload["partition"] = _partition(values.get(block) or {}) if kind == "FSDP" else None
    return ConvertedConfig({"budget": Budget(nvme=nvme), **offload}, None, None, found)


def _partition(fsdp: Mapping[str, Any]) -> str | None:
    """Return the option `partition` of infinity.offload for the block fsdp_config. Raises ConfigError."""
    version = str(fsdp.get("fsdp_version", 1))
    choices = one_of("fsdp_config.fsdp_version", version, _PARTITIONS)
    names = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")[int(version) - 1 :]
    given = [(name, fsdp[name]) for name in names if fsdp.get(name) is not None]
    name, value = given[0] if given else (names[0], next(iter(choices)))
    divided: str | None = one_of(f"fsdp_config.{name}", str(value).upper(), choices)
    return divided


def _for_deepspeed(block: Mapping[str, Any], mixed: Any) -> dict[str, Any]:
    """Return the DeepSpeed configuration that accelerate makes of `block`, its deepspeed_config. mixed: the
    value of mixed_precision.
    """
    path = block.get("deepspeed_config_file")
    if path is not None and is_on(path):
        values = read_mapping(path)
        for other in sorted(block.keys() - {"deepspeed_config_file"}):
            if RULES[f"deepspeed_config.{other}"][0] == TAKEN:
                raise ConfigError(
                    f"The configuration has deepspeed_config_file and {other}, which that file sets.",
                    f"Remove {other}.",
                )
    else:
        zero: dict[str, Any] = {"stage": block.get("zero_stage", 2)}
        for name in ("offload_optimizer", "offload_param"):
            fields = {field: f"{name}_{field}" for field in ("device", "nvme_path")}
            zero[name] = {field: block[there] for field, there in fields.items() if there in block}
        values = {
            "zero_optimization": zero,
            "gradient_accumulation_steps": block.get("gradient_accumulation_steps", "auto"),
            "gradient_clipping": block.get("gradient_clipping", "auto"),
        }
    for name in ("fp16", "bf16"):
        cast = {"auto_cast": True} if name == mixed == "fp16" else {}
        switch = values.get(name) or {"enabled": "auto", **cast}
        on = name == mixed if switch.get("enabled") == "auto" else switch.get("enabled", False)
        values[name] = {**switch, "enabled": on}
    return values
