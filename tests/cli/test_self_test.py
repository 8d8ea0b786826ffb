"""Tests of `infinity doctor --self-test`: it passes here, and names each fault that is injected.

Trials run in forks of the test's process, which inherit the faults, as they would in processes of their own.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_device import COMPUTE, LIBRARY, EmulatedDevice

from infinity import _tiers
from infinity.aio import Faults
from infinity.cli import doctor, driver_trials, self_test, trial
from infinity.cli.finding import Finding
from infinity.cli.self_test import Home
from infinity.cli.trial import Trial
from infinity.device_update.kernels import KERNELS, Kernels, Launch, host_library
from infinity.model.pager import Pager
from infinity.system.directory import free_bytes
from infinity.system.disk_files import injected
from infinity.tiers import Tier
from infinity.tiers.driver import Driver, emulated
from infinity.tiers.pool import tensor_over

CPU = torch.device("cpu")
FAILED = 719
"""CUDA_ERROR_LAUNCH_FAILED, which the driver of the tests does not know by name."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a process that uses CUDA cannot fork")


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "START", "fork")


def tried(*functions: Callable[[], Any], seconds: float = 20.0) -> list[Finding]:
    return [*trial.run([Trial("training", "a trial", functions, seconds)], seconds=60.0)]


def failures(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.failed]


def text_of(findings: list[Finding]) -> str:
    return doctor.report(findings)


# --- driver ------------------------------------------------------------------------------------------------

CALLS = {
    "cuInit": "a trial",
    "cuDeviceGet": "a trial",
    "cuDevicePrimaryCtxRetain": "a trial",
    "cuCtxGetCurrent": "copies",
    "cuCtxSetCurrent": "copies",
    "cuCtxSynchronize": "repeated memory",
    "cuStreamCreateWithPriority": "copies",
    "cuStreamWaitEvent": "events",
    "cuStreamQuery": "events",
    "cuEventCreate": "copies",
    "cuEventRecord": "copies",
    "cuEventQuery": "copies",
    "cuMemcpyAsync": "copies",
    "cuMemGetAllocationGranularity": "repeated memory",
    "cuMemAddressReserve": "repeated memory",
    "cuMemAddressFree": "repeated memory",
    "cuMemCreate": "repeated memory",
    "cuMemRelease": "repeated memory",
    "cuMemMap": "repeated memory",
    "cuMemUnmap": "repeated memory",
    "cuMemSetAccess": "repeated memory",
    "cuMemsetD8_v2": "repeated memory",
}
"""Driver call without which nothing trains -> the first trial that fails where the call does."""
OPTIONAL = {
    "cuMemHostRegister_v2": "registered RAM",
    "cuMemHostUnregister": "registered RAM",
    "cuCtxGetStreamPriorityRange": "stream priorities",
    "cuEventElapsedTime": "event times",
    "cuModuleLoadData": "update kernels",
    "cuModuleGetFunction": "update kernels",
    "cuLaunchKernel": "update kernels",
}
"""Driver call without which training is slower -> the facility that is missing then."""


def on_driver(*calls: str, times: int = 1000) -> Iterator[Finding]:
    """Try an emulated device's driver, of which the next calls of these functions fail."""
    device = EmulatedDevice(3)
    ctypes.CDLL(str(LIBRARY)).cuCtxSetCurrent(None)  # as in a thread that has not used a driver before
    for call in calls:
        for _ in range(times):
            device.fail(call, FAILED)
    driver = Driver.load(str(LIBRARY))
    compute = driver.foreign(COMPUTE)

    def loaded(kernels: Kernels, kinds: Any) -> dict[str, Launch]:
        module = driver.module(b"infinity-host-kernels:" + str(host_library()).encode())
        launches = {name: module.function(name).launch for name in KERNELS}
        return {name: functools.partial(launch, compute) for name, launch in launches.items()}

    Kernels._loaded = loaded  # type: ignore[method-assign]
    with emulated(driver, compute):
        yield from driver_trials.try_driver(CPU)


def test_every_facility_of_a_whole_driver_works() -> None:
    findings = tried(on_driver)
    assert len(findings) == 8
    assert not [each for each in findings if each.missing], text_of(findings)


@pytest.mark.parametrize("call", CALLS)
def test_a_driver_call_that_fails_is_named(call: str) -> None:
    findings = tried(functools.partial(on_driver, call))
    first = failures(findings)[0]
    assert first.name.removeprefix("cpu: ") == CALLS[call]
    assert first.figures["error"] == "DeviceError"
    assert call.removesuffix("_v2") in first.cost and first.cure


@pytest.mark.parametrize("call", OPTIONAL)
def test_a_facility_that_is_refused_is_named_and_no_failure(call: str) -> None:
    findings = tried(functools.partial(on_driver, call))
    assert failures(findings) == []
    (missing,) = [each for each in findings if each.missing]
    assert missing.name == f"cpu: {OPTIONAL[call]}" and missing.cost and missing.cure
    kind = "KernelError" if "kernels" in missing.name else "DeviceError"
    assert missing.figures["refused"] == kind and call.removesuffix("_v2") in missing.found


def with_wrong_bytes() -> Iterator[Finding]:
    driver_trials._Trials._down = wrong_down(driver_trials._Trials._down)  # type: ignore[method-assign]
    yield from on_driver()


def wrong_down(down: Any) -> Any:
    def changed(trials: Any, stream: Any) -> Any:
        trials.there[7] += 1
        return down(trials, stream)

    return changed


def test_a_copy_that_brings_other_bytes_is_named() -> None:
    findings = failures(tried(with_wrong_bytes))
    assert {each.name for each in findings} >= {"cpu: copies", "cpu: registered RAM", "cpu: events"}
    assert "1 of 1048576 bytes are wrong" in findings[0].cost


def with_a_wrong_kernel() -> Iterator[Finding]:
    launch = Kernels.launch

    def twice(self: Kernels, name: str, *given: Any) -> None:
        launch(self, name, *given)
        launch(self, name, *given)

    Kernels.launch = twice  # type: ignore[method-assign]
    yield from on_driver()


def test_a_kernel_that_computes_other_bits_is_named() -> None:
    (missing,) = [each for each in tried(with_a_wrong_kernel) if each.missing]
    assert missing.name == "cpu: update kernels" and "other bits than the CPU" in missing.found
    assert missing.figures["refused"] == "KernelError" and missing.cost and missing.cure


def sharing(call: str | None, lends: bool, end: Any) -> Iterator[Finding]:
    device = EmulatedDevice()
    if call is not None:
        device.fail(call, FAILED)
    region = _tiers.map_host(driver_trials._BYTES, huge_pages=False, shared=True)
    driver_trials._lent = lambda _: tensor_over(region).fill_(driver_trials._LENT)
    with emulated(device.driver, device.compute):
        yield from driver_trials.try_sharing(CPU, lends, end)


def shared(call: str | None) -> list[Finding]:
    ends = driver_trials.multiprocessing.Pipe()
    return tried(*(functools.partial(sharing, call, end is ends[0], end) for end in ends))


def test_a_process_reads_the_device_memory_of_another_one() -> None:
    (finding,) = shared(None)
    assert not finding.missing


@pytest.mark.parametrize(
    "call", ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"]
)
def test_memory_that_cannot_be_shared_is_named(call: str) -> None:
    (finding,) = shared(call)
    assert finding.missing and not finding.failed
    assert finding.figures["refused"] == "DeviceError" and call.removesuffix("_v2") in finding.found
    assert "RAM and messages" in finding.cost and finding.cure


# --- training ----------------------------------------------------------------------------------------------


def on_disk(path: Path, *, apart: bool = False) -> Home:
    return Home("a disk", Tier.NVME, apart, path=str(path))


def test_every_home_of_this_machine_passes(tmp_path: Path) -> None:
    trials = [each for each in self_test.trials([str(tmp_path)]) if "GPU" not in each.name]
    findings = [*trial.run(trials, seconds=60.0)]
    findings += self_test.compared(findings)
    assert failures(findings) == [], text_of(findings)
    assert [each.name for each in findings] == [
        *(each.name for each in trials),
        "equal bits, cpu, fp32",
        "equal bits, cpu, bf16",
    ]
    assert len(findings[-2].figures["homes"]) == len(trials)
    assert [*tmp_path.iterdir()] == []


def broken(faults: Faults, path: Path) -> list[Finding]:
    with injected(faults):
        return tried(functools.partial(self_test.train_alone, on_disk(path)))


@pytest.mark.parametrize(
    "kind, code, error",
    [
        ("read", errno.EIO, "StorageError"),
        ("write", errno.EIO, "StorageError"),
        ("write", errno.ENOSPC, "StorageFull"),
        ("read", errno.ETIMEDOUT, "StorageError"),
        ("sync", errno.EIO, "StorageError"),
    ],
)
def test_a_disk_that_fails_is_named(kind: str, code: int, error: str, tmp_path: Path) -> None:
    faults = Faults()
    faults.fail(kind, 1 if kind == "sync" else 5, code, times=None)
    (finding,) = broken(faults, tmp_path)
    assert finding.figures["error"] == error
    assert errno.errorcode[code] in finding.cost and str(tmp_path) in finding.cost and finding.cure
    assert [*tmp_path.iterdir()] == []


def test_a_disk_that_ends_short_is_named(tmp_path: Path) -> None:
    faults = Faults()
    faults.shorten("read", 1, 0, times=None)
    (finding,) = broken(faults, tmp_path)
    assert finding.figures["error"] == "StorageError" and str(tmp_path) in finding.cost


def test_a_disk_that_loses_a_write_is_named(tmp_path: Path) -> None:
    faults = Faults()
    faults.tear(1, times=None)
    (finding,) = broken(faults, tmp_path)
    assert finding.figures["error"] == "CorruptState" and "other bytes" in finding.cost


def test_a_disk_that_stays_short_of_an_answer_is_named(tmp_path: Path) -> None:
    faults = Faults()
    faults.hold("read", 3, times=None)
    with injected(faults):
        (finding,) = tried(functools.partial(self_test.train_alone, on_disk(tmp_path)), seconds=3.0)
        assert finding.found == "hangs" and "self_test" in finding.figures["log"]
        assert [*tmp_path.iterdir()], "the process had no time to remove its files"
        assert [*trial.run([self_test.removal([str(tmp_path)])], seconds=10.0)] == []
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "path, words",
    [("/proc", "make a directory"), ("/nowhere", "No such file"), ("/etc/passwd", "Not a directory")],
)
def test_a_directory_that_cannot_hold_pages_is_named(path: str, words: str) -> None:
    (finding,) = tried(functools.partial(self_test.train_alone, on_disk(Path(path))))
    assert finding.figures["error"] == "StorageError" and words in finding.cost and finding.cure


def test_a_directory_in_ram_is_named(ram_disk: Path) -> None:
    (finding,) = tried(functools.partial(self_test.train_alone, on_disk(ram_disk)))
    assert finding.figures["error"] == "StorageError" and "which is RAM" in finding.cost


def test_a_full_disk_is_named(small_disk: Path) -> None:
    with open(small_disk / "filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free_bytes(small_disk) - (256 << 10))
    (finding,) = tried(functools.partial(self_test.train_alone, on_disk(small_disk)))
    assert finding.figures["error"] == "StorageFull" and "free" in finding.cost.lower() + finding.cure.lower()


def other_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear
    monkeypatch.setattr(self_test.F, "linear", lambda *given: linear(*given) * 1.0000002)


def test_a_training_that_is_not_as_in_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = self_test._plain

    def other(device: str) -> Any:
        with monkeypatch.context() as patch:
            other_gradients(patch)
            return plain(device)

    monkeypatch.setattr(self_test, "_plain", other)
    (finding,) = tried(functools.partial(self_test.train_alone, Home("RAM", Tier.HOST, False)))
    assert finding.failed and "the gradient of" in finding.cost and "faulty memory" in finding.cure


def test_an_update_with_wrong_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate that is off by 1 in 10 000 is far from the rounding of an update."""
    monkeypatch.setattr(self_test, "_paged", with_another_rate(self_test._paged, monkeypatch))
    (finding,) = tried(functools.partial(self_test.train_alone, Home("RAM", Tier.HOST, False)))
    assert finding.failed and "the first update of" in finding.cost


def with_another_rate(paged: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def changed(*given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(self_test, "_RATE", self_test._RATE * 1.0001)
            return paged(*given)

    return changed


def test_a_resumed_run_with_other_bits_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained = self_test._trained

    def other(model: Any, *given: Any, **options: Any) -> Any:
        if options.get("steps", range(1)).start:
            with torch.no_grad():
                model.norm.weight[0] += 1e-6
        return trained(model, *given, **options)

    monkeypatch.setattr(self_test, "_trained", other)
    (finding,) = tried(functools.partial(self_test.train_alone, on_disk(tmp_path)))
    assert finding.failed and "goes on from a commit" in finding.cost


def test_homes_whose_bits_differ_are_named() -> None:
    def finding(name: str, digest: str) -> Finding:
        return Finding(self_test.SECTION, name, "", {"device": "cpu", "fp32": digest})

    (found,) = self_test.compared([finding("RAM", "a"), finding("/disk", "b"), finding("tier", "a")])
    assert found.failed and "RAM, tier against /disk" in found.cost


def as_rank(rank: int, port: int, then: Callable[[], None]) -> Iterator[Finding]:
    if rank == 1:
        access, calls = Pager.access, iter(range(100))

        def broken(self: Pager, *given: Any) -> Any:
            if next(calls) == 20:
                then()
            return access(self, *given)

        Pager.access = broken  # type: ignore[method-assign]
    yield from self_test.train_as_rank(Home("two ranks", Tier.HOST, False), rank, port)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_is_named(number: signal.Signals) -> None:
    port, then = self_test._free_port(), lambda: os.kill(os.getpid(), number)
    begun = time.monotonic()
    findings = tried(*(functools.partial(as_rank, rank, port, then) for rank in range(2)))
    assert time.monotonic() - begun < 25
    assert {each.figures["error"] for each in failures(findings)} == {"RankFailure", "TrialFailed"}


# --- the command -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_passes_here_in_a_minute(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infinity", "doctor", "--self-test", "--json", "--path", str(tmp_path)]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 60
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"machine", "memory", "storage", "training"} <= {each["section"] for each in found["findings"]}
    assert found["report"] and [*tmp_path.iterdir()] == []
