"""Tests of the choice between lazy and speculative updates, where it is left to the plan."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import api
from infinity.errors import BudgetError
from infinity.formats.optimizer_rules import Rule
from infinity.layout.shards import Share
from infinity.planning.machine_rates import MachineRates
from infinity.planning.plan import Plan
from infinity.planning.planner import quickest
from infinity.planning.predict import UpdateTime, Work
from infinity.tiers import Tier
from tests.support.runs.planned_models import MiB, planned, stack

RATES = MachineRates(
    disk={"read": 4e8, "write": 4e8, "mixed": 4e8},
    host_stream=1e9,
    flops={torch.bfloat16: 1e9},
    compute_memory=1e12,
    link=1e10,
)
"""Of a device whose host has slow RAM, so that updates in RAM take about 0.1 s."""
WORK = Work({torch.bfloat16: 6 * 10**7}, 0, Work({torch.bfloat16: 2 * 10**7}, 0))
NET = stack([256] * 32)
"""4.2M parameters, whose pages take 8 MiB of parameters, as much of gradients and 40 MiB of states."""


def chosen(*, made: list[Plan] | None = None, adopts: Any = None, **options: Any) -> Plan:
    """The choice for parameters on the device and all else in RAM, unless `options` say otherwise."""
    options = {
        "device": 16 * MiB,
        "host": 128 * MiB,
        "speeds": RATES,
        "work": WORK,
        "accumulation": 1,
    } | options

    def make(update: UpdateTime) -> Plan:
        plan = planned(NET, update=update, activations=0, **options)
        if made is not None:
            made.append(plan)
        return plan

    return quickest(make, adopts=adopts)


def test_updates_are_speculative_where_the_backward_hides_them() -> None:
    made: list[Plan] = []
    found = chosen(made=made)
    lazy, speculative = (each.prediction for each in made)
    assert lazy is not None and speculative is not None
    assert speculative.least < 0.95 * lazy.least
    assert found == made[1] and found.update == "speculative" and found.speculating
    assert f"updates: speculative, predicted {speculative.text} s against {lazy.text} s lazy" in str(found)


def test_with_several_backwards_those_of_a_step_are_compared() -> None:
    """Only the last of many backwards has updates to hide: less than 5% of the step."""
    made: list[Plan] = []
    assert chosen(accumulation=64, made=made).update == "lazy"
    assert len(made) == 1, "no second plan is made where nothing could be gained"


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": None},
        {"work": None},
        {"share": Share(0, 2, 3)},
        {"optimizer": None},
        {"speeds": replace(RATES, host_stream=1e12)},
    ],
    ids=str,
)
def test_without_a_choice_updates_are_lazy(options: dict[str, Any]) -> None:
    made: list[Plan] = []
    found = chosen(made=made, **options)
    assert (found.update, found.why, len(made)) == ("lazy", "", 1)


def test_averages_exclude_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule.of
    monkeypatch.setattr(Rule, "of", lambda optimizer: rule(optimizer, average=0.9))
    assert (found := chosen()).update == "lazy" and found.why == ""


def test_updates_are_lazy_where_second_places_would_send_pages_to_the_disk() -> None:
    """Parameters in RAM take theirs before others have a home, so that states go to the disk instead."""
    made: list[Plan] = []
    found = chosen(made=made, device=3 * MiB, host=52 * MiB, nvme={"/disk": 256 * MiB})
    lazy, speculative = made
    assert speculative.home_bytes[Tier.NVME] > lazy.home_bytes[Tier.NVME]
    assert found == lazy
    assert lazy.prediction is not None and speculative.prediction is not None
    words = f"predicted {lazy.prediction.text} s against {speculative.prediction.text} s speculative"
    assert f"updates: lazy, {words}" in str(found)


def test_updates_are_lazy_where_second_places_have_no_room() -> None:
    lazy = planned(
        NET, activations=0, device=16 * MiB, host=128 * MiB, speeds=RATES, work=WORK, accumulation=1
    )

    def make(update: UpdateTime) -> Plan:
        if update == "speculative":
            raise BudgetError("no room", "more", needed=1)
        return lazy

    assert quickest(make) == lazy


def called(function: Callable[..., Any], update: str, **more: Any) -> Any:
    """Call infinity.plan or infinity.offload for a model whose updates hide under its backward."""
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    return function(
        model,
        torch.optim.AdamW(model.parameters()),
        budget=infinity.Budget(device="4MiB", host="64MiB"),
        precision=infinity.Precision(compute="fp32"),
        device="cpu",
        update=update,
        accumulation=1,
        example_inputs=(torch.zeros(64, 256),),
        **more,
    )


def test_updates_are_lazy_where_the_disk_has_no_room_for_three_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "measure_rates", lambda *_: replace(RATES, flops={torch.float32: 1e10}))

    def plan(free: int) -> Plan:
        monkeypatch.setattr(api, "free_bytes", lambda path: free)
        found: Plan = called(infinity.plan, "auto", checkpoint=tmp_path)
        return found

    needed = plan(1 << 40).nvme_bytes
    assert plan(1 << 40).update == plan(needed).update == "speculative"
    assert plan(needed - 1).update == "lazy"


def test_a_run_goes_on_as_its_commit_where_it_adopts_the_slabs() -> None:
    found = chosen(adopts=lambda plan: plan.update == "lazy")
    assert found.update == "lazy" and "updates: lazy, as in the commit" in str(found)
    assert chosen(adopts=lambda plan: False).update == "speculative"
    # A gain of less than 5% is enough to keep three places, and not enough to make them.
    assert chosen(accumulation=64, adopts=lambda plan: plan.update == "speculative").update == "speculative"
    assert chosen(accumulation=64, adopts=lambda plan: False).update == "lazy"


def test_a_resumed_run_adopts_the_slabs_of_lazy_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although speculative updates are predicted to be faster."""
    monkeypatch.setattr(api, "measure_rates", lambda *_: replace(RATES, flops={torch.float32: 1e10}))
    offloaded = functools.partial(called, infinity.offload)
    with offloaded("auto") as runtime:
        assert runtime.plan.update == "speculative"
    with offloaded("lazy", checkpoint=tmp_path) as runtime:
        runtime.save().wait()
    before = [*tmp_path.glob("*slab*")]
    with offloaded("auto", resume=tmp_path) as runtime:
        assert runtime.plan.update == "lazy"
        assert [*tmp_path.glob("*slab*")] == before
