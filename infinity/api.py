"""Public calls: `plan`, which moves nothing, and `offload`."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from infinity.build import carry_out
from infinity.config import Budget, Precision
from infinity.errors import ConfigError
from infinity.formats.optimizer_rules import Rule
from infinity.model.paged_parameter import PagedParameter
from infinity.planning.fake_step import run_fake_step
from infinity.planning.machine_rates import measure_rates
from infinity.planning.operator_timing import Roofline, seconds_of
from infinity.planning.plan import Plan
from infinity.planning.planner import Available, as_model, check_kinds, make_plan, update_time
from infinity.runtime import Runtime
from infinity.tiers.tier import usable_device


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    budget: Budget | None = None,
    precision: Precision | None = None,
    device: torch.device | str | None = None,
    weights: str | os.PathLike[str] | None = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    update: str = "auto",
    accumulation: int | None = None,
) -> Runtime:
    """Move the states of `model` into pages, and return the runtime that moves them from now on.

    model: any nn.Module, changed in place; in RAM, on the device, or built under torch.device("meta"), in
    which case its own initialisers fill it module by module. optimizer: torch.optim's AdamW, Adam, SGD or
    Adagrad over its parameters, replaced by `Runtime.optimizer`; None: inference only. device: default "cuda"
    if there is one, else "cpu". weights: a safetensors file, or a directory of them, that fills the model.
    example_inputs: see infinity.plan. update: when step() updates: "sync", before it returns; "lazy", each
    unit before its next use, while earlier units compute; "eager", each unit in the backward that brings its
    last gradient (infinity/optim/eager.py says what that needs); "auto" chooses (lazy).

    accumulation: number of backwards in a step, if it is known. Eager updates need it; lazy ones use it to
    read their first states during the last backward. With accumulation=1 the plan prefers optimizer states
    to gradients for the nearer tiers, as gradients move less, and a gradient is stored in the dtype in which
    it comes, its parameter's: results have the same bits, and a second gradient raises ConfigError.

    Raises BudgetError before anything is moved if a budget is too small (`needed`: one that is enough),
    UnsupportedOptimizer, ConfigError for a model that cannot be paged, and what the tiers raise; model and
    optimizer are then as they were.
    """
    budget, precision = check_kinds(budget, precision)
    _check(model, optimizer)
    made = plan(
        model,
        optimizer,
        budget=budget,
        precision=precision,
        example_inputs=example_inputs,
        device=device,
        update=update,
        accumulation=accumulation,
    )
    return carry_out(made, model, optimizer, budget=budget, weights=weights)


def plan(
    model_or_config: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    budget: Budget | None = None,
    precision: Precision | None = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    update: str = "auto",
    accumulation: int | None = None,
) -> Plan:
    """The plan by which `offload` would move states with the same arguments; nothing is moved.

    model_or_config: a module on any device, meta included, or a transformers configuration. optimizer: None
    for inference only. example_inputs: positional or keyword arguments of one forward; with them the plan
    knows activations and predicts seconds per step: every distinct operation is timed on the device (2 s at
    most), and bandwidths are probed and kept in the cache directory (2 s; those of a disk soon expire).
    device: default "cuda" if there is one, else "cpu". update, accumulation: as in `offload`.

    Raises BudgetError (`needed`: bytes that are enough), ConfigError, UnsupportedOptimizer, and StorageError
    for a directory that cannot be probed.
    """
    budget, precision = check_kinds(budget, precision)
    chosen = update_time(update, accumulation, precision)
    target = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = as_model(model_or_config)
    rule = None if optimizer is None else Rule.of(optimizer, precision.states)
    draft = functools.partial(
        make_plan,
        model,
        rule,
        budget=budget,
        precision=precision,
        device=target,
        available=Available.now(target),
        update=chosen,
        accumulation=accumulation,
    )
    if example_inputs is None:
        return draft()
    estimate = run_fake_step(
        model, example_inputs, precision=precision, device=target, train=rule is not None
    )
    if estimate is None:
        return draft()
    draft(activations=estimate.activations)  # raises before anything is measured if it cannot fit
    speeds = measure_rates(budget.nvme_bytes, target, precision.compute_dtype)
    roofline = Roofline(flops=speeds.flops, bytes=speeds.host_stream)
    compute = seconds_of(estimate.operations, roofline, target)
    return draft(activations=estimate.activations, compute=compute, speeds=speeds)


def _check(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises ConfigError if the model cannot be paged, or the optimizer is not over its parameters."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"The model is a {type(model).__name__}.", "Give an nn.Module.")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.jit.ScriptModule)):
        raise ConfigError(
            f"The model is a {type(model).__name__}, which handles its parameters by itself.",
            "Give the plain module: infinity.offload partitions over ranks itself.",
        )
    known = set()
    for name, parameter in model.named_parameters():
        known.add(id(parameter))
        if isinstance(parameter, PagedParameter):
            raise ConfigError(
                f"The parameter {name} is in pages already.",
                "Offload a model once; after runtime.close() build it anew.",
            )
        if parameter.grad is not None:
            raise ConfigError(
                f"The parameter {name} has a gradient.", "Call optimizer.zero_grad() before infinity.offload."
            )
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    if any(id(each) not in known for group in groups for each in group["params"]):
        raise ConfigError(
            "The optimizer has a parameter that is not the model's.",
            "Build the optimizer of model.parameters(), after the last change to the model.",
        )
