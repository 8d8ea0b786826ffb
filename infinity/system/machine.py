"""Machine: its memory and processors, and the limits of this process, from /proc, /sys and cgroups."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUP_UNLIMITED = 1 << 60
"""A limit of cgroup v1 of at least this many bytes means "no limit": the kernel then writes a number near
2**63.
"""

_PAGE = os.sysconf("SC_PAGE_SIZE")

_OCTAL = re.compile(r"\\([0-7]{3})")
"""Matches the escapes of blanks, tabs, newlines and backslashes in /proc/self/mountinfo."""

RAM_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of the machine's RAM, and memory limits of this process's cgroups, at one moment."""

    total: int
    available: int
    """Bytes that can be allocated without swapping (MemAvailable in /proc/meminfo)."""
    cgroup_limit: int | None
    """The memory limit in bytes of this process's cgroup or of one of its ancestors, whichever has the fewest
    bytes left; None for no limit.
    """
    cgroup_left: int | None
    """Bytes that processes of the same cgroup can still take before `cgroup_limit` is reached; None for no
    limit. Inactive page cache counts as free, because the kernel can reclaim it.
    """

    @property
    def usable(self) -> int:
        return self.available if self.cgroup_left is None else min(self.available, self.cgroup_left)


@dataclass(frozen=True)
class CpuFacts:
    model: str
    online: int
    allowed: int
    """Number of CPUs in this process's affinity mask."""
    quota: float | None
    """Seconds of CPU time per second that the cgroup allows; None for no limit."""
    numa_nodes: int


def memory() -> MemoryFacts:
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    limit: int | None = None
    left: int | None = None
    for directory in _cgroup_chain("memory"):
        found = _memory_limit(directory)
        if found is not None and (left is None or found[1] < left):
            limit, left = found
    return MemoryFacts(
        total=fields["MemTotal"],
        available=fields.get("MemAvailable", fields["MemFree"]),
        cgroup_limit=limit,
        cgroup_left=left,
    )


@dataclass(frozen=True)
class ProcessMemory:
    resident: int
    peak: int
    """The most resident bytes since the process began, or since the last call of `restart_peak`."""


def process_memory() -> ProcessMemory:
    """This process's resident bytes and their peak, as the kernel counts them now (VmRSS, VmHWM)."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) * 1024
    return ProcessMemory(resident=found["VmRSS"], peak=found["VmHWM"])


def resident_bytes() -> int:
    """Resident bytes of this process. Takes a few microseconds, and may be wrong by some pages."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * _PAGE


def restart_peak() -> None:
    """Reset `ProcessMemory.peak`, where the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def cpu() -> CpuFacts:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    nodes = 1
    with contextlib.suppress(OSError):
        nodes = max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))
    quotas = [quota for directory in _cgroup_chain("cpu") if (quota := _cpu_quota(directory)) is not None]
    return CpuFacts(
        model=model,
        online=os.cpu_count() or 1,
        allowed=len(os.sched_getaffinity(0)),
        quota=min(quotas, default=None),
        numa_nodes=nodes,
    )


def memlock_limit() -> int | None:
    """Bytes of memory that this process may lock in RAM (mlock); None for no limit, as with the capability
    CAP_IPC_LOCK.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _has_capability(_CAP_IPC_LOCK):
        return None
    return soft


def transparent_huge_pages() -> str:
    """The kernel's mode of transparent huge pages: "always", "madvise" or "never"; "absent" without them."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "absent"
    return text[text.index("[") + 1 : text.index("]")]


def identity() -> str:
    """Return a text that is the same for all processes of this machine and differs on every other machine. A
    container counts as a machine of its own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def kernel() -> str:
    """The kernel's release, such as "6.8.0"."""
    return platform.release()


def file_system(path: str | os.PathLike[str]) -> str:
    """The type of the file system that holds `path`, such as "ext4" or "tmpfs"; "unknown" if it is not in
    /proc/self/mountinfo.
    """
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    resolved = os.path.realpath(path)
    best, kind = "", "unknown"
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        head, _, tail = line.partition(" - ")
        fields = head.split()
        mount_point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), fields[4])
        inside = resolved == mount_point or resolved.startswith(mount_point.rstrip("/") + "/")
        if inside and fields[2] == wanted and len(mount_point) >= len(best):
            best, kind = mount_point, tail.split()[0]
    return kind


_CAP_IPC_LOCK = 14


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _cgroup_chain(controller: str) -> Sequence[Path]:
    """Directories in /sys/fs/cgroup of this process's cgroup and of its ancestors, for one controller.
    controller: "memory" or "cpu", in cgroup v2 or v1.
    """
    try:
        return _directories(controller, Path("/proc/self/cgroup").read_text())
    except OSError:
        return ()


@functools.cache
def _directories(controller: str, cgroups: str) -> Sequence[Path]:
    """As `_cgroup_chain`. cgroups: the content of /proc/self/cgroup."""
    chain: list[Path] = []
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
        elif controller in controllers.split(","):
            roots = [Path("/sys/fs/cgroup") / controllers, Path("/sys/fs/cgroup") / controller]
        else:
            continue
        for root in roots:
            directory = root / path.lstrip("/")
            # In a container the path may be the host's. The root itself is then the mounted cgroup.
            for candidate in [directory, *directory.parents]:
                if candidate.is_relative_to(root) and candidate.is_dir() and candidate not in chain:
                    chain.append(candidate)
    return tuple(chain)


def _read_int(path: Path | str) -> int | None:
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read().strip()
    except OSError:
        return None
    return None if text == b"max" else int(text)


def _memory_limit(directory: Path) -> tuple[int, int] | None:
    """(limit, bytes left under it) of the cgroup with this directory; None for no limit."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read_int(f"{directory}/{limit_name}")
        if limit is None or limit >= CGROUP_UNLIMITED:
            continue
        usage = _read_int(f"{directory}/{usage_name}")
        if usage is None:
            continue
        reclaimable = 0
        with contextlib.suppress(OSError):
            for line in (directory / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == cache_name:
                    reclaimable = int(value)
        return limit, max(0, limit - usage + reclaimable)
    return None


def _cpu_quota(directory: Path) -> float | None:
    """Seconds of CPU time per second that the cgroup with this directory allows; None for no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (directory / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us = _read_int(directory / "cpu.cfs_quota_us")
    period_us = _read_int(directory / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None
