"""Tests of the trace, which learns the order in which a step accesses units.

It predicts the next accesses from the learned order, and finds its place in this order again after accesses
that the order does not have, such as those of an evaluation.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.prefetch import Access, AccessKind, Trace
from infinity.prefetch import trace as trace_module

F, B, U = AccessKind.FORWARD, AccessKind.BACKWARD, AccessKind.UPDATE


def forward(*units: int) -> list[Access]:
    return [Access(unit, F) for unit in units]


def training(units: int) -> list[Access]:
    """The accesses of one training step of a model with this number of units.

    Each unit from the first to the last has its update and its forward, then each unit from the last to the
    first has its backward.
    """
    ups = [Access(unit, kind) for unit in range(units) for kind in (U, F)]
    return ups + [Access(unit, B) for unit in reversed(range(units))]


def learned(accesses: list[Access], **options: int) -> Trace:
    trace = Trace(**options)
    for access in accesses:
        trace.record(access)
    trace.step_done()
    return trace


def record(trace: Trace, accesses: list[Access]) -> list[bool]:
    return [trace.record(access) for access in accesses]


def ahead(trace: Trace, limit: int = 3) -> list[Access]:
    return list(trace.upcoming(limit))


def test_nothing_is_expected_before_a_first_step() -> None:
    trace = Trace()
    assert record(trace, forward(0, 1)) == [False, False]
    assert ahead(trace) == []


@given(st.lists(st.builds(Access, st.integers(0, 4), st.sampled_from(AccessKind)), max_size=40))
def test_a_step_repeated_is_expected_throughout(accesses: list[Access]) -> None:
    trace = learned(accesses)
    order = list(trace.learned)
    assert order == [a for i, a in enumerate(accesses) if i == 0 or a != accesses[i - 1]]
    for _ in range(2):
        for place, access in enumerate(order):
            cycle = order[place:] + order[:place]
            assert list(trace.upcoming(len(order) + 5)) == cycle
            assert list(trace.upcoming(2)) == cycle[:2]
            assert trace.record(access)
        trace.step_done()
        assert list(trace.learned) == order


def test_immediate_repeats_are_one_access() -> None:
    trace = Trace()
    assert record(trace, forward(0, 0, 0)) == [False, True, True]
    trace.step_done()
    assert list(trace.learned) == forward(0)


def test_upcoming_of_one_moment_survives_what_is_recorded_after() -> None:
    trace = learned(forward(0, 1, 2, 3))
    seen = trace.upcoming(4)
    assert next(seen) == Access(0, F)
    record(trace, forward(7, 8))
    trace.step_done()
    assert list(seen) == forward(1, 2, 3)


def test_skipped_accesses_within_the_window_are_no_divergence() -> None:
    trace = learned(forward(*range(20)), window=3)
    assert record(trace, forward(0, 4)) == [True, True]
    assert ahead(trace) == forward(5, 6, 7)
    assert record(trace, forward(9)) == [False], "four were left out"
    assert ahead(trace) == forward(10, 11, 12)


def test_skipping_reaches_into_the_next_step() -> None:
    trace = learned(forward(*range(20)), window=3)
    record(trace, forward(*range(18)))
    assert trace.record(Access(0, F))
    assert ahead(trace) == forward(1, 2, 3)


def test_a_short_cycle_does_not_make_everything_a_skip() -> None:
    trace = learned(forward(0, 1, 2, 3, 4))
    assert record(trace, forward(0, 1, 0)) == [True, True, False]


def test_an_order_that_was_swapped_keeps_its_place() -> None:
    trace = learned(forward(*range(20)))
    assert record(trace, forward(0, 3, 1, 2, 4)) == [True] * 5
    assert ahead(trace) == forward(5, 6, 7)
    assert record(trace, forward(1)) == [False], "comes late only once"


def test_what_was_skipped_before_a_divergence_or_in_another_step_is_not_late() -> None:
    trace = learned([*forward(*range(20)), Access(0, B)], window=3)
    assert record(trace, forward(0, 1, 3, 10)) == [True, True, True, False]
    assert record(trace, forward(2, 3, 4)) == [False, True, True], "back to behind 2"
    assert record(trace, forward(6)) == [True]
    trace.step_done()
    assert record(trace, forward(0, 5, 6)) == [True, False, True]
    assert ahead(trace, 1) == forward(7)


def test_two_accesses_that_follow_each_other_often_are_found_ahead_first() -> None:
    passes = [forward(1, 2, *range(10, 15)), forward(1, 3, *range(20, 25)), forward(1, 2, *range(30, 35))]
    trace = learned([access for one in passes for access in one], window=2)
    record(trace, [*passes[0], Access(1, F)])
    assert not trace.record(Access(2, F))
    assert ahead(trace) == forward(30, 31, 32)


def test_unknown_accesses_leave_the_place_as_it_is() -> None:
    trace = learned(training(4))
    record(trace, training(4)[:4])
    before = ahead(trace, 12)
    assert record(trace, forward(90, 91, 92)) == [False] * 3
    assert ahead(trace, 12) == before
    assert trace.record(before[0])


def test_an_evaluation_in_between_costs_one_divergence_each_way() -> None:
    trace = learned(training(20))
    for _ in range(3):
        assert record(trace, forward(*range(20))) == [True] * 20, "the step's own forwards predict them"
        trace.step_done()
    assert all(record(trace, training(20)))
    assert record(trace, forward(*range(20))).count(False) == 0, (
        "after the backwards, round into the next step"
    )
    assert record(trace, forward(*range(20))).count(False) == 1, "backwards were expected"
    trace.step_done()
    assert record(trace, training(20)).count(False) == 0


def test_the_same_two_accesses_in_a_row_are_preferred_to_the_nearest() -> None:
    trace = learned(forward(*range(10), 20, 21, 22, 5, 9, 40), window=2)
    record(trace, forward(0, 5))
    assert not trace.record(Access(9, F)), "it comes first behind 8, but only later behind 5"
    assert ahead(trace, 1) == forward(40)


def test_a_divergence_without_the_same_predecessor_goes_to_the_next_place() -> None:
    trace = learned(forward(*range(10), 30, *range(10)), window=2)
    record(trace, forward(0, 1, 2, 3, 4, 5, 6))
    assert not trace.record(Access(4, F)), "behind the second 3, not round to the first"
    assert ahead(trace, 6) == forward(5, 6, 7, 8, 9, 0)
    assert not trace.record(Access(2, F)), "only from the start again"
    assert ahead(trace, 1) == forward(3)


def test_a_changed_order_is_learned_by_the_next_step() -> None:
    trace = learned(training(6))
    other = [access for access in training(6) if access.unit != 3] + [Access(9, U)]
    record(trace, other)
    trace.step_done()
    assert list(trace.learned) == other
    assert all(record(trace, other))


@pytest.mark.parametrize("between", [[], forward(0), forward(*range(8), 3)])
def test_steps_that_do_not_train_leave_what_was_learned(between: list[Access]) -> None:
    trace = learned(training(4))
    record(trace, between)
    trace.step_done()
    assert list(trace.learned) == training(4)
    assert ahead(trace, 2) == training(4)[:2], "from its start"


def test_without_training_the_last_inference_is_learned_and_an_empty_one_is_not() -> None:
    trace = learned(forward(0, 1))
    record(trace, forward(5, 6))
    trace.step_done()
    trace.step_done()
    assert list(trace.learned) == forward(5, 6)
    record(trace, training(2))
    trace.step_done()
    assert list(trace.learned) == training(2)


def test_a_loop_that_never_steps_stays_bounded_and_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MOST_ACCESSES", 10)
    trace = Trace()
    verdicts = [hit for _ in range(10) for hit in record(trace, forward(0, 1, 2, 3, 4))]
    assert verdicts == [False] * 10 + [True] * 40
    assert list(trace.learned) == forward(0, 1, 2, 3, 4, 0, 1, 2, 3, 4)


@given(st.data())
def test_the_place_is_found_again_after_any_intermission(data: st.DataObject) -> None:
    accesses = st.builds(Access, st.integers(0, 12), st.sampled_from(AccessKind))
    step = training(10)
    trace = learned(step)
    start = data.draw(st.integers(0, len(step) - 1))
    record(trace, step[:start])
    record(trace, data.draw(st.lists(accesses, max_size=30)))
    verdicts = record(trace, step[start:] + 2 * step)
    # Accesses of the step are unique in it, so one divergence finds its place.
    assert verdicts.count(False) <= 1
    assert all(verdicts[-len(step) :])
    assert ahead(trace) == step[:3]
