"""Helpers for tests of copies: an emulated device, and kernels on its compute stream that use memory."""

from __future__ import annotations

import struct

import torch
from emulated_device import LIBRARY, EmulatedDevice

from infinity.tiers.copy_streams import CopyStreams
from infinity.tiers.driver import Function, Stream
from infinity.tiers.link import Transfer

SIZE = 512
"""int32 elements of each tensor that Machine.memory makes."""
OLD, PAGE, SEEN = 1, 2, 0
"""Values that tests fill memory with at first: OLD the target of a copy, PAGE its source, and SEEN the
tensor to which a kernel will write what it reads. So a test can tell which of these writes have happened.
"""


class Machine:
    """An emulated device with a compute stream, on which kernels fill and copy memory."""

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
        """Make a tensor of SIZE elements equal to `value`. It stays alive as long as the machine."""
        made = torch.full((SIZE,), value, dtype=torch.int32)
        self._kept.append(made)
        return made

    def kernel_writes(self, memory: torch.Tensor, value: int) -> None:
        """Queue a kernel on the compute stream that fills the memory with `value`."""
        self.compute.touched(memory.data_ptr(), memory.nbytes, writes=True, label="kernel")
        self._fill.launch(self.compute, 1, 1, struct.pack("QII", memory.data_ptr(), SIZE, value))

    def kernel_reads(self, memory: torch.Tensor) -> torch.Tensor:
        """Queue a read of the memory on the compute stream. Returns the tensor that will hold the values."""
        seen = self.memory(SEEN)
        self.compute.copy(seen.data_ptr(), memory.data_ptr(), memory.nbytes)
        return seen

    def never_ends(self) -> None:
        """Keep the compute stream from doing what is queued from now on, until `run`."""
        self.device.hold(self.compute)

    def run(self) -> None:
        """Let the compute stream go on, and wait until it has done everything."""
        self.device.let_go(self.compute)
        self.compute.synchronize()

    def tried(self, transfer: Transfer) -> bool:
        """Poll a transfer many times, so that all work which can end does end; return whether it has ended.

        A result of False means that the transfer waits for work that is held up, such as by `never_ends`.
        """
        return any(transfer.done() for _ in range(500))


def is_all(memory: torch.Tensor, value: int) -> bool:
    return bool((memory == value).all())
