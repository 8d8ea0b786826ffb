"""Placement: the CPUs on which the threads of the CPU update run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from infinity.errors import ConfigError
from infinity.system import machine

_TOPOLOGY = Path("/sys/devices/system/cpu")


def default_cpus() -> tuple[int, ...]:
    """The CPUs on which a `ThreadPool` runs its threads by default: one CPU of each physical core in the
    affinity mask, and at most as many as the cgroup's CPU quota allows. Of four or more CPUs, an eighth (at
    least one) is left to the training thread.
    """
    return leave_room(one_per_core(sorted(os.sched_getaffinity(0))), machine.cpu().quota)


def one_per_core(cpus: Iterable[int], topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """The first CPU in `cpus` of every physical core. topology: the folder of sysfs that describes CPUs. A
    second hyperthread of a core would not help, because updates are limited by memory bandwidth.
    """
    kept: list[int] = []
    seen: set[str] = set()
    for cpu in cpus:
        try:
            siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            siblings = f"alone: {cpu}"
        if siblings not in seen:
            seen.add(siblings)
            kept.append(cpu)
    return tuple(kept)


def leave_room(cores: Sequence[int], quota: float | None) -> tuple[int, ...]:
    """The CPUs out of `cores` (one CPU of each core) that the update uses.

    quota: the CPU time of the cgroup, in CPUs; None: no limit. The first cores are left to the training
    thread, since interrupts and single-threaded work tend to run there. If fewer than four CPUs are usable,
    none is left to it, because an update on one CPU of two would take twice as long.
    """
    usable = max(1, math.floor(min(len(cores), quota or math.inf)))
    left = 0 if usable < 4 else max(1, usable // 8)
    return tuple(cores[len(cores) - (usable - left) :])


def place(threads: int | None, cpus: Sequence[int] | None) -> list[int]:
    """Return the number of the CPU of each thread of a pool.

    threads: number of threads; None: one for each CPU. cpus: numbers of the CPUs, which repeat if there are
    more threads; None: `default_cpus()`. Raises ConfigError if `cpus` is empty, or has a CPU that this
    process may not use.
    """
    chosen = list(default_cpus() if cpus is None else cpus)
    allowed = os.sched_getaffinity(0)
    unusable = sorted(set(chosen) - allowed)
    if unusable or not chosen:
        raise ConfigError(
            f"cpus names {unusable or 'no CPU'}; this process may use {sorted(allowed)}.",
            "Give CPUs of this process's affinity mask (taskset, cpuset cgroup).",
        )
    return [chosen[i % len(chosen)] for i in range(len(chosen) if threads is None else threads)]
