"""fio: what this kernel and disk give to a program that does nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

BLOCK = 4 << 20
DEPTH = 32
_ENGINES = ("io_uring", "libaio")


class FioFailed(Exception):
    """fio is not installed, or no engine of it works here."""


class Fio:
    """Reads and writes at once, half of the bytes each, 4 MiB x 32, direct, over a file kept for the run."""

    def __init__(self, directory: Path, *, nbytes: int = 1 << 30, seconds: float = 1.0) -> None:
        """Write the file. Raises FioFailed."""
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
        """Bytes per second, reads and writes together. Raises FioFailed."""
        job = self._run("rw", "--rwmixread=50", "--time_based", f"--runtime={1000 * self._seconds:.0f}ms")
        moved: int = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        return moved / (max(job["read"]["runtime"], job["write"]["runtime"]) / 1000)

    def _run(self, mode: str, *more: str) -> dict[str, dict[str, int]]:
        command = [
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
        # Has malloc ask for huge pages (glibc >= 2.35), as ours has them.
        environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0 or "{" not in done.stdout:
            raise FioFailed(
                f"fio with {self.engine} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
            )
        job: dict[str, dict[str, int]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return job
