"""Tests of telemetry: its totals are sums of what was reported, the last step has figures of its own, and
the resource that limited the last step is named.
"""

import json
import re
from dataclasses import FrozenInstanceError, fields, replace
from html import unescape
from pathlib import Path
from threading import Thread

import pytest
import torch
from small_runtime import TIED, loss_of, opened, train_step

from infinity.aio import Faults
from infinity.system.disk_files import injected
from infinity.telemetry.meter import Meter
from infinity.telemetry.stats import Edge, EdgeStats, Stats, Wait


def busy_step(meter: Meter, factor: int = 1) -> None:
    for _ in range(factor):
        meter.moved(Edge.NVME_TO_HOST, 100)
        meter.moved(Edge.NVME_TO_HOST, 50)
        meter.moved(Edge.HOST_TO_NVME, 10)
        meter.stalled(Edge.NVME_TO_HOST, 0.5)
        meter.stalled(Edge.HOST_TO_DEVICE, 0.25)
        meter.updating(0.125)
        meter.accessed(hit=True)
        meter.accessed(hit=False)


def test_edges_are_named_by_their_ends() -> None:
    assert [edge.value for edge in Edge] == ["nvme->host", "host->device", "device->host", "host->nvme"]


def test_nothing_is_known_before_anything_happened() -> None:
    stats = Meter().snapshot()
    assert stats.edges == dict.fromkeys(Edge, EdgeStats())
    assert (stats.hit_rate, stats.limited_by, stats.last_step, stats.step_seconds) == (None,) * 4
    assert (stats.loss_scale, stats.peaks, stats.steps, stats.seconds) == (None, {}, 0, 0)


def test_what_happened_adds_up_before_a_step_is_done() -> None:
    meter = Meter()
    busy_step(meter)
    stats = meter.snapshot()
    assert stats.edges == {
        Edge.NVME_TO_HOST: EdgeStats(bytes=150, transfers=2, stall_seconds=0.5),
        Edge.HOST_TO_DEVICE: EdgeStats(stall_seconds=0.25),
        Edge.DEVICE_TO_HOST: EdgeStats(),
        Edge.HOST_TO_NVME: EdgeStats(bytes=10, transfers=1),
    }
    assert (stats.accesses, stats.misses, stats.hit_rate) == (2, 1, 0.5)
    assert stats.stall_seconds == 0.75
    assert (stats.steps, stats.limited_by, stats.last_step) == (0, None, None)


NO_NUMBERS = {"edges", "peaks", "written", "last_step"}
"""The fields of Stats whose numbers have names of their own in `flat`."""


def test_flat_has_every_number_and_a_logger_can_take_it() -> None:
    meter = Meter()
    assert meter.snapshot().flat()["steps"] == 0
    busy_step(meter)
    meter.peak("device homes", 70)
    meter.scaled(2.0)
    meter.stepped(4.0)
    stats = meter.snapshot()
    flat = json.loads(json.dumps(stats.flat()))
    for found, whole in (("", stats), ("last_step/", stats.last_step)):
        assert whole is not None
        for each in fields(whole):
            value = getattr(whole, each.name)
            if each.name not in NO_NUMBERS and value is not None:
                assert flat[found + each.name] == value
        assert flat[f"{found}nvme_to_host/bytes"] == 150
        assert flat[f"{found}host_to_device/stall_seconds"] == flat[f"{found}stall_seconds"] - 0.5 == 0.25
    assert (flat["peak/device_homes"], flat["hit_rate"], flat["loss_scale"]) == (70, 0.5, 2.0)
    assert {type(each) for each in flat.values()} <= {int, float}


def test_a_notebook_shows_the_text_as_a_table() -> None:
    meter = Meter()
    busy_step(meter)
    meter.peak("<pool>", 70)
    meter.stepped(4.0)
    stats = meter.snapshot()
    html = stats._repr_html_()
    cells = re.sub("<[^>]*>", " ", html)
    words = unescape(cells).split()
    assert words == str(stats).split()
    assert "<td>nvme-&gt;host</td>" in html and "&lt;pool&gt;" in html
    assert len(html) < 2000


def test_steps_are_told_apart_and_sum_to_the_total() -> None:
    meter = Meter()
    busy_step(meter)
    meter.peak("host", 70)
    meter.stepped(2.0)
    busy_step(meter, 2)
    meter.peak("host", 30)
    meter.peak("host", 20)
    meter.stepped(4.0)
    meter.moved(Edge.DEVICE_TO_HOST, 7)
    stats = meter.snapshot()
    step = stats.last_step
    assert step is not None
    assert step.last_step is None
    assert (step.steps, step.seconds, step.step_seconds, step.accesses, step.misses) == (1, 4.0, 4.0, 4, 2)
    assert step.edges[Edge.NVME_TO_HOST] == EdgeStats(bytes=300, transfers=4, stall_seconds=1.0)
    assert step.edges[Edge.DEVICE_TO_HOST] == EdgeStats()
    assert step.update_seconds == 0.25
    assert step.compute_seconds == 4.0 - 1.5 - 0.25
    assert step.peaks == {"host": 30}

    assert (stats.steps, stats.seconds, stats.step_seconds, stats.accesses, stats.misses) == (
        2,
        6.0,
        4.0,
        6,
        3,
    )
    assert stats.edges[Edge.NVME_TO_HOST] == EdgeStats(bytes=450, transfers=6, stall_seconds=1.5)
    assert stats.edges[Edge.DEVICE_TO_HOST] == EdgeStats(bytes=7, transfers=1)
    assert stats.update_seconds == 0.375
    assert stats.compute_seconds == (2.0 - 0.75 - 0.125) + (4.0 - 1.5 - 0.25)
    assert stats.peaks == {"host": 70}


@pytest.mark.parametrize(
    ("stalls", "update", "seconds", "limit"),
    [
        ({}, 0.0, 1.0, "compute"),
        ({Edge.NVME_TO_HOST: 0.25}, 0.25, 1.0, "compute"),
        ({Edge.NVME_TO_HOST: 0.25}, 0.5, 1.0, "update"),
        ({Edge.NVME_TO_HOST: 0.5, Edge.HOST_TO_NVME: 0.25}, 0.125, 1.0, "nvme->host"),
        ({Edge.HOST_TO_DEVICE: 0.25, Edge.DEVICE_TO_HOST: 0.5}, 0.0, 1.0, "device->host"),
        ({Edge.HOST_TO_NVME: 3.0}, 0.0, 1.0, "host->nvme"),
    ],
)
def test_the_largest_share_of_the_last_step_is_the_limit(
    stalls: dict[Edge, float], update: float, seconds: float, limit: str
) -> None:
    meter = Meter()
    meter.stalled(Edge.HOST_TO_DEVICE, 100.0)
    meter.stepped(200.0)
    for edge, stalled in stalls.items():
        meter.stalled(edge, stalled)
    meter.updating(update)
    meter.stepped(seconds)
    meter.stalled(Edge.DEVICE_TO_HOST, 50.0)
    stats = meter.snapshot()
    assert stats.limited_by == limit
    assert stats.last_step is not None
    assert stats.last_step.limited_by == limit
    assert stats.last_step.compute_seconds == max(0.0, seconds - update - sum(stalls.values()))


def test_loss_scale_and_skipped_steps() -> None:
    meter = Meter()
    meter.scaled(1024.0)
    meter.skipped()
    meter.stepped(1.0)
    meter.scaled(512.0)
    meter.stepped(1.0)
    meter.scaled(256.0)
    stats = meter.snapshot()
    assert (stats.steps, stats.skipped_steps, stats.loss_scale) == (2, 1, 256.0)
    assert stats.last_step is not None
    assert (stats.last_step.steps, stats.last_step.skipped_steps, stats.last_step.loss_scale) == (1, 0, 512.0)


def test_a_wait_is_counted_also_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])
    monkeypatch.setattr("infinity.telemetry.meter.time.perf_counter", lambda: next(clock))
    meter = Meter()
    with pytest.raises(OSError, match="broken"), meter.stalling(Edge.NVME_TO_HOST):
        raise OSError("broken")
    assert meter.snapshot().edges[Edge.NVME_TO_HOST] == EdgeStats(stall_seconds=2.5)


def test_a_snapshot_does_not_change() -> None:
    meter = Meter()
    meter.peak("host", 1)
    stats = meter.snapshot()
    busy_step(meter)
    meter.peak("host", 2)
    assert stats.peaks == {"host": 1}
    assert stats.edges[Edge.NVME_TO_HOST] == EdgeStats()
    with pytest.raises(FrozenInstanceError):
        stats.steps = 3  # type: ignore[misc]


def test_threads_lose_nothing() -> None:
    meter = Meter()

    def work() -> None:
        for _ in range(500):
            meter.moved(Edge.NVME_TO_HOST, 3)
            meter.accessed(hit=False)
            meter.stepped(1.0)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = meter.snapshot()
    assert stats.edges[Edge.NVME_TO_HOST] == EdgeStats(bytes=6000, transfers=2000)
    assert (stats.accesses, stats.misses, stats.steps, stats.seconds) == (2000, 2000, 2000, 2000.0)


def test_the_text_is_a_short_table() -> None:
    meter = Meter()
    assert str(meter.snapshot()).splitlines()[1:] == ["steps 0"]
    meter.moved(Edge.NVME_TO_HOST, 3 << 20)
    meter.stalled(Edge.NVME_TO_HOST, 0.25)
    meter.stalled(Edge.NVME_TO_HOST, 0.5, Wait.FAULT)
    for place in range(8):
        meter.accessed(hit=place > 0)
    meter.peak("host", 5 << 20)
    meter.skipped()
    meter.scaled(65536.0)
    meter.stepped(1.0)
    assert str(meter.snapshot()).splitlines() == [
        "edge               moved   transfers     stalled  for faults",
        "nvme->host         3 MiB           1     0.750 s     0.500 s",
        "last step 1.000 s: compute 0.250 s, update 0.000 s, stalls 0.750 s (0.500 s for page faults) · "
        "limited by nvme->host",
        "steps 1 (1 skipped) · accesses 8, 87.5% hits · loss scale 65536",
        "peak host 5 MiB",
    ]


def test_every_total_grows_by_what_a_step_counts() -> None:
    """After a first step in which everything happens, no field of Stats has its initial value, and each
    total equals the figure of the last step.

    The test fails for a new field of Stats that nothing counts.
    """
    meter = Meter()
    busy_step(meter)
    meter.skipped()
    meter.confirmed()
    meter.undone()
    meter.visited(0.5)
    with meter.awaiting("step()"):
        pass
    meter.peak("host", 1)
    meter.scaled(2.0)
    meter.stepped(3.0)
    stats = meter.snapshot()
    assert stats.last_step == replace(stats, last_step=None)
    empty = Meter().snapshot()
    unchanged = [f.name for f in fields(Stats) if getattr(stats, f.name) == getattr(empty, f.name)]
    assert unchanged == []


def test_a_wait_inside_a_wait_counts_once() -> None:
    meter = Meter()
    with meter.stalling(Edge.NVME_TO_HOST), meter.stalling(Edge.HOST_TO_DEVICE):
        pass
    edges = meter.snapshot().edges
    assert edges[Edge.NVME_TO_HOST].stall_seconds > 0
    assert edges[Edge.HOST_TO_DEVICE].stall_seconds == 0


def test_an_update_that_a_stall_waits_for_is_the_stalls() -> None:
    meter = Meter()
    with meter.stalling(Edge.NVME_TO_HOST):
        meter.updating(1.0)
    assert meter.snapshot().update_seconds == 0
    meter.updating(1.0)
    assert meter.snapshot().update_seconds == 1.0


def test_a_wait_for_other_ranks_is_cut_out_of_the_stall_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.0, 4.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr("infinity.telemetry.meter.time.perf_counter", lambda: next(clock))
    meter = Meter()
    with meter.faulting(), meter.stalling(Edge.NVME_TO_HOST):
        with meter.awaiting("parameters"), meter.awaiting("step()"), meter.stalling(Edge.HOST_TO_NVME):
            meter.updating(100.0)
        with meter.stalling(Edge.HOST_TO_NVME):
            pass
    with pytest.raises(OSError, match="broken"), meter.awaiting("step()"):
        raise OSError("broken")
    meter.updating(5.0)
    meter.stepped(50.0)
    stats = meter.snapshot().last_step
    assert stats is not None
    assert stats.edges[Edge.NVME_TO_HOST] == EdgeStats(stall_seconds=17.0, fault_seconds=17.0)
    assert stats.edges[Edge.HOST_TO_NVME] == EdgeStats()
    assert (stats.rank_seconds, stats.update_seconds, stats.compute_seconds) == (13.0, 5.0, 15.0)
    assert stats.limited_by == "nvme->host"
    assert "other ranks 13.000 s" in str(meter.snapshot())


def test_waits_for_demanded_units_are_page_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0, 30.0, 38.0])
    monkeypatch.setattr("infinity.telemetry.meter.time.perf_counter", lambda: next(clock))
    meter = Meter()
    with meter.stalling(Edge.NVME_TO_HOST):
        pass
    with meter.faulting():
        with meter.stalling(Edge.NVME_TO_HOST), meter.stalling(Edge.HOST_TO_NVME, Wait.ROOM):
            pass
        with meter.faulting(), meter.stalling(Edge.HOST_TO_DEVICE, Wait.COPY):
            pass
    with meter.stalling(Edge.HOST_TO_DEVICE, Wait.COPY):
        pass
    meter.stepped(20.0)
    stats = meter.snapshot().last_step
    assert stats is not None
    assert stats.edges[Edge.NVME_TO_HOST] == EdgeStats(stall_seconds=3.0, fault_seconds=2.0)
    assert stats.edges[Edge.HOST_TO_DEVICE] == EdgeStats(stall_seconds=12.0, fault_seconds=4.0)
    assert (stats.stall_seconds, stats.fault_seconds, stats.compute_seconds) == (15.0, 6.0, 5.0)


def test_faults_are_those_of_a_thread() -> None:
    meter = Meter()

    def wait() -> None:
        with meter.stalling(Edge.NVME_TO_HOST):
            pass

    with meter.faulting():
        other = Thread(target=wait)
        other.start()
        other.join()
    stats = meter.snapshot()
    assert stats.stall_seconds > 0
    assert stats.fault_seconds == 0


@pytest.mark.parametrize("home", ["nvme", "unified-nvme"])
def test_a_runtime_tells_faults_from_other_stalls(home: str, tmp_path: Path) -> None:
    """Waits for pages that a forward demands count as faults, and waits for pages of an update do not."""
    model, faults = TIED.make(), Faults()
    with injected(faults), opened(model, tmp_path, home=home) as runtime:
        train_step(model, runtime)
        faults.delay("read", 1, 0.01, times=None)  # longer than a busy machine computes meanwhile
        before = runtime.stats
        with torch.no_grad():
            loss_of(model)
        demanded = runtime.stats
        assert demanded.fault_seconds >= before.fault_seconds + 0.002
        for _ in range(2):
            train_step(model, runtime)
        edge = runtime.stats.edges[Edge.NVME_TO_HOST]
        then = demanded.edges[Edge.NVME_TO_HOST]
        others = edge.stall_seconds - edge.fault_seconds
        assert others >= then.stall_seconds - then.fault_seconds + 0.002
