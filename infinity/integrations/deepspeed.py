"""DeepSpeed configuration: a file or mapping for DeepSpeed, as arguments of `infinity.offload`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from infinity.config import Precision
from infinity.errors import ConfigError, storage_errors
from infinity.integrations.decisions import (
    ELSEWHERE,
    IGNORED,
    MISSING,
    OPEN,
    REFUSED,
    SINGLE,
    TAKEN,
    ConvertedConfig,
    Decision,
    Directories,
    budget_of,
    decide,
    make_rules,
    one_of,
)

_PLANNED = "the plan decides"
_LOADER = "your DataLoader makes batches"
_MASTERS = 'Masters have fp32 precision: remove it, and give Precision(states="bf16") for smaller moments.'
_PARALLEL = "Ranks divide pages and take batches of their own: set it to 1, or remove it."
_DATA = "Give the model such data or layers in your loop, and remove it."
_BITS = "Pages and what ranks send have all bits of their dtype: remove it."

RULES = make_rules(
    (TAKEN, "partition=", "zero_optimization. stage"),
    (TAKEN, "budget=", "zero_optimization. cpu_offload cpu_offload_param"),
    (
        TAKEN,
        "budget=: RAM and nvme have what the device has no room for",
        "zero_optimization.offload_optimizer. device zero_optimization.offload_param. device",
    ),
    (
        TAKEN,
        "budget=: 90% of what is free there",
        "zero_optimization.offload_optimizer. nvme_path zero_optimization.offload_param. nvme_path",
    ),
    (TAKEN, "precision=: compute", "bf16. enabled fp16. enabled data_types. param_dtype"),
    (TAKEN, "precision=: accumulate", "data_types. grad_accum_dtype"),
    (TAKEN, "precision=: inputs", "fp16. auto_cast"),
    (
        TAKEN,
        "accumulation=; divide each loss by it, as engine.backward() did",
        "gradient_accumulation_steps",
    ),
    (TAKEN, "clip: call runtime.clip_grad_norm_(clip) before step()", "gradient_clipping"),
    (TAKEN, "optimizer: build_optimizer(parameters)", "optimizer. type params"),
    (
        IGNORED,
        _PLANNED,
        """zero_optimization. contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions
        use_multi_rank_bucket_allreduce allgather_bucket_size overlap_comm sub_group_size prefetch_bucket_size
        cpu_offload_use_pin_memory param_persistence_threshold model_persistence_threshold
        max_live_parameters max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params
        allgather_sequential legacy_stage1 round_robin_gradients parameter_alignment memory_efficient_linear
        pipeline_loading_checkpoint override_module_apply save_muon_momentum_buffer_in_memory leaf_module
        stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        zero_optimization.offload_optimizer. buffer_count pin_memory fast_init ratio super_offload
        cpuadam_cores_perc pipeline_read pipeline_write
        zero_optimization.offload_param. buffer_count buffer_size max_in_cpu pin_memory
        . disable_allgather bf16. immediate_grad_update optimizer. legacy_fusion""",
    ),
    (IGNORED, "`infinity tune` measures the disks", "aio"),
    (
        IGNORED,
        "gradient norms are exact, and computed when asked for",
        "zero_optimization. compute_grad_norm",
    ),
    (
        IGNORED,
        "a parameter without a gradient is skipped, as in torch",
        "zero_optimization. ignore_unused_parameters",
    ),
    (
        IGNORED,
        "it checks or prints what goes on in DeepSpeed",
        """zero_optimization. log_trace_cache_warnings enable_sanity_checks . dump_state log_level
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer vocabulary_size""",
    ),
    (
        IGNORED,
        "gradients are averaged over ranks in the dtype of Precision.accumulate",
        """communication_data_type seq_parallel_communication_data_type prescale_gradients
        gradient_predivide_factor gradient_allreduce_op""",
    ),
    (
        IGNORED,
        "true gradients: the scale is 2^15 at first, and decides only which steps overflow",
        "fp16. initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
    ),
    (
        IGNORED,
        "buffers keep their dtypes; Precision.keep is for parameters",
        "data_types. keep_in_fp32_modules",
    ),
    (IGNORED, "there are no experts to place", "use_data_before_expert_parallelism"),
    (ELSEWHERE, _LOADER, "train_batch_size train_micro_batch_size_per_gpu dataloader_drop_last"),
    (ELSEWHERE, "your loop decides when to call step()", "managed_gradient_accumulation"),
    (
        ELSEWHERE,
        "torch.optim.lr_scheduler, over runtime.optimizer",
        "scheduler. type params",
    ),
    (
        ELSEWHERE,
        "checkpoint the model itself: model.gradient_checkpointing_enable(), torch.utils.checkpoint",
        "activation_checkpointing",
    ),
    (
        ELSEWHERE,
        "runtime.export(directory)",
        """zero_optimization. gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
        stage3_gather_fp16_weights_on_model_save""",
    ),
    (
        ELSEWHERE,
        "infinity.offload(checkpoint=, resume=), runtime.save(): masters are exact, ranks may be others",
        "zero_optimization. load_from_fp32_weights elastic_checkpoint . checkpoint datastates_ckpt nebula",
    ),
    (
        ELSEWHERE,
        "runtime.stats, runtime.timeline()",
        "steps_per_print wall_clock_breakdown memory_breakdown flops_profiler comms_logger timers",
    ),
    (ELSEWHERE, "log runtime.stats to your writer", "tensorboard wandb comet csv_monitor"),
    (ELSEWHERE, "a gradient that is inf or NaN raises NonFiniteGradient", "bf16. check_grad_overflow"),
    (ELSEWHERE, "torch.autocast around the forward", "torch_autocast"),
    (ELSEWHERE, "print(runtime.plan), infinity tune", "autotuning"),
    (ELSEWHERE, "gc.disable(), in your program", "disable_python_gc"),
    (ELSEWHERE, "torch.compile of blocks of the model", "compile graph_harvesting"),
    (
        MISSING,
        "pages are divided among all ranks",
        "zero_optimization. zero_hpz_partition_size mics_shard_size mics_hierarchical_params_gather",
    ),
    (MISSING, "generate with the model as it is", "hybrid_engine"),
    (MISSING, "gradients are dense", "sparse_gradients"),
    (
        REFUSED,
        _BITS,
        """zero_optimization. zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients zeropp_loco_param""",
    ),
    (
        REFUSED,
        "Each step updates all parameters by all of their gradients: remove it.",
        "zero_optimization. zenflow",
    ),
    (
        REFUSED,
        _MASTERS,
        "fp16. fp16_master_weights_and_grads bf16. bf16_master_weights_and_grads bf16_optimizer_states",
    ),
    (REFUSED, "The scale is dynamic, and unseen: set it to 0, or remove it.", "fp16. loss_scale"),
    (REFUSED, "Convert buffers before infinity.offload, and remove it.", "data_types. buffer_dtype"),
    (
        REFUSED,
        _DATA,
        "progressive_layer_drop curriculum_learning data_efficiency sparse_attention",
    ),
    (
        REFUSED,
        "Quantize or prune the model after the training, and remove it.",
        "compression_training quantize_training weight_quantization eigenvalue",
    ),
    (REFUSED, 'Use the block bf16 or fp16, and remove "amp".', "amp"),
    (REFUSED, "Give a number of ranks and a batch that stay, and remove it.", "elasticity"),
    (REFUSED, _PARALLEL, "expert_parallel pipeline"),
    (
        SINGLE,
        _PARALLEL,
        "sequence_parallel_size tensor_parallel. autotp_size tp.tp_size tensor_parallel.tp_size",
    ),
    (
        IGNORED,
        "the model is not divided",
        """tensor_parallel. dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config
        preset_model replace_with_kernel_inject tp_overlap_comm vocab_parallel_ce_backend
        vocab_parallel_lm_head tp tensor_parallel""",
    ),
)
"""What becomes of each field of DeepSpeed 0.19.8, and of some that earlier versions had."""

_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
}
_PARTITIONS = {0: None, 1: "optimizer", 2: "gradients", 3: "parameters"}
_STEPS = "gradient_accumulation_steps"
_CLIP = 1.0
"""gradient_clipping of DeepSpeed 0.19.8 where the configuration says nothing."""


def from_deepspeed_config(
    config: str | os.PathLike[str] | Mapping[str, Any], *, nvme: Directories | None = None
) -> ConvertedConfig:
    """Convert a configuration for DeepSpeed. Neither needs nor imports DeepSpeed.

    config: a JSON file, or what it holds. nvme: as in `Budget`, in place of the configuration's directories,
    which have no sizes there: without it each gets 90% of what is free now.

    Values that are "auto" come from the trainer that reads the file: they are left out of the result, and
    `ConvertedConfig.open` lists them.

    Raises ConfigError for a field that is not DeepSpeed's, for one that would change the result of training
    and that this package does not have, unless it is off, and for a value that cannot be used. Raises
    StorageError if the file or a directory of it cannot be read.
    """
    values = dict(config) if isinstance(config, Mapping) else read_json(config)
    if isinstance(values.get("zero_optimization"), bool):
        values["zero_optimization"] = {"stage": int(values["zero_optimization"])}
    if "bfloat16" in values:
        values.setdefault("bf16", values.pop("bfloat16"))
    decisions = list(decide(values, RULES, "DeepSpeed"))
    if str(values.get("gradient_allreduce_op")).lower() == "sum":
        raise ConfigError(
            "The configuration asks for sums of gradients (gradient_allreduce_op); here they are averaged.",
            "Multiply the loss by the number of ranks, and remove the field.",
        )
    given = {each.field: each.value for each in decisions if each.decision == TAKEN and each.why != OPEN}
    offload: dict[str, Any] = {
        "budget": budget_of(_paths(given), nvme),
        "partition": one_of("zero_optimization.stage", given.get("zero_optimization.stage", 0), _PARTITIONS),
    }
    if not any(each.why == OPEN and each.field.endswith(".enabled") for each in decisions):
        offload["precision"] = _precision(given)
    steps = given.get(_STEPS)
    if values.get("managed_gradient_accumulation") is False:
        why = "your loop decides when to call step(); divide each loss by it"
        decisions = [
            replace(each, decision=ELSEWHERE, why=why) if each.field == _STEPS else each for each in decisions
        ]
    elif steps is not None:
        if type(steps) is not int or steps < 1:
            raise ConfigError(f"The field {_STEPS} is {steps!r}.", "Give a number from 1 on.")
        offload["accumulation"] = steps
    if values.get("gradient_clipping") is None:
        why = "clip: DeepSpeed 0.19.8 clips where nothing is said; earlier versions did not"
        decisions.append(Decision("gradient_clipping", _CLIP, TAKEN, why))
        given["gradient_clipping"] = _CLIP
    clip = given.get("gradient_clipping")
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip >= 0):
        raise ConfigError(f"The field gradient_clipping is {clip!r}.", "Give a number; 0 clips nothing.")
    optimizer = _optimizer(values.get("optimizer"), decisions)
    return ConvertedConfig(offload, clip or None, optimizer, tuple(decisions))


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a JSON file. Raises StorageError, and ConfigError for anything else."""
    try:
        with storage_errors("read", path), open(path, encoding="utf-8") as file:
            values = json.load(file, object_pairs_hook=_once)
    except ValueError as error:  # neither JSON nor UTF-8
        raise ConfigError(
            f"{os.fspath(path)} is not JSON: {error}.", "Give a configuration in JSON."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{os.fspath(path)} holds no configuration.", "Give a JSON object.")
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of `pairs`. Raises ConfigError for a name that comes twice, of which JSON drops one."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"The configuration has the field {twice} twice.", "Remove one of them.")
    return values


def _paths(given: Mapping[str, Any]) -> list[str]:
    """The directories of the blocks whose device is nvme. given: values of fields that are taken."""
    paths = []
    for block in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        device = given.get(f"{block}.device") or "none"
        if one_of(f"{block}.device", device, {"none": False, "cpu": False, "nvme": True}):
            path = given.get(f"{block}.nvme_path")
            if not isinstance(path, str | os.PathLike):
                raise ConfigError(
                    f"The field {block}.nvme_path is {path!r}.", "Give a directory on the disk."
                )
            paths.append(os.fspath(path))
    return paths


def _precision(given: Mapping[str, Any]) -> Precision:
    """The precision of a configuration that leaves none open."""
    switches = {"bf16": given.get("bf16.enabled", False), "fp16": given.get("fp16.enabled", False)}
    on = [
        name
        for name, value in switches.items()
        if one_of(f"{name}.enabled", value, {True: True, False: False})
    ]
    if len(on) > 1:
        raise ConfigError("The configuration has both bf16 and fp16.", "Turn one of them off.")
    compute = on[0] if on else "fp32"
    named = {
        field: one_of(f"data_types.{field}", given.get(f"data_types.{field}") or compute, _DTYPES)
        for field in ("param_dtype", "grad_accum_dtype")
    }
    if named["param_dtype"] != compute or named["grad_accum_dtype"] not in (compute, "fp32"):
        field = "param_dtype" if named["param_dtype"] != compute else "grad_accum_dtype"
        raise ConfigError(
            f"The field data_types.{field} is {named[field]}, and the model computes in {compute}.",
            "Turn bf16 or fp16 on to match, or remove the field.",
        )
    said = given.get("data_types.grad_accum_dtype") is not None
    return Precision(
        compute=compute,
        accumulate="compute" if said and named["grad_accum_dtype"] != "fp32" else "fp32",
        inputs="cast" if given.get("fp16.auto_cast") is True else "keep",
    )


def _optimizer(block: Any, decisions: list[Decision]) -> tuple[str, dict[str, Any]] | None:
    """The optimizer of the block `optimizer`, with DeepSpeed's defaults where torch's are others.

    decisions: the decision on the block's params is replaced by one for each of them. Raises ConfigError.
    """
    if not block or block.get("type") is None:
        return None
    params = dict(block.get("params") or {})
    name = str(block["type"])
    adam = name.lower() in ("adam", "adamw")
    if adam:
        decoupled = params.pop("adam_w_mode", True) or name.lower() == "adamw"
        name = "AdamW" if decoupled else "Adam"
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)
    elif name.lower() == "adagrad":
        name = "Adagrad"
    if name not in ("AdamW", "Adam", "Adagrad", "SGD"):
        raise ConfigError(
            f"The optimizer of the configuration is {name}, which is not there.",
            "Give infinity.offload AdamW, Adam, SGD or Adagrad of torch.optim, and remove the block.",
        )
    for option, only, cure in (
        ("bias_correction", True, "Correct it, as torch does, or use SGD."),
        ("fp32_optimizer_states", True, 'Remove it, and give Precision(states="bf16").'),
        ("set_grad_none", True, "Remove it, and call zero_grad(set_to_none=False)."),
    ):
        if params.pop(option, only) not in (only, "auto"):
            raise ConfigError(f"The field optimizer.params.{option} is not {only}.", cure)
    known = [each for each in inspect.signature(getattr(torch.optim, name)).parameters if each != "params"]
    here = next(i for i, each in enumerate(decisions) if each.field == "optimizer.type")
    rules = make_rules((TAKEN, f"optimizer: torch.optim.{name}", f"optimizer.params. {' '.join(known)}"))
    rows = list(decide({"optimizer": {"params": params}}, rules, f"torch.optim.{name}"))
    decisions[:] = [each for each in decisions if each.field != "optimizer.params"]
    decisions[here + 1 : here + 1] = rows
    if "betas" in params and params["betas"] != "auto":
        params["betas"] = tuple(params["betas"])
    return name, {option: value for option, value in params.items() if value != "auto"}
