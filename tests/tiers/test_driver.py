"""Tests of the table of CUDA driver calls through which copies, events and kernels go.

A library that lacks a call must be refused. A transfer must copy every byte, and transfers and kernels must
wait for the work of their stream and for the events that they are given. A call that fails must raise an
error that names the call and the cause.
"""

from __future__ import annotations

import pickle
import struct
import threading

import pytest
import torch
from emulated_device import LIBRARY, EmulatedDevice, host_uses

from infinity.errors import ConfigError, DeviceError
from infinity.tiers.driver import Driver, Event

SIZE = 1 << 12


@pytest.fixture(params=[False, True], ids=["stepped", "threads"])
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    return EmulatedDevice(5, threads=request.param)


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"libnot-there\.so"):
        Driver.load("libnot-there.so")


def test_a_library_that_lacks_a_call_is_named_with_the_call() -> None:
    with pytest.raises(ConfigError, match=r"libc\.so\.6 has no cuInit"):
        Driver.load("libc.so.6")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_DEVICE") as caught:
        Driver.load(str(LIBRARY), 3)
    assert (caught.value.call, caught.value.code) == ("cuDeviceGet", 101)


@pytest.mark.parametrize("piece", [0, 1000, 1 << 20])
def test_a_transfer_copies_every_byte_in_pieces_of_any_size(device: EmulatedDevice, piece: int) -> None:
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    into = torch.zeros_like(source)
    stream = device.driver.stream()
    stream.transfer(into.data_ptr(), source.data_ptr(), SIZE, piece=piece).synchronize()
    assert torch.equal(into, source)
    assert device.count("cuMemcpyAsync") == {0: 1, 1000: 5, 1 << 20: 1}[piece]


def test_a_transfer_waits_for_what_it_is_to_come_after(device: EmulatedDevice) -> None:
    first, second = device.driver.stream(), device.driver.stream()
    source, between, into = torch.ones(3, SIZE)
    into.zero_()
    between.zero_()
    device.hold(first)
    event = first.transfer(between.data_ptr(), source.data_ptr(), source.nbytes)
    last = second.transfer(into.data_ptr(), between.data_ptr(), into.nbytes, after=event)
    for _ in range(100):
        assert not last.done()
    device.let_go(first)
    last.synchronize()
    assert torch.equal(into, source)
    assert device.violations == []


def test_events_with_timing_measure_between_them(device: EmulatedDevice) -> None:
    stream = device.driver.stream()
    before = stream.record(timing=True)
    memory = torch.zeros(2, SIZE)
    after = stream.transfer(memory[0].data_ptr(), memory[1].data_ptr(), memory[0].nbytes, timing=True)
    after.synchronize()
    assert 0 <= after.milliseconds_since(before) < 1e6
    untimed = stream.record()
    untimed.synchronize()
    with pytest.raises(DeviceError, match="cuEventElapsedTime"):
        untimed.milliseconds_since(before)


def test_events_are_used_again(device: EmulatedDevice) -> None:
    stream = device.driver.stream()
    for _ in range(20):
        stream.record().synchronize()
    assert device.count("cuEventCreate") <= 1


def test_a_thread_without_a_context_gets_one(device: EmulatedDevice) -> None:
    stream = device.driver.stream()
    memory = torch.arange(2.0 * SIZE).view(2, SIZE)
    failures: list[BaseException] = []

    def copy() -> None:
        try:
            stream.transfer(memory[0].data_ptr(), memory[1].data_ptr(), memory[0].nbytes).synchronize()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert failures == []
    assert torch.equal(memory[0], memory[1])


@pytest.mark.parametrize(
    ("call", "nth"),
    [("cuMemcpyAsync", 1), ("cuMemcpyAsync", 2), ("cuStreamWaitEvent", 1), ("cuEventRecord", 2)],
)
def test_a_call_that_fails_says_which_and_why(device: EmulatedDevice, call: str, nth: int) -> None:
    stream = device.driver.stream()
    memory = torch.zeros(2, SIZE)
    event = stream.record()

    def transfer() -> Event:
        return stream.transfer(memory[0].data_ptr(), memory[1].data_ptr(), memory[0].nbytes, after=event)

    device.fail(call, 700, nth)
    for _ in range(nth - 1):
        transfer()
    with pytest.raises(DeviceError) as caught:
        transfer()
    error = caught.value
    assert (error.call, error.code, error.name) == (call, 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert "illegal memory access" in error.cause and error.cure
    assert pickle.loads(pickle.dumps(error)).name == error.name
    transfer().synchronize()


def test_a_wait_for_what_failed_raises(device: EmulatedDevice) -> None:
    stream = device.driver.stream()
    event = stream.record()
    device.fail("cuEventQuery", 700)
    with pytest.raises(DeviceError, match="cuEventQuery"):
        event.synchronize()
    device.fail("cuStreamQuery", 700)
    with pytest.raises(DeviceError, match="cuStreamQuery"):
        stream.synchronize()


def test_an_error_without_a_name_keeps_its_number(device: EmulatedDevice) -> None:
    device.fail("cuStreamCreateWithPriority", 98765)
    with pytest.raises(DeviceError, match="98765"):
        device.driver.stream()


def test_a_kernel_runs_in_its_stream_s_order(device: EmulatedDevice) -> None:
    module = device.driver.module(b"infinity-host-kernels:" + str(LIBRARY).encode())
    fill = module.function("infinity_test_fill")
    stream = device.driver.stream()
    memory, seen = torch.zeros(2, SIZE, dtype=torch.int32)
    for value in range(1, 6):
        fill.launch(stream, 1, 1, struct.pack("QII", memory.data_ptr(), SIZE, value))
        stream.copy(seen.data_ptr(), memory.data_ptr(), seen.nbytes)
    stream.synchronize()
    assert seen.tolist() == [5] * SIZE
    assert device.count("cuLaunchKernel") == 5


def test_kernels_that_are_not_there_are_refused(device: EmulatedDevice) -> None:
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_IMAGE"):
        device.driver.module(b"not an image")
    module = device.driver.module(b"infinity-host-kernels:" + str(LIBRARY).encode())
    with pytest.raises(DeviceError, match="CUDA_ERROR_NOT_FOUND"):
        module.function("no_such_kernel")
    fill = module.function("infinity_test_fill")
    with pytest.raises(ValueError, match="4096"):
        fill.launch(device.driver.stream(), 1, 1, bytes(4097))


def test_host_memory_is_registered_once(device: EmulatedDevice) -> None:
    memory = torch.zeros(SIZE)
    device.driver.register_host(memory.data_ptr(), memory.nbytes)
    with pytest.raises(DeviceError, match="ALREADY_REGISTERED"):
        device.driver.register_host(memory.data_ptr() + 4, 4)
    device.driver.unregister_host(memory.data_ptr())
    with pytest.raises(DeviceError, match="NOT_REGISTERED"):
        device.driver.unregister_host(memory.data_ptr())


def test_a_real_driver_has_no_checker_and_this_one_has(device: EmulatedDevice) -> None:
    assert device.driver.checked
    memory = torch.zeros(SIZE)
    host_uses(device, memory, writes=True)
    assert device.violations == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cuda_driver_copies_both_ways() -> None:
    driver = Driver.load("libcuda.so.1", torch.cuda.current_device())
    assert not driver.checked
    stream = driver.stream(priority=1)
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8).pin_memory()
    there = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    back = torch.zeros(SIZE, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    stream.copy(there.data_ptr(), source.data_ptr(), SIZE, piece=1000)
    stream.transfer(back.data_ptr(), there.data_ptr(), SIZE).synchronize()
    assert torch.equal(back, source)
    compute = driver.foreign(torch.cuda.current_stream().cuda_stream)
    compute.wait(stream.record())
    assert torch.equal(there.cpu(), source)
