"""Disk sweep: tries backends, block sizes and queue depths, and measures several disks together."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.aio import Volume
from infinity.system.io_settings import DEFAULT, IoSettings
from infinity.tiers.striping import choose_striping
from infinity.tiers.trial_file import MODES, REQUEST_BYTES, Memory, TestFile, issue, measure
from infinity.tuning.search import best_of, choose, grid, median_rate, search

Progress = Callable[[str], None]
"""Called before each trial, with a text that names its settings."""

_LATENCY = 0.064
"""Seconds: settings have at most as many bytes in flight as the disk writes in them, or `_LEAST_IN_FLIGHT`. A
disk of one's own needs far fewer (Little's law), but a deeper queue gets more of a shared disk.
"""
_LEAST_IN_FLIGHT = 16 << 20
_FINALISTS = 4


BLOCKS = (256 << 10, 1 << 20, 2 << 20, 4 << 20)
"""Bytes of the I/O blocks that are tried."""
DEPTHS = (8, 16, 32, 64)
SLICE_SECONDS = 0.05
"""Seconds that one trial spends on each of the three modes."""
_FILL = 0.9
"""The fraction of the test files that a striped volume takes, which has whole periods; see `Striping`."""


@dataclass(frozen=True)
class Measured:
    """The median rates of one combination of settings over `trials` trials, in bytes per second."""

    settings: IoSettings
    read: float
    write: float
    mixed: float
    trials: int


@dataclass(frozen=True, kw_only=True)
class DiskSweep:
    path: str
    nbytes: int
    direct: bool
    """Whether the test file was open with O_DIRECT. Otherwise all I/O passes through the page cache."""
    chosen: Measured
    """The settings that all I/O will use."""
    best: dict[str, Measured]
    """The fastest settings in each mode, among those that stayed to the end of the sweep."""
    points: tuple[Measured, ...]
    """All settings that were tried. Those that stayed longest in the sweep come first."""


@dataclass(frozen=True, kw_only=True)
class Stripes:
    """How bytes are divided between several disks, and the rates of all together, in bytes per second."""

    paths: tuple[str, ...]
    shares: tuple[float, ...]
    """The fraction of the bytes on each path: in proportion to the disks' mixed rates."""
    read: float
    write: float
    mixed: float


def sweep_disk(
    file: TestFile, backends: Sequence[str], *, seconds: float, bytes_in_flight: int, progress: Progress
) -> DiskSweep:
    """Find the best I/O settings for the disk of a test file, of the backends with BLOCKS and DEPTHS.

    Left out are those with more bytes in flight than `bytes_in_flight`, than half of the test file or than
    `_LATENCY` allows, and those for which no time is left. backends: those that work there. seconds: for all
    trials together. Raises StorageError or StorageFull if I/O fails.
    """
    most = min(bytes_in_flight, file.nbytes // 2, max(_LEAST_IN_FLIGHT, int(file.first_write * _LATENCY)))
    untuned = IoSettings(backends[0], DEFAULT.block_bytes, DEFAULT.depth)
    always = [untuned] if untuned.bytes_in_flight <= min(bytes_in_flight, file.nbytes) else []

    def trial(settings: IoSettings) -> dict[str, float]:
        progress(f"{settings.backend} {settings.block_bytes >> 10} KiB x {settings.depth}")
        return {mode: file.rate(settings, mode, SLICE_SECONDS).steady for mode in MODES}

    points = grid(backends, BLOCKS, DEPTHS, most)
    order = random.Random(0)
    passes = search(points, trial, seconds=seconds, finalists=_FINALISTS, order=order, always=always)
    medians = {
        settings: Measured(
            settings,
            **{mode: median_rate(passes, settings, mode) for mode in MODES},
            trials=sum(settings in each for each in passes),
        )
        for settings in passes[0]
    }
    return DiskSweep(
        path=file.directory,
        nbytes=file.nbytes,
        direct=file.direct,
        chosen=medians[choose(passes, untuned)],
        best={mode: medians[best_of(passes, mode)] for mode in MODES},
        points=tuple(sorted(medians.values(), key=lambda each: -each.trials)),
    )


def measure_stripes(
    files: Sequence[TestFile], disks: Sequence[DiskSweep], memory: Memory, *, seconds: float
) -> Stripes:
    """Measure a volume that is striped over test files like the NVMe tier, in proportion to mixed rates.

    disks: the results of their sweeps. seconds: of each mode. Raises StorageError and StorageFull.
    """
    total = sum(disk.chosen.mixed for disk in disks)
    shares = tuple(disk.chosen.mixed / total for disk in disks)
    nbytes = int(min(file.nbytes / share for file, share in zip(files, shares, strict=True)) * _FILL)
    striping = choose_striping(nbytes, [file.nbytes for file in files], shares, REQUEST_BYTES)
    request = REQUEST_BYTES * len(files)
    window = -(-sum(disk.chosen.settings.bytes_in_flight for disk in disks) // request) + 2
    places = [place * request for place in range(nbytes // request)]
    with contextlib.ExitStack() as cleanup:
        parts = [
            (cleanup.enter_context(file.opened(disk.chosen.settings)), weight)
            for file, disk, weight in zip(files, disks, striping.weights, strict=True)
            if weight
        ]
        volume = Volume(parts, striping.stripe_bytes)
        rates = {
            mode: measure(
                issue(volume, mode, request, itertools.cycle(places), memory), request, window, seconds
            ).steady
            for mode in MODES
        }
    return Stripes(paths=tuple(disk.path for disk in disks), shares=shares, **rates)
