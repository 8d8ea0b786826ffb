"""Tests of training with torch.optim.Muon: as torch in fp32, with equal bits at all homes and over ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import HOMES, budget_for, check_homes
from ranked_cases import HOMES as RANKED_HOMES
from ranked_cases import Case
from ranked_models import SUBJECTS, Bottlenecks
from torch import Tensor, nn
from training_ranks import check_bits, launch

import infinity
from infinity import ConfigError, UnsupportedOptimizer
from infinity.formats.muon import Muon
from infinity.formats.optimizer_rules import Rule
from infinity.tiers import Tier

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

STEPS = 30
slow = pytest.mark.slow


class Model(nn.Module):
    """Tall and wide matrices of several chunks or less than one, a shift, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 48)
        self.first = nn.Linear(48, 160, bias=False)
        self.second = nn.Linear(160, 130, bias=False)
        self.last = nn.Linear(130, 5, bias=False)
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embed(tokens).to(self.second.weight.dtype)))
        return self.last(torch.tanh(self.second(x))).float() + self.shift


def made() -> Model:
    torch.manual_seed(3)
    return Model()


def optimizers(model: Model) -> tuple[Any, torch.optim.Optimizer]:
    """Muon for the matrices, with other options for the last, and AdamW for the rest, as torch's docs say."""
    groups = [
        {"params": [model.first.weight, model.second.weight]},
        {
            "params": [model.last.weight],
            "lr": 5e-3,
            "nesterov": False,
            "adjust_lr_fn": "match_rms_adamw",
            "ns_steps": 3,
        },
    ]
    rest = torch.optim.AdamW([model.embed.weight, model.shift], lr=1e-2)
    return torch.optim.Muon(groups, lr=0.02), rest


def loss_of(model: nn.Module, number: int) -> Tensor:
    random = torch.Generator().manual_seed(number)
    tokens, wanted = torch.randint(11, (16,), generator=random), torch.randn(16, 5, generator=random)
    return (model(tokens) - wanted).square().mean()


def step(model: nn.Module, number: int, *optimizers: Any) -> float:
    loss = loss_of(model, number)
    loss.backward()
    for each in optimizers:
        each.step()
    for each in optimizers:
        each.zero_grad()
    return loss.item()


def plain() -> tuple[list[float], dict[str, Tensor]]:
    model = made()
    both = optimizers(model)
    return [step(model, number, *both) for number in range(STEPS)], dict(model.state_dict())


def offloaded(directory: Path, home: str, **precisions: str) -> tuple[Model, Any, Any]:
    """The model, its runtime with Muon, and the plain AdamW beside it, whose parameters stay fp32."""
    model = made()
    muon, rest = optimizers(model)
    precision = infinity.Precision(**{"compute": "fp32", **precisions}, keep=("embed.*", "shift"))
    budget = budget_for(home, model, muon, directory, precision)
    runtime = infinity.offload(model, muon, budget=budget, precision=precision, device="cpu")
    check_homes(home, runtime.plan)
    return model, runtime, rest


def trained(directory: Path, home: str, **precisions: str) -> tuple[list[float], dict[str, Tensor]]:
    model, runtime, rest = offloaded(directory, home, **precisions)
    with runtime:
        losses = [step(model, number, runtime.optimizer, rest) for number in range(STEPS)]
        found = {name: each.detach().clone() for name, each in model.named_parameters()}
        for index, state in enumerate(runtime.optimizer.state.values()):
            found |= {f"{index} {name}": each.clone() for name, each in state.items()}
        return losses, found


@pytest.mark.sweep(most=1)
@pytest.mark.filterwarnings("ignore:Saved activations")
@pytest.mark.parametrize(
    "home",
    [
        each if each in ("nvme", "unified") else pytest.param(each, marks=slow)
        for each in (*HOMES, "mirrored")
    ],
)
def test_an_fp32_training_is_torchs(home: str, tmp_path: Path) -> None:
    losses, truth = plain()
    seen, found = trained(tmp_path, home)
    assert seen == pytest.approx(losses, rel=1e-5)
    for name, each in truth.items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:Saved activations")
@pytest.mark.parametrize(
    ("compute", "states", "homes"),
    [
        ("bf16", "fp32", ("nvme", "unified")),
        pytest.param("bf16", "bf16", HOMES, marks=slow),
        pytest.param("fp16", "fp32", HOMES, marks=slow),
    ],
)
def test_all_homes_give_equal_bits(compute: str, states: str, homes: tuple[str, ...], tmp_path: Path) -> None:
    base = None
    for home in homes:
        losses, found = trained(tmp_path, home, compute=compute, states=states)
        base = base or (losses, found)
        assert losses == base[0] and all(torch.equal(found[name], each) for name, each in base[1].items())


@pytest.mark.filterwarnings("ignore:Saved activations")
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_commit_resumes_with_the_bits_of_the_undisturbed_run(compute: str, tmp_path: Path) -> None:
    precision = infinity.Precision(compute=compute)

    def matrices() -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(96, 70, bias=False), nn.Tanh(), nn.Linear(70, 40, bias=False))
        return model, torch.optim.Muon(model.parameters(), lr=0.02)

    def take(model: nn.Module, runtime: Any, steps: range) -> list[Tensor]:
        for number in steps:
            inputs = torch.randn(8, 96, generator=torch.Generator().manual_seed(number))
            model(inputs.to(precision.compute_dtype)).float().square().mean().backward()
            runtime.clip_grad_norm_(0.5)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            if number == 2:
                runtime.save()
        states = [each for state in runtime.optimizer.state.values() for each in state.values()]
        return [each.detach().clone() for each in (*model.parameters(), *states)]

    def opened(**options: Any) -> Any:
        model, muon = matrices()
        budget = infinity.Budget(host="64MiB", nvme={str(tmp_path): "64MiB"})
        checkpoint = tmp_path / "commits"
        return model, infinity.offload(
            model, muon, budget=budget, precision=precision, device="cpu", checkpoint=checkpoint, **options
        )

    model, runtime = opened()
    with runtime:
        straight = take(model, runtime, range(5))
    model, runtime = opened(resume=tmp_path / "commits")
    with runtime:
        resumed = take(model, runtime, range(3, 5))
    assert len(straight) == (4 if compute == "fp32" else 6)
    assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))


def test_states_go_both_ways() -> None:
    model = made()
    muon, rest = optimizers(model)
    for number in range(2):
        step(model, number, muon, rest)
    precision = infinity.Precision(compute="fp32")
    budget = infinity.Budget(host="64MiB")
    with infinity.offload(model, muon, budget=budget, precision=precision, device="cpu") as runtime:
        step(model, 2, runtime.optimizer, rest)
        saved, values = runtime.optimizer.state_dict(), model.state_dict()
    other = made()
    muon, rest_of_other = optimizers(other)
    other.load_state_dict(values)
    muon.load_state_dict(saved)
    rest_of_other.load_state_dict(rest.state_dict())
    step(other, 3, muon, rest_of_other)
    truth = made()
    both = optimizers(truth)
    for number in range(4):
        step(truth, number, *both)
    for name, each in truth.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], each, rtol=0, atol=1e-5)


def test_the_plan_has_room_for_the_largest_matrix() -> None:
    model = made()
    precision = infinity.Precision(compute="fp32")
    muon, sgd = optimizers(model)[0], torch.optim.SGD(model.parameters(), momentum=0.9)
    ours, other = (
        infinity.plan(model, each, budget=infinity.Budget(host="64MiB"), precision=precision, device="cpu")
        for each in (muon, sgd)
    )
    assert ours.matrix_bytes >= 24 * 160 * 130 and other.matrix_bytes == 0
    assert ours.smallest[Tier.HOST] == other.smallest[Tier.HOST] + ours.matrix_bytes
    assert ours.arena_bytes == other.arena_bytes


def test_gradients_stay_as_they_were(tmp_path: Path) -> None:
    model, runtime, _ = offloaded(tmp_path, "unified")
    with runtime:
        loss_of(model, 0).backward()
        before = runtime.grad(model.second.weight)
        runtime.optimizer.step()
        assert torch.equal(runtime.grad(model.second.weight), before)


def test_an_update_that_is_interrupted_ends_the_runtime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, runtime, _ = offloaded(tmp_path, "unified")
    update, calls = Muon.update, []

    def second_fails(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        update(*given)

    with runtime:
        loss_of(model, 0).backward()
        monkeypatch.setattr(Muon, "update", second_fails)
        with pytest.raises(KeyboardInterrupt):
            runtime.optimizer.step()
        with pytest.raises(ConfigError, match="interrupted half way"):
            runtime.optimizer.step()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"precision": infinity.Precision(states="int8")}, UnsupportedOptimizer, "8 bits"),
        ({"average": 0.9}, UnsupportedOptimizer, "averages"),
        ({"update": "eager", "accumulation": 1}, ConfigError, "whole matrices"),
    ],
)
def test_what_needs_elements_one_by_one_is_refused(options: Any, error: Any, match: str) -> None:
    model = made()
    with pytest.raises(error, match=match):
        infinity.offload(model, optimizers(model)[0], device="cpu", **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("ns_steps", 100),
        ("ns_coefficients", (1.0, 2.0)),
        ("adjust_lr_fn", "mine"),
        ("momentum", "much"),
        ("params", [nn.Parameter(torch.zeros(3))]),
        ("params", [nn.Parameter(torch.zeros(200, 200))]),
    ],
)
def test_values_out_of_range_are_refused_before_an_update(option: str, value: Any) -> None:
    muon, _ = optimizers(made())
    rule = Rule.of(muon)
    muon.param_groups[1][option] = value
    with pytest.raises(ConfigError, match="shape" if option == "params" else option):
        rule.check(muon.param_groups)


def test_a_momentum_that_is_the_direction_is_kept() -> None:
    """Without Nesterov's momentum the iteration starts from the momentum itself, which must not change."""
    muon, _ = optimizers(made())
    options = Rule.of(muon).whole(muon.param_groups[1])
    momentum = torch.zeros(4, 6)
    options.update(torch.zeros(4, 6), momentum, torch.ones(4, 6), torch.device("cpu"))
    assert torch.allclose(momentum, torch.full((4, 6), 0.05))


@slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_have_the_bits_of_one(ranks: int, tmp_path: Path) -> None:
    cases = [
        Case("decoder", stage, home=home, compute=compute, optimizer="muon", clip=0.05, steps=300)
        for stage in range(4)
        for home in RANKED_HOMES
        for compute in ("fp32", "bf16")
    ]
    check_bits(tuple(cases if ranks == 2 else cases[::5]), ranks, tmp_path, timeout=1800.0)


FORMATS = (
    ("fp32", "fp32"),
    ("fp32", "bf16"),
    ("bf16", "fp32"),
    ("bf16", "bf16"),
    ("fp16", "fp32"),
    ("fp16", "bf16"),
)
LARGE = 1 << 30
"""Budget in bytes of a tier that has room for all of `Bottlenecks`."""


def large(
    steps: int, directory: Path | None = None, home: str = "", compute: str = "fp32", states: str = "fp32"
) -> tuple[list[float], list[Tensor]]:
    """Train 29.9M parameters, offloaded if there is a directory. Returns losses, parameters, and moments.

    home: as for `budget_for`, or "disk": all but 64 MiB lies on NVMe, and there is no further device.
    """
    torch.manual_seed(5)
    model, subject = Bottlenecks(), SUBJECTS["bottlenecks"]
    muon: Any = torch.optim.Muon(model.parameters(), lr=5e-4)

    def take() -> list[float]:
        losses = []
        for number in range(steps):
            loss = subject.loss_of(model, subject.batch(number % 16, 0))
            loss.backward()
            muon.step()
            muon.zero_grad()
            losses.append(loss.item())
        return losses

    if directory is None:
        return take(), [each.detach() for each in model.parameters()]
    precision = infinity.Precision(compute=compute, states=states)
    if home == "disk":
        budget = infinity.Budget(host="64MiB", nvme={str(directory): LARGE})
    else:
        budget = budget_for(home, model, muon, directory, precision, roomy=LARGE)
    with infinity.offload(model, muon, budget=budget, precision=precision, device="cpu") as runtime:
        if home != "disk":
            check_homes(home, runtime.plan)
        muon = runtime.optimizer
        losses = take()
        values = [each.detach().clone() for each in model.parameters()]
        states_of = [each.clone() for state in muon.state.values() for each in state.values()]
        return losses, values + states_of


@slow
@pytest.mark.filterwarnings("ignore:Saved activations")
def test_thirty_million_parameters_over_300_steps_are_torchs(tmp_path: Path) -> None:
    losses, truth = large(300)
    found = [large(300, tmp_path, home) for home in ("unified", "disk")]
    assert all(math.isfinite(each) for each in losses) and losses[-1] < losses[0] / 2
    for seen, values in found:
        assert seen == pytest.approx(losses, rel=1e-5)
        for one, other in zip(values, truth, strict=False):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


@slow
@pytest.mark.filterwarnings("ignore:Saved activations")
@pytest.mark.parametrize(("compute", "states"), FORMATS)
def test_thirty_million_parameters_have_equal_bits_at_all_homes(
    compute: str, states: str, tmp_path: Path
) -> None:
    losses, truth = large(3, tmp_path, HOMES[0], compute, states)
    for home in HOMES[1:]:
        seen, values = large(3, tmp_path, home, compute, states)
        assert seen == losses and all(map(torch.equal, values, truth))


@slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_thirty_million_parameters_have_the_bits_of_one_rank(ranks: int, tmp_path: Path) -> None:
    cases = [
        Case("bottlenecks", stage, home=home, compute=compute, optimizer="muon", rate=5e-4, roomy=LARGE)
        for stage, home, compute in ((1, "unified", "fp32"), (2, "host", "bf16"), (3, "device", "bf16"))
    ]
    check_bits(tuple(replace(each, steps=4 // ranks) for each in cases), ranks, tmp_path, timeout=900.0)


@slow
def test_several_ranks_resume(tmp_path: Path) -> None:
    cases = [Case("mlp", stage, home=home, optimizer="muon") for stage in (0, 3) for home in ("nvme", "host")]
    check_bits(tuple(cases), 2, tmp_path, function="training_with_a_break")


@slow
def test_ranks_that_round_otherwise_are_an_error(tmp_path: Path) -> None:
    cases = [Case("mlp", stage, optimizer="muon") for stage in (1, 3)]
    for case in cases:
        (found,) = launch("training_on_unequal_devices", [case], 2, tmp_path, timeout=120)
        assert all("RankDivergence" in each and "equal devices" in each for each in found), found
