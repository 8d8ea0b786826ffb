"""The link's order of copies and kernels, on a machine that runs its streams in whatever order it may."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from infinity.tiers.link import ARRIVED, CpuLink, CudaLink, EventTransfer, open_link

CUDA = torch.device("cuda", 0)


class FakeEvent:
    def __init__(self, machine: Machine) -> None:
        self.happened = False
        self._machine = machine

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self._machine.run()
        assert self.happened


class FakeStream:
    """A queue of actions, each of which says whether it could be done now."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], bool]] = deque()
        self._machine = machine

    def put(self, action: Callable[[], object]) -> None:
        self.queue.append(lambda: (action(), True)[1])

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._machine)
        self.put(lambda: setattr(event, "happened", True))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append(lambda: event.happened)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._machine.run()
        assert not self.queue


class Machine:
    """Streams that run only when somebody waits; of those that can, always the first in the given order."""

    def __init__(self, order: tuple[str, ...]) -> None:
        self.order = order
        self.compute = FakeStream(self, "compute")
        self.streams = {"compute": self.compute}
        self.current = self.compute

    def stream(self, device: torch.device) -> FakeStream:
        assert device == CUDA
        name = "up" if "up" not in self.streams else "down"
        self.streams[name] = FakeStream(self, name)
        return self.streams[name]

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for name in self.order:
                queue = self.streams[name].queue
                if queue and queue[0]():
                    queue.popleft()
                    moved = True
                    break  # whoever comes first in the order goes on as soon as it can


class Bytes:
    """Stands for a tensor: one value, copied when the stream gets there."""

    def __init__(self, machine: Machine, value: str) -> None:
        self.value = value
        self.recorded: list[FakeStream] = []
        self._machine = machine

    def copy_(self, source: Bytes, *, non_blocking: bool) -> None:
        assert non_blocking
        self._machine.current.put(lambda: setattr(self, "value", source.value))

    def record_stream(self, stream: FakeStream) -> None:
        self.recorded.append(stream)


@pytest.fixture(params=list(itertools.permutations(("compute", "up", "down"))), ids=" then ".join)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(request.param)
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return made


def link_on(machine: Machine) -> Any:
    link: Any = CudaLink(CUDA)
    machine.run()
    return link


def kernel_reads(machine: Machine, memory: Bytes) -> list[str]:
    """What a kernel that is queued now will have read."""
    seen: list[str] = []
    machine.compute.put(lambda: seen.append(memory.value))
    return seen


def kernel_waits_for(machine: Machine, go: list[bool]) -> None:
    """A kernel that does not end before `go` holds anything."""
    machine.compute.queue.append(lambda: bool(go))


def test_the_first_copy_waits_for_work_from_before_the_link(machine: Machine) -> None:
    memory, host = Bytes(machine, "somebody's"), Bytes(machine, "page")
    seen = kernel_reads(machine, memory)
    machine.compute.put(lambda: setattr(memory, "value", "late"))
    link: Any = CudaLink(CUDA)
    link.to_device(memory, host, 0).wait()
    assert seen == ["somebody's"]
    assert memory.value == "page"


def test_compute_after_a_fence_sees_what_was_copied_up(machine: Machine) -> None:
    link = link_on(machine)
    memory, host = Bytes(machine, "old"), Bytes(machine, "page")
    link.fence(link.to_device(memory, host, 0))
    seen = kernel_reads(machine, memory)
    machine.run()
    assert seen == ["page"]


def test_a_fence_after_what_arrived_already_orders_nothing(machine: Machine) -> None:
    link = link_on(machine)
    link.fence(ARRIVED)
    assert not machine.compute.queue


def test_bytes_that_never_were_lent_wait_for_nobody(machine: Machine) -> None:
    link = link_on(machine)
    memory, host = Bytes(machine, "old"), Bytes(machine, "page")
    kernel_waits_for(machine, [])
    link.to_device(memory, host, 0).wait()
    assert memory.value == "page"


@pytest.mark.parametrize("marks", [(), (2,), (1, 2)], ids=str)
def test_a_copy_without_a_mark_waits_for_all_that_compute_has_queued(
    machine: Machine, marks: tuple[int, ...]
) -> None:
    link = link_on(machine)
    memory, host = Bytes(machine, "old"), Bytes(machine, "page")
    for returns in marks:
        link.mark(returns)
    seen = kernel_reads(machine, memory)
    link.to_device(memory, host, 3).wait()
    assert seen == ["old"]
    assert memory.value == "page"


@pytest.mark.parametrize("last_return", [1, 2, 3])
def test_a_copy_waits_for_the_mark_of_its_bytes_and_no_longer(machine: Machine, last_return: int) -> None:
    link = link_on(machine)
    memory, host = Bytes(machine, "old"), Bytes(machine, "page")
    seen = kernel_reads(machine, memory)
    link.mark(3)
    kernel_waits_for(machine, [])  # this one never ends
    link.mark(4)
    link.to_device(memory, host, last_return).wait()
    assert seen == ["old"]
    assert memory.value == "page"


def test_marks_that_are_done_are_forgotten_and_still_answered_for(machine: Machine) -> None:
    link = link_on(machine)
    memory, host = Bytes(machine, "old"), Bytes(machine, "page")
    go: list[bool] = []
    for returns in range(1, 50):
        link.mark(returns)
        link.mark(returns)
        machine.run()
    assert len(link._marks) <= 2
    kernel_waits_for(machine, go)
    seen = kernel_reads(machine, memory)
    link.mark(50)
    transfer = link.to_device(memory, host, 50)
    machine.run()
    assert not transfer.done()
    go.append(True)
    transfer.wait()
    assert seen == ["old"]
    link.to_device(memory, host, 7).wait()


def test_a_second_mark_of_one_count_costs_no_event(machine: Machine) -> None:
    link = link_on(machine)
    link.mark(5)
    queued = len(machine.compute.queue)
    link.mark(5)
    assert len(machine.compute.queue) == queued


def test_a_copy_down_comes_after_the_kernels_before_it(machine: Machine) -> None:
    link = link_on(machine)
    memory, host = Bytes(machine, "old"), Bytes(machine, "")
    machine.compute.put(lambda: setattr(memory, "value", "gradient"))
    transfer = link.to_host(host, memory)
    kernel_waits_for(machine, [])
    transfer.wait()
    assert host.value == "gradient"
    assert memory.recorded == [machine.streams["down"]]


def test_a_transfer_keeps_both_ends_until_it_is_done(machine: Machine) -> None:
    link = link_on(machine)
    memory, host = Bytes(machine, "old"), Bytes(machine, "page")
    transfer: EventTransfer = link.to_device(memory, host, 0)
    assert not transfer.done()
    assert transfer._ends == (memory, host)
    machine.run()
    assert transfer.done()
    assert transfer._ends == ()
    transfer.wait()
    assert transfer.done()


def test_drain_ends_copies_both_ways(machine: Machine) -> None:
    link = link_on(machine)
    memory, host, other = Bytes(machine, "old"), Bytes(machine, "page"), Bytes(machine, "")
    up, down = link.to_device(memory, host, 0), link.to_host(other, memory)
    link.drain()
    assert up.done()
    assert down.done()


@pytest.mark.parametrize("order", [CudaLink.drain, CudaLink.follow_compute])
def test_no_copy_after_it_overtakes_a_kernel_from_before_it(
    machine: Machine, order: Callable[[CudaLink], None]
) -> None:
    link = link_on(machine)
    memory, updated = Bytes(machine, "old"), Bytes(machine, "updated")
    go: list[bool] = []
    kernel_waits_for(machine, go)
    seen = kernel_reads(machine, memory)
    order(link)
    transfer = link.to_device(memory, updated, 0)
    machine.run()
    assert not transfer.done()
    go.append(True)
    transfer.wait()
    assert seen == ["old"]
    assert memory.value == "updated"


def test_between_ram_and_ram_copies_are_done_at_once() -> None:
    link = open_link(torch.device("cpu"))
    assert isinstance(link, CpuLink)
    there, back = torch.zeros(4), torch.zeros(4)
    up = link.to_device(there, torch.arange(4.0), 0)
    down = link.to_host(back, there)
    link.mark(1)
    link.fence(up)
    link.drain()
    for transfer in (up, down):
        assert transfer.done()
        transfer.wait()
    assert back.tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    """The real thing, with kernels slow enough to be overtaken."""

    SIZE = 1 << 22
    SLOW = 50_000_000
    """Clock cycles; some 30 ms."""

    def host(self, value: int) -> torch.Tensor:
        return torch.full((self.SIZE,), value, dtype=torch.uint8).pin_memory()

    def test_the_first_copy_waits_for_work_from_before_the_link(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        memory = torch.zeros(self.SIZE, dtype=torch.uint8, device=device)
        torch.cuda._sleep(self.SLOW)
        memory.fill_(1)
        link = open_link(device)
        link.to_device(memory, self.host(2), 0).wait()
        torch.cuda.synchronize()
        assert bool((memory == 2).all())

    @pytest.mark.parametrize("marked", [True, False])
    def test_copies_up_do_not_overtake_the_last_use(self, marked: bool) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        memory = torch.zeros(self.SIZE, dtype=torch.uint8, device=device)
        link = open_link(device)
        torch.cuda._sleep(self.SLOW)
        seen = memory.clone()
        if marked:
            link.mark(1)
        transfer = link.to_device(memory, self.host(3), 1)
        link.fence(transfer)
        then = memory.clone()
        assert not bool(seen.any())
        assert bool((then == 3).all())
        transfer.wait()
        assert transfer.done()

    def test_copies_down_see_what_was_queued(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        link = open_link(device)
        into = self.host(0)
        gradient = torch.zeros(self.SIZE, dtype=torch.uint8, device=device)
        torch.cuda._sleep(self.SLOW)
        gradient.fill_(5)
        transfer = link.to_host(into, gradient)
        del gradient
        torch.full((self.SIZE,), 7, dtype=torch.uint8, device=device)  # might get the same memory
        transfer.wait()
        assert bool((into == 5).all())
