"""Committed runs: a small training with commits, and what each of its commits must hold.

Everything that a commit keeps matters to the next steps: learning rates change, three random number
generators are drawn from, a buffer counts, a parameter gets its first gradient late, and another is edited.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from homes import ROOMY
from parity import copied, tensors_copied
from torch import Tensor, nn

import infinity
from infinity.checkpoint.run_state import generators
from infinity.tiers import NvmeTier, Tier, nvme

STEPS = 6
MORE = 3
"""Steps that are trained from a crash state."""
COMMITS = (2, 3, 5)
"""The steps after which a run commits. The first commit is waited for at once, the second after the next
step, and the third at the end.
"""
EDITED_AFTER = 3
SPARE_FROM = 4
"""The first step that uses `Small.spare` and `Small.norm.gate`."""


class Small(nn.Module):
    """A model of four units. One has a frozen parameter, one has a parameter that the first steps do not use,
    and one is not used by the first steps at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.norm.gate = nn.Parameter(torch.ones(64))
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(64, 8)
        self.spare = nn.Linear(64, 8)
        self.last.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        self.seen += x.double().mean()
        hidden = self.drop(torch.tanh(self.norm(self.first(x))))
        return self.last(hidden) + self.spare(hidden * self.norm.gate) if spare else self.last(hidden)


@dataclass(frozen=True)
class Job:
    """How a run is made."""

    home: str = "nvme"
    """Where pages rest: "nvme", or "ram" or "device" (for which RAM stands in), with the slab in the
    directory of the commits.
    """
    paths: int = 1
    """Number of NVMe directories; with several, stripes are as short as pages."""
    update: str = "lazy"
    compute: str = "fp32"

    def directories(self, root: Path) -> list[Path]:
        """The directories of a run below `root`, which are made: that of the commits, and those of slabs."""
        numbers = range(self.paths if self.home == "nvme" else 0)
        found = [root / "commits", *(root / f"pages-{number}" for number in numbers)]
        for each in found:
            each.mkdir(parents=True, exist_ok=True)
        return found


def make() -> tuple[Small, torch.optim.Optimizer]:
    """The model as it begins, and its optimizer. Also seeds all generators."""
    torch.manual_seed(5)
    model = Small()
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    np.random.seed(6)
    random.seed(7)
    return model, torch.optim.AdamW(groups, lr=1e-2)


@contextlib.contextmanager
def opened(job: Job, directories: Sequence[Path], *, resume: bool = False) -> Iterator[tuple[Small, Any]]:
    """Offload the model with commits in the first directory and slabs in the others. Yields (model, runtime).

    resume: continue the newest commit there, and load it.
    """
    model, optimizer = make()
    asked = arguments(job, directories, resume=resume)
    with _short_stripes(), infinity.offload(model, optimizer, **asked) as runtime:
        if resume:
            runtime.load()
        yield model, runtime


@contextlib.contextmanager
def _short_stripes() -> Iterator[None]:
    """Have NVMe tiers use stripes of 8 KiB on all paths alike, without a measurement of the disks."""
    defaults = NvmeTier.__init__.__kwdefaults__
    before = dict(defaults), nvme._probe
    try:
        defaults["stripe_bytes"] = 8192
        nvme._probe = lambda *_: 1e9
        yield
    finally:
        defaults.update(before[0])
        nvme._probe = before[1]


def arguments(job: Job, directories: Sequence[Path], *, resume: bool) -> dict[str, Any]:
    """The arguments of `infinity.offload` for a run."""
    commits, *slabs = directories
    room = {str(each): ROOMY for each in slabs} or None
    early = job.update in ("eager", "speculative")
    apart = ROOMY if job.home == "device" else None
    return {
        "budget": infinity.Budget(
            device=apart, host=ROOMY if job.home == "ram" else smallest_host(job, commits), nvme=room
        ),
        "precision": infinity.Precision(compute=job.compute),
        "device": "cpu",
        "update": job.update,
        "accumulation": 1 if early else None,
        "resume" if resume else "checkpoint": commits,
    }


_SMALLEST: dict[Job, int] = {}


def smallest_host(job: Job, directory: Path) -> int:
    """Bytes of host RAM in which no page can rest. directory: any on a disk; nothing is written there."""
    if job not in _SMALLEST:
        model, optimizer = make()
        plan = infinity.plan(
            model,
            optimizer,
            budget=infinity.Budget(
                device=ROOMY if job.home == "device" else None, host=ROOMY, nvme={str(directory): ROOMY}
            ),
            precision=infinity.Precision(compute=job.compute),
            device="cpu",
            update=job.update,
            accumulation=1 if job.update in ("eager", "speculative") else None,
            checkpoint=directory,
        )
        _SMALLEST[job] = int(plan.smallest[Tier.HOST])
    return _SMALLEST[job]


def take_step(model: Small, runtime: Any, step: int) -> float:
    """Train step number `step`, counted from 1. Returns the loss.

    In even steps the learning rate is set only before `step()`, so that speculative updates are wrong.
    """

    def set_rate() -> None:
        for group in runtime.optimizer.param_groups:
            group["lr"] = 1e-2 / step

    late = runtime.plan.speculative and step % 2 == 0
    if not late:
        set_rate()
    dtype = torch.bfloat16 if runtime.plan.precision.compute == "bf16" else torch.float32
    inputs = torch.randn(4, 32) * (0.5 + random.random() + float(np.random.rand()))
    loss = model(inputs.to(dtype), step >= SPARE_FROM).float().square().mean()
    loss.backward()
    if late:
        set_rate()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return loss.item()


def after(model: Any, runtime: Any, step: int) -> None:
    """Do what a run does after a step and its commit."""
    if step == EDITED_AFTER:
        with runtime.full_parameters(model.first), torch.no_grad():
            model.first.bias.add_(0.125)


def user_state(step: int) -> dict[str, Any]:
    """The state that is saved with a commit after a step."""
    return {"step": step, "note": ("text", step)}


@dataclass(frozen=True)
class Shot:
    """The state of a run after a step, as its own public names give it."""

    loss: float
    parameters: dict[str, Tensor]
    states: dict[str, dict[str, Any]]
    """By parameter name, in the form of torch's state dicts."""
    groups: list[dict[str, Any]]
    """Options of the param groups, and under "params" the names of their parameters."""
    buffers: dict[str, Tensor]
    generators: dict[str, Any]
    state: dict[str, Any]


def shot(model: Small, runtime: Any, step: int, loss: float) -> Shot:
    """Take the state of a run after a step, which waits for the step's updates."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    options = tensors_copied(
        [
            {**each, "params": [names[id(p)] for p in each["params"]]}
            for each in runtime.optimizer.param_groups
        ]
    )
    order = [name for group in options for name in group["params"]]
    state = runtime.optimizer.state_dict()["state"]
    buffers = dict(model.named_buffers())
    values = {name: each for name, each in copied(model.state_dict()).items() if name not in buffers}
    return Shot(
        loss,
        values,
        {order[index]: tensors_copied(each) for index, each in state.items()},
        options,
        copied(buffers),
        listed(generators()),
        user_state(step),
    )


def listed(tree: Any) -> Any:
    """A nest in which NumPy arrays are lists, so that it can be compared."""
    if isinstance(tree, np.ndarray):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: listed(each) for key, each in tree.items()}
    return type(tree)(map(listed, tree)) if isinstance(tree, (list, tuple)) else tree


@functools.cache
def undisturbed(compute: str = "fp32") -> dict[int, Shot]:
    """The states after each step of the run without commits, with all pages in RAM, by the step's number."""
    model, optimizer = make()
    found = {}
    with infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host=ROOMY),
        precision=infinity.Precision(compute=compute),
        device="cpu",
    ) as runtime:
        for step in range(1, STEPS + MORE + 1):
            loss = take_step(model, runtime, step)
            found[step] = shot(model, runtime, step, loss)
            after(model, runtime, step)
    return found


class Marks:
    """The marks of a recording: which commit was begun after which step, and which is known to be durable."""

    def __init__(self, mark: Callable[[str], None]) -> None:
        self._mark = mark

    def save(self, runtime: Any, step: int) -> Any:
        """Save, and return the commit."""
        generation = runtime._components.committer.generation + 1
        self._mark(f"begun {generation} {step}")
        return runtime.save(state=user_state(step))

    def wait(self, commit: Any) -> None:
        """Wait for a commit."""
        commit.wait()
        self._mark(f"durable {commit.generation} 0")


def committing(model: Any, runtime: Any, marks: Any, steps: range) -> Iterator[int]:
    """Yield steps that the caller trains, and commit between them after those of COMMITS. The last commit may
    be pending. marks: has the methods `save` and `wait` of Marks.
    """
    pending = None
    for step in steps:
        yield step
        if pending is not None:
            marks.wait(pending)
            pending = None
        if step in COMMITS:
            pending = marks.save(runtime, step)
            if step == COMMITS[0]:
                marks.wait(pending)
                pending = None
        after(model, runtime, step)


def train(model: Small, runtime: Any, marks: Marks, steps: range) -> list[float]:
    """Train steps with the commits of COMMITS, and return the losses. The last commit may be pending."""
    return [take_step(model, runtime, step) for step in committing(model, runtime, marks, steps)]
