"""Contender "ours": trains with infinity in benchmarks that compare it with other libraries.

The model is built on the meta device. Its parameters, gradients and optimizer states are pages under budgets.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import asdict
from typing import Any

import torch

import infinity
from infinity.activations.heap import malloc_trim
from infinity.build import carry_out
from infinity.checkpoint.directory import Checkpoint
from infinity.pages.ledger import Commit
from infinity.planning.fake_step import run_fake_step
from infinity.planning.placement import Kind
from infinity.ranks import SingleRank
from infinity.system import machine
from infinity.system.disk_files import DiskFiles
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier
from peers.budgets import all_on_nvme, host_budget
from peers.pattern import fill_by_pattern
from peers.saving import sync_tree
from peers.task import BETAS, WEIGHT_DECAY, Task


class Ours:
    """Contender that trains with infinity, in the loop that README shows."""

    def __init__(self, task: Task) -> None:
        # The bandwidths for the plan are probed in this run, in a cache of its own.
        os.environ["XDG_CACHE_HOME"] = task.directory
        torch.manual_seed(0)
        with torch.device("meta"):
            self.model = task.model()
            tokens = torch.zeros(task.batch, task.seq, dtype=torch.int64)
        if task.device == "cuda":  # the peers initialise on the GPU; see Task.real_model
            fill_by_pattern(self.model, task.decoder["layers"])
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
        budget, plan = _planned(task, self.model, optimizer, (tokens, tokens))
        # From here on the plan accounts for memory. Planning has run every operation, so libraries are
        # loaded, and free memory that planning left in the heap would hide as much growth.
        planning_peak = machine.process_memory().peak
        _empty_heap()
        machine.restart_peak()
        base = machine.process_memory().resident
        self._clip = task.clip
        self._plan = figures(plan) | {"rss_base": base, "rss_planning": planning_peak}
        started = time.perf_counter()
        commits = (
            None if task.checkpoint is None else Checkpoint(task.checkpoint, None, DiskFiles(), SingleRank())
        )
        self.runtime = carry_out(
            plan, self.model, optimizer, budget=budget, ranks=SingleRank(), checkpoint=commits
        )
        self._plan["filled_seconds"] = time.perf_counter() - started
        self._commits = commits is not None
        self._commit: Commit | None = None
        self._gradients: int | None = None

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self.model(tokens, targets)
        loss.backward()
        if self._clip is not None:
            self.runtime.clip_grad_norm_(self._clip)
        self.runtime.optimizer.step()
        self.runtime.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, directory: str) -> None:
        """Begin a commit, which becomes durable in the background. Without commits: write a copy of the run
        into `directory`, and wait until it is on the disk.
        """
        if self._commits:
            self._commit = self.runtime.save()
        else:
            self.runtime.save(directory)
            sync_tree(directory)

    @property
    def pending(self) -> bool:
        """Whether the last commit has not ended."""
        return self._commit is not None and not self._commit.done

    def landed(self) -> None:
        """Wait until the last commit is durable."""
        if self._commit is not None:
            self._commit.wait()

    def settle(self) -> None:
        """Complete all updates and writes of the steps so far."""
        parts = self.runtime._components
        assert parts.scheduler is not None
        with parts.pager.lock:
            parts.scheduler.complete_all()
            parts.store.settle()

    def count_gradients(self) -> None:
        """Count gradients that are written to NVMe apart from now on, in `written`."""
        parts = self.runtime._components
        if self._gradients is not None or parts.gradients is None:
            return
        self._gradients = 0
        homes = {id(page.home) for page in parts.gradients.pages.values()}
        begin = parts.store._begin_write

        def counting(home: Any, offset: int, source: torch.Tensor, *more: Any, **options: Any) -> Any:
            if id(home) in homes and home.nvme_lease is not None:
                self._gradients += source.nbytes  # type: ignore[operator]
            return begin(home, offset, source, *more, **options)

        parts.store._begin_write = counting  # type: ignore[method-assign]

    def written(self) -> dict[str, int]:
        """Bytes written so far to NVMe, except by commits' files. "edge": as stats count them, when a write
        is requested. "engine": as the I/O engines count them, when it has ended. "gradients": those of
        gradients since `count_gradients`, which the others count, too.
        """
        nvme = self.runtime._components.store.nvme
        return {
            "edge": self.runtime.stats.edges[Edge.HOST_TO_NVME].bytes,
            "engine": 0 if nvme is None else sum(each.write_bytes for each in nvme.stats),
            "gradients": self._gradients or 0,
        }

    def facts(self) -> dict[str, Any]:
        stats = self.runtime.stats
        found: dict[str, Any] = {"plan": self._plan, "peaks": stats.peaks}
        if stats.last_step is not None:
            last = stats.last_step
            found["last_step"] = {
                "seconds": last.seconds,
                "compute": last.compute_seconds,
                "update": last.update_seconds,
                "stalls": {edge.value: each.stall_seconds for edge, each in last.edges.items()},
                "bytes": {edge.value: each.bytes for edge, each in last.edges.items()},
                "disk_bytes": last.edges[Edge.NVME_TO_HOST].bytes + last.edges[Edge.HOST_TO_NVME].bytes,
                "limited_by": last.limited_by,
                "hit_rate": last.hit_rate,
            }
        return found

    def close(self) -> None:
        self.runtime.close()


def _planned(
    task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple[torch.Tensor, ...]
) -> tuple[infinity.Budget, infinity.Plan]:
    """Find the budget of a task, and make the plan under this budget; returns both.

    In mode "fit" the budgets are the task's. Every other mode is one of budgets.WORDS, and says how many of
    the pages rest on NVMe; `host_budget` finds the host budget for that. inputs: example inputs of the
    model, by which a plan is measured.
    """
    # accumulate="compute" is exact with one micro-batch a step, because nothing is summed.
    fixed: dict[str, Any] = {
        "precision": infinity.Precision(compute="bf16", accumulate="compute", states=task.states),
        "device": task.device,
        "update": task.update,
        "accumulation": 1,
    }

    def draft(budget: infinity.Budget, **more: Any) -> infinity.Plan:
        return infinity.plan(model, optimizer, budget=budget, checkpoint=task.checkpoint, **fixed, **more)

    device, host = task.budgets["device"], task.budgets["host"]
    nvme = {task.directory: task.budgets["nvme"]} if task.budgets["nvme"] else None
    if task.mode != "fit":
        host = host_budget(
            task.mode, draft, device=device, nvme=nvme, reserved=activation_bytes(task, model, inputs)
        )
    budget = infinity.Budget(device=device, host=host, nvme=None if task.mode == "all-host" else nvme)
    plan = draft(budget, example_inputs=inputs)
    return budget, all_on_nvme(plan) if task.mode == "all-nvme" else plan


def activation_bytes(task: Task, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Return the bytes of the host budget that activations take; 0 if they cannot be estimated.

    Also 0 if the model computes on a GPU, or if the task has a device budget, because activations are not
    under the host budget then.
    """
    if task.device != "cpu" or task.budgets["device"] is not None:
        return 0
    estimate = run_fake_step(
        model, inputs, precision=infinity.Precision(compute="bf16"), device=torch.device("cpu"), train=True
    )
    return estimate.activations or 0


def _empty_heap() -> None:
    """Return free memory of the heap to the system, if the C library can."""
    gc.collect()
    trim = malloc_trim()
    if trim is not None:
        trim(0)


def figures(plan: infinity.Plan) -> dict[str, Any]:
    """Return what a benchmark reports of a plan: prediction, traffic, bytes by tier, and printed table."""
    return {
        "prediction": None if plan.prediction is None else plan.prediction.as_dict(),
        "traffic": asdict(plan.traffic),
        "host_bytes": plan.host_bytes,
        "device_bytes": plan.device_bytes,
        "nvme_bytes": plan.nvme_bytes,
        "ram_bytes": plan.ram_bytes,
        "activations": plan.activations,
        "budgets": {tier.value: nbytes for tier, nbytes in plan.budgets.items()},
        "homes": {tier.value: plan.home_bytes[tier] for tier in Tier},
        "state_bytes": sum(plan.page_sizes[Kind.OPTIMIZER]),
        "commit_bytes": plan.commit_bytes,
        "first_commit_bytes": plan.first_commit_bytes,
        "table": str(plan),
    }


def open_contender(task: Task) -> Ours:
    """Build the model of `task` and its runtime, and return the contender, which is ready to train.

    task.mode: "fit" for the task's own budgets, or one of budgets.WORDS.
    """
    return Ours(task)
