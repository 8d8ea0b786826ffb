"""Tests of the test driver's checker of the order of memory accesses.

It reports two accesses to the same bytes, at least one of them a write, if no wait orders one after the
other. It reports nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from emulated_device import EmulatedDevice, compute_uses, host_uses

from infinity.tiers.driver import Event, Stream

COUNT = 256


class Bench:
    """An emulated device with two streams for copies, `first` and `second`, and a tensor `memory` to share.

    The tests let these streams, the compute stream and the host access `memory`. `others` are eight tensors
    of the same size, from or into which `memory` is copied; at first all elements of others[i] are i.
    """

    def __init__(self, seed: int) -> None:
        self.device = EmulatedDevice(seed)
        self.first, self.second = self.device.driver.stream(), self.device.driver.stream()
        self.memory = torch.zeros(COUNT)
        self.others = [torch.full((COUNT,), float(number)) for number in range(8)]

    def write(self, stream: Stream) -> None:
        """Queue a copy from `others[1]` into `memory` on `stream`."""
        stream.copy(self.memory.data_ptr(), self.others[1].data_ptr(), self.memory.nbytes)

    def read(self, stream: Stream, into: int = 2) -> None:
        """Queue a copy from `memory` into `others[into]` on `stream`."""
        stream.copy(self.others[into].data_ptr(), self.memory.data_ptr(), self.memory.nbytes)

    @property
    def found(self) -> int:
        return len(self.device.violations)


@pytest.fixture(params=[0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def test_copies_of_one_stream_are_in_order(bench: Bench) -> None:
    bench.write(bench.first)
    bench.read(bench.first)
    bench.write(bench.first)
    assert bench.device.violations == []


@pytest.mark.parametrize("earlier", ["reads", "writes"])
@pytest.mark.parametrize("later", ["reads", "writes"])
def test_two_streams_conflict_where_one_writes(bench: Bench, earlier: str, later: str) -> None:
    for stream, use, other in ((bench.first, earlier, 3), (bench.second, later, 4)):
        if use == "reads":
            bench.read(stream, other)
        else:
            bench.write(stream)
    assert bench.found == (0 if earlier == later == "reads" else 1)


def test_a_violation_names_both_uses(bench: Bench) -> None:
    bench.device.name(bench.first, "up")
    bench.write(bench.first)
    compute_uses(bench.device, bench.memory, writes=False)
    (found,) = bench.device.violations
    address = f"0x{bench.memory.data_ptr():x}"
    assert found == (
        f"[compute: test reads {4 * COUNT} bytes at {address}] is not ordered after "
        f"[up: copy writes {4 * COUNT} bytes at {address}]"
    )


def test_bytes_that_happen_to_be_right_are_no_excuse(bench: Bench) -> None:
    bench.write(bench.first)
    while not torch.equal(bench.memory, bench.others[1]):
        bench.second.record().done()
    compute_uses(bench.device, bench.memory, writes=False)
    assert bench.found == 1


@pytest.mark.parametrize(("start", "end"), [(0, 1), (255, 256), (100, 101), (0, 256)])
def test_one_shared_byte_is_a_conflict(bench: Bench, start: int, end: int) -> None:
    bench.write(bench.first)
    compute_uses(bench.device, bench.memory[start:end], writes=True)
    assert bench.found == 1


def test_neighbours_are_no_conflict(bench: Bench) -> None:
    middle = bench.memory[64:128]
    bench.first.copy(middle.data_ptr(), bench.others[1].data_ptr(), middle.nbytes)
    for neighbour in (bench.memory[:64], bench.memory[128:]):
        compute_uses(bench.device, neighbour, writes=True)
    assert bench.found == 0
    compute_uses(bench.device, middle[:1], writes=False)
    assert bench.found == 1


def test_a_write_over_several_uses_must_follow_all_of_them(bench: Bench) -> None:
    halves = bench.memory[:128], bench.memory[128:]
    first = bench.first.transfer(bench.others[1].data_ptr(), halves[0].data_ptr(), halves[0].nbytes)
    second = bench.second.transfer(bench.others[2].data_ptr(), halves[1].data_ptr(), halves[1].nbytes)
    bench.device.compute.wait(first)
    compute_uses(bench.device, bench.memory, writes=True)
    assert bench.found == 1
    bench.device.reset(1)
    for event in (first, second):
        bench.device.compute.wait(event)
    compute_uses(bench.device, bench.memory, writes=True)
    assert bench.found == 0


def _by_wait(bench: Bench, event: Event) -> None:
    bench.second.wait(event)


def _by_another_stream(bench: Bench, event: Event) -> None:
    bench.device.compute.wait(event)
    bench.second.wait(bench.device.compute.record())


def _by_the_host(bench: Bench, event: Event) -> None:
    event.synchronize()


def _by_asking(bench: Bench, event: Event) -> None:
    while not event.done():
        pass


def _by_the_whole_stream(bench: Bench, event: Event) -> None:
    bench.first.synchronize()


JOINS = [_by_wait, _by_another_stream, _by_the_host, _by_asking, _by_the_whole_stream]


@pytest.mark.parametrize("join", JOINS)
def test_every_kind_of_wait_makes_an_order(bench: Bench, join: Callable[[Bench, Event], None]) -> None:
    bench.write(bench.first)
    join(bench, bench.first.record())
    bench.read(bench.second)
    bench.second.synchronize()
    assert bench.device.violations == []
    assert torch.equal(bench.others[2], bench.others[1])


@pytest.mark.parametrize("join", JOINS[:4])
def test_an_event_says_nothing_of_what_comes_after_it(
    bench: Bench, join: Callable[[Bench, Event], None]
) -> None:
    event = bench.first.record()
    bench.write(bench.first)
    join(bench, event)
    bench.read(bench.second)
    assert bench.found == 1


def test_an_answer_of_not_yet_makes_no_order(bench: Bench) -> None:
    bench.device.hold(bench.first)
    bench.write(bench.first)
    assert not bench.first.record().done()
    assert not bench.first.done()
    bench.read(bench.second)
    assert bench.found == 1
    bench.device.let_go(bench.first)


def test_the_host_comes_after_what_it_waited_for_and_before_what_it_queues(bench: Bench) -> None:
    host_uses(bench.device, bench.memory, writes=True)
    bench.read(bench.first)
    bench.first.record().synchronize()
    host_uses(bench.device, bench.memory, writes=True)
    assert bench.device.violations == []


@pytest.mark.parametrize("writes", [True, False])
def test_a_host_that_does_not_wait_is_found(bench: Bench, writes: bool) -> None:
    bench.write(bench.first)
    host_uses(bench.device, bench.memory, writes=writes)
    assert bench.found == 1


def test_the_host_is_not_ordered_by_what_only_compute_waits_for(bench: Bench) -> None:
    bench.write(bench.first)
    bench.device.compute.wait(bench.first.record())
    compute_uses(bench.device, bench.memory, writes=True)
    host_uses(bench.device, bench.memory, writes=False)
    assert bench.found == 1


def test_compute_s_events_are_not_done_the_moment_they_are_recorded() -> None:
    late = 0
    for seed in range(50):
        device = EmulatedDevice(seed)
        event = device.compute.record()
        late += not event.done()
        event.synchronize()
    assert 10 < late < 50


def test_a_seed_gives_the_same_order_again_and_another_another() -> None:
    def answers(seed: int) -> list[tuple[bool, ...]]:
        device = EmulatedDevice(seed)
        streams = [device.driver.stream() for _ in range(3)]
        device.reset(seed)  # the seed draws which stream is favoured
        there, here = torch.zeros(3, 4), torch.ones(3, 4)
        seen = []
        for _ in range(20):
            events = [
                stream.transfer(into.data_ptr(), source.data_ptr(), into.nbytes)
                for stream, into, source in zip(streams, there, here, strict=True)
            ]
            seen.append(tuple(event.done() for event in events))
        for stream in streams:
            stream.synchronize()
        return seen

    orders = [answers(seed) for seed in range(10)]
    assert orders == [answers(seed) for seed in range(10)]
    assert len({str(order) for order in orders}) >= 5


def test_an_event_that_is_used_again_is_another_moment(bench: Bench) -> None:
    """A stream that was told to wait for an event waits for the same work if the event is used again.

    `second` is told to wait for an event that `first` recorded behind work that is held back. Then the
    driver's event is recorded again on a third stream, which has no work. `second` must still not run
    before the work of `first`.
    """
    bench.device.hold(bench.first)
    bench.write(bench.first)
    event = bench.first.record()
    bench.second.wait(event)
    del event  # the next event takes its place
    again = bench.device.driver.stream().record()
    again.synchronize()
    bench.read(bench.second)
    assert bench.device.count("cuEventCreate") <= 1
    assert not any(bench.second.done() for _ in range(100))
    bench.device.let_go(bench.first)
    bench.second.synchronize()
    again.synchronize()
    assert torch.equal(bench.others[2], bench.others[1])
    assert bench.device.violations == []


def test_threads_of_the_host_are_one_unless_they_are_separate(bench: Bench) -> None:
    def wait_and_use(key: int | None) -> None:
        event.synchronize()
        if key is not None:
            bench.device.release(key)

    for separate, key, expected in ((False, None, 0), (True, None, 1), (True, 7, 0)):
        bench.device.reset(0)
        if separate:
            bench.device.separate_threads()
        bench.write(bench.first)
        event = bench.first.record()
        thread = threading.Thread(target=wait_and_use, args=(key,))
        thread.start()
        thread.join()
        if key is not None:
            bench.device.acquire(key)
        host_uses(bench.device, bench.memory, writes=False)
        assert bench.found == expected


def test_what_was_seen_is_forgotten_by_a_reset(bench: Bench) -> None:
    bench.write(bench.first)
    compute_uses(bench.device, bench.memory, writes=True)
    assert bench.found == 1
    bench.device.reset(0)
    assert bench.found == 0
    compute_uses(bench.device, bench.memory, writes=True)
    assert bench.found == 0
