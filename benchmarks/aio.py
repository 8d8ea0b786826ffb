"""Compares infinity's I/O engine with fio, in turns in one run.

Both use the same backend, block size, depth and file, and the same order of blocks. fio shows the limit: the
speed that this kernel and device give to a program that does nothing else. The speed of a disk, above all of
a virtual disk, may change severalfold within a minute. Therefore turns are short, infinity and fio form
pairs of neighbouring turns, and every second pair begins with fio. Only the ratio within a pair counts, and
the result is the median over pairs.

    python benchmarks/aio.py --directory /mnt/nvme0
    python benchmarks/aio.py --directory /tmp --quick --json
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from machine_facts import machine_facts

from infinity import aio

MODES = ("read", "write", "mixed")


@dataclass(frozen=True)
class Case:
    """Settings with which infinity and fio both run.

    block: bytes of a transfer. depth: greatest number of transfers in flight.
    """

    engine: str
    mode: str
    block: int
    depth: int
    huge_pages: bool

    def __str__(self) -> str:
        size = f"{self.block >> 20} MiB" if self.block >= 1 << 20 else f"{self.block >> 10} KiB"
        pages = "" if self.huge_pages else " base pages"
        return f"{self.engine:8} {self.mode:5} {size:>7} x {self.depth}{pages}"


@dataclass(frozen=True)
class Turn:
    """The speed, and the CPU time for each GiB, of infinity or fio in one turn."""

    bytes_per_second: float
    cpu_seconds_per_gib: float


@dataclass(frozen=True)
class Result:
    """The result of a case. `ratio` is infinity's speed divided by fio's, the median over pairs of turns."""

    case: Case
    ratio: float
    ratios: list[float]
    ours_gb_s: float
    fio_gb_s: float
    ours_cpu_s_per_gib: float
    fio_cpu_s_per_gib: float


# The physical layout of this memory decides the speed. Over scattered 4 KiB pages a transfer has so many
# segments that a disk may cut it into small requests, and adjacent pages, which come by luck, are up to twice
# as fast. So infinity and fio either both have huge pages, or share the very same pages.
class Memory:
    """Memory with random bytes, which transfers read into or write from.

    `shared` is the path of a file in /dev/shm through which fio can use the same pages. It is None if the
    memory has huge pages.
    """

    def __init__(self, nbytes: int, huge: bool) -> None:
        self.nbytes = nbytes
        self.shared: Path | None = None
        if huge:
            # The mapping is private, as an arena is: shared anonymous memory rarely gets huge pages.
            self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.map.madvise(mmap.MADV_HUGEPAGE)
        else:
            with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:
                self.shared = Path(file.name)
                file.truncate(nbytes)
                self.map = mmap.mmap(file.fileno(), nbytes)
        pattern = os.urandom(1 << 20)
        for start in range(0, nbytes, len(pattern)):
            self.map[start : start + len(pattern)] = pattern[: nbytes - start]
        self.view = memoryview(self.map)

    def close(self) -> None:
        if self.shared:
            self.shared.unlink()


class Ours:
    """infinity's I/O engine, which stays open between turns, as in a runtime."""

    def __init__(self, case: Case, path: Path) -> None:
        self.engine = aio.Engine(path.parent, backend=case.engine, depth=case.depth, block_bytes=case.block)
        self.file = self.engine.open(str(path))
        # Requests are like the runtime's: of several blocks, and twice as many as fill the queue. The
        # memory is as large as fio's, so two requests use a buffer at a time, which is harmless: nobody
        # looks at the bytes.
        self.request = max(case.block, 8 << 20)
        self.window = max(3, 2 * case.depth * case.block // self.request)
        self.memory = Memory(max(case.depth * case.block, self.request), case.huge_pages)
        if case.engine == "io_uring":
            address = aio_address(self.memory.map)
            self.engine.register_buffer(address, self.memory.nbytes)

    def turn(self, case: Case, nbytes: int) -> Turn:
        used = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        pending: deque[aio.Future] = deque()
        for index, offset in enumerate(range(0, nbytes, self.request)):
            if len(pending) == self.window:
                pending.popleft().wait()
            slot = index * self.request % (self.memory.nbytes // self.request * self.request)
            view = self.memory.view[slot : slot + min(self.request, nbytes - offset)]
            reading = case.mode == "read" or (case.mode == "mixed" and index % 2 == 0)
            pending.append(self.file.read(view, offset) if reading else self.file.write(view, offset))
        aio.wait_all(list(pending))
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        return Turn(nbytes / seconds, cpu / (nbytes / 2**30))

    def close(self) -> None:
        self.engine.close()
        self.memory.close()


def aio_address(memory: mmap.mmap) -> int:
    """The address at which a mapping begins."""
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def fio_turn(fio: str, case: Case, path: Path, nbytes: int, ours: Ours) -> Turn:
    """Run fio once over the first `nbytes` bytes of the file `path`, with the settings of `case`.

    fio also gets the further options that are fastest for this backend. Its buffers are registered with the
    kernel if those of `ours` are, and they lie in the same kind of memory (huge pages, or the pages of
    `ours`).
    """
    fixed = ours.engine.facts.registered_bytes > 0
    command = [
        fio,
        "--name=limit",
        f"--filename={path}",
        f"--ioengine={case.engine}",
        f"--rw={'rw' if case.mode == 'mixed' else case.mode}",
        f"--bs={case.block}",
        f"--iodepth={case.depth}",
        f"--size={nbytes}",
        "--rwmixread=50",
        "--direct=1",
        "--thread",
        "--gtod_reduce=1",
        "--scramble_buffers=0",
        "--fallocate=none",
        "--invalidate=0",
        "--output-format=json",
    ]
    if case.engine == "io_uring":
        command += ["--registerfiles=1", *(["--fixedbufs=1"] if fixed else [])]
    if ours.memory.shared:
        command.append(f"--mem=mmapshared:{ours.memory.shared}")
    # Has malloc ask for huge pages (glibc >= 2.35).
    environment = os.environ | {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb={int(case.huge_pages)}"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    if moved != nbytes:
        raise RuntimeError(f"fio moved {moved} bytes instead of {nbytes}")
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Turn(nbytes / seconds, cpu / (nbytes / 2**30))


def compare(fio: str, case: Case, path: Path, nbytes: int, pairs: int) -> Result:
    ours = Ours(case, path)
    turns: list[tuple[Turn, Turn]] = []
    try:
        ours.turn(case, nbytes)  # not counted: it touches memory for the first time
        for pair in range(pairs):
            if pair % 2 == 0:
                mine = ours.turn(case, nbytes)
                limit = fio_turn(fio, case, path, nbytes, ours)
            else:
                limit = fio_turn(fio, case, path, nbytes, ours)
                mine = ours.turn(case, nbytes)
            turns.append((mine, limit))
    finally:
        ours.close()
    ratios = [mine.bytes_per_second / limit.bytes_per_second for mine, limit in turns]
    return Result(
        case=case,
        ratio=statistics.median(ratios),
        ratios=[round(ratio, 3) for ratio in ratios],
        ours_gb_s=statistics.median(mine.bytes_per_second for mine, _ in turns) / 1e9,
        fio_gb_s=statistics.median(limit.bytes_per_second for _, limit in turns) / 1e9,
        ours_cpu_s_per_gib=statistics.median(mine.cpu_seconds_per_gib for mine, _ in turns),
        fio_cpu_s_per_gib=statistics.median(limit.cpu_seconds_per_gib for _, limit in turns),
    )


def written_file(path: Path, nbytes: int) -> None:
    """Write a file of `nbytes` random bytes, so that no turn runs on extents that were never written.

    On such extents the file system would do other work.
    """
    chunk = os.urandom(4 << 20)
    with open(path, "wb") as file:
        for start in range(0, nbytes, len(chunk)):
            file.write(chunk[: nbytes - start])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def facts(directory: Path, fio: str) -> dict[str, object]:
    version = subprocess.run([fio, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return machine_facts() | {
        "fio": version,
        "probe": asdict(aio.probe(directory)),
    }


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for block in arguments.block:
        for engine in arguments.engine:
            for mode in arguments.mode:
                yield Case(engine, mode, block, arguments.depth, arguments.pages == "huge")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk to use"
    )
    parser.add_argument("--file", type=Path, help="an existing file to overwrite, instead of a new one")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes per turn (default 1 GiB)")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of turns per case")
    parser.add_argument("--engine", nargs="+", default=["io_uring", "libaio"], choices=aio.BACKENDS[:2])
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--block", nargs="+", type=int, default=[4 << 20, 256 << 10], help="bytes")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument(
        "--pages",
        choices=("huge", "base"),
        default="huge",
        help="pages of the buffers: huge, or base pages that infinity and fio share",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test of a second or so")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.size, arguments.pairs, arguments.block = 32 << 20, 1, [1 << 20]
    return arguments


def find_fio() -> str | None:
    """The path of fio, or None, after a message on stderr, if fio is not installed."""
    fio = shutil.which("fio")
    if fio is None:
        print("fio is not installed, and this benchmark compares with it.", file=sys.stderr)
    return fio


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    fio = find_fio()
    if fio is None:
        return 2
    made = None
    path = arguments.file
    if path is None:
        path = made = arguments.directory / f"infinity-benchmark-{os.getpid()}"
    try:
        if made:
            written_file(path, arguments.size)
        elif path.stat().st_size < arguments.size:
            print(f"{path} is smaller than {arguments.size} bytes.", file=sys.stderr)
            return 2
        results = []
        for case in cases(arguments):
            result = compare(fio, case, path, arguments.size, arguments.pairs)
            results.append(result)
            print(
                f"{case}  ours {result.ours_gb_s:5.2f} GB/s  fio {result.fio_gb_s:5.2f} GB/s  "
                f"ratio {result.ratio:.3f}  cpu {result.ours_cpu_s_per_gib:.3f} against "
                f"{result.fio_cpu_s_per_gib:.3f} s/GiB",
                flush=True,
            )
        report = {
            "facts": facts(path.parent, fio),
            "bytes_per_turn": arguments.size,
            "pairs": arguments.pairs,
            "results": [asdict(result) for result in results],
        }
        if arguments.json:
            print(json.dumps(report))
    finally:
        if made:
            made.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
