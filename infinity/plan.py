"""The plan: what lies where and what it costs, before a byte is moved. Pure but for `plan` itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from infinity import machine
from infinity.bandwidths import measure_bandwidths
from infinity.config import Budget, Precision, format_size, round_up
from infinity.errors import ConfigError
from infinity.estimate import estimate_step
from infinity.layout import ModelLayout, build
from infinity.operators import Roofline, seconds_of
from infinity.placement import Homes, Kind, Room, Search
from infinity.predict import Bandwidths, Prediction, Traffic, predict, traffic
from infinity.reserve import Reserve
from infinity.rules import Rule, StateFormat, state_format
from infinity.shortage import format_count, shortage, usable_nvme
from infinity.table import render
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.tiers.tier import usable_device
from infinity.units import survey

_MARGIN = 512 << 20
"""Bytes left to others where no budget is given, or 5% where that is more."""

_SECONDS_PER_DAY = 86_400

_UNKNOWN_SHARE = 4
"""One in so many bytes of a CUDA budget is no page's as long as nobody knows what activations take."""


@dataclass(frozen=True)
class Available:
    """Bytes that can be had now, less a margin: the budgets of who gives none."""

    device: int
    host: int

    @staticmethod
    def now(device: torch.device) -> Available:
        """What `device` and this machine have free."""
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        return Available(_less_margin(free), _less_margin(machine.memory().usable))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every page's home, every pool's size, and what a step should take."""

    layout: ModelLayout
    precision: Precision
    rule: Rule | None
    """None: inference only."""
    device: torch.device
    unified: bool
    """Device and host are the same RAM: parameters at home in the host tier are used in place."""
    homes: Homes
    """Per unit and kind; None for a page without bytes (nothing is trainable, or no optimizer)."""
    slot_bytes: int
    """Bytes of a host staging slot: parameters, gradients and states of any chunk."""
    slots: int
    resident_bytes: int
    """Bytes of the pool in which parameter pages become resident; 0 where all are at home there."""
    budgets: dict[Tier, int]
    """Bytes, of the tiers that there are."""
    smallest: dict[Tier, int]
    """Budgets that do together with the least memory, in bytes."""
    activations: int | None
    """Bytes at the peak of a step, parameters and gradients excluded; None: unknown."""
    reserved: int
    """Bytes of the computing tier's budget that are left to activations and buffers."""
    prediction: Prediction | None = None
    """Of a step of one micro-batch; None: unknown."""
    speeds: Bandwidths | None = None
    compute: float | None = None
    """Seconds that the operations of one forward and backward take; None: unknown."""

    def page_bytes(self, unit: int, kind: Kind) -> int:
        """Bytes of a page; a multiple of 4096."""
        return self._pages[kind][unit]

    def gradient_offset(self, unit: int, chunk: int) -> int:
        """Bytes from the start of the unit's gradient page to those of a chunk; a multiple of 4096."""
        return self._gradient_ends[unit][chunk]

    def state_offset(self, unit: int, chunk: int) -> int:
        """Bytes from the start of the unit's optimizer page to the states of a chunk; a multiple of 4096."""
        return self._state_ends[unit][chunk]

    def state_format(self, unit: int, chunk: int) -> StateFormat:
        """Where the arrays of a chunk lie in its part of the optimizer page; none without an optimizer."""
        layout = self.layout.units[unit]
        dtype = layout.regions[layout.chunks[chunk].region].dtype
        arrays = self.rule.arrays(dtype) if self.rule else ()
        return state_format(arrays, layout.chunks[chunk].count)

    @functools.cached_property
    def home_bytes(self) -> dict[Tier, int]:
        """Bytes of the pages at home in each tier."""
        found = dict.fromkeys(Tier, 0)
        for tier, _, nbytes in self._resting():
            found[tier] += nbytes
        return found

    @property
    def device_bytes(self) -> int:
        """Bytes of the device tier's memory: pages and the pool of residents; 0 when unified."""
        return 0 if self.unified else self.home_bytes[Tier.DEVICE] + self.resident_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena: pages, slots, and when unified the pool of residents."""
        resident = self.resident_bytes if self.unified else 0
        return self.home_bytes[Tier.HOST] + self.slots * self.slot_bytes + resident

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM: the host arena, and where the CPU computes the device's and what is reserved too."""
        return self.host_bytes + (self.device_bytes + self.reserved if self.device.type == "cpu" else 0)

    @property
    def nvme_bytes(self) -> int:
        """Bytes of pages in slab files."""
        return self.home_bytes[Tier.NVME]

    @functools.cached_property
    def traffic(self) -> Traffic:
        """Bytes that a step moves over every edge."""
        trained = [
            sum(
                round_up(region.elements * region.dtype.itemsize, PAGE_ALIGNMENT)
                for region in unit.regions
                if region.trainable and self.rule
            )
            for unit in self.layout.units
        ]
        return traffic(
            self.homes,
            self._pages,
            trained,
            unified=self.unified,
            computes_in_ram=self.device.type == "cpu",
        )

    def predict(self, micro_batches: int = 1) -> Prediction | None:
        """What a step of so many forwards and backwards of the example inputs should take.

        None where the plan was made without them, or their computation depends on data.
        """
        if self.speeds is None or self.compute is None:
            return None
        return predict(self.traffic, self.speeds, self.compute, micro_batches)

    def rows(self) -> list[dict[str, Any]]:
        """The table: a dict per tier with its name and bytes. `activations` is None where unknown."""
        used = {Tier.DEVICE: self.device_bytes, Tier.HOST: self.host_bytes, Tier.NVME: self.nvme_bytes}
        slots = self.slots * self.slot_bytes
        working = {Tier.DEVICE: self.resident_bytes, Tier.HOST: slots, Tier.NVME: 0}
        if self.unified:
            working[Tier.HOST] += self.resident_bytes
        kinds = {(tier, kind): 0 for tier in Tier for kind in Kind}
        for tier, kind, nbytes in self._resting():
            kinds[tier, kind] += nbytes
        computes_in = Tier.HOST if self.unified else Tier.DEVICE
        used[computes_in] += self.reserved
        return [
            {
                "tier": tier.value,
                "budget": budget,
                "params": kinds[tier, Kind.PARAMETER],
                "gradients": kinds[tier, Kind.GRADIENT],
                "optimizer": kinds[tier, Kind.OPTIMIZER],
                "working": working[tier],
                "activations": self.activations if tier is computes_in else 0,
                "free": budget - used[tier],
            }
            for tier, budget in self.budgets.items()
        ]

    def __str__(self) -> str:
        per_step = self.traffic.disk_write
        writes = f"writes {format_size(per_step)}/step to disk"
        speed = "predicted unknown s/step"
        if self.prediction is not None:
            seconds = self.prediction.seconds
            what = "measured" if self.prediction.measured else "predicted"
            speed = f"{what} {seconds:.2g} s/step · limited by {self.prediction.limited_by}"
            writes += f" ({format_size(int(per_step * _SECONDS_PER_DAY / seconds))}/day)"
        line = speed if Tier.NVME not in self.budgets else f"{speed} · {writes}"
        smallest = " · ".join(f"{tier.value} {format_size(n)}" for tier, n in self.smallest.items())
        return f"{render(self.rows())}\n{line}\nsmallest budgets that would do: {smallest}"

    @functools.cached_property
    def _pages(self) -> dict[Kind, list[int]]:
        return {
            Kind.PARAMETER: [unit.nbytes for unit in self.layout.units],
            Kind.GRADIENT: [ends[-1] for ends in self._gradient_ends],
            Kind.OPTIMIZER: [ends[-1] for ends in self._state_ends],
        }

    @functools.cached_property
    def _gradient_ends(self) -> list[list[int]]:
        return [[*_ends(self._gradient_sizes(unit))] for unit in range(len(self.layout.units))]

    @functools.cached_property
    def _state_ends(self) -> list[list[int]]:
        units = enumerate(self.layout.units)
        return [
            [*_ends(self.state_format(index, chunk).nbytes for chunk in range(len(unit.chunks)))]
            for index, unit in units
        ]

    def _gradient_sizes(self, unit: int) -> Iterator[int]:
        layout = self.layout.units[unit]
        for chunk in layout.chunks:
            dtype = self.precision.accumulate_dtype(layout.regions[chunk.region].dtype)
            yield round_up(chunk.count * dtype.itemsize, PAGE_ALIGNMENT) if self.rule else 0

    def _resting(self) -> Iterator[tuple[Tier, Kind, int]]:
        for unit, homes in enumerate(self.homes):
            for kind, tier in homes.items():
                if tier is not None:
                    yield tier, kind, self._pages[kind][unit]


def _ends(sizes: Any) -> Iterator[int]:
    end = 0
    yield end
    for nbytes in sizes:
        end += nbytes
        yield end


def make_plan(
    model: nn.Module,
    rule: Rule | None,
    *,
    budget: Budget,
    precision: Precision,
    device: torch.device,
    available: Available,
    speeds: Bandwidths | None = None,
    activations: int | None = None,
    compute: float | None = None,
) -> Plan:
    """The plan for a model within `budget`. Pure: reads no tensor's data, measures nothing.

    available: what stands in for a budget that is None. activations: bytes at the peak of a step; they count
    against the tier that computes; where they are unknown, a CUDA device keeps a quarter free for them.
    compute: seconds of the operations of forward and backward; with `speeds` they give the prediction.
    Raises BudgetError where a budget is too small (`needed`: the smallest that would do), and ConfigError as
    `infinity.units.survey` does.
    """
    unified = device.type == "cpu" and budget.device_bytes is None
    surveyed = survey(model, precision)
    budgets = _budgets(budget, available, unified=unified)
    reserve = Reserve.of(
        activations, _buffer_bytes(model), unknown=_UNKNOWN_SHARE if device.type == "cuda" else None
    )
    computes_in = Tier.HOST if unified else Tier.DEVICE
    left = {**budgets, computes_in: budgets[computes_in] - reserve.within(budgets[computes_in])}
    room = Room(
        device=None if unified else left[Tier.DEVICE],
        host=left[Tier.HOST],
        nvme=usable_nvme(budget.nvme_bytes),
    )
    search = Search(surveyed, precision, rule)
    placement = search.place(room)
    if placement is None:
        elements = sum(parameter.numel for parameter in surveyed.parameters)
        raise shortage(
            search,
            room,
            budgets,
            len(budget.nvme_bytes),
            f"{format_count(elements)} parameters",
            reserves={computes_in: reserve},
        )
    smallest = search.smallest(unified=unified, nvme=bool(budget.nvme_bytes))
    smallest[computes_in] = reserve.budget_for(smallest[computes_in])
    made = Plan(
        layout=build(surveyed, placement.grouping, placement.chunk_elements),
        precision=precision,
        rule=rule,
        device=device,
        unified=unified,
        homes=placement.homes,
        slot_bytes=placement.slot_bytes,
        slots=placement.slots,
        resident_bytes=placement.resident_bytes,
        budgets=budgets,
        smallest=smallest,
        activations=activations,
        reserved=reserve.within(budgets[computes_in]),
        speeds=speeds,
        compute=compute,
    )
    return replace(made, prediction=made.predict())


def plan(
    model_or_config: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    budget: Budget | None = None,
    precision: Precision | None = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """What `offload` would do with the same arguments, without moving a byte.

    model_or_config: a module on any device, meta included, or a transformers configuration. optimizer: None
    for inference only. example_inputs: positional or keyword arguments of one forward; with them the plan
    knows activations and predicts seconds per step: every distinct operation is timed on the device (2 s at
    most), and bandwidths are probed and kept in the cache directory (1.5 s; those of a disk soon expire).
    device: default "cuda" where there is one, else "cpu".

    Raises BudgetError (`needed`: bytes that would do), ConfigError, UnsupportedOptimizer, and StorageError
    for a directory that cannot be probed.
    """
    budget, precision = check_kinds(budget, precision)
    target = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = as_model(model_or_config)
    rule = None if optimizer is None else Rule.of(optimizer)
    draft = functools.partial(
        make_plan,
        model,
        rule,
        budget=budget,
        precision=precision,
        device=target,
        available=Available.now(target),
    )
    if example_inputs is None:
        return draft()
    estimate = estimate_step(
        model, example_inputs, precision=precision, device=target, train=rule is not None
    )
    if estimate is None:
        return draft()
    draft(activations=estimate.activations)  # what cannot fit fails before anything is measured
    speeds = measure_bandwidths(budget.nvme_bytes, target, precision.compute_dtype)
    roofline = Roofline(flops=speeds.flops, bytes=speeds.host_stream)
    compute = seconds_of(estimate.operations, roofline, target)
    return draft(activations=estimate.activations, compute=compute, speeds=speeds)


def check_kinds(budget: Budget | None, precision: Precision | None) -> tuple[Budget, Precision]:
    """The two with their defaults. Raises ConfigError for values of another kind."""
    if not isinstance(budget, Budget | None):
        raise ConfigError(f"The budget is a {type(budget).__name__}.", "Give infinity.Budget(host=..., ...).")
    if not isinstance(precision, Precision | None):
        raise ConfigError(
            f"The precision is a {type(precision).__name__}.", 'Give infinity.Precision(compute="bf16", ...).'
        )
    return budget or Budget(), precision or Precision()


def as_model(model_or_config: Any) -> nn.Module:
    """A module as it is; of a transformers configuration the model (causal where it can be), on meta.

    Raises ConfigError for anything else, and where transformers is not installed.
    """
    if isinstance(model_or_config, nn.Module):
        return model_or_config
    if not hasattr(model_or_config, "model_type"):
        raise ConfigError(
            f"A {type(model_or_config).__name__} was given to plan.",
            "Give an nn.Module, or a transformers configuration (AutoConfig.from_pretrained).",
        )
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "A transformers configuration was given and transformers is not installed.",
            "Install transformers, or give the model, built under torch.device('meta').",
        ) from error
    causal = transformers.AutoModelForCausalLM._model_mapping
    kind = transformers.AutoModelForCausalLM if type(model_or_config) in causal else transformers.AutoModel
    with torch.device("meta"):
        built: nn.Module = kind.from_config(model_or_config)  # type: ignore[no-untyped-call]
    return built


def _budgets(budget: Budget, available: Available, *, unified: bool) -> dict[Tier, int]:
    found = {} if unified else {Tier.DEVICE: _or(budget.device_bytes, available.device)}
    found[Tier.HOST] = _or(budget.host_bytes, available.host)
    if budget.nvme_bytes:
        found[Tier.NVME] = sum(budget.nvme_bytes.values())
    return found


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _less_margin(nbytes: int) -> int:
    return max(0, nbytes - max(_MARGIN, nbytes // 20)) // PAGE_ALIGNMENT * PAGE_ALIGNMENT


def _buffer_bytes(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())
