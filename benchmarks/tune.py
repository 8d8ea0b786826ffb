"""Compares the settings that `infinity tune` chooses with the best of an exhaustive sweep by fio.

infinity and fio read and write the same test file. fio tries every engine, block size, depth and number of
jobs, in several passes, each in a new order; such a combination is a point. The best points of the sweep
then run in turns with infinity's I/O engine, which has the settings that `infinity tune` chose. In a round
each of them runs once. The maximum of many noisy figures is too high, so only the rates in rounds count,
not those in the sweep. The best point is the point with the highest median rate over rounds. The result of
a mode (read, write or mixed) is the median, over rounds, of infinity's rate divided by the best point's
rate in the same round.

    python benchmarks/tune.py --directory /mnt/nvme0
    python benchmarks/tune.py --directory /tmp --quick --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from aio import MODES, Case, Ours, find_fio, written_file
from machine_facts import machine_facts

from infinity import aio
from infinity.system.io_settings import DEFAULT, IoSettings
from infinity.tiers.trial_file import SMALLEST, Memory, TestFile
from infinity.tuning.sweep import sweep_disk
from infinity.tuning.tune import Tuning, tune

GOAL = 0.95


@dataclass(frozen=True)
class FioPoint:
    """Settings of a run of fio: `jobs` jobs at once, each of which keeps `depth` requests of `block` bytes in
    flight.
    """

    engine: str
    block: int
    depth: int
    jobs: int

    def __str__(self) -> str:
        return f"{self.engine} {self.block >> 10} KiB x {self.depth} x {self.jobs} job(s)"


@dataclass(frozen=True)
class Result:
    """The result of one mode: "read", "write" or "mixed". Rates are medians over rounds, in GB/s.

    `best` is the settings with which fio had the highest median rate. `ratios` has, for each round,
    infinity's rate divided by fio's rate at these settings; `ratio` is the median of `ratios`.
    """

    mode: str
    ratio: float
    ratios: list[float]
    ours_gb_s: float
    best: FioPoint
    best_gb_s: float
    same_gb_s: float | None
    """Rate of fio with one job and the backend, block size and depth that infinity uses; None if this backend
    is neither io_uring nor libaio. It shows whether a difference is due to the settings or to infinity's I/O
    engine."""
    contenders: dict[str, float]
    """Settings (as text) of each of the points at which fio was fastest in the sweep -> fio's rate in GB/s
    when it then ran in turns with infinity.
    """


def fio_rate(
    fio: str, point: FioPoint, mode: str, path: Path, nbytes: int, *, runtime: float | None
) -> float:
    """Run fio once, and return bytes per second.

    The run covers the whole file once, or lasts `runtime` seconds if that is given. nbytes: size of the file.
    """
    share = nbytes // point.jobs // point.block * point.block
    command = [
        fio,
        "--name=limit",
        f"--filename={path}",
        f"--ioengine={point.engine}",
        f"--rw={'rw' if mode == 'mixed' else mode}",
        f"--bs={point.block}",
        f"--iodepth={point.depth}",
        f"--numjobs={point.jobs}",
        f"--size={share}",
        f"--offset_increment={share}",
        "--rwmixread=50",
        "--direct=1",
        "--thread",
        "--group_reporting",
        "--gtod_reduce=1",
        "--scramble_buffers=0",
        "--fallocate=none",
        "--invalidate=0",
        "--output-format=json",
    ]
    if point.engine == "io_uring":
        command += ["--registerfiles=1", "--fixedbufs=1"]  # as infinity's engine has
    if runtime is not None:
        command += ["--time_based", f"--runtime={round(runtime * 1000)}ms"]
    # Has malloc ask for huge pages (glibc >= 2.35), which infinity's memory has too.
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    job = json.loads(done[done.index("{") :])["jobs"][0]
    milliseconds = max(1, job["read"]["runtime"], job["write"]["runtime"])
    return (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / milliseconds * 1000


def fio_points(arguments: argparse.Namespace) -> list[FioPoint]:
    """All combinations of the settings on the command line that fio is to try.

    Left out are those with more bytes in flight than `--in-flight` allows, or than half of the file.
    """
    return [
        FioPoint(engine, block, depth, jobs)
        for engine in arguments.engine
        for block in arguments.block
        for depth in arguments.depth
        for jobs in arguments.jobs
        if block * depth * jobs <= min(arguments.in_flight, arguments.size // 2)
    ]


def exhaustive(
    fio: str, points: list[FioPoint], path: Path, arguments: argparse.Namespace
) -> dict[str, dict[FioPoint, float]]:
    """Run fio in every mode at every point, `--passes` times, each for `--slice` seconds.

    Returns mode -> point -> the median over passes of the bytes per second.
    """
    order = random.Random(0)
    rates: dict[str, dict[FioPoint, list[float]]] = {mode: {} for mode in MODES}
    for number in range(arguments.passes):
        for point in order.sample(points, len(points)):
            for mode in MODES:
                rate = fio_rate(fio, point, mode, path, arguments.size, runtime=arguments.slice)
                rates[mode].setdefault(point, []).append(rate)
        print(f"fio: pass {number + 1} of {arguments.passes} over {len(points)} points", file=sys.stderr)
    return {
        mode: {point: statistics.median(found) for point, found in of_mode.items()}
        for mode, of_mode in rates.items()
    }


def in_turns(
    fio: str,
    case: Case,
    contenders: list[FioPoint],
    path: Path,
    arguments: argparse.Namespace,
) -> Result:
    """Compare infinity's I/O engine with fio at its best points, the `contenders`, in one mode.

    case: the mode, and the settings that `infinity tune` chose. path: the file to read and write. In every
    round infinity and each contender have one run, in an order that is new in each round.
    """
    mode = case.mode
    order = random.Random(1)
    same = FioPoint(case.engine, case.block, case.depth, 1)
    points = [*contenders, *([same] if case.engine in ("io_uring", "libaio") else [])]
    rates: dict[FioPoint | None, list[float]] = {each: [] for each in [None, *points]}
    ours = Ours(case, path)
    try:
        ours.turn(case, arguments.size)  # not counted: it touches memory for the first time
        for _ in range(arguments.rounds):
            for each in order.sample(list(rates), len(rates)):
                if each is None:
                    rates[each].append(ours.turn(case, arguments.size).bytes_per_second)
                else:
                    rates[each].append(fio_rate(fio, each, mode, path, arguments.size, runtime=None))
    finally:
        ours.close()
    medians = {each: statistics.median(found) for each, found in rates.items()}
    best = max(points, key=medians.__getitem__)
    ratios = [mine / limit for mine, limit in zip(rates[None], rates[best], strict=True)]
    return Result(
        mode=mode,
        ratio=statistics.median(ratios),
        ratios=[round(ratio, 3) for ratio in ratios],
        ours_gb_s=medians[None] / 1e9,
        best=best,
        best_gb_s=medians[best] / 1e9,
        same_gb_s=medians[same] / 1e9 if same in medians else None,
        contenders={str(each): round(medians[each] / 1e9, 3) for each in contenders},
    )


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """Context in which the user's cache is a temporary directory, so that found settings are not kept."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def tuned_settings(arguments: argparse.Namespace) -> tuple[IoSettings, dict[str, object]]:
    """Tune the disk as `infinity tune` does. Returns (chosen settings, a dict with these settings and the
    rates measured with them, and with the seconds that tuning took unless `--quick` was given).
    """
    directory = os.fspath(arguments.directory)
    if arguments.quick:
        with TestFile(directory, arguments.size, Memory(SMALLEST), DEFAULT) as file:
            names = [backend.name for backend in aio.probe(directory).backends if backend.ok]
            found = sweep_disk(file, names, seconds=0.5, bytes_in_flight=SMALLEST, progress=lambda what: None)
        return found.chosen.settings, asdict(found.chosen)
    with own_cache():
        tuning: Tuning = tune([directory], size=arguments.size)
    (disk,) = tuning.disks
    return disk.chosen.settings, asdict(disk.chosen) | {"seconds": tuning.seconds}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk to use"
    )
    parser.add_argument("--size", type=int, default=2 << 30, help="bytes of the file (default 2 GiB)")
    parser.add_argument(
        "--engine", nargs="+", default=["io_uring", "libaio"], choices=["io_uring", "libaio", "psync"]
    )
    parser.add_argument(
        "--block", nargs="+", type=int, default=[1 << power for power in (18, 20, 21, 22, 24)]
    )
    parser.add_argument("--depth", nargs="+", type=int, default=[1, 4, 16, 32, 64])
    parser.add_argument("--jobs", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--in-flight", type=int, default=256 << 20, help="most bytes in flight")
    parser.add_argument("--slice", type=float, default=0.25, help="seconds of one run in the sweep")
    parser.add_argument("--passes", type=int, default=2, help="passes of fio over all points")
    parser.add_argument(
        "--best", type=int, default=4, help="best points of fio that run in turns with infinity"
    )
    parser.add_argument("--rounds", type=int, default=11, help="rounds of turns per mode")
    parser.add_argument("--quick", action="store_true", help="a smoke test of some seconds")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.size, arguments.passes, arguments.rounds, arguments.best = SMALLEST, 1, 1, 1
        arguments.block, arguments.depth, arguments.jobs = [1 << 20], [4], [1]
        arguments.slice = 0.02
    return arguments


def compare(fio: str, path: Path, arguments: argparse.Namespace) -> dict[str, object]:
    written_file(path, arguments.size)
    points = fio_points(arguments)
    swept = exhaustive(fio, points, path, arguments)
    tuned, figures = tuned_settings(arguments)
    print(f"tuned: {tuned.backend} {tuned.block_bytes >> 10} KiB x {tuned.depth}")
    results = []
    for mode in MODES:
        best = sorted(points, key=swept[mode].__getitem__, reverse=True)[: arguments.best]
        case = Case(tuned.backend, mode, tuned.block_bytes, tuned.depth, huge_pages=True)
        result = in_turns(fio, case, best, path, arguments)
        results.append(result)
        same = "" if result.same_gb_s is None else f"  fio as tuned {result.same_gb_s:5.2f} GB/s"
        spread = f"{min(result.ratios):.2f} to {max(result.ratios):.2f}"
        print(
            f"{mode:5}  tuned {result.ours_gb_s:5.2f} GB/s  best of fio {result.best_gb_s:5.2f} GB/s "
            f"({result.best})  ratio {result.ratio:.3f} ({spread}){same}",
            flush=True,
        )
    return {
        "facts": machine_facts(),
        "fio_points": len(points),
        "bytes": arguments.size,
        "goal": GOAL,
        "tuned": figures,
        "results": [asdict(result) for result in results],
        "sweep": {
            mode: {str(point): round(rate / 1e9, 3) for point, rate in of_mode.items()}
            for mode, of_mode in swept.items()
        },
    }


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    fio = find_fio()
    if fio is None:
        return 2
    path = arguments.directory / f"infinity-benchmark-{os.getpid()}"
    try:
        report = compare(fio, path, arguments)
    finally:
        path.unlink(missing_ok=True)
    if arguments.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
