"""Trainings of the zoo with each policy of activations, in each memory, recorded for comparison.

Copies and transfers end late and out of order. Saved tensors of the zoo's small models become pages.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from emulated_device import EmulatedDevice
from micro_batches import without_dropout
from parity import copied, injected
from torch import Tensor, nn
from zoo import Entry, entry

import infinity
from infinity.activations import residual_pages
from infinity.aio import Faults
from infinity.errors import BudgetError
from infinity.planning.plan import Plan

AMPLE = 64 << 20
TINY = 4096
STEPS = 2


@dataclass(frozen=True)
class Case:
    """A training. Its string is an id for pytest."""

    model: str
    policy: str
    memory: str
    """Where the model computes: "unified", "apart" (copies end at once) or "streams" (they end late)."""
    below: str
    """What activations leave for: "RAM", or "NVMe" with as little RAM as will do."""
    compute: str
    backwards: str
    """Of a step: "one", "three", "together" (three by accumulate(), without dropout) or "blocks together"
    (three by accumulate(recompute=True)).
    """

    @property
    def count(self) -> int:
        return 1 if self.backwards == "one" else 3

    @property
    def accumulates(self) -> bool:
        return self.backwards.endswith("together")

    def __str__(self) -> str:
        return ", ".join(vars(self).values())


@dataclass
class Run:
    """What no policy may change. Tensors are copies."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    """Of each step, by the parameter's name."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """state_dict() after the last step, with buffers."""
    random: Tensor | None = None
    """The state of torch's random numbers at the end."""


@contextlib.contextmanager
def small_pages(nbytes: int = 256) -> Iterator[None]:
    """Within the `with` statement, storages of `nbytes` bytes and more become residual pages."""
    with mock.patch.object(residual_pages, "SMALLEST", nbytes):
        yield


def smallest_budget(
    planned: Callable[..., Plan],
    memory: str,
    below: str,
    directory: Path,
    *,
    ample: bool = True,
    part: int = 2,
) -> infinity.Budget:
    """Return the smallest budget of the tiers from which activations leave: of the device, if it is apart,
    and of RAM, if they leave for NVMe. Other tiers are ample.

    planned: function (budget=) that makes the plan. ample: whether RAM is ample where it is the only tier.
    part: with NVMe, RAM has room for all activations divided by this number.
    """
    near = {} if memory == "unified" else {"device": _needed(planned, "device", host=AMPLE)}
    nvme = {"nvme": {str(directory): AMPLE}} if below == "NVMe" else {}
    if not nvme and (near or ample):
        return infinity.Budget(**near, host=AMPLE)
    budget = infinity.Budget(**near, host=_needed(planned, "host", **near, **nvme), **nvme)
    ram = planned(budget=budget).residuals.ram
    less = replace(budget, host=budget.host - ram + ram // part)
    try:
        planned(budget=less)
    except BudgetError:  # with NVMe, too, as for one large page
        return budget
    return less


def _needed(planned: Callable[..., Plan], tier: str, **others: Any) -> int:
    with pytest.raises(BudgetError) as error:
        planned(budget=infinity.Budget(**{tier: TINY}, **others))
    assert (error.value.tier, error.value.needed is not None) == (tier, True), error.value
    return int(error.value.needed or 0)


def late(seed: int) -> Faults:
    """Faults that delay two of five transfers of the disk by 1 or 2 ms, so that others overtake them."""
    faults = Faults()
    for nth in range(1 + seed % 3, 600, 5):
        faults.delay("any", nth, 0.002)
        faults.delay("any", nth + 2, 0.001)
    return faults


def trained(case: Case, directory: Path) -> tuple[Run, Plan]:
    """Train for STEPS steps. Returns the run and the plan."""
    each, seed = entry(case.model), zlib.crc32(str(case).encode())
    streams = EmulatedDevice(seed).in_use() if case.memory == "streams" else contextlib.nullcontext()
    model = each.make()
    if case.backwards == "together":
        without_dropout(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    facts = {
        "precision": infinity.Precision(compute=case.compute, keep=each.keep),
        "device": "cpu",
        "activations": case.policy,
        "example_inputs": each.batch(0, 0)[:1],
        "accumulation": case.count if each.one_gradient else None,
    }
    faults = late(seed)
    with small_pages(), streams, injected(faults):
        planned = functools.partial(infinity.plan, model, optimizer, **facts)
        budget = smallest_budget(planned, case.memory, case.below, directory, ample=case.policy != "auto")
        if case.accumulates and case.memory != "unified":
            budget = _with_room(planned(budget=budget), budget)
        with infinity.offload(model, optimizer, budget=budget, **facts) as runtime:
            run, plan = _run(case, each, model, runtime), runtime.plan
    assert list(directory.iterdir()) == []
    return run, plan


def _with_room(plan: Plan, budget: infinity.Budget) -> infinity.Budget:
    """Return a budget with RAM for the activations of all micro-batches, unless these go to NVMe."""
    return budget if plan.residuals.disk else replace(budget, host=AMPLE)


def _run(case: Case, each: Entry, model: nn.Module, runtime: infinity.Runtime) -> Run:
    run = Run()
    torch.manual_seed(4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*plain loop")
        for step in range(STEPS):
            batches = [each.batch(step, micro) for micro in range(case.count)]
            loss_of = functools.partial(each.loss, model)
            if case.accumulates:
                blocks = case.backwards == "blocks together"
                count = None if runtime.plan.residuals.disk else case.count
                losses = runtime.accumulate(batches, loss_of, together=count, recompute=blocks)
            else:
                losses = [_backward(loss_of(batch)) for batch in batches]
            run.losses += [loss.item() for loss in losses]
            run.gradients.append({name: runtime.grad(each) for name, each in model.named_parameters()})
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
    run.state, run.random = copied(model.state_dict()), torch.get_rng_state()
    return run


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def plain_gradients(case: Case) -> dict[str, Tensor | None]:
    """The gradients of the first step in plain PyTorch, in float32."""
    each = entry(case.model)
    model = without_dropout(each.make()) if case.backwards == "together" else each.make()
    torch.manual_seed(4)
    for micro in range(case.count):
        each.loss(model, each.batch(0, micro)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
