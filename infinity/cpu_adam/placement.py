"""CPUs on which the update's threads run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from infinity.errors import ConfigError
from infinity.system import machine

_TOPOLOGY = Path("/sys/devices/system/cpu")


def default_cpus() -> tuple[int, ...]:
    """The CPUs on which a `ThreadPool` puts its threads.

    They are one CPU of each physical core in the affinity mask, no more than the cgroup's CPU quota. Where
    these are four or more, an eighth of them (at least one) is left to the trainer.
    """
    return leave_room(one_per_core(sorted(os.sched_getaffinity(0))), machine.cpu().quota)


def one_per_core(cpus: Iterable[int], topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """The first of `cpus` on every physical core: an update waits for memory, and a sibling hyperthread
    adds no bandwidth."""
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
    """The cores that the update takes out of `cores`. quota: CPUs' worth of time; None: no limit.

    The first cores are left to the trainer, since interrupts and single-threaded work tend to be there. Of
    fewer than four cores none is left: the update then competes with the trainer, but on one of two cores it
    would take twice as long.
    """
    usable = max(1, math.floor(min(len(cores), quota or math.inf)))
    left = 0 if usable < 4 else max(1, usable // 8)
    return tuple(cores[len(cores) - (usable - left) :])


def place(threads: int | None, cpus: Sequence[int] | None) -> list[int]:
    """The CPU of each thread. Raises ConfigError for CPUs that this process may not use."""
    chosen = list(default_cpus() if cpus is None else cpus)
    allowed = os.sched_getaffinity(0)
    unusable = sorted(set(chosen) - allowed)
    if unusable or not chosen:
        raise ConfigError(
            f"cpus names {unusable or 'no CPU'}; this process may use {sorted(allowed)}.",
            "Give CPUs of this process's affinity mask (taskset, cpuset cgroup).",
        )
    return [chosen[i % len(chosen)] for i in range(len(chosen) if threads is None else threads)]
