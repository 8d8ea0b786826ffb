"""Tests of the link that copies between host and device.

From RAM to RAM, copies are done before the call returns. `emulated` gives links to an emulated device only
inside its context, and only in the thread that entered the context. On a GPU, no copy overtakes the kernels
that were queued before and use the same memory.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from emulated_device import EmulatedDevice, compute_uses
from kernel_machine import SIZE

from infinity.errors import ConfigError
from infinity.tiers.copy_streams import CopyStreams, open_link
from infinity.tiers.driver import emulated
from infinity.tiers.link import ARRIVED, DeviceLink, Joined, User


def test_between_ram_and_ram_copies_are_done_at_once() -> None:
    link = open_link(torch.device("cpu"))
    assert type(link) is DeviceLink
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


class Failing:
    """A transfer that fails, and whose error keeps alive what the frames above it refer to."""

    timing = None

    def done(self) -> bool:
        return True

    def wait(self) -> object:
        raise ConfigError("The device is gone.", "Look for it.")


def test_a_joined_transfer_that_failed_keeps_no_memory() -> None:
    def read() -> weakref.ref[torch.Tensor]:
        memory = torch.zeros(8)
        try:
            Joined([ARRIVED, Failing(), Failing()]).wait()
        except ConfigError as error:
            assert error.cause == "The device is gone."
        return weakref.ref(memory)

    gc.disable()  # else a collection may free the memory in time
    try:
        assert read()() is None
    finally:
        gc.enable()


def test_a_device_is_emulated_inside_only_and_for_this_thread() -> None:
    device = EmulatedDevice()
    made: list[DeviceLink] = []
    with emulated(device.driver, device.compute):
        made.append(open_link(torch.device("cpu")))
        other = threading.Thread(target=lambda: made.append(open_link(torch.device("cpu"))))
        other.start()
        other.join()
    made.append(open_link(torch.device("cpu")))
    assert [type(each) for each in made] == [CopyStreams, DeviceLink, DeviceLink]


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
    """Tests of the link to a real GPU, with kernels slow enough for copies to overtake them."""

    SIZE = 1 << 22
    SLOW = 50_000_000
    """The length of a slow kernel in clock cycles, about 30 ms."""

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
        torch.full(
            (self.SIZE,), 7, dtype=torch.uint8, device=device
        )  # a new tensor might get the same memory
        transfer.wait()
        assert bool((into == 5).all())
