"""Random training programs for tests of copy streams, the CUDA streams that copy pages between tiers. The
programs train a model of a few blocks (submodules), with all pages at a chosen place.

A number determines a program: which blocks each forward goes through, in which order and how often, in which
thread each backward runs, and what happens between backward and step and after the step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import torch
from emulated_device import COMPUTE, LIBRARY
from homes import budget_for, short_visits, visiting_budget
from torch import nn

import infinity
from infinity.planning import twin_flow
from infinity.tiers.driver import Driver, emulated

BLOCKS = 5


WIDTH = 8


class Blocks(nn.Module):
    """A model of blocks of different sizes, which a forward uses in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16 * hidden), nn.Tanh(), nn.Linear(16 * hidden, WIDTH))
            for hidden in (8, 12, 8, 20, 8)
        )

    def forward(self, inputs: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for block in order:
            inputs = inputs + self.blocks[block](inputs)
        return inputs.square().mean()


@dataclass(frozen=True)
class Step:
    orders: tuple[tuple[int, ...], ...]
    """For each micro-batch, the indices of the blocks that its forward uses, in the order of their use."""
    evaluated: tuple[int, ...]
    """Indices of the blocks that a forward under no_grad uses, in the order of their use. This forward runs
    after the backwards and before the optimizer's step. Empty if there is no such forward.
    """
    limit: float | None
    """The norm to which the gradients are clipped; a large one changes nothing. None: nothing is clipped."""
    read: bool
    """Whether the gradients of all parameters are read, with runtime.grad, before the step."""
    edited: int | None
    """Index of the block whose first weight is changed after the step; None if no weight is changed."""
    restored: bool
    """Whether the optimizer gets the state back, after the step, that it had after the first step."""
    elsewhere: bool
    """Whether the backwards run in another thread than the rest, which waits for that thread."""


@dataclass(frozen=True)
class Place:
    """Where the pages of a Blocks model rest (`home` of `budget_for`, or "visits": as if mirrored, and chunks
    visit the device), and when updates run.
    """

    home: str
    update: str = "lazy"
    kernels: bool = False
    """Whether the device updates the units whose pages rest on it, and visiting chunks; if not, the CPU
    updates all.
    """


def program_of(number: int, update: str) -> list[Step]:
    """Return the three steps of program `number`. update: as in `offload`, but not "auto".

    Eager updates use gradients up in the backward. With them, a program reads and clips no gradients, and
    evaluates nothing before a step. Where `declares`, all steps have the same number of backwards.
    """
    draw = random.Random(number)
    eager, backwards = update == "eager", draw.randint(1, 2)

    def order() -> tuple[int, ...]:
        blocks = draw.sample(range(BLOCKS), draw.randint(2, BLOCKS))
        again = [] if draw.random() < 0.5 else draw.choices(blocks, k=1)
        return (*blocks, *again)

    return [
        Step(
            orders=tuple(order() for _ in range(backwards if declares(update) else draw.randint(1, 2))),
            evaluated=order() if draw.random() < 0.4 and not eager else (),
            limit=draw.choice((0.1, 1e9)) if draw.random() < 0.5 and not eager else None,
            read=draw.random() < 0.3 and not eager,
            edited=draw.randrange(BLOCKS) if draw.random() < 0.3 else None,
            restored=draw.random() < 0.3,
            elsewhere=draw.random() < 0.5,
        )
        for _ in range(3)
    ]


def declares(update: str) -> bool:
    """Whether `offload` has to be told how many backwards each step has."""
    return update in ("eager", "speculative")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary directory on a disk, shared by all runs. A runtime removes its slabs when it closes."""
    return tempfile.TemporaryDirectory(prefix="copy-order-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))


@functools.cache
def budget_of(place: Place, backwards: int | None = None) -> Any:
    """Return the infinity.Budget with which all pages of a Blocks model rest at `place.home`.

    backwards: the number of backwards that is declared to `offload`. The caller has made
    `twin_flow.has_kernels` return `place.kernels`, because the plan, and so the budget, depends on that.
    """
    model = Blocks()
    driver, precision = Driver.load(str(LIBRARY)), infinity.Precision(compute="fp32")
    options: Any = {"accumulation": backwards, "update": place.update}
    with emulated(driver, driver.foreign(COMPUTE)):  # so that plans are for memory apart
        if place.home == "visits":
            return visiting_budget(model, adamw(model), precision=precision, device="cpu", **options)
        found = budget_for(place.home, model, adamw(model), Path(folder().name), precision, **options)
        if place.home != "host":
            return found
        # Room for more than one page to be resident.
        return infinity.Budget(device=2 * found.device_bytes, host=found.host_bytes)


def trained(number: int, place: Place) -> dict[str, Any]:
    """Run program `number` with pages at `place`, and return a dict of all that can differ between two runs.

    The dict has the losses ("losses"), the losses under no_grad ("evaluated"), the gradients that were read
    ("gradients") and the norms of clipping ("norms"), each a list in the order of the program. It also has
    the final state dicts of the model ("parameters") and of the optimizer ("optimizer").
    """
    model, program, visits = Blocks(), program_of(number, place.update), place.home == "visits"
    if visits and place.update == "eager":  # which needs one gradient a step
        program = [replace(step, orders=step.orders[:1]) for step in program]
    backwards = len(program[0].orders) if declares(place.update) else None
    seen: dict[str, Any] = {"losses": [], "evaluated": [], "gradients": [], "norms": []}
    kept: dict[str, Any] = {}
    inputs = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    with (
        mock.patch.object(twin_flow, "has_kernels", lambda device: place.kernels),
        short_visits() if visits else contextlib.nullcontext(),
        infinity.offload(
            model,
            adamw(model),
            budget=budget_of(place, backwards),
            precision=infinity.Precision(compute="fp32"),
            device="cpu",
            update=place.update,
            accumulation=backwards,
        ) as runtime,
        ThreadPoolExecutor(1) as other,
    ):
        plan, direct = runtime.plan, runtime._components.store.link.direct
        assert bool(plan.visiting_units) == (visits and not direct)
        assert visits or bool(plan.updated_on_device) == place.kernels
        for step in program:
            for order in step.orders:
                loss = model(inputs, order)
                if step.elsewhere:
                    other.submit(loss.backward).result()
                else:
                    loss.backward()
                seen["losses"].append(loss.item())
            if step.read:
                seen["gradients"].append([runtime.grad(each) for each in model.parameters()])
            if step.limit is not None:
                seen["norms"].append(float(runtime.clip_grad_norm_(step.limit)))
            if step.evaluated:
                with torch.no_grad():
                    seen["evaluated"].append(model(inputs, step.evaluated).item())
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            kept = kept or parity.tensors_copied(runtime.optimizer.state_dict())
            if step.restored:
                runtime.optimizer.load_state_dict(kept)
            if step.edited is not None:
                with torch.no_grad():
                    model.blocks[step.edited][0].weight.mul_(0.5)
        seen["parameters"] = parity.copied(model.state_dict())
        seen["optimizer"] = parity.tensors_copied(runtime.optimizer.state_dict())
    return seen


def stepped(model: Any, runtime: Any) -> list[torch.Tensor]:
    inputs = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    model(inputs, tuple(range(BLOCKS))).backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return list(parity.copied(model.state_dict()).values())
