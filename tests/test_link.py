"""The link's order of copies and kernels, on streams that run in whatever order they may."""

from __future__ import annotations

import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from emulated_device import LIBRARY, EmulatedDevice, compute_uses, host_uses

from infinity.errors import DeviceError
from infinity.tiers import link as link_module
from infinity.tiers.driver import Function, Stream, emulated
from infinity.tiers.link import (
    ARRIVED,
    CopyStreams,
    CpuLink,
    DeviceLink,
    Lane,
    Order,
    Transfer,
    User,
    open_link,
)

SIZE = 512
OLD, PAGE, SEEN = 1, 2, 0


class Machine:
    """A device with a stream for kernels, which fill and copy memory of theirs."""

    def __init__(self, seed: int) -> None:
        self.device = EmulatedDevice(seed)
        self.compute: Stream = self.device.driver.stream()
        self.device.name(self.compute, "compute")
        image = b"infinity-host-kernels:" + str(LIBRARY).encode()
        self._kept: list[torch.Tensor] = []
        self._fill: Function = self.device.driver.module(image).function("infinity_test_fill")

    def link(self) -> CopyStreams:
        made = CopyStreams(self.device.driver, lambda: self.compute)
        for name, stream in made.streams.items():
            self.device.name(stream, name)
        return made

    def memory(self, value: int) -> torch.Tensor:
        """Which stays until all work is done, as a pool's does."""
        made = torch.full((SIZE,), value, dtype=torch.int32)
        self._kept.append(made)
        return made

    def kernel_writes(self, memory: torch.Tensor, value: int) -> None:
        """Queue a kernel that fills the memory."""
        self.compute.touched(memory.data_ptr(), memory.nbytes, writes=True, label="kernel")
        self._fill.launch(self.compute, 1, 1, struct.pack("QII", memory.data_ptr(), SIZE, value))

    def kernel_reads(self, memory: torch.Tensor) -> torch.Tensor:
        """Queue a kernel that reads the memory; what it will have read."""
        seen = self.memory(SEEN)
        self.compute.copy(seen.data_ptr(), memory.data_ptr(), memory.nbytes)
        return seen

    def never_ends(self) -> None:
        """What compute queues from now on does not happen before `run`."""
        self.device.hold(self.compute)

    def run(self) -> None:
        """Let compute go on, until it has done everything."""
        self.device.let_go(self.compute)
        self.compute.synchronize()

    def tried(self, transfer: Transfer) -> bool:
        """Whether a transfer ends when everything that can go on has had the time to."""
        return any(transfer.done() for _ in range(500))


@pytest.fixture(params=range(6))
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    made = Machine(request.param)
    yield made
    made.device.reset(0)  # ends all work before its memory goes


def is_all(memory: torch.Tensor, value: int) -> bool:
    return bool((memory == value).all())


def test_the_first_copy_waits_for_work_from_before_the_link(machine: Machine) -> None:
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    machine.never_ends()
    seen = machine.kernel_reads(memory)
    transfer = machine.link().to_device(memory, host, 0)
    assert not machine.tried(transfer)
    machine.run()
    transfer.wait()
    assert is_all(seen, OLD) and is_all(memory, PAGE)
    assert machine.device.violations == []


@pytest.mark.parametrize("lane", Lane)
def test_compute_after_a_fence_sees_what_was_copied_up(machine: Machine, lane: Lane) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    link.fence(link.to_device(memory, host, 0, lane))
    seen = machine.kernel_reads(memory)
    machine.run()
    assert is_all(seen, PAGE)
    assert machine.device.violations == []


def test_a_fence_after_what_arrived_already_orders_nothing(machine: Machine) -> None:
    link = machine.link()
    before = machine.device.count("cuStreamWaitEvent")
    link.fence(ARRIVED)
    assert machine.device.count("cuStreamWaitEvent") == before


def test_bytes_that_never_were_lent_wait_for_nobody(machine: Machine) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    machine.run()
    machine.never_ends()
    machine.kernel_writes(machine.memory(OLD), 5)
    link.to_device(memory, host, 0).wait()
    assert is_all(memory, PAGE)
    machine.run()


@pytest.mark.parametrize("marks", [(), (2,), (1, 2)], ids=str)
def test_a_copy_without_a_mark_waits_for_all_that_compute_has_queued(
    machine: Machine, marks: tuple[int, ...]
) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    for returns in marks:
        link.mark(returns)
    seen = machine.kernel_reads(memory)
    link.to_device(memory, host, 3).wait()
    assert is_all(seen, OLD) and is_all(memory, PAGE)
    assert machine.device.violations == []


@pytest.mark.parametrize("last_return", [1, 2, 3])
@pytest.mark.parametrize("marked_again", [False, True])
def test_a_copy_waits_for_the_mark_of_its_bytes_and_no_longer(
    machine: Machine, last_return: int, marked_again: bool
) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    seen = machine.kernel_reads(memory)
    link.mark(3)
    machine.run()
    machine.never_ends()
    machine.kernel_writes(machine.memory(OLD), 5)
    if marked_again:
        link.mark(4)
    assert machine.tried(link.to_device(memory, host, last_return))
    assert is_all(seen, OLD) and is_all(memory, PAGE)
    assert machine.device.violations == []
    machine.run()


def test_marks_that_are_done_are_forgotten_and_still_answered_for(machine: Machine) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    for returns in range(1, 50):
        link.mark(returns)
        link.mark(returns)
        machine.run()
    assert len(link._marks) <= 2
    machine.never_ends()
    seen = machine.kernel_reads(memory)
    link.mark(50)
    transfer = link.to_device(memory, host, 50)
    assert not machine.tried(transfer)
    machine.run()
    transfer.wait()
    assert is_all(seen, OLD)
    link.to_device(memory, host, 7).wait()


def test_a_second_mark_of_one_count_costs_no_event(machine: Machine) -> None:
    link = machine.link()
    link.mark(5)
    recorded = machine.device.count("cuEventRecord")
    link.mark(5)
    assert machine.device.count("cuEventRecord") == recorded


def test_a_copy_down_comes_after_the_kernels_before_it(machine: Machine) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(SEEN)
    machine.kernel_writes(memory, 7)
    link.to_host(host, memory).wait()
    host_uses(machine.device, host, writes=False)
    assert is_all(host, 7)
    assert machine.device.violations == []


def test_a_copy_down_after_an_event_waits_for_nothing_later(machine: Machine) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(SEEN)
    machine.kernel_writes(memory, 7)
    written = link.record()
    machine.run()
    machine.never_ends()
    machine.kernel_writes(machine.memory(OLD), 5)
    link.to_host(host, memory, written).wait()
    assert is_all(host, 7)
    assert machine.device.violations == []
    machine.run()


def test_a_transfer_keeps_both_ends_until_it_is_done(machine: Machine) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    up = link.streams["up (urgent)"]
    machine.device.hold(up)
    transfer = link.to_device(memory, host, 0)
    assert not transfer.done()
    assert transfer._ends == (memory, host)
    machine.device.let_go(up)
    transfer.wait()
    assert transfer._ends == ()
    assert transfer.done()


def test_a_gradient_that_nobody_else_keeps_is_kept_until_it_has_come_down(machine: Machine) -> None:
    link = machine.link()
    host = machine.memory(SEEN)
    down = link.streams["down"]
    machine.device.hold(down)
    gradient = torch.full((SIZE,), OLD, dtype=torch.int32)
    storage = gradient.untyped_storage()
    link.to_host(host, gradient)
    del gradient
    assert torch._C._storage_Use_Count(storage._cdata) > 1
    machine.device.let_go(down)
    down.synchronize()
    link.to_host(machine.memory(SEEN), machine.memory(OLD)).wait()
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    assert is_all(host, OLD)


def test_an_urgent_copy_passes_a_prefetch(machine: Machine) -> None:
    link = machine.link()
    long, short = machine.memory(OLD), machine.memory(OLD)
    machine.device.hold(link.streams["up (prefetch)"])
    prefetch = link.to_device(long, machine.memory(PAGE), 0, Lane.PREFETCH)
    link.to_device(short, machine.memory(PAGE), 0).wait()
    assert is_all(short, PAGE) and is_all(long, OLD)
    machine.device.let_go(link.streams["up (prefetch)"])
    prefetch.wait()
    assert is_all(long, PAGE)


def test_a_long_copy_up_goes_in_pieces(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_PIECE", 1000)
    link = machine.link()
    memory, host = machine.memory(OLD), torch.arange(SIZE, dtype=torch.int32)
    link.to_device(memory, host, 0).wait()
    assert torch.equal(memory, host)
    assert machine.device.count("cuMemcpyAsync") == -(-memory.nbytes // 1000)


def test_drain_ends_copies_both_ways(machine: Machine) -> None:
    link = machine.link()
    memory, host, other = machine.memory(OLD), machine.memory(PAGE), machine.memory(SEEN)
    link.fence(link.to_device(memory, host, 0))
    link.to_host(other, memory)
    link.drain()
    for each in (host, other):
        host_uses(machine.device, each, writes=True)
    assert is_all(other, PAGE)
    assert machine.device.violations == []


@pytest.mark.parametrize("order", [CopyStreams.drain, CopyStreams.follow_compute])
@pytest.mark.parametrize("lane", Lane)
def test_no_copy_after_it_overtakes_a_kernel_from_before_it(
    machine: Machine, order: Callable[[CopyStreams], None], lane: Lane
) -> None:
    link = machine.link()
    memory, updated = machine.memory(OLD), machine.memory(PAGE)
    machine.run()
    machine.never_ends()
    seen = machine.kernel_reads(memory)
    order(link)
    transfer = link.to_device(memory, updated, 0, lane)
    assert not machine.tried(transfer)
    machine.run()
    transfer.wait()
    assert is_all(seen, OLD) and is_all(memory, PAGE)
    assert machine.device.violations == []


def test_nothing_but_a_wait_waits_for_copies_that_are_held(machine: Machine) -> None:
    """Whoever calls from a hook gets on, whatever the copies do."""
    link = machine.link()
    for stream in link.streams.values():
        machine.device.hold(stream)
    memory, host, other = machine.memory(OLD), machine.memory(PAGE), machine.memory(SEEN)
    transfers = [link.to_device(memory, host, 0, Lane.PREFETCH)]
    link.fence(transfers[0])
    seen = machine.kernel_reads(memory)
    link.mark(1)
    link.follow_compute()
    transfers.append(link.to_host(other, memory, link.record()))
    link.uses(User.COMPUTE, memory, writes=False)
    assert not any(transfer.done() for transfer in transfers)
    for stream in link.streams.values():
        machine.device.let_go(stream)
    link.drain()
    machine.run()
    assert is_all(seen, PAGE) and is_all(other, PAGE)
    assert machine.device.violations == []


@pytest.mark.parametrize("wait", ["transfer", "drain"])
def test_ctrl_c_ends_a_wait_that_would_not_end(machine: Machine, wait: str) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    up = link.streams["up (urgent)"]
    machine.device.hold(up)
    transfer = link.to_device(memory, host, 0)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        transfer.wait() if wait == "transfer" else link.drain()
    timer.join()
    assert transfer._ends == (memory, host)
    machine.device.let_go(up)
    transfer.wait()
    assert is_all(memory, PAGE)


def test_a_copy_that_failed_says_so_to_whoever_waits(machine: Machine) -> None:
    link = machine.link()
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    transfer = link.to_device(memory, host, 0)
    machine.device.fail("cuEventQuery", 700)
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        transfer.wait()
    transfer.wait()


# --- every order is needed, and its absence is seen -----------------------------------------------------


def _opening(machine: Machine) -> None:
    memory, host = machine.memory(OLD), machine.memory(PAGE)
    machine.kernel_reads(memory)
    machine.link().to_device(memory, host, 0)


def _arrival(machine: Machine) -> None:
    link, memory = machine.link(), machine.memory(OLD)
    link.fence(link.to_device(memory, machine.memory(PAGE), 0))
    machine.kernel_reads(memory)


def _last_use(machine: Machine) -> None:
    link, memory = machine.link(), machine.memory(OLD)
    machine.kernel_reads(memory)
    link.mark(1)
    link.to_device(memory, machine.memory(PAGE), 1)


def _following(machine: Machine) -> None:
    link, memory = machine.link(), machine.memory(OLD)
    machine.kernel_reads(memory)
    link.follow_compute()
    link.to_device(memory, machine.memory(PAGE), 0)


def _last_writer(machine: Machine) -> None:
    link, memory = machine.link(), machine.memory(OLD)
    machine.kernel_writes(memory, 7)
    link.to_host(machine.memory(SEEN), memory)


def _host_waits(machine: Machine) -> None:
    link, host = machine.link(), machine.memory(SEEN)
    link.to_host(host, machine.memory(OLD)).wait()
    link.uses(User.HOST, host, writes=False)


def _host_asks(machine: Machine) -> None:
    link, host = machine.link(), machine.memory(PAGE)
    transfer = link.to_device(machine.memory(OLD), host, 0)
    while not transfer.done():
        pass
    link.uses(User.HOST, host, writes=True)


def _drain(machine: Machine) -> None:
    link, host = machine.link(), machine.memory(PAGE)
    link.fence(link.to_device(machine.memory(OLD), host, 0))
    link.drain()
    link.uses(User.HOST, host, writes=True)


SCENES: dict[Order, Callable[[Machine], None]] = {
    Order.OPENING: _opening,
    Order.ARRIVAL: _arrival,
    Order.LAST_USE: _last_use,
    Order.FOLLOWING: _following,
    Order.LAST_WRITER: _last_writer,
    Order.HOST_WAITS: _host_waits,
    Order.HOST_ASKS: _host_asks,
    Order.DRAIN: _drain,
}


@pytest.mark.parametrize("order", Order)
def test_each_order_is_kept_and_missed_where_it_is_not(machine: Machine, order: Order) -> None:
    for each in Order:
        with machine.device.without(each):
            SCENES[order](machine)
        assert bool(machine.device.violations) is (each is order), each
        machine.device.reset(1)


# --- other links ----------------------------------------------------------------------------------------


def test_between_ram_and_ram_copies_are_done_at_once() -> None:
    link = open_link(torch.device("cpu"))
    assert isinstance(link, CpuLink)
    there, back = torch.zeros(4), torch.zeros(4)
    up = link.to_device(there, torch.arange(4.0), 0)
    down = link.to_host(back, there, link.record())
    link.mark(1)
    link.fence(up)
    link.drain()
    for transfer in (up, down):
        assert transfer.done()
        transfer.wait()
    assert back.tolist() == [0, 1, 2, 3]
    link.close()


def test_a_device_is_emulated_inside_only_and_for_this_thread() -> None:
    device = EmulatedDevice()
    made: list[DeviceLink] = []
    with emulated(device.driver, device.compute):
        made.append(open_link(torch.device("cpu")))
        other = threading.Thread(target=lambda: made.append(open_link(torch.device("cpu"))))
        other.start()
        other.join()
    made.append(open_link(torch.device("cpu")))
    assert [type(each) for each in made] == [CopyStreams, CpuLink, CpuLink]


def test_what_compute_uses_is_told_to_the_checker() -> None:
    device = EmulatedDevice()
    with emulated(device.driver, device.compute):
        link = open_link(torch.device("cpu"))
    memory, host = torch.zeros(SIZE), torch.ones(SIZE)
    link.uses(User.COMPUTE, memory, writes=False, label="page")
    link.to_device(memory, host, 0)
    (found,) = device.violations
    assert "copy writes" in found and "compute: page reads" in found
    link.close()
    compute_uses(device, memory, writes=False)


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
