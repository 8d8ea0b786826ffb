"""Copies of small runs: runtimes to copy, the copy and its restoring, and a run's raw states to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for
from parity import OPTIMIZERS, seeded_loss
from small_runtime import files, settle
from torch import nn
from zoo import Entry, entry

import infinity
from infinity.aio import Faults
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource
from infinity.checkpoint.copies import open_copy
from infinity.checkpoint.restore import Restored, restore, show
from infinity.system.disk_files import DiskFiles, injected

STATE = {"groups": [{"lr": 0.1, "names": ["a", "b"]}], "text": "ü"}
"""What the tests give `save` as `state`."""


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    """A directory for the pages of runtimes."""
    path = tmp_path / "swap"
    path.mkdir()
    return path


@pytest.fixture
def copy(tmp_path: Path, swap: Path) -> Path:
    """A copy of a small run with int8 moments."""
    of = entry("frozen")
    model = of.make()
    with offloaded(model, swap, states="int8") as runtime:
        train(model, runtime, of, range(1))
        copy_to(tmp_path / "copy", runtime)
    return tmp_path / "copy"


def opened(path: Path) -> tuple[SavedCommit, CommitSource]:
    """Open a copy."""
    return open_copy(path, DiskFiles())


def slab_of(path: Path) -> Path:
    """The file of a copy's arrays."""
    (found,) = path.glob("*.slab")
    return found


def bits_of(path: Path) -> dict[str, torch.Tensor]:
    """All arrays of a copy by "parameter|array": flat, in memory order."""
    saved, source = opened(path)
    return {
        f"{entry.names[0]}|{array}": source.read(entry.names[0], array, 0, entry.numel)
        for entry in saved.manifest.parameters
        for array in entry.arrays(saved.manifest.rule)
    }


@contextlib.contextmanager
def offloaded(
    model: nn.Module,
    directory: Path,
    *,
    home: str = "nvme",
    compute: str = "bf16",
    states: str = "fp32",
    optimizer: str | None = "adamw",
    keep: tuple[str, ...] = (),
    accumulation: int | None = None,
    faults: Faults | None = None,
) -> Iterator[Any]:
    """Offload the model, and yield the runtime. Asserts that nothing is left in the directory at the end.

    home: where pages rest (see homes.py). compute, states, keep: as in infinity.Precision. optimizer: a key
    of OPTIMIZERS, or None for inference. accumulation: as in infinity.offload.
    """
    made = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute=compute, states=states, keep=keep)
    budget = budget_for(home, model, made, directory, precision, accumulation=accumulation)
    with (
        injected(faults or Faults()),
        infinity.offload(
            model, made, budget=budget, precision=precision, device="cpu", accumulation=accumulation
        ) as runtime,
    ):
        yield runtime
    assert files(directory) == []


def train(model: nn.Module, runtime: Any, of: Entry, steps: range) -> list[float]:
    """Train the steps of these numbers, and return their losses."""
    losses = []
    for step in steps:
        loss = seeded_loss(of, model, of.batch(step, 0), step, 0)
        loss.backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def copy_to(path: Path, runtime: Any, state: object = None) -> None:
    """Complete all work of the runtime, and write a copy of its run."""
    quiet(runtime)
    runtime.save(path, state=STATE if state is None else state)


def load_into(runtime: Any, source: Path | CommitSource) -> Restored:
    """Restore a copy, or any other source, into a runtime."""
    parts = runtime._components
    quiet(runtime)
    found_in = opened(source)[1] if isinstance(source, Path) else source
    with parts.pager.lock:
        homes = [page.home for page in parts.pages]
        found = restore(found_in, parts.plan.layout, homes, parts.states, parts.store)
        show(parts.pages, parts.edits, parts.store)
    return found


def quiet(runtime: Any) -> None:
    """Complete all work of the runtime, and write the user's edits home."""
    parts = runtime._components
    if parts.scheduler is not None:
        settle(runtime)
    with parts.pager.lock:
        parts.prefetch_engine.land_all()
        parts.edits.sync_edits()
        parts.store.settle()


def raw(runtime: Any, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what pages have of each parameter: values, state arrays with values as they are stored, and
    marks. All arrays are flat and in memory order.
    """
    quiet(runtime)
    states, found = runtime._components.states, {}
    store = runtime._components.store
    for name, parameter in model.named_parameters():
        page, index = parameter._place.page, parameter._place.index
        layout = page.layout.parameters[index]
        nbytes = layout.numel * layout.dtype.itemsize
        there: dict[str, Any] = {
            "values": store.fetch(page.home, page.start(index), nbytes).view(layout.dtype)
        }
        if states is not None and layout.trainable:
            state = states.pages[page.index]
            begun = index in state.has_moments
            for array in states.rule.arrays(layout.dtype):
                if begun or array.name in ("remainder", "master"):
                    there[array.name] = states._read(state, index, array.name)
            there |= {"step": state.steps[index], "begun": begun, "edited": index in state.edited}
        found[name] = there
    return found


def take_rest(model: nn.Module, runtime: Any, other: nn.Module, others: Any) -> None:
    """Give the model the buffers of another one, and its runtime the loss scale of the other's runtime."""
    for buffer, theirs in zip(model.buffers(), other.buffers(), strict=True):
        buffer.copy_(theirs)
    vars(runtime._components.scale).update(vars(others._components.scale))


def changed(model: nn.Module) -> nn.Module:
    """Give the parameters other values, in place, so that a restored model shows that it was restored."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model
