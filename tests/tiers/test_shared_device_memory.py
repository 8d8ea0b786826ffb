"""Tests of device memory that a process shares with others (CUDA IPC), through the driver for tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import sharing_process
import torch
from emulated_device import LIBRARY, EmulatedDevice, host_uses
from warm_python import Popen

from infinity import _tiers
from infinity.errors import DeviceError

SIZE = 1 << 14


@contextlib.contextmanager
def shared() -> Iterator[bytes]:
    """Yield the handle of device memory of another process, which lives until the end of the context."""
    command = [sys.executable, sharing_process.__file__, str(LIBRARY), str(SIZE)]
    process = Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        handle, offset = process.stdout.readline().split()
        assert offset == "100"
        yield bytes.fromhex(handle)
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice(3)


def test_a_copy_brings_bytes_of_another_process(device: EmulatedDevice) -> None:
    into, stream = torch.zeros(SIZE // 2, dtype=torch.uint8), device.driver.stream()
    with shared() as handle:
        memory = device.driver.open_shared(handle)
        stream.transfer(into.data_ptr(), memory.address + SIZE // 2, into.nbytes).synchronize()
        host_uses(device, into, writes=False)
        assert bool((into == 3).all())
        assert device.left == [f"{SIZE} bytes, opened"]
        memory.close()
        memory.close()
    assert (memory.address, device.left, device.violations) == (0, [], [])


@pytest.mark.parametrize("waits", [False, True])
def test_memory_is_not_closed_while_a_copy_is_under_way(device: EmulatedDevice, waits: bool) -> None:
    into, stream = torch.zeros(SIZE, dtype=torch.uint8), device.driver.stream()
    with shared() as handle:
        memory = device.driver.open_shared(handle)
        event = stream.transfer(into.data_ptr(), memory.address, SIZE)
        with contextlib.nullcontext() if waits else device.unseen():
            event.synchronize()
        memory.close()
    found = ["closing" in each for each in device.violations]
    assert found == ([] if waits else [True])


def test_another_process_s_memory_is_only_read(device: EmulatedDevice) -> None:
    source, stream = torch.zeros(SIZE, dtype=torch.uint8), device.driver.stream()
    with shared() as handle:
        memory = device.driver.open_shared(handle)
        with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            stream.copy(memory.address, source.data_ptr(), SIZE)
        device.compute.touched(memory.address, 1, writes=True, label="update")
        assert "of another process" in device.violations[0]
        device.driver.synchronize()
        memory.close()


def test_what_cannot_be_shared_or_opened(device: EmulatedDevice) -> None:
    region = _tiers.map_host(SIZE, huge_pages=False, shared=True)
    handle, offset = device.driver.share(region.address)
    assert offset == 0
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_CONTEXT"):
        device.driver.open_shared(handle)  # its own
    with pytest.raises(ValueError, match="64 bytes"):
        device.driver.open_shared(b"short")
    region.close_descriptor()
    private = _tiers.map_host(SIZE, huge_pages=False)
    for address in (region.address, private.address):
        with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
            device.driver.share(address)
    with shared() as ended:
        pass
    with pytest.raises(DeviceError, match="cuIpcOpenMemHandle"):
        device.driver.open_shared(ended)
    assert device.left == []
