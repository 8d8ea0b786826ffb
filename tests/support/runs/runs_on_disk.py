"""Runs on disk: small runtimes that commit and resume, and what is in their directories."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from homes import budget_for
from parity import OPTIMIZERS, seeded_loss
from run_copies import raw
from torch import nn
from zoo import Entry, entry

import infinity
from infinity.aio import Faults
from infinity.system.disk_files import Observer, injected

FROZEN = entry("frozen")
"""The model by default."""

HOMES = ("nvme", "unified", "mixed", "unified-nvme")
"""Names of homes (see homes.py) between which commits differ: pages on NVMe, in RAM, and both."""


@dataclass(frozen=True)
class Run:
    """The settings of a small run with commits, and where it has its files."""

    root: Path
    of: Entry = FROZEN
    home: str = "nvme"
    compute: str = "bf16"
    states: str = "fp32"
    optimizer: str = "adamw"
    update: str = "auto"
    accumulation: int | None = None
    commits: bool = True

    @property
    def swap(self) -> Path:
        """The directory of the NVMe tier, if the home has one."""
        path = self.root / "swap"
        path.mkdir(exist_ok=True)
        return path

    @property
    def directory(self) -> Path:
        """The directory of the commits."""
        return self.root / "commits"

    def budget(self, model: nn.Module, made: Any) -> Any:
        """The budget under which the pages rest at `home`."""
        return budget_for(
            self.home,
            model,
            made,
            self.swap,
            self.precision,
            accumulation=self.accumulation,
            checkpoint=self.directory if self.commits else None,
        )

    @property
    def precision(self) -> Any:
        return infinity.Precision(compute=self.compute, states=self.states, keep=self.of.keep)

    @contextlib.contextmanager
    def opened(
        self,
        *,
        resume: bool = False,
        faults: Faults | None = None,
        observer: Observer | None = None,
        **options: Any,
    ) -> Iterator[tuple[nn.Module, Any]]:
        """Offload a new model, and yield (model, runtime). options: replace those of `infinity.offload`."""
        model = self.of.make()
        made = OPTIMIZERS[self.optimizer](model.parameters(), lr=1e-2)
        settings: dict[str, Any] = {
            "precision": self.precision,
            "device": "cpu",
            "accumulation": self.accumulation,
            "update": self.update,
        }
        if self.commits:
            settings["resume" if resume else "checkpoint"] = self.directory
        settings |= options
        if "budget" not in settings:
            settings["budget"] = self.budget(model, made)
        with injected(faults or Faults(), observer), infinity.offload(model, made, **settings) as runtime:
            yield model, runtime

    def train(self, model: nn.Module, runtime: Any, steps: range) -> list[float]:
        """Train the steps of these numbers, and return their losses."""
        return [step_of(self.of, model, runtime, step) for step in steps]


def step_of(of: Entry, model: nn.Module, runtime: Any, step: int) -> float:
    """Train the step with this number, and return its loss."""
    loss = seeded_loss(of, model, of.batch(step, 0), step, 0)
    loss.backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return loss.item()


def everything(model: nn.Module, runtime: Any) -> dict[str, Any]:
    """All of a run's state: the bytes of its pages, buffers, the loss scale, and options of param groups."""
    scale = runtime._components.scale
    return {
        "pages": raw(runtime, model),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "scale": (scale.value, scale.good_steps),
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in runtime.optimizer.param_groups
        ],
    }


def copied(run: Run, root: Path) -> Run:
    """Copy the files of a run, which may be running but moves nothing now, to the new directory `root`."""
    for directory in (run.swap, run.directory):
        ignored = shutil.ignore_patterns("*.lock")
        shutil.copytree(directory, root / directory.name, ignore=ignored)
    return replace(run, root=root)


def names(directory: Path) -> list[str]:
    """The names of the files in a directory, sorted."""
    return sorted(each.name for each in directory.iterdir())
