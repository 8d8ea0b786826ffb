"""Contender "ours_ranked": trains with infinity on one of several ranks, or alone.

The mode is the stage of ZeRO and a place for the pages of this rank, such as "3:ram" or "3:nvme". Modes with
"ram" have no NVMe tier, and a host budget with room for what this rank keeps and for the pages that come and
go. Modes with "nvme" have a host budget with ample room to compute and update pages; pages that do not fit
there, too, rest on NVMe. Modes that end with ":flat" keep nothing of other nodes. Activations come on top. A
host budget of the task replaces both.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import distributed

import infinity
from infinity.api import plan_for
from infinity.config import NODE_CACHE_VARIABLE
from infinity.layout.shards import Share
from infinity.ranks import SingleRank
from infinity.system.launcher import RankLocation
from peers import world
from peers.budgets import host_budget
from peers.ours import activation_bytes, figures
from peers.task import BETAS, WEIGHT_DECAY, Batches, Task

PARTITIONS = (None, "optimizer", "gradients", "parameters")
"""Stage of ZeRO -> the argument `partition` of infinity.offload."""
PLACES = {"ram": "all-host", "nvme": "all-nvme"}
"""Place in a mode -> word of `host_budget`."""


class OursRanked:
    """Contender that trains with infinity, in the loop that README shows, on one rank."""

    def __init__(self, task: Task) -> None:
        os.environ["XDG_CACHE_HOME"] = task.directory
        stage, place, *flat = task.mode.split(":")
        if flat:
            os.environ[NODE_CACHE_VARIABLE] = "0"
        world.set_environment(task)
        distributed.init_process_group("gloo")
        self.rss_base = world.joined()
        torch.manual_seed(0)
        with torch.device("meta"):
            self._model = task.model()
        optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=task.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
        options: dict[str, Any] = {
            "precision": infinity.Precision(compute="bf16", states=task.states),
            "device": task.device,
            "update": task.update,
            "accumulation": 1,
        }
        nvme = {task.directory: task.budgets["nvme"]}
        host = task.budgets["host"]
        inputs = Batches(task).next()
        if host is None:
            draft = functools.partial(
                self._draft, optimizer, Share(task.rank, task.ranks, int(stage)), options
            )
            reserved = activation_bytes(task, self._model, inputs)
            host = host_budget(PLACES[place], draft, device=None, nvme=nvme, reserved=reserved)
        self._clip = task.clip
        self._runtime = infinity.offload(
            self._model,
            optimizer,
            budget=infinity.Budget(
                device=task.budgets["device"], host=host, nvme=nvme if place == "nvme" else None
            ),
            partition=PARTITIONS[int(stage)],
            example_inputs=inputs,
            **options,
        )
        self._plan = figures(self._runtime.plan)

    def _draft(
        self,
        optimizer: torch.optim.Optimizer,
        share: Share,
        options: dict[str, Any],
        budget: infinity.Budget,
    ) -> infinity.Plan:
        """The plan of this rank under `budget`, made without the other ranks and without activations."""
        others = {name: value for name, value in options.items() if name != "device"}
        return plan_for(
            SingleRank(options.get("device"), share=share, place=RankLocation(0, 0, share.ranks)),
            self._model,
            optimizer,
            budget=budget,
            example_inputs=None,
            **others,
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self._model(tokens, targets)
        loss.backward()
        if self._clip is not None:
            self._runtime.clip_grad_norm_(self._clip)
        self._runtime.optimizer.step()
        self._runtime.optimizer.zero_grad()
        return float(loss.detach())

    def facts(self) -> dict[str, Any]:
        """The plan, and what the runtime has counted so far: the bytes sent to other ranks, by purpose
        ("sent"), and those received from ranks on other nodes ("crossed").
        """
        ranks: Any = self._runtime._components.ranks
        if ranks.share.ranks == 1:
            return {"plan": self._plan}
        traffic, share = ranks.wire.traffic(), self._runtime.plan.share
        crossed = sum(
            nbytes
            for (source, _), nbytes in traffic.received_from.items()
            if share.on_node and source // share.on_node != share.rank // share.on_node
        )
        return {"plan": self._plan, "sent": dict(traffic.sent), "crossed": crossed}

    def close(self) -> None:
        self._runtime.close()
        distributed.destroy_process_group()


def open_contender(task: Task) -> OursRanked:
    """Build the model of `task` and its runtime, together with the other ranks."""
    return OursRanked(task)
