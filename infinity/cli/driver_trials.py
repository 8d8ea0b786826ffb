"""Driver trials: try what training asks of a device's driver, each facility by bytes that must come back."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from infinity.cli.finding import Finding
from infinity.cli.trial import Trial
from infinity.device_update.kernel_trial import refusal
from infinity.device_update.kernels import UpdateKind, can_compile, kinds_of
from infinity.errors import DeviceError, InfinityError, KernelError
from infinity.tiers.arena import REGISTER_CURE
from infinity.tiers.driver import Driver, Event, Stream, compute_stream, current, driver_of
from infinity.tiers.pool import adopt, tensor_over
from infinity.tiers.tier import aligned_ram

SECTION = "driver"
_BYTES = 1 << 20
_LENT = 7
_PATIENCE = 10.0
"""Seconds for which one process waits for the other's word."""
_WRONG_CURE = (
    "Do not train on this device: look at the kernel log (dmesg) and nvidia-smi, and report this with the "
    "text at the end."
)


class _Trials:
    """The facilities of one device's driver. Each method tries one and returns what works, as text.

    All raise InfinityError, if bytes are not those that were sent, and DeviceError.
    """

    def __init__(self, device: torch.device) -> None:
        found = driver_of(device)
        assert found is not None, "the device has a driver"
        self.device = device
        self.driver: Driver = found
        self.sent = aligned_ram(_BYTES)
        self.sent.copy_(torch.arange(_BYTES, device="cpu") % 251)
        self.back = aligned_ram(_BYTES)
        self.there = torch.empty(_BYTES, dtype=torch.uint8, device=device)

    def copies(self) -> str:
        stream = self.driver.stream()
        self._up(stream)
        self._down(stream).synchronize()
        self._compare("a copy to the device and back")
        return "bytes go to the device and come back"

    def registration(self) -> str:
        self.driver.register_host(self.sent.data_ptr(), _BYTES)
        try:
            self.copies()
        finally:
            self.driver.unregister_host(self.sent.data_ptr())
        return "RAM is page-locked, copied and unlocked"

    def events(self) -> str:
        first, second = self.driver.stream(), self.driver.stream()
        second.wait(self._up(first))
        event = self._down(second)
        until = time.monotonic() + _PATIENCE
        while not (event.done() and second.done()):
            if time.monotonic() > until:
                raise InfinityError(f"An event did not happen within {_PATIENCE:g} s.", _WRONG_CURE)
        self._compare("a copy that waits for one of another stream")
        return "a stream waits for another, and the host asks"

    def timing(self) -> str:
        stream = self.driver.stream()
        before = stream.record(timing=True)
        self._up(stream)
        after = stream.record(timing=True)
        after.synchronize()
        milliseconds = after.milliseconds_since(before)
        if not 0 <= milliseconds < 1e3 * _PATIENCE:
            raise InfinityError(
                f"Between two events were {milliseconds} ms, as the device says.", _WRONG_CURE
            )
        return f"1 MiB in {milliseconds:.2f} ms, by events"

    def priorities(self) -> str:
        urgent = self.driver.stream(priority=1)
        self._up(urgent)
        self._down(urgent).synchronize()
        self._compare("a copy on an urgent stream")
        return "an urgent stream copies"

    def compute(self) -> str:
        """Torch's kernels on its own stream come before and after copies on another one."""
        stream, computes = self.driver.stream(), compute_stream(self.device)
        computes.wait(self._up(stream))
        computes.synchronize()  # the emulated device computes on this thread
        self.there.add_(1)
        stream.wait(computes.record())
        self._down(stream).synchronize()
        self.back.sub_(1)
        self._compare("a kernel between two copies")
        return "kernels come after the copies that they wait for, and before those that wait for them"

    def repeated(self) -> str:
        chunk = self.driver.granularity
        memory = self.driver.repeat(chunk, 2, 0xFF)
        try:
            seen = tensor_over(adopt(memory.address, 2 * chunk, self.device, memory))
            wrong = int((seen != 0xFF).sum())
        finally:
            self.driver.synchronize()
            memory.release()
        if wrong:
            raise InfinityError(f"{wrong} bytes of memory that is mapped twice are wrong.", _WRONG_CURE)
        return "one chunk of memory is mapped at two places"

    def kernels(self) -> str:
        """The kernels that most trainings need, which the user's cache keeps."""
        reason: str | None = "NVRTC was not found."
        if self.device.type == "cpu" or can_compile():
            fp32, bf16 = torch.float32, torch.bfloat16
            both = (kinds_of("AdamW", fp32, parameter, fp32) for parameter in (fp32, bf16))
            reason = refusal(self.device, frozenset[UpdateKind]().union(*both))
        if reason is not None:
            raise KernelError(reason, _OPTIONAL["update kernels"][1])
        return "updates have the CPU's bits"

    def _up(self, stream: Stream) -> Event:
        return stream.transfer(self.there.data_ptr(), self.sent.data_ptr(), _BYTES)

    def _down(self, stream: Stream) -> Event:
        self.back.zero_()
        return stream.transfer(self.back.data_ptr(), self.there.data_ptr(), _BYTES)

    def _compare(self, what: str) -> None:
        wrong = int((self.sent != self.back).sum())
        if wrong:
            raise InfinityError(f"{wrong} of {_BYTES} bytes are wrong after {what}.", _WRONG_CURE)


_OPTIONAL = {
    "registered RAM": ("Copies are staged by the driver and do not overlap compute.", REGISTER_CURE),
    "stream priorities": ("Urgent copies queue behind prefetches.", "Update the NVIDIA driver."),
    "event times": ("Timelines have no copies.", "Update the NVIDIA driver."),
    "update kernels": (
        "The CPU does all updates.",
        "Use a build of torch whose CUDA knows this device, with NVIDIA's wheel of NVRTC.",
    ),
    "sharing": (
        "What ranks of this node have on their devices goes through RAM and messages.",
        "Give all ranks the same user and IPC namespace (docker: --ipc=host), and leave "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments out.",
    ),
}
"""Name of a facility that training does without -> (what its absence costs, how to cure that)."""


def trials() -> list[Trial]:
    """The trials of the drivers of all GPUs. They find nothing where there is none."""
    ends = multiprocessing.Pipe()
    sharing = [functools.partial(_on_gpu, try_sharing, end is ends[0], end) for end in ends]
    return [
        Trial(SECTION, "driver", [functools.partial(_on_gpus, try_driver)], seconds=30.0),
        Trial(SECTION, "sharing", sharing),
    ]


def _on_gpus(function: Callable[[torch.device], Iterator[Finding]]) -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        yield from function(torch.device("cuda", index))


def _on_gpu(function: Callable[..., Iterator[Finding]], *arguments: Any) -> Iterator[Finding]:
    if torch.cuda.is_available():
        yield from function(torch.device("cuda", 0), *arguments)


def try_driver(device: torch.device) -> Iterator[Finding]:
    """Try every facility of a device's driver. Yields one finding for each; raises the errors of
    `cuda_driver`.
    """
    with current(device):
        trials = _Trials(device)
        tried = {
            "copies": trials.copies,
            "registered RAM": trials.registration,
            "events": trials.events,
            "event times": trials.timing,
            "stream priorities": trials.priorities,
            "order of kernels": trials.compute,
            "repeated memory": trials.repeated,
            "update kernels": trials.kernels,
        }
        for name, trial in tried.items():
            yield _tried(device, name, trial)


def try_sharing(device: torch.device, lends: bool, other: Connection) -> Iterator[Finding]:
    """Try whether a process reads the device memory of another one (CUDA IPC). Two processes call this, one
    of which lends; the other yields what it has found. other: the connection with the other process.
    """
    if not lends:
        yield _tried(device, "sharing", functools.partial(_read_shared, device, other))
        other.send("done")
        return
    memory, driver = _lent(device), driver_of(device)
    assert driver is not None
    with current(device):
        try:
            other.send(driver.share(memory.data_ptr()))
        except DeviceError as error:
            other.send(error)
        other.poll(_PATIENCE)  # until the other one is done


def _read_shared(device: torch.device, other: Connection) -> str:
    driver = driver_of(device)
    assert driver is not None
    if not other.poll(_PATIENCE):
        raise InfinityError("The process that lends memory said nothing.", _WRONG_CURE)
    got = other.recv()
    if isinstance(got, DeviceError):
        raise got
    handle, offset = got
    with current(device):
        memory = driver.open_shared(handle)
        back = aligned_ram(_BYTES)
        stream = driver.stream()
        stream.transfer(back.data_ptr(), memory.address + offset, _BYTES).synchronize()
        memory.close()
    wrong = int((back != _LENT).sum())
    if wrong:
        raise InfinityError(f"{wrong} of {_BYTES} bytes of another process are wrong.", _WRONG_CURE)
    return "a process reads another one's device memory"


def _lent(device: torch.device) -> torch.Tensor:
    """Device memory that another process is to read: _BYTES bytes _LENT."""
    memory = torch.full((_BYTES,), _LENT, dtype=torch.uint8, device=device)
    compute_stream(device).synchronize()
    return memory


def _tried(device: torch.device, name: str, trial: Callable[[], str]) -> Finding:
    begun, place = time.perf_counter(), f"{device}: {name}"
    try:
        found = trial()
    except InfinityError as error:
        if name not in _OPTIONAL or not isinstance(error, DeviceError | KernelError):
            return Finding.of(error, SECTION, place, "fails")
        return Finding(SECTION, place, error.cause, {"refused": type(error).__name__}, True, *_OPTIONAL[name])
    return Finding(SECTION, place, found, {"seconds": time.perf_counter() - begun})
