"""Sweep of a disk: tries backends, block sizes and queue depths for reads, for writes and for both mixed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.system.io_settings import DEFAULT, IoSettings
from infinity.tiers.trial_file import MODES, TestFile
from infinity.tuning.search import Halving, best_of, choose, grid, median_rate

Progress = Callable[[str], None]
"""A function that is called before each trial, with a text that names the settings of the trial."""

_LATENCY = 0.064
"""Seconds that limit the bytes in flight of the settings that a sweep tries. The limit is the bytes that the
disk writes in this time, but at least `_LEAST_IN_FLIGHT`. A disk without other users needs far fewer bytes in
flight (Little's law), but a deeper queue gets more of a shared disk.
"""
_LEAST_IN_FLIGHT = 16 << 20
_FINALISTS = 4


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The settings that a sweep tries, and the time that the sweep takes."""

    seconds: float
    """Seconds that all sweeps of one run of `infinity tune` take together."""
    blocks: tuple[int, ...]
    """Sizes in bytes of the I/O blocks that are tried."""
    depths: tuple[int, ...]
    slice_seconds: float
    """Seconds that one trial spends on each of the three modes: reads, writes and both mixed."""


QUICK = Effort(
    seconds=40.0,
    blocks=(256 << 10, 1 << 20, 2 << 20, 4 << 20),
    depths=(8, 16, 32, 64),
    slice_seconds=0.05,
)
THOROUGH = Effort(
    seconds=240.0,
    blocks=tuple(1 << power for power in range(17, 25)),
    depths=(1, 2, 4, 8, 16, 32, 64, 128),
    slice_seconds=0.1,
)


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
    """The results of the sweep of one disk. `path` is the directory on the disk that held the test file, and
    `chosen` has the settings that infinity will use for the disk.
    """

    path: str
    nbytes: int
    """Bytes of the test file."""
    direct: bool
    """Whether the test file was open with O_DIRECT. Without O_DIRECT, all I/O passes through the page
    cache.
    """
    chosen: Measured
    best: dict[str, Measured]
    """The fastest settings in each mode ("read", "write" or "mixed"), among the settings that stayed to the
    end of the sweep. Slow settings are dropped earlier, after fewer trials.
    """
    points: tuple[Measured, ...]
    """The rates of all settings that were tried. Those that stayed longest in the sweep come first."""


def sweep_disk(
    file: TestFile,
    backends: Sequence[str],
    effort: Effort,
    *,
    seconds: float,
    bytes_in_flight: int,
    progress: Progress,
) -> DiskSweep:
    """Find the best I/O settings for the disk that a test file is on.

    Tries the combinations of the backends with the block sizes and queue depths of `effort`. Left out are
    those with more bytes in flight (block size times queue depth) than `bytes_in_flight`, than half of the
    test file or than `_LATENCY` allows, and those for which no time is left.

    file: the test file. backends: names of the I/O backends that work there. seconds: seconds for all trials
    together. progress: called before each trial. Raises StorageError or StorageFull if I/O fails.
    """
    most = min(bytes_in_flight, file.nbytes // 2, max(_LEAST_IN_FLIGHT, int(file.first_write * _LATENCY)))
    untuned = IoSettings(backends[0], DEFAULT.block_bytes, DEFAULT.depth)
    always = [untuned] if untuned.bytes_in_flight <= min(bytes_in_flight, file.nbytes) else []

    def trial(settings: IoSettings) -> dict[str, float]:
        progress(f"{settings.backend} {settings.block_bytes >> 10} KiB x {settings.depth}")
        return {mode: file.rate(settings, mode, effort.slice_seconds).steady for mode in MODES}

    halving = Halving(
        grid(backends, effort.blocks, effort.depths, most),
        trial,
        seconds=seconds,
        finalists=_FINALISTS,
        order=random.Random(0),
        always=always,
    )
    return _report(file, halving, untuned)


def _report(file: TestFile, halving: Halving[IoSettings], untuned: IoSettings) -> DiskSweep:
    passes = halving.passes
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
