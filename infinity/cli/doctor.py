"""Command `infinity doctor`: reports this machine's features, and the cost and cure of missing features."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity import __version__, aio, cpu_adam
from infinity.config import format_size
from infinity.cpu_adam.stream_speed import stream_speed
from infinity.errors import InfinityError
from infinity.system import machine
from infinity.system.directory import free_bytes
from infinity.tiers import probes
from infinity.tiers.arena import REGISTER_CURE, arena_link, probe_huge_pages

_SECTIONS = ("machine", "memory", "device", "storage")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A feature that this machine has or lacks, as one row of the report."""

    section: str
    name: str
    found: str
    """Printed description of what the machine has."""
    missing: bool = False
    """Whether the feature is missing or limited. Then `cost` names the consequence, and `cure` the remedy."""
    cost: str = ""
    cure: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """The measured or probed values by name, for the output as JSON: bytes, bytes per second, flags."""


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="report what this machine offers, what is missing, what the lack costs and how to end it",
        description="Try each feature of this machine and report the result. Takes some five seconds a path.",
    )
    parser.add_argument(
        "--path",
        action="append",
        metavar="DIR",
        help="a directory that may hold pages (repeatable; default: the current directory)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line of stdout"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine the machine and print the findings.

    Returns 1 if a path cannot hold pages, and 0 otherwise, because anything else that is missing only costs
    speed.
    """
    console = Console(stderr=options.json)
    findings: list[Finding] = []
    with console.status("looking around"):
        findings.extend(examine(options.path or [os.getcwd()]))
    _print(console, findings)
    if options.json:
        print(json.dumps({"infinity": __version__, "findings": [asdict(finding) for finding in findings]}))
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
            yield Finding(
                section="storage",
                name=path,
                found="cannot hold pages",
                missing=True,
                cost=error.cause,
                cure=error.cure,
                figures={"error": type(error).__name__},
            )


def _processors() -> Iterator[Finding]:
    yield Finding(
        section="machine",
        name="software",
        found=f"infinity {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Linux {machine.kernel()}",
        figures={"python": platform.python_version(), "torch": torch.__version__, "kernel": machine.kernel()},
    )
    cpu = machine.cpu()
    usable = min(cpu.allowed, cpu.quota or cpu.allowed)
    limited = usable < cpu.online
    yield Finding(
        section="machine",
        name="processor",
        found=f"{cpu.model}: {usable:g} of {cpu.online} CPUs for this process, {cpu.numa_nodes} NUMA node(s)",
        missing=limited,
        cost=f"The update and the I/O threads share {usable:g} CPUs." if limited else "",
        cure="Widen the affinity mask (taskset) or the cgroup's cpu quota (--cpus)." if limited else "",
        figures=asdict(cpu),
    )
    isas = cpu_adam.runnable_isas()
    scalar = isas[0] == "scalar"
    yield Finding(
        section="machine",
        name="update kernels",
        found=f"{isas[0]} of {', '.join(isas)}",
        missing=scalar,
        cost="The CPU update runs several times slower, one element at a time." if scalar else "",
        cure="Use a CPU with AVX2 and FMA (2013 and later), or a hypervisor that shows them."
        if scalar
        else "",
        figures={"isa": isas[0], "runnable": list(isas)},
    )


def _memory() -> Iterator[Finding]:
    memory = machine.memory()
    limit = "no cgroup limit" if memory.cgroup_limit is None else f"cgroup {format_size(memory.cgroup_limit)}"
    limited = memory.cgroup_left is not None and memory.cgroup_left < memory.available
    yield Finding(
        section="memory",
        name="RAM",
        found=f"{format_size(memory.usable)} usable of {format_size(memory.total)}, {limit}",
        missing=limited,
        cost=f"The host tier ends at {format_size(memory.usable)} though more RAM is free."
        if limited
        else "",
        cure="Raise the cgroup's memory limit (memory.max, --memory)." if limited else "",
        figures={**asdict(memory), "usable": memory.usable},
    )
    speed = stream_speed()
    yield Finding(
        section="memory",
        name="memory speed",
        found=f"{speed / 1e9:.1f} GB/s read and written in place; an fp32 update moves 28 B per parameter, "
        f"so at most {speed / 28 / 1e9:.2f} G parameters/s",
        figures={"bytes_per_second": speed},
    )
    pages = probe_huge_pages()
    absent = machine.transparent_huge_pages() in ("never", "absent")
    yield Finding(
        section="memory",
        name="huge pages",
        found=f"{machine.transparent_huge_pages()}: {pages.reason}",
        missing=absent,
        cost="First touches are slow and the CPU update misses the TLB more often." if absent else "",
        cure="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" if absent else "",
        figures=asdict(pages),
    )
    lock = machine.memlock_limit()
    yield Finding(
        section="memory",
        name="locked memory",
        found="unlimited" if lock is None else format_size(lock),
        missing=lock is not None,
        cost="Arenas larger than that are not registered with io_uring: more work per request."
        if lock is not None
        else "",
        cure="ulimit -l unlimited (or LimitMEMLOCK=infinity, --ulimit memlock=-1)."
        if lock is not None
        else "",
        figures={"bytes": lock},
    )


def _device() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        build = torch.version.cuda
        yield Finding(
            section="device",
            name="GPU",
            found="none that torch can use"
            + (" (a CPU build of torch)" if build is None else f" (torch is built for CUDA {build})"),
            missing=True,
            cost="Forward and backward run on the CPU; everything else works the same.",
            cure="Where there is a GPU: install its driver (nvidia-smi shows it) and a CUDA build of torch.",
            figures={"available": False},
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            section="device",
            name=f"cuda:{index}",
            found=f"{properties.name}: {format_size(free)} free of {format_size(total)}",
            figures={"available": True, "name": properties.name, "free": free, "total": total},
        )
    link, pinned = arena_link()
    yield Finding(
        section="device",
        name="device link",
        found=f"{link.to_device / 1e9:.1f} GB/s to the device, {link.to_host / 1e9:.1f} GB/s back; "
        f"host arena {pinned.reason}",
        missing=not pinned.done,
        cost="" if pinned.done else "Copies are staged through a bounce buffer and do not overlap compute.",
        cure="" if pinned.done else REGISTER_CURE,
        figures={"to_device": link.to_device, "to_host": link.to_host, "registered": pinned.done},
    )


def _storage(path: str) -> Iterator[Finding]:
    report = aio.probe(path)
    kind = machine.file_system(path)
    free = free_bytes(path)
    is_ram = kind in machine.RAM_FILE_SYSTEMS
    yield Finding(
        section="storage",
        name=path,
        found=f"{kind}, {format_size(free)} free" + (", which is RAM" if is_ram else ""),
        missing=is_ram,
        cost="Pages there would not leave memory: the nvme tier refuses it." if is_ram else "",
        cure="Give a directory on a disk." if is_ram else "",
        figures={"file_system": kind, "free": free, "ram": is_ram},
    )
    yield _direct_io(path, report)
    for backend in report.backends:
        yield Finding(
            section="storage",
            name=f"{path} {backend.name}",
            found=(backend.features or "works") if backend.ok else backend.reason,
            missing=not backend.ok,
            cost="" if backend.ok else _BACKEND_COST[backend.name],
            cure="" if backend.ok else _BACKEND_CURE[backend.name],
            figures=asdict(backend),
        )
    if is_ram:
        return
    speed = probes.disk_speed(path)
    yield Finding(
        section="storage",
        name=f"{path} speed",
        found=f"read {speed.read / 1e9:.2f}, write {speed.write / 1e9:.2f}, mixed {speed.mixed / 1e9:.2f} "
        f"GB/s ({speed.backend})",
        figures=asdict(speed),
    )


_BACKEND_COST = {
    "io_uring": "libaio is used: one more system call per wait, no registered buffers.",
    "libaio": "Nothing while io_uring works; without both, threads are used, at one CPU wake-up per block.",
    "threads": "Nothing while another engine works.",
}
_BACKEND_CURE = {
    "io_uring": "Linux 5.6 or later with sysctl kernel.io_uring_disabled=0; in a container, a seccomp "
    "profile that allows io_uring (docker: --security-opt seccomp=unconfined).",
    "libaio": "Raise sysctl fs.aio-max-nr; in a container, a seccomp profile that allows io_setup.",
    "threads": "Allow threads (ulimit -u, pids cgroup).",
}


def _direct_io(path: str, report: aio.DirectoryReport) -> Finding:
    direct = any(backend.ok and backend.direct for backend in report.backends)
    return Finding(
        section="storage",
        name=f"{path} O_DIRECT",
        found=f"works, aligned to {report.offset_alignment} B (file) and {report.memory_alignment} B (memory)"
        if direct
        else "; ".join(sorted({b.reason for b in report.backends if b.reason})) or "refused",
        missing=not direct,
        cost=""
        if direct
        else "All pages pass through the page cache: a copy each, and RAM beyond the budget.",
        cure="" if direct else "Use ext4, xfs or btrfs without compression on a local disk.",
        figures={
            "direct": direct,
            "offset_alignment": report.offset_alignment,
            "memory_alignment": report.memory_alignment,
        },
    )


def _print(console: Console, findings: list[Finding]) -> None:
    fancy = "utf" in (console.encoding or "").lower()
    good, bad, arrow = ("✓", "!", "→") if fancy else ("+", "!", "->")
    for section in _SECTIONS:
        table = Table(title=section, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(style="bold")
        table.add_column()
        for finding in findings:
            if finding.section != section:
                continue
            mark = Text(bad, "yellow") if finding.missing else Text(good, "green")
            text = Text(finding.found)
            if finding.missing:
                text.append(f"\n{finding.cost}", "yellow").append(f"\n{arrow} {finding.cure}")
            table.add_row(mark, Text(finding.name), text)
        console.print(table, "")
