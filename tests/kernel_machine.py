"""A machine for tests of copies: an emulated device with a stream for kernels, and memory for them."""

from __future__ import annotations

import struct

import torch
from emulated_device import LIBRARY, EmulatedDevice

from infinity.tiers.copy_streams import CopyStreams
from infinity.tiers.driver import Function, Stream
from infinity.tiers.link import Transfer

SIZE = 512
"""Elements of a memory."""
OLD, PAGE, SEEN = 1, 2, 0
"""What memories are filled with: what was there, what comes, and what a read is to overwrite."""


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


def is_all(memory: torch.Tensor, value: int) -> bool:
    return bool((memory == value).all())
