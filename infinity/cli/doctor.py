"""Command `infinity doctor`: reports this machine's features, and the cost and cure of missing features."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity import __version__, aio, cpu_adam
from infinity.cli.command import Output, add_json
from infinity.config import format_size
from infinity.cpu_adam.pool import stream_speed
from infinity.errors import InfinityError
from infinity.system import machine
from infinity.system.directory import free_bytes
from infinity.tiers import probes
from infinity.tiers.arena import REGISTER_CURE, arena_link, probe_huge_pages

_SECTIONS = ("machine", "memory", "device", "storage")
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


@dataclass
class Finding:
    """A feature that this machine has or lacks."""

    section: str
    name: str
    found: str
    """What the machine has, for people."""
    figures: Mapping[str, Any]
    """The same facts for --json: bytes, bytes per second, flags."""
    missing: bool = False
    """Whether the feature is missing or limited."""
    cost: str = ""
    cure: str = ""

    def __post_init__(self) -> None:
        if not self.missing:
            self.cost = self.cure = ""


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="report what this machine offers, what is missing, what the lack costs and how to end it",
        description="Try each feature of this machine and report the result. Takes some five seconds a path.",
    )
    path = "a directory that may hold pages (repeatable; default: the current directory)"
    parser.add_argument("--path", action="append", metavar="DIR", help=path)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine the machine and print the findings.

    Returns 1 if a path cannot hold pages, and 0 otherwise, because anything else that is missing only costs
    speed.
    """
    out = Output(options)
    with out.console.status("looking around"):
        findings = list(examine(options.path or [os.getcwd()]))
    _print(out.console, findings)
    out.json({"findings": [asdict(finding) for finding in findings]})
    return int(any("error" in finding.figures for finding in findings))


def examine(paths: list[str]) -> Iterator[Finding]:
    """Yield all findings, section by section. paths: directories that may hold pages."""
    yield from _processors()
    yield from _memory()
    yield from _device()
    for path in paths:
        try:
            yield from _storage(path)
        except InfinityError as error:
            kind = {"error": type(error).__name__}
            yield Finding("storage", path, "cannot hold pages", kind, True, error.cause, error.cure)


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
    link, pinned = arena_link()
    yield Finding(
        "device",
        "device link",
        f"{link.to_device / 1e9:.1f} GB/s to the device, {link.to_host / 1e9:.1f} GB/s back; "
        f"host arena {pinned.reason}",
        {"to_device": link.to_device, "to_host": link.to_host, "registered": pinned.done},
        not pinned.done,
        "Copies are staged through a bounce buffer and do not overlap compute.",
        REGISTER_CURE,
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
    if not is_ram:
        speed = probes.disk_speed(path)
        text = (
            f"read {speed.read / 1e9:.2f}, write {speed.write / 1e9:.2f}, mixed {speed.mixed / 1e9:.2f} "
            f"GB/s ({speed.backend})"
        )
        yield Finding("storage", f"{path} speed", text, asdict(speed))


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
