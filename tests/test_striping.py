import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from infinity.errors import BudgetError
from infinity.tiers.striping import path_bytes, proportional_shares, stripe_weights

MIB = 1 << 20

paths = st.lists(st.tuples(st.integers(1, 4000), st.floats(0.1, 10)), min_size=1, max_size=5)


@given(paths, st.floats(0.01, 1))
def test_shares_fill_the_budgets_like_water(paths: list[tuple[int, float]], fill: float) -> None:
    budgets = [budget * MIB for budget, _ in paths]
    speeds = [speed for _, speed in paths]
    nbytes = int(sum(budgets) * fill)
    shares = proportional_shares(nbytes, budgets, speeds)
    assert sum(shares) == pytest.approx(nbytes)
    seconds = [share / speed for share, speed in zip(shares, speeds, strict=True)]
    for share, budget, time in zip(shares, budgets, seconds, strict=True):
        assert share <= budget * (1 + 1e-9)
        assert share == pytest.approx(budget) or time == pytest.approx(max(seconds))


@given(paths, st.floats(0.01, 1), st.sampled_from([64 << 10, MIB, 4 * MIB]))
def test_weights_keep_every_budget_and_come_near_the_shares(
    paths: list[tuple[int, float]], fill: float, stripe: int
) -> None:
    budgets = [budget * MIB for budget, _ in paths]
    speeds = [speed for _, speed in paths]
    nbytes = max(1, int(sum(budgets) * fill))
    try:
        weights = stripe_weights(nbytes, budgets, speeds, stripe)
    except BudgetError:
        assume(False)
    needed = path_bytes(nbytes, weights, stripe)
    assert sum(needed) >= nbytes
    assert all(need <= budget for need, budget in zip(needed, budgets, strict=True))


def test_weights_of_typical_machines() -> None:
    gib = 1 << 30
    assert stripe_weights(100 * gib, [400 * gib], [3.0], 4 * MIB) == [1]
    assert stripe_weights(100 * gib, [400 * gib, 400 * gib], [3.0, 3.0], 4 * MIB) == [1, 1]
    assert stripe_weights(100 * gib, [400 * gib, 400 * gib], [6.0, 2.0], 4 * MIB) == [3, 1]
    assert stripe_weights(100 * gib, [400 * gib, 10 * gib], [1.0, 1.0], 4 * MIB) == [29, 3]
    assert stripe_weights(100 * gib, [400 * gib] * 3, [7.0, 7.0, 0.001], 4 * MIB) == [1, 1, 0]


def test_the_whole_of_unequal_budgets_can_be_used_to_a_few_stripes() -> None:
    budgets = [400 << 30, 100 << 30]
    weights = stripe_weights(495 << 30, budgets, [1.0, 1.0], 4 * MIB)
    assert sum(path_bytes(495 << 30, weights, 4 * MIB)) <= sum(budgets)


def test_too_small_budgets_say_what_is_needed() -> None:
    with pytest.raises(BudgetError) as error:
        stripe_weights(3 * MIB, [MIB, MIB], [1.0, 1.0], 64 << 10)
    assert error.value.needed == 3 * MIB
    assert stripe_weights(3 * MIB, [error.value.needed], [1.0], 64 << 10) == [1]
