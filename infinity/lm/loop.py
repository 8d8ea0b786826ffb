"""Training loop: trains a language model as any user of `infinity.offload` would, measures it on held-out
text, and lets it write a sample.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from infinity.config import round_up
from infinity.lm.data import Batches
from infinity.lm.model import LanguageModel
from infinity.ranks import SingleRank
from infinity.runtime import Runtime
from infinity.telemetry.stats import Stats

_WEIGHT_DECAY = 0.1
_BETAS = (0.9, 0.95)
_WARM_UP = 10
"""The learning rate rises during the first 1/_WARM_UP of a run's steps, but during at most 100 steps."""
_FLOOR = 0.1
"""Fraction of the highest learning rate that is left at the end of the cosine decay."""

_EVALUATION = 160 * 10**9
"""The most parameters times tokens of an evaluation, so that a model of 10M parameters is evaluated on all 16
Ki held-out tokens. With a limit in seconds, the loss would depend on the machine and on the number of ranks
that share the work.
"""
_SAMPLE = 10**10
"""The most parameters times tokens of a sample. A token of a sample costs more than one of an evaluation,
because it takes a forward over its whole context.
"""

_LONGEST_CONTEXT = 256
"""The most tokens of context in a sample. Each new token costs a forward over the whole context, because keys
and values are not cached.
"""
_LENGTHS = 64
"""Contexts are padded to a multiple of this number of tokens: operations on the CPU keep memory for every
length that they have seen, some 3 MiB for a model of 10M parameters.
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The hyper-parameters of a training run."""

    steps: int
    accumulate: int
    """Micro-batches in a step, on each rank."""
    learning_rate: float
    """The highest learning rate of the run."""
    clip: float
    """Largest global 2-norm of the gradients; inf: they are not clipped."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Figures of one finished step."""

    step: int
    """Number of the step, from 1 on."""
    loss: float
    """Mean loss of the step's micro-batches on all ranks, in nats per token."""
    norm: float
    """Global 2-norm of the gradients, before clipping."""
    learning_rate: float
    tokens: int
    """Number of tokens that all ranks predicted."""
    seconds: float
    """Wall time of the step, including the reading of its data."""
    stats: Stats


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """An AdamW in which only parameters of two or more dimensions have weight decay."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([each for each in groups if each["params"]], lr=learning_rate, betas=_BETAS)


def warm_up_and_cosine(step: int, steps: int) -> float:
    """The learning rate of a step (from 0 on) as a fraction of the highest: a linear rise, then a cosine
    decay.
    """
    warm = min(100, max(1, steps // _WARM_UP))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * min(1.0, done))) / 2


class Training:
    """A training run, step by step."""

    def __init__(
        self,
        language_model: LanguageModel,
        runtime: Runtime,
        batches: Batches,
        recipe: Recipe,
        ranks: SingleRank,
    ) -> None:
        """ranks: the ranks that train together. R ranks together train on the micro-batches of a run with
        one rank: rank r on those with the numbers r, R + r, 2R + r, ...
        """
        self.step = 0
        """Number of finished steps, including those of an earlier process."""
        self._subject, self._runtime = language_model, runtime
        self._batches, self._recipe = batches, recipe
        self._ranks = ranks
        self._scheduler = LambdaLR(runtime.optimizer, lambda step: warm_up_and_cosine(step, recipe.steps))

    def steps(self) -> Iterator[StepReport]:
        """Train until `recipe.steps` steps are finished, and yield a report after each, before the next."""
        self._subject.model.train()
        while self.step < self._recipe.steps:
            yield self._train_step()

    def state(self) -> dict[str, Any]:
        """The number of finished steps and the schedule's state, for `continue_from`."""
        return {"step": self.step, "steps": self._recipe.steps, "scheduler": self._scheduler.state_dict()}

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, a result of `Training.state`. The runtime has the parameters of that step
        already. The learning rate follows this recipe's schedule from the next step on.
        """
        self.step = state["step"]
        self._scheduler.load_state_dict(state["scheduler"])
        groups = self._runtime.optimizer.param_groups
        for group, highest in zip(groups, self._scheduler.base_lrs, strict=True):
            group["lr"] = highest * warm_up_and_cosine(self.step, self._recipe.steps)

    def _train_step(self) -> StepReport:
        recipe, device, optimizer = self._recipe, self._runtime.plan.device, self._runtime.optimizer
        share = self._ranks.share
        started, losses, tokens = time.perf_counter(), [], 0
        for micro in range(recipe.accumulate):
            number = micro * share.ranks + share.rank
            batch = self._batches.training(self.step, number).to(device)
            loss = self._subject.loss(batch)
            (loss / recipe.accumulate).backward()
            losses.append(loss.detach())
            tokens += batch[:, 1:].numel()
        norm = self._runtime.clip_grad_norm_(recipe.clip)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        self._scheduler.step()
        optimizer.zero_grad()
        heard = self._ranks.gather("the losses of a step", [float(each) for each in losses])
        self.step += 1
        last = self._runtime.stats.last_step
        assert last is not None
        return StepReport(
            step=self.step,
            # fmean rounds an exact sum once, so that the order of micro-batches changes no bit.
            loss=statistics.fmean(each for rank in heard.values() for each in rank),
            norm=float(norm),
            learning_rate=rate,
            tokens=tokens * share.ranks,
            seconds=time.perf_counter() - started,
            stats=last,
        )


def evaluation_batches(parameters: int, tokens: int) -> int:
    """The most batches over which the held-out loss is measured. tokens: number of tokens that a batch
    predicts.
    """
    return max(1, _EVALUATION // (max(1, parameters) * tokens))


class HeldOut:
    """Measures the loss of a model on held-out text, which is never trained on."""

    def __init__(
        self,
        language_model: LanguageModel,
        batches: Batches,
        device: torch.device,
        *,
        ranks: SingleRank,
        count: int | None = None,
    ) -> None:
        """count: the most held-out batches to use; None: all."""
        self._ranks, self._subject = ranks, language_model
        self._batches = [batch.to(device) for batch in batches.held_out()[:count]]
        self.count = len(self._batches)

    def loss(self, *, between: Callable[[], object] = lambda: None) -> float:
        """The mean loss over the held-out batches, in nats per token. All ranks call this, and share the
        batches. between: called after each batch; may raise an exception to end the call.
        """
        share, found = self._ranks.share, list[float]()
        with _evaluating(self._subject.model):
            for first in range(0, len(self._batches), share.ranks):
                mine = self._batches[first : first + share.ranks][share.rank : share.rank + 1]
                losses = [float(self._subject.loss(batch)) for batch in mine]
                between()
                heard = self._ranks.gather("the loss on held-out text", losses)
                found += [each for theirs in heard.values() for each in theirs]
        return statistics.fmean(found)


def sample_tokens(parameters: int) -> int:
    return max(8, min(200, _SAMPLE // max(1, parameters)))


def generate(
    language_model: LanguageModel,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    device: torch.device | str,
    between: Callable[[], object] = lambda: None,
) -> str:
    """Return the prompt with the model's continuation of at most `tokens` tokens. The continuation ends early
    if the largest logit is NaN or infinite.

    temperature: divisor of the logits, above 0. seed: seed of the random generator. Equal seeds and logits
    give the same text on any device, and the global random state does not change. between: called after each
    token; may raise an exception to end the call.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = min(language_model.longest or _LONGEST_CONTEXT, _LONGEST_CONTEXT)
    vocabulary = language_model.vocabulary
    given = vocabulary.encode(prompt)
    context = given or vocabulary.encode("\n") or [0]
    made: list[int] = []
    with _evaluating(language_model.model):
        while len(made) < tokens:
            seen = [*context, *made][-longest:]
            filled = seen + [0] * (min(round_up(len(seen), _LENGTHS), longest) - len(seen))
            tokens_in = torch.tensor([filled], dtype=torch.int64, device=device)
            logits = language_model.next_token_logits(tokens_in, len(seen) - 1)[0].cpu()
            if not logits.max().isfinite():
                break
            # In float64 and with the largest logit at 0, so that no temperature makes a logit overflow.
            chances = ((logits.double() - logits.max()) / temperature).softmax(dim=0)
            made.append(int(torch.multinomial(chances, 1, generator=generator)))
            between()
    # Prompt and continuation are decoded together: a tokenizer may decode a token differently at the
    # beginning of a text.
    return prompt + vocabulary.decode([*given, *made])[len(vocabulary.decode(given)) :]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context without gradients and in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
