"""The sweep of a disk: engines, block sizes and depths tried in turn, for reads, writes and both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.system.io_settings import DEFAULT, IoSettings
from infinity.tiers.trial_file import MODES, TestFile
from infinity.tuning.search import Halving, best_of, choose, grid, median_rate

Progress = Callable[[str], None]
"""Called before each trial with what is tried."""

_LATENCY = 0.064
"""Seconds. By Little's law, bytes in flight are rate x latency: a disk that nobody else uses needs far less
of them than this, but of one that is shared a deeper queue gets a larger share."""
_LEAST_IN_FLIGHT = 16 << 20
_FINALISTS = 4


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is tried, and for how long."""

    seconds: float
    """Of all sweeps together."""
    blocks: tuple[int, ...]
    depths: tuple[int, ...]
    slice_seconds: float
    """Of one mode in one trial."""


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
    """Medians of one combination."""

    settings: IoSettings
    read: float
    write: float
    mixed: float
    trials: int


@dataclass(frozen=True, kw_only=True)
class DiskSweep:
    """What was found on one path. Rates are bytes per second."""

    path: str
    nbytes: int
    """Of the test file."""
    direct: bool
    """O_DIRECT; without it, all passes through the page cache."""
    chosen: Measured
    best: dict[str, Measured]
    """Mode -> the fastest there of those that were tried to the end."""
    points: tuple[Measured, ...]
    """All that were tried; those that were tried most come first."""


def sweep_disk(
    file: TestFile,
    backends: Sequence[str],
    effort: Effort,
    *,
    seconds: float,
    bytes_in_flight: int,
    progress: Progress,
) -> DiskSweep:
    """Try the effort's grid on a file with these backends, no more than `bytes_in_flight` under way.

    Raises what `TestFile.rate` raises.
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
