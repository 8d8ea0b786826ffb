"""Training loop: trains a language model as any user of `infinity.offload` would, and reports every step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from infinity.lm.batches import Batches
from infinity.lm.language_model import LanguageModel
from infinity.runtime import Runtime
from infinity.telemetry.stats import Stats

_WEIGHT_DECAY = 0.1
_BETAS = (0.9, 0.95)
_WARM_UP = 10
"""The learning rate rises during the first 1/_WARM_UP of a run's steps, but during at most 100 steps."""
_FLOOR = 0.1
"""Fraction of the highest learning rate that is left at the end of the cosine decay."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The hyper-parameters of a training run."""

    steps: int
    accumulate: int
    """Number of micro-batches in a step."""
    learning_rate: float
    """The highest learning rate of the run."""
    clip: float
    """Value to which the global 2-norm of the gradients is clipped."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The report of one finished step."""

    step: int
    """Number of the step, from 1 on."""
    loss: float
    """Mean loss of the step's micro-batches, in nats per token."""
    norm: float
    """Global 2-norm of the gradients, before clipping."""
    learning_rate: float
    tokens: int
    """Number of tokens that were predicted in the step."""
    seconds: float
    """Seconds that the step took, reading the data included."""
    stats: Stats
    """The runtime's measurements of the step."""


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """Make an AdamW optimizer for `model`. Only parameters of two or more dimensions get weight decay."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([each for each in groups if each["params"]], lr=learning_rate, betas=_BETAS)


def warm_up_and_cosine(step: int, steps: int) -> float:
    """The factor that multiplies the highest learning rate in a step: a linear rise, then a cosine decay.

    step: number of the step, from 0 on. steps: number of steps in the run.
    """
    warm = min(100, max(1, steps // _WARM_UP))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def train(
    language_model: LanguageModel, runtime: Runtime, batches: Batches, recipe: Recipe
) -> Iterator[StepReport]:
    """Train the model for `recipe.steps` steps, and yield a report after each.

    The next step is computed only when the caller takes its report from the iterator. runtime: the runtime
    that pages `language_model.model`. batches: gives the batch of every micro-batch.
    """
    device, optimizer = runtime.plan.device, runtime.optimizer
    scheduler = LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, recipe.steps))
    language_model.model.train()
    for step in range(recipe.steps):
        started, losses, tokens = time.perf_counter(), [], 0
        for micro in range(recipe.accumulate):
            batch = batches.training(step, micro).to(device)
            loss = language_model.loss(batch)
            (loss / recipe.accumulate).backward()
            losses.append(loss.detach())
            tokens += batch[:, 1:].numel()
        norm = runtime.clip_grad_norm_(recipe.clip)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss_value = statistics.fmean(float(each) for each in losses)
        last = runtime.stats.last_step
        assert last is not None
        yield StepReport(
            step=step + 1,
            loss=loss_value,
            norm=float(norm),
            learning_rate=rate,
            tokens=tokens,
            seconds=time.perf_counter() - started,
            stats=last,
        )


class HeldOut:
    """Measures the loss of a model on held-out text, which is never trained on."""

    def __init__(self, language_model: LanguageModel, batches: Batches, device: torch.device) -> None:
        self._subject = language_model
        self._batches = [batch.to(device) for batch in batches.held_out()]

    def loss(self, *, seconds: float | None = None) -> float:
        """Measure and return the mean loss over the held-out batches, in nats per token.

        seconds: time after which no further batch is begun. A limit is needed because the model may be read
        from disk for each batch. If a call leaves batches out, later calls leave the same batches out, so
        that the losses of all calls are comparable.
        """
        model, found = self._subject.model, []
        training = model.training
        started = time.perf_counter()
        model.eval()
        try:
            with torch.no_grad():
                for batch in self._batches:
                    found.append(float(self._subject.loss(batch)))
                    if seconds is not None and time.perf_counter() - started > seconds:
                        break
        finally:
            model.train(training)
        self._batches = self._batches[: len(found)]
        return statistics.fmean(found)
