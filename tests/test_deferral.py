"""Which updates wait for the next forward: how many bytes, where in the model, and what runs."""

from pathlib import Path

import pytest
from eager_runtimes import opened, spent
from hypothesis import given
from hypothesis import strategies as st
from small_runtime import loss_of

from infinity.deferral import deferred
from infinity.gradients import Gradients
from infinity.placement import Homes, Kind
from infinity.tiers import Tier


def homes(*tiers: Tier | None) -> Homes:
    """Of states; parameters and gradients are in RAM."""
    return tuple(
        {Kind.PARAMETER: Tier.HOST, Kind.GRADIENT: Tier.HOST, Kind.OPTIMIZER: tier} for tier in tiers
    )


def test_one_in_four_evenly_apart_and_not_the_last_of_the_backward() -> None:
    # The backward comes from the end: the third, the seventh and the eleventh of twelve.
    assert deferred(homes(*[Tier.NVME] * 12), [100] * 12) == {9, 5, 1}
    assert deferred(homes(*[Tier.NVME] * 3), [100] * 3) == {0}
    assert deferred(homes(*[Tier.NVME] * 2), [100] * 2) == set()
    assert deferred((), []) == set()


def test_units_whose_states_rest_elsewhere_do_not_count() -> None:
    tiers = (Tier.HOST, Tier.NVME, None, Tier.NVME, Tier.DEVICE, Tier.NVME, Tier.HOST)
    assert deferred(homes(*tiers), [100] * 7) == {1}


@given(
    st.lists(
        st.tuples(st.sampled_from([Tier.NVME, Tier.HOST, None]), st.integers(1, 1000)),
        max_size=40,
    )
)
def test_never_a_quarter_more_or_less_than_the_largest_unit(units: list[tuple[Tier | None, int]]) -> None:
    states = [nbytes for _, nbytes in units]
    tiers = [tier for tier, _ in units]
    found = deferred(homes(*tiers), states)
    on_disk = [unit for unit, tier in enumerate(tiers) if tier is Tier.NVME]
    assert found <= set(on_disk)
    if on_disk:
        bytes_on_disk = sum(states[unit] for unit in on_disk)
        largest = max(states[unit] for unit in on_disk)
        assert abs(sum(states[unit] for unit in found) - bytes_on_disk / 4) <= largest


def test_deferred_units_are_left_to_step_and_to_the_next_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gradients, "crowded", False)
    with opened(tmp_path, more=384 << 10) as (model, runtime):
        plan = runtime.plan
        assert plan.deferred and len(plan.deferred) < len(plan.layout.units) / 2
        for step in range(2):
            loss_of(model, step).backward()
            assert not plan.deferred & set(spent(runtime))
            assert set(spent(runtime)) >= {
                unit for unit, home in enumerate(plan.homes) if home[Kind.OPTIMIZER] is Tier.HOST
            }
            chains = (chain for group in runtime._parts.updater._units for chain in group.chains)
            assert not plan.deferred & {chain.unit for chain in chains if chain.is_ahead}
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        assert all(float(each["step"]) == 2 for each in runtime.optimizer.state.values())


def test_only_eager_updates_are_deferred(tmp_path: Path) -> None:
    with opened(tmp_path, update="lazy", more=384 << 10) as (_, runtime):
        assert runtime.plan.deferred == frozenset()
