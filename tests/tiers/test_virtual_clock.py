"""Tests of the virtual clock: the times of short programs are those that a person computes by hand.

The link moves a byte in 20 ps each way, a copy on the device takes 2 x 1 ps a byte, and host memory moves a
byte in 10 ps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from emulated_device import EmulatedDevice
from virtual_clock import SECOND, Rates, VirtualClock

from infinity.tiers.copy_streams import CopyStreams
from infinity.tiers.driver import Event, Stream
from infinity.tiers.link import Lane

SIZE = 1000
UP = DOWN = 20 * SIZE
"""What a copy of SIZE bytes takes on the link."""
RATES = Rates(link_up=SECOND // 20, link_down=SECOND // 20, device=SECOND, host_memory=SECOND // 10)


class Bench:
    """An emulated device with a clock, two streams, and 2 x SIZE bytes of memory at either end."""

    def __init__(self) -> None:
        self.device = EmulatedDevice(3)
        self.clock = VirtualClock(RATES)
        self.first, self.second = self.device.driver.stream(), self.device.driver.stream()
        self.host, self.there = (
            torch.ones(2 * SIZE, dtype=torch.uint8),
            torch.zeros(2 * SIZE, dtype=torch.uint8),
        )
        self.device.driver.register_host(self.host.data_ptr(), self.host.nbytes)

    def up(self, stream: Stream, nbytes: int = SIZE) -> Event:
        return stream.transfer(self.there.data_ptr(), self.host.data_ptr(), nbytes)

    def down(self, stream: Stream, nbytes: int = SIZE, after: Event | None = None) -> Event:
        return stream.transfer(self.host.data_ptr(), self.there.data_ptr(), nbytes, after=after)

    def at(self, event: Event) -> int:
        """Wait for an event, and return the time of this thread."""
        event.synchronize()
        return self.clock.now


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.device.driver.unregister_host(made.host.data_ptr())
    made.device.reset(0)


def test_copies_in_both_directions_take_the_same_time(bench: Bench) -> None:
    up, down = bench.up(bench.first), bench.down(bench.second)
    assert bench.clock.now == 0  # nobody has waited
    assert bench.at(up) == bench.at(down) == UP
    assert bench.clock.busy("link_up", 0, SECOND) == bench.clock.busy("link_down", 0, SECOND) == UP


def test_one_link_does_one_copy_after_the_other_whatever_their_streams(bench: Bench) -> None:
    events = [bench.up(bench.first), bench.up(bench.second, 500), bench.up(bench.first, 100)]
    assert [bench.at(event) for event in events] == [20_000, 30_000, 32_000]


def test_a_stream_waits_for_the_recording_of_an_event(bench: Bench) -> None:
    compute = bench.device.compute
    bench.clock.computes(compute, 7_000)
    written = compute.record()
    bench.clock.computes(compute, 5_000)
    copied = bench.down(bench.first, after=written)
    compute.wait(copied)
    bench.clock.computes(compute, 1)
    assert bench.clock.end_of(bench.first) == 7_000 + DOWN
    assert bench.clock.end_of(compute) == 7_000 + DOWN + 1
    assert bench.at(written) == 7_000


def test_later_work_takes_the_time_that_work_before_it_leaves_free(bench: Bench) -> None:
    bench.clock.computes(bench.device.compute, 25_000)
    late = bench.up(bench.first, 100)
    bench.first.wait(bench.device.compute.record())
    later = bench.up(bench.first, 100)
    between = bench.up(bench.second, 1500)  # 23,000 of its 30,000 are free before `later`
    assert [bench.at(each) for each in (late, later, between)] == [2_000, 27_000, 34_000]
    assert bench.clock.busy("link_up", 0, 27_000) == 27_000
    assert bench.clock.busy("link_up", 26_000, 40_000) == 8_000


def test_work_begins_when_the_thread_that_queues_it_has_come_there(bench: Bench) -> None:
    bench.at(bench.up(bench.first))
    assert bench.at(bench.down(bench.second)) == UP + DOWN
    bench.clock.wait_until(100_000)
    bench.clock.wait_until(50_000)
    assert bench.at(bench.second.record()) == 100_000


def test_a_copy_on_the_device_reads_and_writes_its_memory(bench: Bench) -> None:
    other = torch.zeros_like(bench.there)
    compute = bench.device.compute
    compute.copy(other.data_ptr(), bench.there.data_ptr(), SIZE)
    assert bench.clock.end_of(compute) == 2 * SIZE
    assert bench.clock.busy("device", 0, SECOND) == 2 * SIZE


def test_host_memory_serves_copies_and_threads_of_the_host(bench: Bench) -> None:
    copied = bench.down(bench.first)  # takes 10,000 of its time
    assert bench.clock.host_works(500) == 15_000
    assert bench.clock.host_works(100) == 16_000
    assert bench.clock.now == 0
    assert bench.at(copied) == DOWN  # the link is slower, so the copy does not wait for the memory
    assert bench.clock.host_works(100) == 21_000


def test_a_question_is_answered_by_the_time_of_the_thread_that_asks(bench: Bench) -> None:
    copied, other = bench.up(bench.first), bench.down(bench.second)
    assert not any(event.done() for _ in range(50) for event in (copied, other))
    assert bench.clock.now == 0
    bench.clock.wait_until(UP - 1)
    assert not copied.done()
    bench.clock.wait_until(UP)
    assert copied.done() and other.done()


def test_a_thread_that_asks_nothing_else_waits(bench: Bench) -> None:
    copied = bench.up(bench.first)
    asked = next(times for times in range(1, 1000) if copied.done())
    assert asked > 1 and bench.clock.now == UP


def test_threads_have_times_of_their_own_and_hand_them_over(bench: Bench) -> None:
    def work() -> None:
        bench.at(bench.up(bench.first))
        bench.device.release(1)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert bench.clock.now == 0
    bench.device.acquire(1)
    assert bench.clock.now == UP


def test_synchronize_waits_for_all_streams(bench: Bench) -> None:
    bench.up(bench.first)
    bench.clock.computes(bench.device.compute, 3 * UP)
    bench.device.driver.synchronize()
    assert bench.clock.now == 3 * UP


def test_events_are_timed_by_the_clock(bench: Bench) -> None:
    began = bench.first.record(timing=True)
    bench.up(bench.first)
    ended = bench.first.record(timing=True)
    bench.at(ended)
    assert ended.milliseconds_since(began) == pytest.approx(UP / SECOND * 1000, rel=1e-6)


def test_copies_move_their_bytes_unless_they_only_take_time(bench: Bench) -> None:
    bench.at(bench.up(bench.first))
    assert int(bench.there.sum()) == SIZE
    bench.there.zero_()
    bench.clock = VirtualClock(RATES, copies=False)
    assert bench.at(bench.up(bench.first)) == UP
    assert not bench.there.any()


def test_a_link_prefetches_beside_urgent_copies_and_fences_compute(bench: Bench) -> None:
    link = CopyStreams(bench.device.driver, lambda: bench.device.compute)
    halves = bench.there[:500], bench.there[500:SIZE]
    prefetched = link.to_device(halves[0], bench.host[:500], 0, Lane.PREFETCH)
    bench.clock.computes(bench.device.compute, 8_000)
    link.follow_compute()
    urgent = link.to_device(halves[1], bench.host[500:SIZE], 0, Lane.URGENT)
    link.fence(prefetched)
    assert bench.clock.end_of(bench.device.compute) == 10_000
    link.fence(urgent)
    assert bench.clock.end_of(bench.device.compute) == 20_000
    link.close()
    assert bench.clock.now == 20_000 and bench.device.violations == []


def test_without_the_clock_all_times_are_zero(bench: Bench) -> None:
    bench.device.reset(0)
    bench.clock.computes(bench.device.compute, 5)
    bench.clock.wait_until(5)
    assert bench.clock.host_works(5) == bench.clock.busy("device", 0, 5) == 0
    bench.at(bench.up(bench.first))
    assert bench.clock.now == bench.clock.end_of(bench.first) == 0
