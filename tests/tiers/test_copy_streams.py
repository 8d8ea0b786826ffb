"""Tests of the copy streams: copies and kernels that use the same memory keep their order, and copies end.

They run on an emulated device, whose seed decides in which of the permitted orders streams do their work.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from emulated_device import host_uses
from kernel_machine import OLD, PAGE, SEEN, SIZE, Machine, is_all

from infinity.errors import DeviceError
from infinity.tiers import copy_streams
from infinity.tiers.copy_streams import CopyStreams, Order
from infinity.tiers.link import ARRIVED, Lane, User


@pytest.fixture(params=[0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    made = Machine(request.param)
    yield made
    made.device.reset(0)  # ends all work before the memory is freed


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
    monkeypatch.setattr(copy_streams, "_PIECE", 1000)
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
    """While the device does no copy, no method of the link blocks, except those whose purpose is to wait.

    Once the copies go on, they have the right results.
    """
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


def _offer(machine: Machine) -> None:
    link, memory = machine.link(), machine.memory(OLD)
    machine.kernel_writes(memory, 7)
    written = link.record()
    if not link.happened(written):
        link.await_event(written)
    link.uses(User.HOST, memory, writes=False)


SCENES: dict[Order, Callable[[Machine], None]] = {
    Order.OPENING: _opening,
    Order.ARRIVAL: _arrival,
    Order.LAST_USE: _last_use,
    Order.FOLLOWING: _following,
    Order.LAST_WRITER: _last_writer,
    Order.HOST_WAITS: _host_waits,
    Order.HOST_ASKS: _host_asks,
    Order.OFFER: _offer,
    Order.DRAIN: _drain,
}


@pytest.mark.parametrize("order", Order)
def test_each_order_is_kept_and_missed_where_it_is_not(machine: Machine, order: Order) -> None:
    for each in Order:
        with machine.device.without(each):
            SCENES[order](machine)
        assert bool(machine.device.violations) is (each is order), each
        machine.device.reset(1)
