"""DeepSpeed configuration: a file or mapping for DeepSpeed, as arguments of `infinity.offload`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch

from infinity.config import Budget, Precision, Size
from infinity.errors import ConfigError, storage_errors
from infinity.integrations import decisions
from infinity.integrations.decisions import ELSEWHERE, OPEN, TAKEN, ConvertedConfig, one_of
from infinity.system.directory import free_bytes

RULES = decisions.read_rules("deepspeed_fields.txt")
"""The decision on each field of DeepSpeed 0.19.8, and on some of earlier versions."""

_DTYPES = {
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "fp32": ("fp32", "float32", "float", "torch.float32"),
}
_PARTITIONS = {0: None, 1: "optimizer", 2: "gradients", 3: "parameters"}
_OPTIMIZERS = {"adam": "AdamW", "adamw": "AdamW", "adagrad": "Adagrad", "sgd": "SGD", "lion": "Lion"}
_LION = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
"""DeepSpeed's defaults for Lion, which differ from lion-pytorch's."""
_STEPS, _CLIP, _PARAMS = "gradient_accumulation_steps", "gradient_clipping", "optimizer.params."


def from_deepspeed_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    nvme: Mapping[str | os.PathLike[str], Size] | None = None,
) -> ConvertedConfig:
    """Convert a configuration for DeepSpeed, without importing DeepSpeed.

    config: a JSON file, or its content. nvme: as in `Budget`, in place of the configuration's directories.
    Without `nvme`, the configuration's directories get 90% of the free space of each file system, in equal
    shares.

    Fields that are "auto" get their values from a trainer: they are left out of the result, and
    `ConvertedConfig.open` lists them.

    Raises ConfigError for a field that DeepSpeed does not have, for a value that cannot be used, and for a
    feature that is turned on, changes the result of training and does not exist in this package. Raises
    StorageError if the file or one of its directories cannot be read.
    """
    values = dict(config) if isinstance(config, Mapping) else decisions.read_mapping(config)
    rules, kind = dict(RULES), None
    if isinstance(values.get("zero_optimization"), bool):
        values["zero_optimization"] = {"stage": int(values["zero_optimization"])}
    if "bfloat16" in values:
        values.setdefault("bf16", values.pop("bfloat16"))
    if values.get("managed_gradient_accumulation") is False:
        rules[_STEPS] = ELSEWHERE, "your loop decides when to call step(); divide each loss by it"
    if values.get(_CLIP) is None:
        values[_CLIP] = 1.0
        rules[_CLIP] = TAKEN, "clip: DeepSpeed 0.19.8 clips where nothing is said; earlier versions did not"
    if isinstance(values.get("optimizer"), Mapping) and values["optimizer"].get("type") is not None:
        kind, params = _optimizer(values["optimizer"])
        values["optimizer"] = {**values["optimizer"], "params": params}
        if kind == "Lion":
            why, known = "optimizer: Lion of lion-pytorch", {*_LION}
        else:
            why = f"optimizer: torch.optim.{kind}"
            known = {*inspect.signature(getattr(torch.optim, kind)).parameters} - {"params"}
        rules |= {f"{_PARAMS}{option}": (TAKEN, why) for option in known}
    found = tuple(decisions.decide(values, rules, "DeepSpeed"))
    if str(values.get("gradient_allreduce_op")).lower() == "sum":
        raise ConfigError(
            "The configuration asks for sums of gradients (gradient_allreduce_op); here they are averaged.",
            "Multiply the loss by the number of ranks, and remove the field.",
        )
    given = {each.field: each.value for each in found if each.decision == TAKEN and each.why != OPEN}
    offload: dict[str, Any] = {
        "budget": _budget(given, nvme),
        "partition": one_of("zero_optimization.stage", given.get("zero_optimization.stage", 0), _PARTITIONS),
    }
    if not any(each.why == OPEN and each.field.endswith(".enabled") for each in found):
        offload["precision"] = _precision(given)
    steps, clip = given.get(_STEPS), given.get(_CLIP)
    if steps is not None:
        if type(steps) is not int or steps < 1:
            raise ConfigError(f"The field {_STEPS} is {steps!r}.", "Give a number from 1 on.")
        offload["accumulation"] = steps
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip >= 0):
        raise ConfigError(f"The field {_CLIP} is {clip!r}.", "Give a number; 0 clips nothing.")
    options = {name.removeprefix(_PARAMS): given[name] for name in given if name.startswith(_PARAMS)}
    return ConvertedConfig(offload, clip or None, (kind, options) if kind else None, found)


def _budget(given: Mapping[str, Any], nvme: Mapping[str | os.PathLike[str], Size] | None) -> Budget:
    """Return the budget with `nvme`. If it is None, take the directories of the configuration: they get 90%
    of the free space of their file system, and directories on the same file system get equal shares of this.

    given: path -> value of the fields that are TAKEN. Raises ConfigError, and StorageError for a directory
    that cannot be read.
    """
    free = {}
    for block in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        device, path = given.get(f"{block}.device") or "none", given.get(f"{block}.nvme_path")
        if not one_of(f"{block}.device", device, {"none": False, "cpu": False, "nvme": nvme is None}):
            continue
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"The field {block}.nvme_path is {path!r}.", "Give a directory on the disk.")
        with storage_errors("look at", path, cure=f'Make it, or give nvme={{"{path}": "400GiB"}}.'):
            free[os.fspath(path)] = os.stat(path).st_dev, free_bytes(path)
    systems = [system for system, _ in free.values()]
    sizes: dict[str | os.PathLike[str], Size] = {
        path: room * 9 // 10 // systems.count(system) for path, (system, room) in free.items()
    }
    return Budget(nvme=nvme if nvme is not None else sizes or None)


def _precision(given: Mapping[str, Any]) -> Precision:
    """Return the precision of a configuration. given: path -> value of the fields that are TAKEN."""
    switch = {True: True, False: False}
    on = [n for n in ("bf16", "fp16") if one_of(f"{n}.enabled", given.get(f"{n}.enabled", False), switch)]
    if len(on) > 1:
        raise ConfigError("The configuration has both bf16 and fp16.", "Turn one of them off.")
    compute = on[0] if on else "fp32"
    own, full = dict.fromkeys(_DTYPES[compute], "compute"), dict.fromkeys(_DTYPES["fp32"], "fp32")
    where = f", where the model computes in {compute},"
    one_of(f"data_types.param_dtype{where}", given.get("data_types.param_dtype") or compute, own)
    sums = given.get("data_types.grad_accum_dtype") or "fp32"
    return Precision(
        compute=compute,
        accumulate=one_of(f"data_types.grad_accum_dtype{where}", sums, {**own, **full}),
        inputs="cast" if given.get("fp16.auto_cast") is True else "keep",
    )


def _optimizer(block: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (name of the optimizer's class, its options) for the block `optimizer`. The options include
    DeepSpeed's defaults where they differ from the class's. Raises ConfigError.
    """
    kind, params = str(block["type"]).lower(), dict(block.get("params") or {})
    if kind == "muon":
        raise ConfigError(
            "DeepSpeed's Muon is two optimizers: Muon for matrices, and Adam for all other parameters, which "
            "are those named embed or lm_head, too.",
            "Remove the block. Give infinity.offload a torch.optim.Muon of the matrices, name the others in "
            "Precision(keep=...), and update them by an AdamW of yours.",
        )
    if kind not in _OPTIMIZERS:
        raise ConfigError(
            f"The optimizer of the configuration is {block['type']}, which infinity does not have.",
            "Give infinity.offload AdamW, Adam, SGD or Adagrad of torch.optim, or Lion of lion-pytorch, and "
            "remove the block.",
        )
    for option, cure in (
        ("bias_correction", "Correct it, as torch does, or use SGD."),
        ("fp32_optimizer_states", 'Remove it, and give Precision(states="bf16").'),
        ("set_grad_none", "Remove it, and call zero_grad(set_to_none=False)."),
    ):
        if params.pop(option, True) not in (True, "auto"):
            raise ConfigError(f"The field {_PARAMS}{option} is not True.", cure)
    name = _OPTIMIZERS[kind]
    if name == "Lion":
        params = {**_LION, **params}
    if name == "AdamW":
        if not params.pop("adam_w_mode", True) and kind == "adam":
            name = "Adam"
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)
    if isinstance(params.get("betas"), list):
        params["betas"] = tuple(params["betas"])
    return name, params
