"""Command `infinity doctor`: reports this machine's features, and the cost and cure of missing features; with
--self-test it also trains at every home.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity import __version__, aio, cpu_adam
from infinity.cli import driver_trials, self_test, trial
from infinity.cli.command import Output, add_json
from infinity.cli.finding import Finding
from infinity.cli.trial import Trial
from infinity.config import format_size
from infinity.cpu_adam.pool import stream_speed
from infinity.errors import InfinityError, other_bytes, storage_errors
from infinity.system import machine
from infinity.system.directory import free_bytes
from infinity.tiers import probes
from infinity.tiers.arena import REGISTER_CURE, arena_link, probe_huge_pages
from infinity.tiers.tier import aligned_ram

_SECTIONS = ("machine", "memory", "device", driver_trials.SECTION, "storage", self_test.SECTION)
_BUFFER_BYTES = 1 << 20
_SECONDS = 50.0
"""The time for all trials of the self-test."""
_SLOW_LINK = 6e9
"""Bytes per second. A link that is slower is a finding."""
_BACKENDS = {
    "io_uring": (
        "libaio is used: one more system call per wait, no registered buffers.",
        "Linux 5.6 or later with sysctl kernel.io_uring_disabled=0; in a container, a seccomp profile that "
        "allows io_uring (docker: --security-opt seccomp=unconfined).",
    ),
    "libaio": (
        "Nothing while io_uring works; without both, threads are used, at one CPU wake-up per block.",
        "Raise sysctl fs.aio-max-nr; in a container, a seccomp profile that allows io_setup.",
    ),
    "threads": ("Nothing while another engine works.", "Allow threads (ulimit -u, pids cgroup)."),
}
"""Backend's name -> (what its absence costs, how to cure that)."""


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="report what this machine offers, what is missing, what the lack costs and how to end it",
        description="Try each feature of this machine and report the result. Takes some five seconds a path.",
    )
    path = "a directory that may hold pages (repeatable; default: the current directory)"
    parser.add_argument("--path", action="append", metavar="DIR", help=path)
    text = (
        "also train a tiny model at every home that this machine has, beside plain PyTorch; each trial has a "
        "process and a time limit of its own. Takes less than a minute"
    )
    parser.add_argument("--self-test", action="store_true", help=text)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine the machine and print the findings.

    Returns 1 if a path cannot hold pages or a trial of the self-test fails, and 0 otherwise, because anything
    else that is missing only costs speed.
    """
    out = Output(options)
    paths = [os.path.abspath(path) for path in options.path or [os.getcwd()]]
    found: list[Finding] = []
    with out.console.status("looking around") as status:
        for each in tried(paths) if options.self_test else examine(paths):
            found.append(each)
            status.update(f"{each.section}: {each.name}")
    _print(out.console, found)
    failed = [each for each in found if each.failed]
    text = report(found) if options.self_test else None
    if options.self_test:
        out.say(f"self-test: {len(failed) or 'no'} failures among {len(found)} findings")
    if text is not None and failed:
        out.say(f"\nFor a report of this failure:\n\n{text}")
    out.json({"findings": [asdict(each) for each in found], **({"report": text} if text else {})})
    return int(bool(failed))


def examine(paths: Sequence[str]) -> Iterator[Finding]:
    """Yield all findings, section by section. paths: directories that may hold pages."""
    yield from _machine()
    yield from _device()
    for path in paths:
        yield from _disk(path)


def tried(paths: Sequence[str]) -> Iterator[Finding]:
    """Yield the findings of `examine` and of the self-test, each found in a process of its own. Takes less
    than a minute, whatever hangs.
    """
    found: list[Finding] = []
    examined = [
        Trial("machine", "machine", [_machine]),
        Trial("device", "GPU", [_device]),
        *driver_trials.trials(),
        *(Trial("storage", path, [functools.partial(_disk, path)]) for path in paths),
    ]
    try:
        for each in trial.run([*examined, *self_test.trials(paths)], seconds=_SECONDS):
            found.append(each)
            yield each
        yield from self_test.compared(found)
    finally:
        for _ in trial.run([self_test.removal(paths)], seconds=_SECONDS):
            pass


def report(findings: Iterable[Finding]) -> str:
    """Text for a bug report: each finding on a line, and the last output of trials that crashed."""
    lines = [f"infinity {__version__}"]
    for each in findings:
        mark = "FAILED" if each.failed else "lacks" if each.missing else "ok"
        error = f" [{each.figures['error']}] {each.cost} {each.cure}" if each.failed else ""
        lines.append(f"{mark:6} {each.section}: {each.name}: {each.found}{error}")
        lines += [f"    {line}" for line in str(each.figures.get("log", "")).splitlines()]
    return "\n".join(lines)


def _machine() -> Iterator[Finding]:
    yield from _processors()
    yield from _memory()


def _disk(path: str) -> Iterator[Finding]:
    try:
        yield from _storage(path)
    except InfinityError as error:
        yield Finding.of(error, "storage", path, "cannot hold pages")


def _processors() -> Iterator[Finding]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "kernel": machine.kernel()}
    text = "infinity {}, Python {python}, torch {torch}, Linux {kernel}".format(__version__, **versions)
    yield Finding("machine", "software", text, versions)
    cpu = machine.cpu()
    usable = min(cpu.allowed, cpu.quota or cpu.allowed)
    yield Finding(
        "machine",
        "processor",
        f"{cpu.model}: {usable:g} of {cpu.online} CPUs for this process, {cpu.numa_nodes} NUMA node(s)",
        asdict(cpu),
        usable < cpu.online,
        f"The update and the I/O threads share {usable:g} CPUs.",
        "Widen the affinity mask (taskset) or the cgroup's cpu quota (--cpus).",
    )
    isas = cpu_adam.runnable_isas()
    yield Finding(
        "machine",
        "update kernels",
        f"{isas[0]} of {', '.join(isas)}",
        {"isa": isas[0], "runnable": list(isas)},
        isas[0] == "scalar",
        "The CPU update runs several times slower, one element at a time.",
        "Use a CPU with AVX2 and FMA (2013 and later), or a hypervisor that shows them.",
    )


def _memory() -> Iterator[Finding]:
    memory = machine.memory()
    limit = "no cgroup limit" if memory.cgroup_limit is None else f"cgroup {format_size(memory.cgroup_limit)}"
    yield Finding(
        "memory",
        "RAM",
        f"{format_size(memory.usable)} usable of {format_size(memory.total)}, {limit}",
        {**asdict(memory), "usable": memory.usable},
        memory.cgroup_left is not None and memory.cgroup_left < memory.available,
        f"The host tier ends at {format_size(memory.usable)} though more RAM is free.",
        "Raise the cgroup's memory limit (memory.max, --memory).",
    )
    speed = stream_speed()
    text = (
        f"{speed / 1e9:.1f} GB/s read and written in place; an fp32 update moves 28 B per parameter, "
        f"so at most {speed / 28 / 1e9:.2f} G parameters/s"
    )
    yield Finding("memory", "memory speed", text, {"bytes_per_second": speed})
    pages, mode = probe_huge_pages(), machine.transparent_huge_pages()
    yield Finding(
        "memory",
        "huge pages",
        f"{mode}: {pages.reason}",
        asdict(pages),
        mode in ("never", "absent"),
        "First touches are slow and the CPU update misses the TLB more often.",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )
    lock = machine.memlock_limit()
    yield Finding(
        "memory",
        "locked memory",
        "unlimited" if lock is None else format_size(lock),
        {"bytes": lock},
        lock is not None,
        "Arenas larger than that are not registered with io_uring: more work per request.",
        "ulimit -l unlimited (or LimitMEMLOCK=infinity, --ulimit memlock=-1).",
    )


def _device() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        build = torch.version.cuda
        built = "a CPU build of torch" if build is None else f"torch is built for CUDA {build}"
        yield Finding(
            "device",
            "GPU",
            f"none that torch can use ({built})",
            {"available": False},
            True,
            "Forward and backward run on the CPU; everything else works the same.",
            "Where there is a GPU: install its driver (nvidia-smi shows it) and a CUDA build of torch.",
        )
        return
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        free, total = torch.cuda.mem_get_info(index)
        text = f"{name}: {format_size(free)} free of {format_size(total)}"
        figures = {"available": True, "name": name, "free": free, "total": total}
        yield Finding("device", f"cuda:{index}", text, figures)
        yield _link(torch.device("cuda", index))


def _link(device: torch.device) -> Finding:
    link, pinned = arena_link(device)
    slow = min(link.to_device, link.to_host) < _SLOW_LINK
    return Finding(
        "device",
        f"{device} link",
        f"{link.to_device / 1e9:.1f} GB/s to the device, {link.to_host / 1e9:.1f} GB/s back; "
        f"host arena {pinned.reason}",
        {"to_device": link.to_device, "to_host": link.to_host, "registered": pinned.done},
        slow or not pinned.done,
        "Pages cross it at less than half of what 16 lanes of PCIe 3 carry."
        if pinned.done
        else "Copies are staged through a bounce buffer and do not overlap compute.",
        "Put the card into a slot with 16 lanes (nvidia-smi -q shows the link's width), look at the virtual "
        "machine's settings, or keep more pages on the device."
        if pinned.done
        else REGISTER_CURE,
    )


def _storage(path: str) -> Iterator[Finding]:
    report, kind, free = aio.probe(path), machine.file_system(path), free_bytes(path)
    is_ram = kind in machine.RAM_FILE_SYSTEMS
    yield Finding(
        "storage",
        path,
        f"{kind}, {format_size(free)} free" + (", which is RAM" if is_ram else ""),
        {"file_system": kind, "free": free, "ram": is_ram},
        is_ram,
        "Pages there would not leave memory: the nvme tier refuses it.",
        "Give a directory on a disk.",
    )
    direct = any(backend.ok and backend.direct for backend in report.backends)
    offset, memory = report.offset_alignment, report.memory_alignment
    works = f"works, aligned to {offset} B (file) and {memory} B (memory)"
    reasons = sorted({backend.reason for backend in report.backends if backend.reason})
    yield Finding(
        "storage",
        f"{path} O_DIRECT",
        works if direct else "; ".join(reasons) or "refused",
        {"direct": direct, "offset_alignment": offset, "memory_alignment": memory},
        not direct,
        "All pages pass through the page cache: a copy each, and RAM beyond the budget.",
        "Use ext4, xfs or btrfs without compression on a local disk.",
    )
    for backend in report.backends:
        text = (backend.features or "works") if backend.ok else backend.reason
        lack = not backend.ok, *_BACKENDS[backend.name]
        yield Finding("storage", f"{path} {backend.name}", text, asdict(backend), *lack)
    registered = _registered_buffers(path)
    yield Finding(
        "storage",
        f"{path} registered buffers",
        registered or "work",
        {"registered": not registered},
        bool(registered),
        "More work per request: the kernel pins a buffer for each.",
        "io_uring, see above, and ulimit -l unlimited (LimitMEMLOCK=infinity, --ulimit memlock=-1).",
    )
    if not is_ram:
        speed = probes.disk_speed(path)
        text = (
            f"read {speed.read / 1e9:.2f}, write {speed.write / 1e9:.2f}, mixed {speed.mixed / 1e9:.2f} "
            f"GB/s ({speed.backend})"
        )
        yield Finding("storage", f"{path} speed", text, asdict(speed))


def _registered_buffers(path: str) -> str:
    """Write and read through a buffer that is registered with the I/O engine. Returns why it cannot be
    registered, or "". Raises StorageError, and CorruptState if other bytes are read.
    """
    buffer = aligned_ram(_BUFFER_BYTES)
    with (
        storage_errors("make a file in", path),
        tempfile.NamedTemporaryFile(prefix=".infinity-test-", dir=path) as named,
        aio.Engine(path) as engine,
    ):
        registered = engine.register_buffer(buffer.data_ptr(), buffer.nbytes)
        with engine.open(named.name) as file:
            file.write(buffer.fill_(7), 0).wait()
            file.read(buffer.zero_(), 0).wait()
        if not bool((buffer == 7).all()):
            raise other_bytes(named.name, 0, None)
        return "" if registered else engine.facts.registration_failure


def _print(console: Console, findings: list[Finding]) -> None:
    fancy = "utf" in (console.encoding or "").lower()
    good, bad, arrow = ("✓", "!", "→") if fancy else ("+", "!", "->")
    for section in _SECTIONS:
        table = Table(title=section, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(style="bold")
        table.add_column()
        for finding in (each for each in findings if each.section == section):
            mark = Text(bad, "yellow") if finding.missing else Text(good, "green")
            text = Text(finding.found)
            if finding.missing:
                text.append(f"\n{finding.cost}", "yellow").append(f"\n{arrow} {finding.cure}")
            table.add_row(mark, Text(finding.name), text)
        console.print(table, "")
