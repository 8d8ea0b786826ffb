"""Runtimes over small models, for tests of what users may do with a model whose parameters are paged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from homes import budget_for, check_homes
from parity import gradients_of
from torch import Tensor, nn
from zoo import Entry, entry

import infinity

TIED = entry("tied")
"""The zoo's model with attention and tied weights, and without dropout."""

WIDE = "blocks.1.mlp.0.weight"
"""A parameter of TIED that is larger than the smallest chunk."""

Gradients = Callable[[], dict[str, Tensor | None]]


def two_layers(width: int = 64) -> nn.Sequential:
    """A model of two linear layers with `width` features. In a small budget it has more than one page."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


@contextlib.contextmanager
def opened(
    model: nn.Module,
    directory: Path,
    *,
    home: str = "nvme",
    compute: str = "fp32",
    states: str = "fp32",
    device_factor: int = 1,
) -> Iterator[Any]:
    """Offload the model with AdamW, and yield the runtime.

    The runtime computes on the device where the model is, or on the CPU if that is the meta device.

    home: where pages rest (see homes.py). compute, states: as in infinity.Precision. device_factor: a factor
    by which the device budget is multiplied. Above 1, parameters may rest on the device, too. Asserts that
    nothing is left in the directory at the end.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute=compute, states=states)
    at = next(model.parameters()).device
    device = "cpu" if at.type == "meta" else at
    budget = budget_for(home, model, optimizer, directory, precision, device=device)
    if device_factor > 1:
        budget = infinity.Budget(
            device=device_factor * budget.device_bytes, host=budget.host_bytes, nvme=budget.nvme
        )
    with infinity.offload(model, optimizer, budget=budget, precision=precision, device=device) as runtime:
        if device_factor == 1:
            check_homes(home, runtime.plan)
        yield runtime
    assert files(directory) == []


def files(directory: Path) -> list[str]:
    """Return the names of the files in the directory."""
    return [each.name for each in directory.iterdir()]


def settle(runtime: Any) -> None:
    """Complete all updates, reads ahead and writes, so that nothing is due or under way any more."""
    parts = runtime._components
    with parts.pager.lock:
        parts.scheduler.complete_all()
        parts.prefetch_engine.land_all()
        parts.store.settle()
        parts.store.poll()


def gradients(runtime: Any, model: nn.Module) -> dict[str, Tensor | None]:
    return {name: runtime.grad(each) for name, each in model.named_parameters()}


def loss_of(model: nn.Module, step: int = 0, *, of: Entry = TIED) -> Tensor:
    return of.loss(model, of.batch(step, 0))


def train_step(model: nn.Module, runtime: Any, step: int = 0) -> float:
    """Train one step on batch number `step`. Returns the loss before the update."""
    loss = loss_of(model, step)
    loss.backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return loss.item()


def in_both(
    act: Callable[[nn.Module, Gradients], Any],
    directory: Path,
    *,
    home: str = "nvme",
    device: str = "cpu",
    of: Entry = TIED,
    device_factor: int = 1,
) -> tuple[Any, Any]:
    """Call `act(model, gradients)` on a paged model and on an equal plain model, and return both results.

    Returns (result of the paged model, result of the plain model). act: gets the model, and a function
    without arguments that returns copies of all the model's gradients by name. of: the model's entry in the
    zoo. device: where the models are made. home, device_factor: as in `opened`.
    """
    plain = of.make(device)
    expected = act(plain, lambda: gradients_of(plain))
    model = of.make(device)
    with opened(model, directory, home=home, device_factor=device_factor) as runtime:
        got = act(model, lambda: gradients(runtime, model))
    return got, expected
