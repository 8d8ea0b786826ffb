"""Tests of the days after which a drive has taken the writes that it is rated for."""

import pytest

from infinity.telemetry.meter import Meter
from infinity.telemetry.stats import Edge, Stats
from infinity.telemetry.wear import Written, days_until_worn


def test_terabytes_are_decimal() -> None:
    assert days_until_worn(600, 3e12) == 200
    assert days_until_worn(0.5, 1e12) == 0.5


@pytest.mark.parametrize("rate", [None, 0, 0.0])
def test_without_writes_no_drive_is_worn(rate: float | None) -> None:
    assert days_until_worn(600, rate) is None


def wear(stats: Stats) -> tuple[float | None, float | None, float | None]:
    return stats.written_per_step, stats.written_per_day, stats.days_to(432)


def test_stats_tell_of_the_writes_of_all_steps_but_the_first() -> None:
    meter = Meter()
    meter.moved(Edge.HOST_TO_NVME, 8 * 10**9)  # the model is filled
    assert wear(meter.snapshot()) == (None, None, None)
    meter.moved(Edge.HOST_TO_NVME, 10**9)
    meter.stepped(4.0)
    meter.moved(Edge.HOST_TO_NVME, 5 * 10**9)
    assert meter.snapshot().written == Written(bytes=9 * 10**9, steps=1, seconds=4.0)
    meter.moved(Edge.NVME_TO_HOST, 7)
    meter.stepped(2.0)
    meter.moved(Edge.HOST_TO_NVME, 3)  # belongs to the step that has begun
    stats = meter.snapshot()
    assert stats.last_step is not None
    for each in (stats, stats.last_step):
        assert wear(each) == (5 * 10**9, 216_000 * 10**9, pytest.approx(2))


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
            assert found.days_to(600) == pytest.approx(600e12 / (11e9 * 43_200), rel=0.02)
    assert found.written == Written(bytes=11 * 10**12, steps=1000, seconds=2000.0)


def test_a_run_that_writes_nothing_wears_nothing() -> None:
    meter = Meter()
    for _ in range(3):
        meter.stepped(1.0)
        assert wear(meter.snapshot()) == (0, 0, None)
