"""Tests that `infinity doctor` names the cost and the cure of each thing that a machine can lack."""

import dataclasses
import io
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from emulated_device import EmulatedDevice
from virtual_clock import Rates, VirtualClock

from infinity import aio
from infinity.cli import doctor
from infinity.errors import StorageFull
from infinity.system import machine
from infinity.tiers import arena, probes


def named(findings: Iterable[doctor.Finding], name: str) -> doctor.Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def assert_missing(finding: doctor.Finding, cost: str, cure: str) -> None:
    assert finding.missing
    assert cost in finding.cost
    assert cure in finding.cure


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.cli.doctor.stream_speed", lambda: 28e9)
    monkeypatch.setattr(probes, "disk_speed", lambda path: probes.DiskSpeed(1e9, 2e9, 1.5e9, "io_uring"))


def test_few_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine.CpuFacts(model="x", online=8, allowed=8, quota=1.5, numa_nodes=1)
    monkeypatch.setattr(machine, "cpu", lambda: facts)
    assert_missing(named(doctor._processors(), "processor"), "1.5 CPUs", "quota")


def test_no_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.cpu_adam, "runnable_isas", lambda: ("scalar",))
    assert_missing(named(doctor._processors(), "update kernels"), "slower", "AVX2")


def test_a_tight_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine.MemoryFacts(total=64 << 30, available=60 << 30, cgroup_limit=8 << 30, cgroup_left=6 << 30)
    monkeypatch.setattr(machine, "memory", lambda: facts)
    finding = named(doctor._memory(), "RAM")
    assert_missing(finding, "6 GiB", "memory.max")
    assert finding.figures["usable"] == 6 << 30


def test_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "transparent_huge_pages", lambda: "never")
    assert_missing(named(doctor._memory(), "huge pages"), "TLB", "madvise")


def test_a_small_memlock_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memlock_limit", lambda: 8 << 20)
    assert_missing(named(doctor._memory(), "locked memory"), "registered", "ulimit -l")


def test_the_memory_speed_is_put_in_parameters() -> None:
    assert "1.00 G parameters/s" in named(doctor._memory(), "memory speed").found


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_gpu() -> None:
    assert_missing(named(doctor._device(), "GPU"), "CPU", "CUDA build")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_and_its_link() -> None:
    findings = list(doctor._device())
    assert not named(findings, "cuda:0").missing
    link = named(findings, "cuda:0 link")
    assert link.figures["registered"]
    assert min(link.figures["to_device"], link.figures["to_host"]) > 1e8


def test_ram_in_a_disks_place(ram_disk: Path) -> None:
    finding = named(doctor._storage(str(ram_disk)), str(ram_disk))
    assert_missing(finding, "refuses", "disk")


@pytest.mark.parametrize("backend", aio.BACKENDS)
def test_an_engine_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    real = aio.probe(tmp_path)
    reports = tuple(
        dataclasses.replace(report, ok=False, direct=False, reason="EPERM: seccomp")
        if report.name == backend
        else report
        for report in real.backends
    )
    monkeypatch.setattr(aio, "probe", lambda path: dataclasses.replace(real, backends=reports))
    finding = named(doctor._storage(str(tmp_path)), f"{tmp_path} {backend}")
    assert finding.missing
    assert finding.found == "EPERM: seccomp"
    assert finding.cost
    assert finding.cure


def test_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = aio.probe(tmp_path)
    reports = tuple(dataclasses.replace(each, direct=False, reason="no O_DIRECT") for each in real.backends)
    monkeypatch.setattr(aio, "probe", lambda path: dataclasses.replace(real, direct=False, backends=reports))
    finding = named(doctor._storage(str(tmp_path)), f"{tmp_path} O_DIRECT")
    assert_missing(finding, "page cache", "ext4")
    assert finding.found == "no O_DIRECT"


def test_a_disk_too_full_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str) -> probes.DiskSpeed:
        raise StorageFull("It is full.", "Free space.", path=path)

    monkeypatch.setattr(probes, "disk_speed", full)
    monkeypatch.setattr(doctor, "_processors", lambda: iter(()))
    monkeypatch.setattr(doctor, "_memory", lambda: iter(()))
    monkeypatch.setattr(doctor, "_device", lambda: iter(()))
    finding = list(doctor.examine([str(tmp_path)]))[-1]
    assert (finding.cost, finding.cure) == ("It is full.", "Free space.")
    assert finding.figures == {"error": "StorageFull"}


def test_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link of an emulated device is timed by its events, in virtual time."""
    monkeypatch.setattr(arena, "_LINK_BYTES", 1 << 20)
    for rate, slow in ((10**9, True), (25 * 10**9, False)):
        device = EmulatedDevice()
        VirtualClock(Rates(link_up=2 * rate, link_down=rate, device=10**12, host_memory=10**11))
        with device.in_use():
            finding = doctor._link(torch.device("cpu"))
        device.reset(0)
        assert finding.missing is slow and not finding.failed
        assert ("16 lanes" in finding.cure) is slow
        assert finding.figures["to_device"] == pytest.approx(2 * rate, rel=1e-3)
        assert finding.figures["to_host"] == pytest.approx(rate, rel=1e-3)


def test_printing_shows_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        doctor.Finding(section, f"name-{section}", "[found]", {}, True, "c1", "c2")
        for section in doctor._SECTIONS
    ]
    doctor._print(doctor.Console(width=200), findings)
    printed = capsys.readouterr().out
    for section in doctor._SECTIONS:
        assert f"name-{section}" in printed
    assert printed.count("[found]") == len(findings), "what is found is text, not markup"


def test_printing_to_a_terminal_without_unicode(tmp_path: Path) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    finding = doctor.Finding("memory", "RAM", "some", {}, True, "c1", "c2")
    doctor._print(doctor.Console(file=stream, width=80), [finding])
    stream.flush()
    assert b"-> c2" in stream.buffer.getvalue()
