"""Helpers that train with runtime.accumulate and with the plain loop, and check that both agree.

The plain loop runs forward and backward of one micro-batch after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from faulty import start_torch_threads
from parity import differences
from process_resources import nothing_left
from small_runtime import gradients, opened
from torch import Tensor, nn
from zoo import Entry

MICRO_BATCHES = 4
PLAIN = "runs the plain loop"

Found = tuple[list[Tensor], dict[str, Tensor | None]]


def without_dropout(model: nn.Module) -> nn.Module:
    """Set all dropout of the model to 0, so that nothing in training mode is random, and return the model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def batches_of(of: Entry, count: int = MICRO_BATCHES) -> list[Any]:
    return [of.batch(0, micro) for micro in range(count)]


def plain_loop(loss_fn: Callable[[Any], Tensor], batches: list[Any]) -> list[Tensor]:
    losses = []
    for batch in batches:
        loss = loss_fn(batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def found_by(
    of: Entry,
    directory: Path,
    *,
    vertical: bool,
    home: str = "nvme",
    device: str = "cpu",
    compute: str = "fp32",
    device_factor: int = 1,
    loss_of: Callable[[nn.Module, Any], Tensor] | None = None,
    steps: int = 2,
    count: int = MICRO_BATCHES,
    **options: Any,
) -> Found:
    """Train a model of zoo.py, offloaded, and return (losses of all steps, gradients of the last step).

    of: the model with its batches and loss. vertical: True takes micro-batches through runtime.accumulate,
    which gets `options`; False takes them through the plain loop. home, compute, device_factor: as in
    small_runtime.opened. device: where the model is. loss_of: used instead of the loss of `of`, if given.
    count: number of micro-batches in a step.
    """
    model = without_dropout(of.make(device))
    with opened(model, directory, home=home, compute=compute, device_factor=device_factor) as runtime:
        losses: list[Tensor] = []
        for step in range(steps):
            if step:
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            torch.manual_seed(step)

            def loss_fn(batch: Any) -> Tensor:
                return (loss_of or of.loss)(model, batch) / count

            batches = batches_of(of, count)
            losses += (
                runtime.accumulate(batches, loss_fn, **options) if vertical else plain_loop(loss_fn, batches)
            )
        assert not any(each.requires_grad for each in losses) or not vertical
        return losses, gradients(runtime, model)


def assert_same(of: Entry, directory: Path, **options: Any) -> None:
    """Assert that runtime.accumulate gives the losses and gradients of the plain loop, to the bit.

    of, directory, options: as in `found_by`. The options `together` and `recompute` are for
    runtime.accumulate, so that the plain loop runs without them.
    """
    kept = {name: options[name] for name in options if name not in ("together", "recompute")}
    expected = found_by(of, directory, vertical=False, **kept)
    got = found_by(of, directory, vertical=True, **options)
    assert any(each is not None for each in expected[1].values())
    assert differences(got, expected) == []


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*plain loop")
        yield


@contextmanager
def threads_as_before() -> Iterator[None]:
    start_torch_threads()
    with nothing_left(garbage=True):
        yield
