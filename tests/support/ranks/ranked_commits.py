"""Ranked commits: a small training of two ranks with commits, and what each rank's part of them must hold.

One rank, with the micro-batches of both, has the same parameters and states bit by bit. Buffers, generators
and the user's state are each rank's own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from committed_runs import SPARE_FROM, STEPS, Shot, after, listed, shot
from homes import ROOMY, check_homes
from ranked_cases import PARTITIONS
from torch import Tensor, nn

import infinity
from infinity.api import plan_for
from infinity.checkpoint.run_state import generators, set_generators
from infinity.layout.shards import Share
from infinity.ranks import SingleRank
from infinity.tiers import Tier

RANKS = 2
MORE = 2
"""Steps that are trained from a crash state."""
INPUTS, HIDDEN, OUTPUTS = 32, 160, 32


class Divided(nn.Module):
    """A model of which each rank owns a part of every matrix: they have between 4096 and 8192 elements.

    One parameter is frozen, one is not used by the first steps, and one module is not used by them at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.norm.gate = nn.Parameter(torch.ones(HIDDEN))
        self.middle = nn.Linear(HIDDEN, OUTPUTS)
        self.last = nn.Linear(HIDDEN, OUTPUTS)
        self.spare = nn.Linear(HIDDEN, OUTPUTS)
        self.last.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        self.seen += x.double().mean()
        hidden = torch.tanh(self.norm(self.first(x)))
        out = self.last(hidden) + self.middle(hidden)
        return out + self.spare(hidden * self.norm.gate) if spare else out


@dataclass(frozen=True)
class Job:
    """How a run is made."""

    stage: int = 3
    home: str = "nvme"
    """Where pages rest: "nvme", or "ram" with the slab in the directory of the commits."""
    update: str = "lazy"
    compute: str = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.compute == "bf16" else torch.float32


class Node(NamedTuple):
    """A node with a disk of its own, on which one of the ranks runs."""

    root: Path
    """Directory of the run."""
    number: int

    @property
    def commits(self) -> Path:
        """The directory that a rank is given here for its commits."""
        return self.root / f"node-{self.number}" / "commits"

    @property
    def pages(self) -> Path:
        """The directory that a rank is given here for its pages."""
        return self.root / f"node-{self.number}" / "pages"

    @property
    def directories(self) -> list[Path]:
        """The directories that have files: those of rank commits, and that of pages."""
        return [each for each in (*sorted(self.commits.iterdir()), self.pages) if each.is_dir()]

    def enter(self) -> None:
        """Put this process on the node, for runtimes that it makes from now on."""
        os.environ.update(GROUP_RANK=str(self.number), LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")


def make() -> tuple[Divided, torch.optim.Optimizer]:
    """The model as it begins, and its optimizer."""
    torch.manual_seed(5)
    model = Divided()
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


@contextlib.contextmanager
def opened(job: Job, node: Node, rank: int, *, resume: bool = False) -> Iterator[tuple[Divided, Any]]:
    """Offload the model on one of the ranks, which is on `node`. Yields (model, runtime).

    resume: continue the newest commit there, and load it.
    """
    node.enter()
    node.pages.mkdir(parents=True, exist_ok=True)
    model, optimizer = make()
    nvme = {str(node.pages): ROOMY} if job.home == "nvme" else None
    precision, declared = infinity.Precision(compute=job.compute), job.update in ("eager", "speculative")
    options: dict[str, Any] = {"update": job.update, "accumulation": 1 if declared else None}
    host = ROOMY
    if job.home == "nvme":
        roomy = plan_for(
            SingleRank("cpu", share=Share(rank, RANKS, job.stage)),
            model,
            optimizer,
            budget=infinity.Budget(host=ROOMY, nvme=nvme),
            precision=precision,
            example_inputs=None,
            slab_directory=str(node.commits),
            **options,
        )
        host = int(roomy.smallest[Tier.HOST])  # so that no page can rest there
    with infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host=host, nvme=nvme),
        precision=precision,
        device="cpu",
        partition=PARTITIONS[job.stage],
        **{"resume" if resume else "checkpoint": node.commits},
        **options,
    ) as runtime:
        check_homes("unified-nvme" if job.home == "nvme" else "unified", runtime.plan)
        if resume:
            runtime.load()
        else:
            _seed(rank)
        yield model, runtime


def _seed(rank: int) -> None:
    """Seed all generators, with seeds of a rank's own."""
    torch.manual_seed(50 + rank)
    np.random.seed(60 + rank)
    random.seed(70 + rank)


def _draw() -> None:
    """Draw from all generators, as a step does. No value of the training depends on what is drawn."""
    torch.rand(3)
    np.random.rand(3)
    random.random()


def _inputs(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    """The micro-batch of a rank in a step, (4, INPUTS)."""
    seeded = torch.Generator().manual_seed(RANKS * step + rank)
    return torch.randn(4, INPUTS, generator=seeded).to(dtype)


def take_step(model: Divided, runtime: Any, job: Job, step: int, ranks: range) -> list[float]:
    """Train step number `step`, counted from 1. ranks: those whose micro-batches are run here.

    Returns the loss of each of the micro-batches.
    """
    for group in runtime.optimizer.param_groups:
        group["lr"] = 1e-2 / step
    losses = []
    for rank in ranks:
        out = model(_inputs(step, rank, job.dtype), step >= SPARE_FROM)
        loss = out.float().square().mean()
        (loss / len(ranks)).backward()  # several ranks average their gradients
        losses.append(loss.item())
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    _draw()
    return losses


def user_state(rank: int, step: int) -> dict[str, Any]:
    """The state that a rank saves with a commit after a step."""
    return {"rank": rank, "step": step, "note": ("text", step)}


@functools.cache
def undisturbed(compute: str) -> dict[int, tuple[list[float], Shot]]:
    """The run of one rank without commits, with all pages in RAM: number of a step -> the losses of all
    ranks' micro-batches, and the state after the step.
    """
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
            losses = take_step(model, runtime, Job(compute=compute), step, range(RANKS))
            found[step] = losses, shot(model, runtime, step, 0.0)
            after(model, runtime, step)
    return found


@functools.cache
def expected(job: Job, rank: int, step: int) -> Shot:
    """The state of a rank after a step. Parameters and states are whole, as those of all ranks together."""
    before = generators()
    _seed(rank)
    seen = torch.zeros(3, dtype=torch.float64)
    for number in range(1, step + 1):
        seen += _inputs(number, rank, job.dtype).double().mean()
        _draw()
    drawn = listed(generators())
    set_generators(before)
    state = undisturbed(job.compute)[step][1]
    return replace(state, buffers={"seen": seen}, generators=drawn, state=user_state(rank, step))
