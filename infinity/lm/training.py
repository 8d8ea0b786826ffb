"""Training loop: trains a language model as any user of `infinity.offload` would, and reports every step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from infinity.lm.batches import Batches
from infinity.lm.language_model import LanguageModel
from infinity.lm.ranks import ONE_RANK, RunRanks
from infinity.lm.step_end import StepEnd
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
    """Number of micro-batches in a step, on each rank."""
    learning_rate: float
    """The highest learning rate of the run."""
    clip: float
    """Value to which the global 2-norm of the gradients is clipped; inf: gradients are not clipped."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The report of one finished step."""

    step: int
    """Number of the step, from 1 on."""
    loss: float
    """Mean loss of the step's micro-batches on all ranks, in nats per token."""
    norm: float
    """Global 2-norm of the gradients, before clipping."""
    learning_rate: float
    tokens: int
    """Number of tokens that were predicted in the step, by all ranks."""
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


def do_nothing() -> None:
    """The default of parameters named `between`, which are called between parts of a long computation."""


class Training:
    """A training run, step by step, which can be stopped after any micro-batch and continued later."""

    def __init__(
        self,
        language_model: LanguageModel,
        runtime: Runtime,
        batches: Batches,
        recipe: Recipe,
        *,
        between: Callable[[], object] | None = None,
        ranks: RunRanks = ONE_RANK,
    ) -> None:
        """runtime: the runtime that pages `language_model.model`, and averages gradients over ranks. batches:
        gives the batch of every micro-batch. ranks: those that train the model; micro-batch m of rank r takes
        the batch that a single rank takes for its micro-batch m * ranks + r. between: called after each
        micro-batch; an exception that it raises ends the run, and `undo` then forgets the step that was under
        way. None: nothing is called, and nothing is kept for `undo`.
        """
        self.step = 0
        """Number of steps that were finished, those of an earlier process included."""
        self._subject = language_model
        self._runtime = runtime
        self._batches = batches
        self._recipe = recipe
        self._between = between or do_nothing
        self._ranks = ranks
        self._scheduler = LambdaLR(runtime.optimizer, lambda step: warm_up_and_cosine(step, recipe.steps))
        self._step_end = None if between is None else StepEnd(language_model.model)

    def steps(self) -> Iterator[StepReport]:
        """Train until `recipe.steps` steps are finished, and yield a report after each.

        The next step is computed only when the caller takes its report from the iterator.
        """
        self._subject.model.train()
        while self.step < self._recipe.steps:
            yield self._train_step()

    def state(self) -> dict[str, Any]:
        """The number of finished steps and the schedule's state, for `continue_from`."""
        return {
            "step": self.step,
            "steps": self._recipe.steps,
            "scheduler": self._scheduler.state_dict(),
        }

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Go on after the steps that `state` counts, whose updates the runtime's parameters have had.

        state: a result of `state`. If the recipe there had another number of steps, the learning rate follows
        the schedule of this recipe from the next step on.
        """
        self.step = state["step"]
        self._scheduler.load_state_dict(state["scheduler"])
        for group, highest in zip(
            self._runtime.optimizer.param_groups, self._scheduler.base_lrs, strict=True
        ):
            group["lr"] = highest * warm_up_and_cosine(self.step, self._recipe.steps)
        if self._step_end is not None:
            self._step_end.keep()

    def undo(self) -> None:
        """Forget the micro-batches of a step that was not finished: the run is as at the end of the last."""
        self._runtime.optimizer.zero_grad()
        if self._step_end is not None:
            self._step_end.restore()

    def _train_step(self) -> StepReport:
        recipe, device, optimizer = self._recipe, self._runtime.plan.device, self._runtime.optimizer
        started, losses, tokens = time.perf_counter(), [], 0
        for micro in range(recipe.accumulate):
            number = micro * self._ranks.ranks + self._ranks.rank
            batch = self._batches.training(self.step, number).to(device)
            loss = self._subject.loss(batch)
            (loss / recipe.accumulate).backward()
            losses.append(loss.detach())
            tokens += batch[:, 1:].numel()
            self._between()
        norm = self._runtime.clip_grad_norm_(recipe.clip)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        self._scheduler.step()
        optimizer.zero_grad()
        heard = self._ranks.gather("the losses of a step", [float(each) for each in losses])
        # The sum of fmean is exact before it is rounded, so that the order of micro-batches changes no bit.
        loss_value = statistics.fmean(each for rank in heard for each in rank)
        self.step += 1
        if self._step_end is not None:
            self._step_end.keep()
        last = self._runtime.stats.last_step
        assert last is not None
        return StepReport(
            step=self.step,
            loss=loss_value,
            norm=float(norm),
            learning_rate=rate,
            tokens=tokens * self._ranks.ranks,
            seconds=time.perf_counter() - started,
            stats=last,
        )


def train(
    language_model: LanguageModel, runtime: Runtime, batches: Batches, recipe: Recipe
) -> Iterator[StepReport]:
    """Train the model for `recipe.steps` steps, and yield a report after each. Arguments: of `Training`."""
    yield from Training(language_model, runtime, batches, recipe).steps()


class HeldOut:
    """Measures the loss of a model on held-out text, which is never trained on."""

    def __init__(
        self,
        language_model: LanguageModel,
        batches: Batches,
        device: torch.device,
        *,
        count: int | None = None,
        ranks: RunRanks = ONE_RANK,
    ) -> None:
        """count: the most batches that are taken of the held-out ones; None: all.
        ranks: those that divide the batches among them.
        """
        self._ranks = ranks
        self._subject = language_model
        self._batches = [batch.to(device) for batch in batches.held_out()[:count]]

    @property
    def count(self) -> int:
        """Number of batches over which `loss` is the mean."""
        return len(self._batches)

    def loss(self, *, between: Callable[[], object] = do_nothing) -> float:
        """Measure and return the mean loss over the held-out batches, in nats per token.

        With several ranks all of them call this. They measure a batch each at a time, and all return the same
        mean. between: called after each batch, and may raise an exception to end the call.
        """
        model, ranks, found = self._subject.model, self._ranks, list[float]()
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for first in range(0, len(self._batches), ranks.ranks):
                    mine = self._batches[first : first + ranks.ranks][ranks.rank : ranks.rank + 1]
                    losses = [float(self._subject.loss(batch)) for batch in mine]
                    between()
                    heard = ranks.gather("the loss on held-out text", losses)
                    found += [each for theirs in heard for each in theirs]
        finally:
            model.train(training)
        return statistics.fmean(found)
