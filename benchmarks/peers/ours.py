"""infinity: the model is built on meta, its states are pages under the budgets."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any

import torch

import infinity
from infinity import machine
from infinity.offload import carry_out
from infinity.telemetry import Edge
from peers.task import BETAS, CLIP, WEIGHT_DECAY, Task


class Ours:
    """The loop of the README."""

    def __init__(self, task: Task) -> None:
        # The bandwidths that the plan expects are probed in this run, and kept nowhere.
        os.environ["XDG_CACHE_HOME"] = task.directory
        torch.manual_seed(0)
        with torch.device("meta"):
            self.model = task.model()
            tokens = torch.zeros(task.batch, task.seq, dtype=torch.int64)
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
        budget = infinity.Budget(
            device=task.budgets["device"],
            host=task.budgets["host"],
            nvme={task.directory: task.budgets["nvme"]} if task.budgets["nvme"] else None,
        )
        plan = infinity.plan(
            self.model,
            optimizer,
            budget=budget,
            # Exact with one micro-batch a step: nothing is summed.
            precision=infinity.Precision(compute="bf16", accumulate="compute"),
            example_inputs=(tokens, tokens),
            device=task.device,
        )
        # From here on memory is the plan's: planning has run every operation, so that libraries are loaded.
        base = machine.process_memory().resident
        self._plan = planned(plan) | {"rss_base": base}
        started = time.perf_counter()
        self.runtime = carry_out(plan, self.model, optimizer, budget=budget)
        self._plan["filled_seconds"] = time.perf_counter() - started

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self.model(tokens, targets)
        loss.backward()
        self.runtime.clip_grad_norm_(CLIP)
        self.runtime.optimizer.step()
        self.runtime.optimizer.zero_grad()
        return float(loss.detach())

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


def planned(plan: infinity.Plan) -> dict[str, Any]:
    """The plan's figures, in bytes and seconds."""
    return {
        "prediction": None if plan.prediction is None else asdict(plan.prediction),
        "traffic": asdict(plan.traffic),
        "host_bytes": plan.host_bytes,
        "device_bytes": plan.device_bytes,
        "nvme_bytes": plan.nvme_bytes,
        "ram_bytes": plan.ram_bytes,
        "activations": plan.activations,
        "table": str(plan),
    }


def open_contender(task: Task) -> Ours:
    """See peers."""
    return Ours(task)
