"""Tuning run: tries backends, block sizes and queue depths on disks, alone and together, measures memory and
the link between host and device, and saves the findings.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from infinity import aio
from infinity.config import Size, format_size, parse_size
from infinity.cpu_adam.pool import stream_speed
from infinity.errors import ConfigError, StorageFull
from infinity.planning import machine_rates
from infinity.system import machine
from infinity.system.directory import check_directory, free_bytes
from infinity.system.io_settings import DEFAULT, DiskProfile, IoSettings, Profile, StripeProfile, now
from infinity.tiers.arena import arena_link
from infinity.tiers.probes import LinkSpeed
from infinity.tiers.striping import choose_striping
from infinity.tiers.trial_file import MODES, REQUEST_BYTES, SMALLEST, Memory, TestFile, issue, measure
from infinity.tuning.search import best_of, choose, grid, median_rate, search

_FILE_BYTES = 2 << 30
_IN_FLIGHT = 256 << 20
_SECONDS = 40.0
"""Seconds that the sweeps of all paths take together."""
_STRIPES_SECONDS = 1.0
"""Seconds of each mode for which all paths together are measured."""
_FILL_SECONDS = 8.0
"""The most seconds that writing the test files of all paths may take in total."""

Progress = Callable[[str], None]
"""Function (text that names the settings of a trial), called before each trial."""

_LATENCY = 0.064
"""Seconds. Settings have at most as many bytes in flight as the disk writes in this time, or
`_LEAST_IN_FLIGHT` if that is more. A disk without other users needs far fewer (Little's law), but on a shared
disk a deeper queue gets a larger share of the rate.
"""
_LEAST_IN_FLIGHT = 16 << 20
_FINALISTS = 4


BLOCKS = (256 << 10, 1 << 20, 2 << 20, 4 << 20)
"""Bytes of the I/O blocks that are tried."""
DEPTHS = (8, 16, 32, 64)
SLICE_SECONDS = 0.05
"""Seconds that one trial spends on each of the three modes."""
_FILL = 0.9
"""The fraction of the test files that a striped volume takes. It is less than 1 because the volume has only
whole periods; see `Striping`.
"""


Report = Callable[[float, str], None]
"""Function (fraction of the work that is done, text that names the trial), called before each trial."""


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
    """The fastest settings in each mode, among those that were tried in every pass of the sweep."""
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


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The findings of one run of `infinity tune`. Rates are bytes per second."""

    disks: tuple[DiskSweep, ...]
    stripes: Stripes | None
    """The measurement of several paths together; None for a single path."""
    shared: tuple[tuple[str, str], ...]
    """Pairs of paths on the same file system, over which striping gains nothing."""
    stream: float
    """Rate at which all threads of the CPU's update together read and write RAM."""
    link: LinkSpeed | None
    """Rates of copies between host RAM and the device; None without a CUDA device."""
    seconds: float
    profile: str
    """The path of the file in which the findings are saved."""
    saved: bool
    note: str | None
    """Why an older file at `profile` could not be used and was replaced; None otherwise."""


def tune(
    paths: Sequence[str], *, size: Size | None = None, report: Report = lambda done, what: None
) -> Tuning:
    """Find the best I/O settings for the disks of directories, and save them for later plans and I/O there.

    size: bytes of each test file; by default 2 GiB, or half of the free bytes if that is less. A test file is
    removed at the end, also after an error. Raises ConfigError for directories, sizes or a value of the
    variable INFINITY_AIO that cannot be used, and StorageError or StorageFull for directories that cannot
    hold the test file.
    """
    start = time.monotonic()
    sizes = _file_sizes(paths, size)
    backends = [_backends(path) for path in paths]

    def progress(what: str) -> None:
        # Test files, memory and the link take some 4 s in addition to the sweeps.
        report(min(1.0, (time.monotonic() - start) / (_SECONDS + 4.0)), what)

    progress("memory")
    stream = stream_speed()
    disks, stripes = _sweep(paths, sizes, backends, progress)
    stream = max(stream, stream_speed())  # other processes can only make the rate lower
    link = arena_link(torch.device("cuda"))[0] if torch.cuda.is_available() else None
    profile = Profile()
    note = profile.note
    saved = _keep(profile, disks, stripes)
    machine_rates.keep(
        {
            path: {mode: getattr(disk.chosen, mode) for mode in MODES}
            for path, disk in zip(paths, disks, strict=True)
        },
        stream=stream,
        link=None if link is None else min(link.to_device, link.to_host),
    )
    places = [(disk.path, os.stat(disk.path).st_dev) for disk in disks]
    shared = tuple((a, b) for (a, at), (b, where) in itertools.combinations(places, 2) if at == where)
    report(1.0, "done")
    return Tuning(
        disks=disks,
        stripes=stripes,
        shared=shared,
        stream=stream,
        link=link,
        seconds=time.monotonic() - start,
        profile=os.fspath(profile.path),
        saved=saved,
        note=note,
    )


def _sweep(
    paths: Sequence[str], sizes: Sequence[int], backends: Sequence[list[str]], progress: Progress
) -> tuple[tuple[DiskSweep, ...], Stripes | None]:
    alone = _SECONDS / len(paths)
    memory = Memory(max(SMALLEST, min(_IN_FLIGHT, machine.memory().usable // 8) // SMALLEST * SMALLEST))
    with contextlib.ExitStack() as cleanup:
        files = []
        for path, nbytes, names in zip(paths, sizes, backends, strict=True):
            progress(f"writing {format_size(nbytes)} in {path}")
            settings = replace(DEFAULT, backend=names[0])
            file = TestFile(path, nbytes, memory, settings, seconds=_FILL_SECONDS / len(paths))
            files.append(cleanup.enter_context(file))
        disks = tuple(
            sweep_disk(file, names, seconds=alone, bytes_in_flight=memory.nbytes, progress=progress)
            for file, names in zip(files, backends, strict=True)
        )
        if len(paths) == 1:
            return disks, None
        progress("all paths together")
        return disks, measure_stripes(files, disks, memory, seconds=_STRIPES_SECONDS)


def _file_sizes(paths: Sequence[str], size: Size | None) -> list[int]:
    """Bytes of each path's test file, multiples of 1 MiB. Paths on one file system share its free bytes."""
    if not paths or len({os.path.realpath(path) for path in paths}) != len(paths):
        raise ConfigError(
            f"The list of directories {list(paths)} is empty or has duplicates.", "Give each directory once."
        )
    devices = [os.stat(check_directory(path)).st_dev for path in paths]
    room = [free_bytes(path) // devices.count(each) for path, each in zip(paths, devices, strict=True)]
    wanted = None if size is None else parse_size(size, what="size") >> 20 << 20
    if wanted is not None and wanted < SMALLEST:
        raise ConfigError(
            f"A test file of {size} is too small to measure a disk.",
            f"Give --size {format_size(SMALLEST)} or more.",
        )
    for path, free in zip(paths, room, strict=True):
        needed = 2 * SMALLEST if wanted is None else wanted
        if free < needed:
            raise StorageFull(
                f"{path} has {format_size(free)} free of the {format_size(needed)} that a test file needs.",
                "Free space there, give another path, or a smaller --size.",
                path=path,
                errno=errno.ENOSPC,
            )
    if wanted is not None:
        return [wanted] * len(paths)
    return [min(_FILE_BYTES, free // 2) >> 20 << 20 for free in room]


def _backends(path: str) -> list[str]:
    """Names of the I/O backends that work in the directory `path`, best first. If any has direct I/O,
    backends without it are omitted. If the environment variable INFINITY_AIO names a backend, it is the only
    one.
    """
    forced = os.environ.get("INFINITY_AIO") or "auto"
    if forced != "auto":
        with aio.Engine(path, backend=forced) as engine:
            return [engine.facts.backend]
    working = [backend for backend in aio.probe(path).backends if backend.ok]
    if not working:
        with aio.Engine(path) as engine:  # raises, with the reasons
            return [engine.facts.backend]
    direct = any(backend.direct for backend in working)
    return [backend.name for backend in working if backend.direct or not direct]


def _keep(profile: Profile, disks: Sequence[DiskSweep], stripes: Stripes | None) -> bool:
    cpu = machine.cpu()
    facts = {"cpu": cpu.model, "cpus": cpu.allowed, "memory": machine.memory().total}
    at = now()
    for disk in disks:
        rates = {mode: getattr(disk.chosen, mode) for mode in MODES}
        found = DiskProfile(settings=disk.chosen.settings, path=disk.path, at=at, facts=facts, **rates)
        profile.keep_disk(disk.path, found)
    if stripes is not None:
        profile.keep_stripes(stripes.paths, StripeProfile(shares=stripes.shares, mixed=stripes.mixed, at=at))
    return profile.save()


def sweep_disk(
    file: TestFile, backends: Sequence[str], *, seconds: float, bytes_in_flight: int, progress: Progress
) -> DiskSweep:
    """Find the best I/O settings for a test file's disk, among combinations of `backends`, BLOCKS and DEPTHS.

    The bytes in flight of a combination are limited: to `bytes_in_flight`, to half of the test file, and to
    what the disk writes in `_LATENCY` seconds. Combinations beyond a limit are not tried, nor those for which
    no time is left. The default settings are always tried if they fit `bytes_in_flight` and the test file.
    backends: names of backends that work on the disk. seconds: for all trials together. Raises StorageError
    or StorageFull if I/O fails.
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
    """Measure the rates of a volume that is striped over the test files. As in the NVMe tier, each file gets
    bytes in proportion to its disk's mixed rate.

    disks: the results of the files' sweeps, in the same order. seconds: the time for which each mode is
    measured. Raises StorageError and StorageFull.
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
        volume = aio.Volume(parts, striping.stripe_bytes)
        rates = {
            mode: measure(
                issue(volume, mode, request, itertools.cycle(places), memory), request, window, seconds
            ).steady
            for mode in MODES
        }
    return Stripes(paths=tuple(disk.path for disk in disks), shares=shares, **rates)
