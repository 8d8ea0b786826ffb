"""Random programs that may not fit their budgets, and runs of them that follow what errors advise."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from emulated_device import EmulatedDevice
from hard_budgets import adamw, budget_of, roomy
from hypothesis import strategies as st
from random_models import WIDTH, Part, Stack, models
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import BudgetError
from infinity.tiers import Tier

PLACES = ("unified", "unified-nvme", "apart", "apart-nvme", "emulated", "emulated-nvme")
"""Kinds of machine, as in hard_budgets.py. "emulated": a device apart with a driver of its own."""


class Net(Stack):
    """A Stack with a buffer, whose forward can run segments of `length` parts under a checkpoint."""

    def __init__(self, parts: tuple[Part, ...], buffer: int) -> None:
        super().__init__(parts)
        self.register_buffer("table", torch.ones(buffer))
        self.length = 0
        self.reentrant = False
        self.views = False

    def segment(self, x: Tensor, ids: Tensor, first: int) -> Tensor:
        for part in self.parts[first : first + self.length]:
            if self.views:  # they are saved where no operation on a parameter is
                for each in part.parameters():
                    x = x + (each.view(-1)[:WIDTH].sum().sin() * x).tanh()
            x = part(x, ids, 1)
        return x

    def forward(self, x: Tensor, ids: Tensor, *rest: Any) -> Tensor:
        if not self.length:
            return super().forward(x, ids, tuple(range(len(self.parts))), 1) + self.table[:1].sum()
        for first in range(0, len(self.parts), self.length):
            x = checkpoint(self.segment, x, ids, first, use_reentrant=self.reentrant)
        return x


@dataclass(frozen=True)
class Case:
    parts: tuple[Part, ...]
    place: str
    more: tuple[float, float, float]
    """By how much of all pages' bytes each tier's budget is above the smallest; below it if negative."""
    program: str
    which: int
    buffer: int = 0
    compute: str = "fp32"
    states: str = "fp32"
    update: str = "auto"


def cases(program: str) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        parts=models(),
        place=st.sampled_from(PLACES),
        more=st.tuples(*[st.sampled_from([-0.2, 0.0, 0.0, 0.05, 0.1, 0.3, 0.6])] * 3),
        program=st.just(program),
        which=st.integers(0, 99),
        buffer=st.sampled_from([1, 1, 1, 30_000]),
        compute=st.sampled_from(["fp32", "fp32", "bf16"]),
        states=st.sampled_from(["fp32", "fp32", "bf16", "int8"]),
        update=st.sampled_from(["auto", "auto", "sync", "eager"]),
    )


def loss_of(model: Net, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, WIDTH, generator=generator).requires_grad_()
    ids = torch.randint(0, 1000, (2, 5), generator=generator)
    return model(x, ids).float().square().mean()


def step(runtime: Any, model: Net, seed: int = 0) -> None:
    loss_of(model, seed).backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


def train(runtime: Any, model: Net, which: int) -> None:
    for seed in range(2):
        step(runtime, model, seed)


def checkpointed(runtime: Any, model: Net, which: int) -> None:
    model.length = 1 + which % 4
    model.reentrant, model.views = bool(which // 4 % 2), bool(which // 8 % 2)
    train(runtime, model, which)


def concatenated(runtime: Any, model: Net, which: int) -> None:
    step(runtime, model)
    context = torch.no_grad() if which % 2 else contextlib.nullcontext()
    with context:
        flat = torch.cat([each.view(-1) for each in model.parameters()])
    (flat.square().sum() if which % 2 else flat.square().sum().backward())
    del flat
    runtime.optimizer.zero_grad()
    step(runtime, model)


def together(runtime: Any, model: Net, which: int) -> None:
    """Use several parameters in one operation."""
    step(runtime, model)
    every = list(model.parameters())
    some = every if which % 3 == 0 else every[which % len(every) :][:3]
    with torch.no_grad():
        torch._foreach_norm(some)
    step(runtime, model)


def whole(runtime: Any, model: Net, which: int) -> None:
    module = model if which % 3 == 0 else model.parts[which % len(model.parts)]
    for _ in range(2):
        with runtime.full_parameters(module), torch.no_grad():
            for each in module.parameters():
                each.add_(0.125)
            if which % 2:
                loss_of(model)
        step(runtime, model)


def held(runtime: Any, model: Net, which: int) -> None:
    """Hold views of some parameters while the model trains."""
    every = list(model.parameters())
    kept = every if which % 4 == 0 else every[which % len(every) :][: 1 + which % 3]
    views = [each.detach() if which % 2 else each.data for each in kept]
    train(runtime, model, which)
    assert len(views) == len(kept)


def penalised(runtime: Any, model: Net, which: int) -> None:
    every = [each for each in model.parameters() if each.requires_grad]
    for seed in range(2):
        found = torch.autograd.grad(loss_of(model, seed), every, create_graph=True, allow_unused=True)
        sum(each.square().sum() for each in found if each is not None).backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()


def copied(runtime: Any, model: Net, which: int) -> None:
    step(runtime, model)
    if which % 2:
        model.state_dict()
        runtime.optimizer.state_dict()
    else:
        for each in model.parameters():
            copy.deepcopy(each)
    step(runtime, model)


def loaded(runtime: Any, model: Net, which: int) -> None:
    step(runtime, model)
    model.load_state_dict(model.state_dict())
    step(runtime, model)


def accumulated(runtime: Any, model: Net, which: int) -> None:
    runtime.accumulate(range(1 + which % 3), lambda seed: loss_of(model, seed))
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    train(runtime, model, which)


def inferred(runtime: Any, model: Net, which: int) -> None:
    with torch.no_grad() if which % 2 else torch.inference_mode():
        for seed in range(2):
            loss_of(model, seed)


PROGRAMS: dict[str, Callable[[Any, Net, int], None]] = {
    each.__name__: each
    for each in (
        train,
        checkpointed,
        concatenated,
        together,
        whole,
        held,
        penalised,
        copied,
        loaded,
        accumulated,
        inferred,
    )
}


@contextlib.contextmanager
def machine(place: str) -> Iterator[None]:
    if place.startswith("emulated"):
        with EmulatedDevice(1).in_use():
            yield
    else:
        yield


def offloaded(case: Case, model: Net, sizes: dict[Tier, int], directory: Path) -> Any:
    precision = infinity.Precision(compute=case.compute, states=case.states)
    eager = case.update == "eager" and case.program in ("train", "whole")
    return infinity.offload(
        model,
        None if case.program == "inferred" and case.which % 3 == 0 else adamw(model),
        budget=budget_of(sizes, directory),
        precision=precision,
        device="cpu",
        update=("eager" if eager else "auto" if case.update == "eager" else case.update),
        accumulation=1 if eager else None,
    )


def first_sizes(case: Case, directory: Path) -> dict[Tier, int]:
    model = Net(case.parts, case.buffer)
    place = case.place.replace("emulated", "apart")
    plan = infinity.plan(
        model,
        adamw(model),
        budget=roomy(place, directory),
        precision=infinity.Precision(compute=case.compute, states=case.states),
        device="cpu",
    )
    sizes = dict(plan.smallest)
    whole = 20 * sum(each.nbytes for each in model.parameters()) + 8192
    for tier, share in zip(sizes, case.more, strict=False):
        sizes[tier] = max(4096, sizes[tier] + int(share * (whole if share > 0 else sizes[tier])))
    if place.endswith("nvme"):
        sizes.setdefault(Tier.NVME, 4096)
    return sizes


def run(case: Case, sizes: dict[Tier, int], directory: Path) -> tuple[bool, BudgetError] | None:
    """Run a program within budgets. Returns the BudgetError, and whether the model had been offloaded."""
    model, started = Net(case.parts, case.buffer), False
    try:
        with offloaded(case, model, sizes, directory) as runtime:
            started = True
            if runtime.training_step is None:
                inferred(runtime, model, case.which)
            else:
                PROGRAMS[case.program](runtime, model, case.which)
    except BudgetError as error:
        return started, error.again()
    except RuntimeError as error:
        if "budget" not in str(error):
            raise
        inner = error.__context__ or error.__cause__
        assert isinstance(inner, BudgetError), error
        return started, inner.again()
    return None


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Within the `with` statement, the garbage collector looks only at objects that are made in it.

    The engine collects garbage before it raises an error, which takes most of a second with torch imported.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def cure(case: Case, directory: Path) -> list[tuple[dict[Tier, int], BudgetError]]:
    """Run a program, give each tier what its first error asks for, and return (budgets, error) of each try.

    Asserts that no tier is asked for twice while the model is offloaded, nor twice while the program runs.
    """
    tries: list[tuple[dict[Tier, int], BudgetError]] = []
    asked: set[tuple[bool, str]] = set()
    with machine(case.place):
        sizes = first_sizes(case, directory)
        while (found := run(case, sizes, directory)) is not None:
            started, error = found
            tries.append((dict(sizes), error))
            assert error.tier is not None, tries
            assert error.needed is not None, tries
            assert (started, error.tier) not in asked, tries
            asked.add((started, error.tier))
            assert error.needed > sizes[Tier(error.tier)], tries
            sizes[Tier(error.tier)] = error.needed
    return tries
