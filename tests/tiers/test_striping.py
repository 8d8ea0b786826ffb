import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinity.errors import BudgetError, ConfigError
from infinity.tiers.striping import Striping, choose_striping, proportional_shares

MIB = 1 << 20
GIB = 1 << 30

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


@given(paths, st.floats(0.01, 0.97), st.sampled_from([64 << 10, MIB, 4 * MIB]))
def test_what_fits_with_three_percent_to_spare_is_striped_within_every_budget(
    paths: list[tuple[int, float]], fill: float, stripe: int
) -> None:
    budgets = [budget * MIB for budget, _ in paths]
    speeds = [speed for _, speed in paths]
    nbytes = max(1, int(sum(budgets) * fill))
    striping = choose_striping(nbytes, budgets, speeds, stripe)
    assert math.gcd(*striping.weights) == 1
    assert striping.stripe_bytes % 4096 == 0
    needed = striping.path_bytes(nbytes)
    assert sum(needed) >= nbytes
    assert all(need <= budget for need, budget in zip(needed, budgets, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 100) | st.integers(0, 10**6), st.floats(0.1, 10)), min_size=2),
    st.floats(0, 1),
)
@example([(95, 1.0), (11, 4.85)], 1.0)
@example([(828, 1.0), (441, 1.0), (563, 1.0), (257, 1.0), (555, 1.0), (450, 1.0), (872, 3.0)], 1.0)
@example([(5, 1.0)] * 40, 1.0)
def test_a_33rd_to_spare_is_always_enough(paths: list[tuple[int, float]], fill: float) -> None:
    """Volumes of whole 4 KiB fit budgets of whole 4 KiB, however small, if a 33rd of the bytes is spare."""
    budgets = [pages * 4096 for pages, _ in paths]
    nbytes = int(sum(budgets) * 32 // 33 * fill) // 4096 * 4096
    if nbytes:
        striping = choose_striping(nbytes, budgets, [speed for _, speed in paths], 4 * MIB)
        needed = striping.path_bytes(nbytes)
        assert sum(needed) >= nbytes
        assert all(need <= budget for need, budget in zip(needed, budgets, strict=True))
        assert sum(striping.weights) < 1 << 16


@given(st.tuples(st.integers(1, 40), st.integers(1, 40)), st.floats(0.01, 1), st.floats(0.1, 10))
@example((8, 12), 1.0, 1.0)
@example((20, 32), 1.0, 1.0)
def test_nothing_is_refused_that_small_weights_could_hold(
    budgets: tuple[int, int], fill: float, speed: float
) -> None:
    limits = [budget * MIB for budget in budgets]
    nbytes = max(1, int(sum(limits) * fill))
    try:
        choose_striping(nbytes, limits, [1.0, speed], 4 * MIB)
    except BudgetError:
        for weights in itertools.product(range(9), repeat=2):
            if any(weights):
                needed = Striping(weights, 4 * MIB).path_bytes(nbytes)
                assert any(need > limit for need, limit in zip(needed, limits, strict=True)), weights


@pytest.mark.parametrize(
    ("nbytes", "budgets", "speeds", "weights"),
    [
        (100 * GIB, [400 * GIB], [3.0], (1,)),
        (100 * GIB, [400 * GIB, 400 * GIB], [3.0, 3.0], (1, 1)),
        (100 * GIB, [400 * GIB, 400 * GIB], [6.0, 2.0], (3, 1)),
        (100 * GIB, [400 * GIB, 400 * GIB], [2.0, 1.0], (2, 1)),
        (100 * GIB, [400 * GIB, 10 * GIB], [1.0, 1.0], (9, 1)),
        (100 * GIB, [400 * GIB] * 3, [7.0, 7.0, 0.001], (1, 1, 0)),
    ],
)
def test_weights_of_typical_machines(
    nbytes: int, budgets: list[int], speeds: list[float], weights: tuple[int, ...]
) -> None:
    assert choose_striping(nbytes, budgets, speeds, 4 * MIB) == Striping(weights, 4 * MIB)


def test_small_budgets_get_small_stripes() -> None:
    striping = choose_striping(10 * MIB, [6 * MIB, 6 * MIB], [1.0, 1.0], 4 * MIB)
    assert striping == Striping((1, 1), 2 * MIB)


def test_the_whole_of_unequal_budgets_can_be_used_to_a_few_stripes() -> None:
    budgets = [400 * GIB, 100 * GIB]
    striping = choose_striping(495 * GIB, budgets, [1.0, 1.0], 4 * MIB)
    assert sum(striping.path_bytes(495 * GIB)) <= sum(budgets)


def test_too_small_budgets_say_what_is_needed() -> None:
    with pytest.raises(BudgetError) as error:
        choose_striping(3 * MIB, [2 * MIB], [1.0], 64 << 10)
    assert error.value.needed == 3 * MIB
    assert choose_striping(3 * MIB, [error.value.needed], [1.0], 64 << 10).weights == (1,)
    with pytest.raises(BudgetError, match="2 path"):
        choose_striping(3 * MIB, [MIB, MIB], [1.0, 1.0], 64 << 10)


@pytest.mark.parametrize(
    ("nbytes", "speeds"),
    [(0, [1.0, 1.0]), (-1, [1.0, 1.0]), (MIB, [1.0]), (MIB, [0.0, 0.0]), (MIB, [1.0, math.nan])],
)
def test_numbers_that_make_no_sense(nbytes: int, speeds: list[float]) -> None:
    with pytest.raises(ConfigError):
        choose_striping(nbytes, [GIB, GIB], speeds, MIB)


@given(paths, st.floats(0.01, 0.97), st.sampled_from([64 << 10, MIB]))
def test_files_hold_the_volume_that_they_were_sized_for(
    paths: list[tuple[int, float]], fill: float, stripe: int
) -> None:
    budgets = [budget * MIB for budget, _ in paths]
    nbytes = max(4096, int(sum(budgets) * fill) // 4096 * 4096)
    striping = choose_striping(nbytes, budgets, [speed for _, speed in paths], stripe)
    sizes = striping.path_bytes(nbytes)
    held = striping.volume_bytes(sizes)
    assert held == sum(sizes) >= nbytes
    assert striping.path_bytes(held) == sizes
    assert striping.volume_bytes([size + striping.stripe_bytes - 1 if size else 9 for size in sizes]) >= held
    if sum(weight > 0 for weight in striping.weights) > 1:
        short = [max(0, size - 1) for size in sizes]
        assert striping.volume_bytes(short) == held - sum(striping.weights) * striping.stripe_bytes
