"""fio: measures the speed that this kernel and disk give to a program that does nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 4 << 20
DEPTH = 32
_ENGINES = ("io_uring", "libaio")
_MIXED = ("--rwmixread=50", "--time_based")
_ENDLESS = 24 * 3600
_INTERRUPTED = 128
"""Exit code of fio after SIGINT."""
_UNTIL_IT_RUNS = 1.0
"""Seconds to wait until fio has begun its I/O."""


class FioFailed(Exception):
    """Error: fio is not installed, or none of fio's I/O engines works here."""


@dataclass
class Background:
    """Measurements of an fio that runs beside another process. They are 0 until fio has ended."""

    speed: float = 0.0
    """Bytes per second that fio read plus those that it wrote."""
    cpu: float = 0.0
    """CPU time that fio used, in CPU seconds per second that it ran; 1.0 is one busy core."""


class Fio:
    """Runs fio on a file of its own: direct I/O in blocks of 4 MiB, 32 of them in flight.

    Half of the bytes are read and half are written, at the same time.
    """

    def __init__(self, directory: Path, *, nbytes: int = 1 << 30, seconds: float = 1.0) -> None:
        """Have fio write its file in `directory`. nbytes: size of the file. seconds: how long `mixed` runs.

        Raises FioFailed.
        """
        found = shutil.which("fio")
        if found is None:
            raise FioFailed("fio is not installed")
        self._fio, self._path, self._nbytes, self._seconds = found, directory / "fio", nbytes, seconds
        for self.engine in _ENGINES:
            try:
                self._run("write")
                return
            except FioFailed as error:
                last = error
        raise last

    def mixed(self) -> float:
        """Run fio, and return the bytes per second that it read plus those that it wrote.

        Raises FioFailed.
        """
        job = self._run("rw", *_MIXED, f"--runtime={1000 * self._seconds:.0f}ms")
        return _speed(job)

    @contextmanager
    def beside(self, rate: float) -> Iterator[Background]:
        """Run fio in the background while the body of the `with` statement is executed.

        fio moves about `rate` bytes per second, of which it reads half and writes half. Yields a Background,
        whose figures are set when the `with` statement has ended. Raises FioFailed after the body if fio
        failed.
        """
        limit = f"--rate={rate / 2:.0f},{rate / 2:.0f}"
        command = self._command("rw", *_MIXED, limit, f"--runtime={_ENDLESS}s")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
        )
        found = Background()
        try:
            time.sleep(_UNTIL_IT_RUNS)
            yield found
        finally:
            process.send_signal(signal.SIGINT)  # fio ends, and reports what it did until then
            out, error = process.communicate()
        job = self._report(0 if process.returncode == _INTERRUPTED else process.returncode, out, error)
        found.speed = _speed(job)
        found.cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100

    def _run(self, mode: str, *more: str) -> dict[str, Any]:
        done = subprocess.run(
            self._command(mode, *more), capture_output=True, text=True, env=_environment(), check=False
        )
        return self._report(done.returncode, done.stdout, done.stderr)

    def _command(self, mode: str, *more: str) -> list[str]:
        return [
            self._fio,
            "--name=limit",
            f"--filename={self._path}",
            f"--ioengine={self.engine}",
            f"--rw={mode}",
            f"--bs={BLOCK}",
            f"--iodepth={DEPTH}",
            f"--size={self._nbytes}",
            "--direct=1",
            "--thread",
            "--gtod_reduce=1",
            "--scramble_buffers=0",
            "--output-format=json",
            *more,
        ]

    def _report(self, code: int, out: str, error: str) -> dict[str, Any]:
        if code != 0 or "{" not in out:
            raise FioFailed(f"fio with {self.engine} ended with {code}: {error.strip()[-500:]}")
        job: dict[str, Any] = json.loads(out[out.index("{") :])["jobs"][0]
        return job


def _speed(job: dict[str, Any]) -> float:
    moved: int = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    return moved / (max(job["read"]["runtime"], job["write"]["runtime"]) / 1000)


def _environment() -> dict[str, str]:
    """Return environment variables that make fio's malloc ask for huge pages (glibc >= 2.35).

    infinity's buffers have huge pages too, so the comparison is fair.
    """
    return os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
