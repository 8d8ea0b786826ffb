"""Sweep of stripes: finds what fraction of the bytes each of several disks should hold, by timing I/O on
volumes that are striped like the NVMe tier.
"""

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
"""Two candidates count as the same if no path's share differs between them by more than this number."""
_FILL = 0.9
"""A striped volume takes at most this fraction of the bytes that fit into the test files. The rest stays free
because a volume takes whole periods of stripes from each file; see `Striping`.
"""


@dataclass(frozen=True, kw_only=True)
class StripeSweep:
    """The results of the sweep of stripes over several disks. `paths` are the directories of the test files,
    one on each disk. `read`, `write` and `mixed` are rates of reads, of writes and of both mixed.
    """

    paths: tuple[str, ...]
    shares: Shares
    """The fraction of the bytes on each path, in the order of `paths`. The fractions add up to 1."""
    read: float
    """Bytes per second read from all paths together, with the bytes distributed as `shares` says."""
    write: float
    mixed: float
    candidates: dict[str, float]
    """Bytes per second of reads and writes mixed, for each candidate that was tried. The key is a text with
    the candidate's shares, such as "60% : 40%".
    """


def candidate_shares(disks: Sequence[DiskSweep]) -> list[Shares]:
    """List the ways to divide bytes between disks that are worth a trial: in proportion to the disks' mixed
    rates, to their read rates, to their write rates, and equally. A way that hardly differs from an earlier
    one is left out. Each way has one fraction per disk, and the fractions add up to 1.
    """
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
    """Find the best way to divide bytes between test files on several disks.

    files: a test file on each disk. disks: the results of each disk's own sweep, whose chosen settings are
    used. memory: the RAM that is read into and written from. effort: says how long a trial takes. seconds:
    seconds for all trials. progress: called before each trial with a text that says what is tried. Raises
    StorageError and StorageFull if I/O fails.
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
    """A context with a volume that is striped over the test files in proportion to `shares`.

    It gives (volume, bytes that the volume can hold). disks: the I/O settings of each file are those chosen
    for its disk.
    """
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
