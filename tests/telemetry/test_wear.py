"""Tests of the days after which a drive has taken the writes that it is rated for."""

import pytest

from infinity.telemetry.meter import Meter
from infinity.telemetry.stats import Edge
from infinity.telemetry.wear import days_until_worn


def test_terabytes_are_decimal() -> None:
    assert days_until_worn(600, 3e12) == 200
    assert days_until_worn(0.5, 1e12) == 0.5


@pytest.mark.parametrize("rate", [None, 0, 0.0])
def test_without_writes_no_drive_is_worn(rate: float | None) -> None:
    assert days_until_worn(600, rate) is None


def test_stats_tell_of_the_writes_of_the_last_step() -> None:
    meter = Meter()
    meter.moved(Edge.HOST_TO_NVME, 10**9)
    before = meter.snapshot()
    assert (before.written_per_step, before.written_per_day, before.days_to(600)) == (None, None, None)
    meter.stepped(1.0)
    meter.moved(Edge.HOST_TO_NVME, 5 * 10**9)
    meter.moved(Edge.NVME_TO_HOST, 7)
    meter.stepped(2.0)
    meter.moved(Edge.HOST_TO_NVME, 3)  # belongs to the step that has begun
    stats = meter.snapshot()
    assert stats.last_step is not None
    for each in (stats, stats.last_step):
        assert each.written_per_step == 5 * 10**9
        assert each.written_per_day == 216_000 * 10**9
        assert each.days_to(432) == pytest.approx(2)
    meter.stepped(1.0)
    meter.stepped(1.0)
    stats = meter.snapshot()
    assert (stats.written_per_step, stats.written_per_day, stats.days_to(600)) == (0, 0, None)
