"""The sweep of stripes: shares of the bytes of several disks, tried through a volume as in the NVMe tier."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infinity.aio import Volume
from infinity.tiers.striping import choose_striping
from infinity.tiers.trial_file import MODES, REQUEST_BYTES, Memory, TestFile, issue, measure
from infinity.tuning.search import Halving, best_of, median_rate
from infinity.tuning.sweep import DiskSweep, Effort, Progress

Shares = tuple[float, ...]

_SAME = 0.02
"""The difference up to which two candidates' shares count as the same."""
_FILL = 0.9
"""The share of the test files that a volume uses, so that whole periods of stripes fit."""


@dataclass(frozen=True, kw_only=True)
class StripeSweep:
    """The findings for several paths together."""

    paths: tuple[str, ...]
    shares: Shares
    """Each path's share of the bytes, in the order of the paths; they add up to 1."""
    read: float
    """Bytes per second of all paths together, with these shares."""
    write: float
    mixed: float
    candidates: dict[str, float]
    """Bytes per second of reads and writes together, by the shares that were tried (text, in percent)."""


def candidate_shares(disks: Sequence[DiskSweep]) -> list[Shares]:
    """The distinct shares to try: in proportion to each disk's own rates (mixed, read, write), and even."""
    speeds = [
        *([getattr(disk.chosen, mode) for disk in disks] for mode in reversed(MODES)),
        [1.0] * len(disks),
    ]
    found: list[Shares] = []
    for each in speeds:
        shares = tuple(speed / sum(each) for speed in each)
        if all(max(abs(a - b) for a, b in zip(shares, other, strict=True)) > _SAME for other in found):
            found.append(shares)
    return found


def sweep_stripes(
    files: Sequence[TestFile],
    disks: Sequence[DiskSweep],
    memory: Memory,
    effort: Effort,
    *,
    seconds: float,
    progress: Progress,
) -> StripeSweep:
    """The best shares for these files, each with the settings chosen for its disk.

    seconds: for all trials. Raises what requests raise: StorageError, StorageFull.
    """
    candidates = candidate_shares(disks)

    def trial(shares: Shares) -> dict[str, float]:
        progress(f"{len(files)} paths, {_percent(shares)}")
        with _volume(files, disks, shares) as (volume, nbytes):
            request = REQUEST_BYTES * len(files)
            in_flight = sum(disk.chosen.settings.bytes_in_flight for disk in disks)
            window = -(-in_flight // request) + 2
            places = [place * request for place in range(nbytes // request)]

            def rate(mode: str) -> float:
                requests = issue(volume, mode, request, itertools.cycle(places), memory)
                return measure(requests, request, window, effort.slice_seconds).steady

            return {mode: rate(mode) for mode in MODES}

    halving = Halving(
        candidates, trial, seconds=seconds, finalists=min(2, len(candidates)), order=random.Random(0)
    )
    chosen = best_of(halving.passes)
    read, write, mixed = (median_rate(halving.passes, chosen, mode) for mode in MODES)
    return StripeSweep(
        paths=tuple(disk.path for disk in disks),
        shares=chosen,
        read=read,
        write=write,
        mixed=mixed,
        candidates={
            _percent(shares): median_rate(halving.passes, shares, "mixed") for shares in halving.passes[0]
        },
    )


@contextlib.contextmanager
def _volume(
    files: Sequence[TestFile], disks: Sequence[DiskSweep], shares: Shares
) -> Iterator[tuple[Volume, int]]:
    """A volume over the files with these shares, and the bytes that it can hold."""
    nbytes = int(min(file.nbytes / share for file, share in zip(files, shares, strict=True)) * _FILL)
    striping = choose_striping(nbytes, [file.nbytes for file in files], shares, REQUEST_BYTES)
    with contextlib.ExitStack() as cleanup:
        parts = [
            (cleanup.enter_context(file.opened(disk.chosen.settings)), weight)
            for file, disk, weight in zip(files, disks, striping.weights, strict=True)
            if weight
        ]
        yield Volume(parts, striping.stripe_bytes), nbytes


def _percent(shares: Shares) -> str:
    return " : ".join(f"{share:.0%}" for share in shares)
