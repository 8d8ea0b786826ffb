"""Tests of the training loop: with a recipe and its learning rate schedule, it trains as plain torch does.

The report of each step must be right, and so must the loss on text that is held out of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_models import ScriptedSubject, preset_of, text_of
from torch import nn

import infinity
from infinity.lm.data import Batches, Text
from infinity.lm.loop import (
    HeldOut,
    Recipe,
    StepReport,
    Training,
    evaluation_batches,
    make_optimizer,
    sample_tokens,
    warm_up_and_cosine,
)
from infinity.lm.model import LanguageModel
from infinity.ranks import SingleRank

BATCH, SEQ = 4, 16


@pytest.fixture
def text(tmp_path: Path) -> Text:
    content = b"".join(b"%d bottles of beer on the wall.\n" % (each % 99) for each in range(2000))
    return text_of(tmp_path, [content])


def recipe(**changed: Any) -> Recipe:
    options = {"steps": 4, "accumulate": 1, "learning_rate": 1e-2, "clip": 1.0, **changed}
    return Recipe(**options)


@contextmanager
def offloaded(
    language_model: LanguageModel, rate: float = 1e-2, **precision: str
) -> Iterator[infinity.Runtime]:
    """Offload the model to host RAM, yield the runtime, and close it at the end.

    rate: learning rate. precision: fields of infinity.Precision; `compute` is "fp32" unless given.
    """
    with infinity.offload(
        language_model.model,
        make_optimizer(language_model.model, rate),
        budget=infinity.Budget(host="64MiB"),
        precision=infinity.Precision(**{"compute": "fp32", **precision}),
        device="cpu",
    ) as runtime:
        yield runtime


def trained(text: Text, how: Recipe, *, batches: Any = None) -> list[StepReport]:
    tiny = preset_of()
    batches = batches or Batches(text, tiny, batch=BATCH, seq=SEQ, seed=0)
    with offloaded(tiny, how.learning_rate) as runtime:
        return list(Training(tiny, runtime, batches, how, SingleRank()).steps())


# --- the schedule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 100, 1000, 5000])
def test_the_rate_rises_to_its_highest_and_falls_to_a_tenth(steps: int) -> None:
    warm = min(100, max(1, steps // 10))
    factors = [warm_up_and_cosine(step, steps) for step in range(steps)]
    assert factors[:warm] == [(step + 1) / warm for step in range(warm)]
    assert factors[warm - 1] == max(factors) == 1.0
    after = factors[warm:]
    assert after == sorted(after, reverse=True)
    assert all(0.1 <= each <= 1.0 for each in after)
    assert warm_up_and_cosine(steps, steps) == pytest.approx(1.0 if steps == warm else 0.1)


def test_the_rate_is_half_way_half_way() -> None:
    assert warm_up_and_cosine(55, 100) == pytest.approx((1 + 0.1) / 2)


def test_the_rate_stays_at_its_floor_beyond_the_end() -> None:
    assert warm_up_and_cosine(500, 100) == pytest.approx(0.1)


# --- the optimizer ---------------------------------------------------------------------------------------


def test_matrices_alone_decay() -> None:
    tiny = preset_of()
    matrices, vectors = make_optimizer(tiny.model, 0.5).param_groups
    assert {each.dim() for each in matrices["params"]} == {2}
    assert {each.dim() for each in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(tiny.model.parameters()))
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert matrices["lr"] == vectors["lr"] == 0.5
    assert matrices["betas"] == (0.9, 0.95)


def test_a_model_of_matrices_alone_has_one_group() -> None:
    assert len(make_optimizer(nn.Linear(2, 2, bias=False), 0.1).param_groups) == 1


# --- the loop --------------------------------------------------------------------------------------------


def in_plain_torch(text: Text, how: Recipe) -> list[tuple[float, float, float]]:
    """Train a preset in plain PyTorch, and return (loss, gradient norm, learning rate) of each step.

    text: what to train on. how: the recipe that `Training` would follow. The norm is that before clipping.
    """
    tiny = preset_of()
    model, batches = tiny.model, Batches(text, tiny, batch=BATCH, seq=SEQ, seed=0)
    optimizer = make_optimizer(model, how.learning_rate)
    found = []
    for step in range(how.steps):
        rate = how.learning_rate * warm_up_and_cosine(step, how.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for micro in range(how.accumulate):
            loss = tiny.loss(batches.training(step, micro)) / how.accumulate
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), how.clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm.item(), rate))
    return found


@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.5), (3, 0.5), (1, math.inf)])
def test_it_trains_as_plain_torch_does(accumulate: int, clip: float, text: Text) -> None:
    how = recipe(steps=12, accumulate=accumulate, clip=clip)
    expected = in_plain_torch(text, how)
    reports = trained(text, how)
    got = [(each.loss, each.norm, each.learning_rate) for each in reports]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert [each.step for each in reports] == list(range(1, 13))
    assert {each.tokens for each in reports} == {accumulate * BATCH * SEQ}
    assert max(each.norm for each in reports) > 0.5  # gradients were clipped in some step


class Components:
    """Stands in for the Batches that `Training` takes. Cuts batches of `whole` into `count` micro-batches."""

    def __init__(self, whole: Batches, count: int) -> None:
        self._whole = whole
        self._count = count

    def training(self, step: int, micro: int) -> torch.Tensor:
        """Return the micro-batch with index `micro` of a step's batch: int64 token ids, (rows, seq + 1)."""
        return self._whole.training(step, 0).chunk(self._count)[micro]


@pytest.mark.parametrize("count", [2, 4])
def test_accumulating_parts_is_training_on_the_whole(count: int, text: Text) -> None:
    whole = Batches(text, preset_of(), batch=BATCH, seq=SEQ, seed=0)
    at_once = trained(text, recipe(steps=8), batches=whole)
    in_parts = trained(text, recipe(steps=8, accumulate=count), batches=Components(whole, count))
    for a, b in zip(at_once, in_parts, strict=True):
        assert (a.loss, a.norm, a.tokens) == pytest.approx((b.loss, b.norm, b.tokens), rel=1e-4)


def test_a_step_is_done_when_its_report_is_asked_for(text: Text) -> None:
    tiny = preset_of()
    tiny.model.eval()
    with offloaded(tiny) as runtime:
        batches = Batches(text, tiny, batch=BATCH, seq=SEQ, seed=0)
        steps = Training(tiny, runtime, batches, recipe(), SingleRank()).steps()
        assert runtime.stats.steps == 0
        first = next(steps)
        assert runtime.stats.steps == first.step == 1
        assert first.stats == runtime.stats.last_step
        assert first.seconds > 0
        assert tiny.model.training
        assert all(runtime.grad(each) is None for each in tiny.model.parameters())
        assert len(list(steps)) == 3
        assert runtime.stats.steps == 4


def test_a_recipe_cannot_change_on_the_way() -> None:
    with pytest.raises(AttributeError):
        recipe().steps = 5  # type: ignore[misc]


# --- text that is never trained on -----------------------------------------------------------------------


class Counting(ScriptedSubject):
    """A model whose losses are 0, 1, 2, ... A call in training mode or with gradients enabled fails."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the next loss, as LanguageModel.loss does for a batch of tokens."""
        assert not torch.is_grad_enabled()
        assert not self.model.training
        self.asked += 1
        return torch.tensor(self.asked - 1.0)


def held_out(text: Text, language_model: Any) -> HeldOut:
    batches = Batches(text, language_model, batch=BATCH, seq=SEQ, seed=0)
    return HeldOut(language_model, batches, torch.device("cpu"), ranks=SingleRank())


@pytest.mark.parametrize("training", [True, False])
def test_the_held_out_loss_is_the_mean_of_its_batches(training: bool, text: Text) -> None:
    language_model = Counting()
    language_model.model.train(training)
    assert held_out(text, language_model).loss() == 3.5  # the mean of 0 .. 7
    assert language_model.asked == 8
    assert language_model.model.training is training


def test_the_number_of_batches_follows_from_the_model_alone() -> None:
    tokens = 8 * 256
    assert evaluation_batches(10**7, tokens) == 7
    assert evaluation_batches(10**8, tokens) == evaluation_batches(10**10, tokens) == 1
    assert evaluation_batches(0, tokens) > 8
    assert [sample_tokens(each) for each in (0, 10**7, 10**8, 10**10)] == [200, 200, 100, 8]


def test_what_is_called_between_batches_can_end_the_measurement(text: Text) -> None:
    def end() -> None:
        if language_model.asked == 3:
            raise KeyboardInterrupt

    language_model = Counting()
    measure = held_out(text, language_model)
    with pytest.raises(KeyboardInterrupt):
        measure.loss(between=end)
    assert (language_model.asked, measure.count) == (3, 8)


def test_a_measurement_may_take_fewer_batches(text: Text) -> None:
    tiny = preset_of()
    batches = Batches(text, tiny, batch=BATCH, seq=SEQ, seed=0)
    with offloaded(tiny):
        few = HeldOut(tiny, batches, torch.device("cpu"), ranks=SingleRank(), count=2)
        every = HeldOut(tiny, batches, torch.device("cpu"), ranks=SingleRank())
        assert (few.count, every.count) == (2, 8)
        assert few.loss() == few.loss() != every.loss()


def test_a_model_that_fails_gets_its_mode_back(text: Text) -> None:
    class Failing(Counting):
        def loss(self, tokens: torch.Tensor) -> torch.Tensor:
            """Raise KeyboardInterrupt, in place of computing a loss."""
            raise KeyboardInterrupt

    language_model = Failing()
    language_model.model.train()
    with pytest.raises(KeyboardInterrupt):
        held_out(text, language_model).loss()
    assert language_model.model.training


def test_training_lowers_the_held_out_loss_and_measuring_changes_nothing(text: Text) -> None:
    losses = []
    for measured in (False, True):
        tiny = preset_of()
        batches = Batches(text, tiny, batch=BATCH, seq=SEQ, seed=0)
        with offloaded(tiny, compute="bf16") as runtime:
            measure = held_out(text, tiny)
            before = measure.loss()
            found = []
            for report in Training(tiny, runtime, batches, recipe(steps=30), SingleRank()).steps():
                found.append(report.loss)
                if measured:
                    measure.loss()
            assert measure.loss() < before - 1.5
        losses.append(found)
    assert losses[0] == losses[1]
