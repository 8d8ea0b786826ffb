"""The loop: what any user of `infinity.offload` would write, with a report of every step."""

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
"""The learning rate rises over one in so many steps, and over a hundred at the most."""
_FLOOR = 0.1
"""Of the learning rate, at the end of its cosine."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run trains."""

    steps: int
    accumulate: int
    """Micro-batches a step."""
    learning_rate: float
    """The highest."""
    clip: float
    """The largest 2-norm of all gradients."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One finished step."""

    step: int
    """From 1 on."""
    loss: float
    """Mean over the step's micro-batches, in nats per token."""
    norm: float
    """Of all gradients, before clipping."""
    learning_rate: float
    tokens: int
    """That were predicted."""
    seconds: float
    """Wall time, data included."""
    stats: Stats
    """What the runtime measured in it."""


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone, as language models are trained."""
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
    """Train, step by step, as the reports are asked for."""
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
        """In nats per token. seconds: stop after so long, at a model that is read from disk each time, and
        take no more batches from then on, so that later figures are of the same text."""
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
