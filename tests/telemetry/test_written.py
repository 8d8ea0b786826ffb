"""Tests of the bytes that are written to disk in a step and a day."""

import pytest

from infinity.telemetry.meter import Meter
from infinity.telemetry.stats import Edge, Stats


def written(stats: Stats) -> tuple[float | None, float | None]:
    return stats.written_per_step, stats.written_per_day


def test_stats_tell_of_the_writes_of_all_steps_but_the_first() -> None:
    meter = Meter()
    meter.moved(Edge.HOST_TO_NVME, 8 * 10**9)  # the model is filled
    assert written(meter.snapshot()) == (None, None)
    meter.moved(Edge.HOST_TO_NVME, 10**9)
    meter.stepped(4.0)
    meter.moved(Edge.HOST_TO_NVME, 5 * 10**9)
    assert written(meter.snapshot()) == (9 * 10**9, 9 * 10**9 / 4 * 86_400)
    meter.moved(Edge.NVME_TO_HOST, 7)
    meter.stepped(2.0)
    meter.moved(Edge.HOST_TO_NVME, 3)  # belongs to the step that has begun
    stats = meter.snapshot()
    assert stats.last_step is not None
    for each in (stats, stats.last_step):
        assert written(each) == (5 * 10**9, 216_000 * 10**9)


def test_a_step_without_writes_of_a_commit_does_not_hide_those_of_the_others() -> None:
    """The figure is nearly the same wherever between two commits it is asked for."""
    meter = Meter()
    meter.stepped(9.0)
    for step in range(1, 1001):
        meter.moved(Edge.HOST_TO_NVME, 10**9 + 40 * 10**9 * (step % 4 == 0))
        meter.stepped(2.0)
        if step > 800:
            found = meter.snapshot()
            assert found.written_per_step == pytest.approx(11e9, rel=0.02)
            assert found.written_per_day == pytest.approx(11e9 * 43_200, rel=0.02)
    assert written(found) == (11 * 10**9, 11 * 10**9 * 43_200)


def test_a_run_may_write_nothing() -> None:
    meter = Meter()
    for _ in range(3):
        meter.stepped(1.0)
        assert written(meter.snapshot()) == (0, 0)
