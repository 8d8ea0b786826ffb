"""Tests of the prefetch schedule: it fetches units in order of use, evicts the units whose next use is
farthest, and never plans for more units to be resident than fit.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from infinity.prefetch import Schedule, schedule, victims
from infinity.prefetch.schedule import HORIZON, LOOKAHEAD

UNITS = 6
traces = st.lists(st.integers(0, UNITS - 1), max_size=20)
unit_sizes = st.lists(st.integers(0, 9), min_size=UNITS, max_size=UNITS)
orders = st.lists(st.integers(0, UNITS - 1), unique=True)


def total(units: Sequence[int] | set[int], sizes: Sequence[int]) -> int:
    return sum(sizes[unit] for unit in units)


def next_use(unit: int, upcoming: Sequence[int]) -> int:
    return upcoming.index(unit) if unit in upcoming else len(upcoming)


def test_fetches_come_in_order_of_use_without_repeats() -> None:
    assert schedule([3, 1, 3, 0, 1, 2], [1] * 4, {1}, {3}, 10) == Schedule((3, 0, 2), ())


def test_the_window_ends_at_the_first_that_does_not_fit() -> None:
    assert schedule([0, 1, 2], [4, 7, 1], set(), set(), 10).fetch == (0,), (
        "2 would fit, but 1 comes before it"
    )


def test_reserve_is_kept_free_and_pinned_units_count() -> None:
    assert schedule([1, 2, 3], [4] * 4, {0}, {0}, 16).fetch == (1, 2, 3)
    assert schedule([1, 2, 3], [4] * 4, {0}, {0}, 16, reserve=1).fetch == (1, 2)
    assert schedule([1, 2, 3], [4] * 4, {0}, {0}, 16, reserve=12).fetch == ()


def test_units_without_bytes_are_neither_fetched_nor_evicted() -> None:
    sizes = [0, 0, 5, 5]
    assert schedule([0, 2], sizes, {1: None, 3: None}, set(), 5) == Schedule((2,), (3,))
    assert victims(100, [], sizes, {1: None, 3: None}, set()) == (3,)


def test_pinned_units_that_are_not_there_keep_their_room() -> None:
    assert schedule([1], [4] * 3, {2}, {0}, 8) == Schedule((1,), (2,))
    assert schedule([0, 1], [4] * 3, {2}, {0}, 8) == Schedule((0, 1), (2,))


def test_the_unit_that_ends_the_window_is_the_last_to_leave() -> None:
    assert schedule([0, 1], [5, 2, 2, 2], dict.fromkeys([1, 2, 3]), set(), 6) == Schedule((0,), (2, 3, 1))


def test_units_never_used_again_leave_first_and_among_them_the_least_recently_used() -> None:
    resident = dict.fromkeys([2, 4, 5, 3, 1])
    assert schedule([0, 1, 2, 3], [1] * 6, resident, set(), 5) == Schedule((0,), (4,))
    assert victims(5, [0, 1, 2, 3], [1] * 6, resident, set()) == (4, 5, 3, 2, 1)


def test_nothing_is_evicted_where_nothing_is_fetched() -> None:
    assert schedule([0], [4, 4], {0, 1}, set(), 8, reserve=4) == Schedule((), ())


def test_units_that_a_later_victim_makes_needless_stay() -> None:
    sizes = [10, 3, 8, 2]
    assert victims(10, [2, 1], sizes, [3, 1, 2], set()) == (3, 2)
    assert victims(10, [3, 2, 1], sizes, [3, 1, 2], set()) == (1, 2)
    assert victims(9, [0, 3, 1], sizes, [1, 3, 0], set()) == (0,)
    assert victims(0, [], sizes, [0], set()) == ()


def test_too_few_units_that_may_leave_all_leave() -> None:
    assert victims(100, [0], [3, 4, 5], [0, 1, 2], {1}) == (2, 0)


def test_endless_uses_are_consumed_only_so_far() -> None:
    taken = count()

    def uses() -> Iterator[int]:
        for _ in taken:
            yield 0

    assert schedule(uses(), [1, 1], {1}, set(), 2) == Schedule((0,), ())
    assert next(taken) <= LOOKAHEAD + 1
    taken = count()
    assert victims(1, uses(), [1], {0}, set()) == (0,)
    assert next(taken) <= 2, "no more than it takes to know the order"
    taken = count()
    assert victims(1, uses(), [1, 1], {0, 1}, set()) == (1,)
    assert next(taken) <= HORIZON + 1


@given(traces, unit_sizes, orders, st.data())
def test_no_plan_exceeds_the_capacity(
    upcoming: list[int], sizes: list[int], resident: list[int], data: st.DataObject
) -> None:
    capacity = total(resident, sizes) + data.draw(st.integers(0, 20))
    limit = capacity - (reserve := data.draw(st.integers(0, 8)))
    pinned = data.draw(st.sets(st.sampled_from(resident))) if resident else set()
    fetch, evict = schedule(iter(upcoming), sizes, dict.fromkeys(resident), pinned, capacity, reserve=reserve)

    distinct = [unit for unit in dict.fromkeys(upcoming) if sizes[unit]]
    window: list[int] = []
    for stop in range(len(distinct) + 1):
        if total({*distinct[:stop], *pinned}, sizes) <= limit:
            window = distinct[:stop]
    assert fetch == tuple(unit for unit in window if unit not in resident)

    assert set(evict) <= set(resident) - pinned - set(window)
    assert len(set(evict)) == len(evict)
    uses = [next_use(unit, upcoming) for unit in evict]
    assert uses == sorted(uses, reverse=True)
    after = {*resident, *fetch} - set(evict)
    if fetch:
        assert total(after, sizes) <= limit
    for unit in evict:
        assert total({*after, unit}, sizes) > limit, "one eviction too many"


@given(unit_sizes, orders, traces, st.integers(0, 40), st.data())
def test_victims_free_what_is_needed_and_no_more(
    sizes: list[int], resident: list[int], upcoming: list[int], needed: int, data: st.DataObject
) -> None:
    pinned = data.draw(st.sets(st.sampled_from(resident))) if resident else set()
    out = victims(needed, iter(upcoming), sizes, resident, pinned)
    spare = set(resident) - pinned
    assert set(out) <= spare
    freed = total(out, sizes)
    assert freed >= min(needed, total(spare, sizes))
    assert all(freed - sizes[unit] < needed for unit in out)
    uses = [next_use(unit, upcoming) for unit in out]
    assert uses == sorted(uses, reverse=True)


def fewest_misses(uses: Sequence[int], slots: int) -> int:
    """Return the fewest misses that are possible, by trying every choice of units to evict.

    A miss is a use of a unit that is not resident. uses: units in order of use. slots: the number of units
    that can be resident together.
    """

    @cache
    def misses(at: int, resident: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        unit = uses[at]
        if unit in resident:
            return misses(at + 1, resident)
        if len(resident) < slots:
            return 1 + misses(at + 1, resident | {unit})
        return 1 + min(misses(at + 1, resident - {out} | {unit}) for out in resident)

    return misses(0, frozenset())


@given(st.lists(st.integers(0, 4), max_size=14), st.integers(1, 3))
def test_demand_paging_with_victims_misses_as_rarely_as_can_be(uses: list[int], slots: int) -> None:
    sizes = [1] * 5
    resident: dict[int, None] = {}
    misses = 0
    for at, unit in enumerate(uses):
        if resident.pop(unit, 0) == 0:
            misses += 1
            for out in victims(len(resident) + 1 - slots, uses[at:], sizes, resident, set()):
                del resident[out]
        resident[unit] = None
    assert misses == fewest_misses(uses, slots)


@given(st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=30), unit_sizes, st.integers(0, 12))
def test_following_the_schedule_has_each_unit_there_before_its_use(
    uses: list[int], sizes: list[int], more: int
) -> None:
    """Where memory holds any two successive units, every unit but the first is resident when it is used.

    Resident units never exceed the memory. more: bytes of memory beyond those of the largest such pair.
    """
    capacity = more + max(total({a, b}, sizes) for a, b in zip(uses, uses[1:] + uses[-1:], strict=True))
    resident: set[int] = set()
    for at, unit in enumerate(uses):
        assert at == 0 or unit in resident or sizes[unit] == 0
        fetch, evict = schedule(uses[at:], sizes, resident, {unit} & resident, capacity)
        resident = resident - set(evict) | set(fetch)
        assert total(resident, sizes) <= capacity
