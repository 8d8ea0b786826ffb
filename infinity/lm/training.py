"""Training loop, as any user of `infinity.offload` would write it, with a report of every step."""

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
"""The learning rate rises during the first tenth of the steps, but at most during a hundred."""
_FLOOR = 0.1
"""Fraction of the learning rate that is left at the end of its cosine."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The numbers by which a run trains."""

    steps: int
    accumulate: int
    """Micro-batches in a step."""
    learning_rate: float
    """The highest learning rate of the run."""
    clip: float
    """Largest global 2-norm of the gradients."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The report of one finished step."""

    step: int
    """Number of the step, from 1 on."""
    loss: float
    """Mean over the step's micro-batches, in nats per token."""
    norm: float
    """Global 2-norm of the gradients, before clipping."""
    learning_rate: float
    tokens: int
    """Number of tokens that were predicted."""
    seconds: float
    """Wall time, including reading the data."""
    stats: Stats
    """The runtime's measurements of the step."""


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, as is usual for language models."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([each for each in groups if each["params"]], lr=learning_rate, betas=_BETAS)


def warm_up_and_cosine(step: int, steps: int) -> float:
    """The factor of the learning rate in `step` (from 0) of `steps`."""
    warm = min(100, max(1, steps // _WARM_UP))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def train(
    language_model: LanguageModel, runtime: Runtime, batches: Batches, recipe: Recipe
) -> Iterator[StepReport]:
    """Train, one step for each report that is taken from the iterator."""
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
    """The loss on text that is never trained on."""

    def __init__(self, language_model: LanguageModel, batches: Batches, device: torch.device) -> None:
        self._subject = language_model
        self._batches = [batch.to(device) for batch in batches.held_out()]

    def loss(self, *, seconds: float | None = None) -> float:
        """The mean loss, in nats per token.

        seconds: time after which it stops, because a model may be read from disk for each batch. Later calls
        then use only the batches of this one, so that their figures are of the same text.
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
