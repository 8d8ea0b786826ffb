"""Toy commits: a small protocol that keeps one state in slabs and commits it, with places for mistakes.

The state is a few parts, which change with every step. A part has two places in its slab, and a commit
makes the places of one step durable. The order of a commit's stages is an argument, so that tests can break
it.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from recorded_run import Recording

from infinity.aio import Engine, Faults, Future, wait_all
from infinity.errors import StorageError
from infinity.system.disk_files import DiskFiles

HEADER = 4096
PART = 8192
PARTS = 3
"""Parts of each slab."""
SLABS = ("slab-0", "slab-1")
BLOCK = 4096
TRANSFERS_PER_STEP = 2 * PARTS * PART // BLOCK
STEPS = 6
STEPS_PER_COMMIT = 2
COMMITTED = b"committed"

STAGES = (
    "wait for writes",
    "sync slabs",
    "write headers",
    "checksums",
    "manifest",
    "rename",
    "sync directory",
    "report",
    "free old places",
    "remove old",
)
"""The stages of a commit, in their right order."""


class CarelessFiles(DiskFiles):
    """Disk files that never reach the disk: no sync of a file happens."""

    def sync(self, descriptor: int, path: object) -> None:
        pass


class ToyRun:
    """Runs the protocol in a directory, over two slabs of one engine each. A context manager.

    stages: the stages of every commit, by the names in `_stage`. twins: whether a part's two places are used
    in turn. late_scalars: whether the manifest says which step it is when it is written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        stages: Sequence[str] = STAGES,
        twins: bool = True,
        late_scalars: bool = False,
    ) -> None:
        self.directory = directory
        self._stages, self._twins, self._late_scalars = stages, twins, late_scalars
        self.faults = Faults()
        for slab in SLABS:
            (directory / slab).write_bytes(bytes(HEADER + 2 * PARTS * PART))
        self._engines = [
            Engine(directory, backend="threads", depth=16, block_bytes=BLOCK, faults=self.faults)
            for _ in SLABS
        ]
        self._slabs = [
            engine.open(directory / slab) for engine, slab in zip(self._engines, SLABS, strict=True)
        ]
        self.recording = Recording(self.faults)
        self._disk = DiskFiles(self.recording)
        self._careless = CarelessFiles(self.recording)
        self._memory = mmap.mmap(-1, len(SLABS) * PARTS * PART)
        self._writes: list[Future] = []
        self._durable_place = 0
        self._steps = self._generation = 0

    def __enter__(self) -> ToyRun:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            engine.close()

    def run(self, steps: int = STEPS) -> None:
        """Take some steps, with a commit after every second one. Raises StorageError."""
        while self._steps < steps:
            self._step()
            if self._steps % STEPS_PER_COMMIT == 0:
                self._commit()

    @property
    def _place(self) -> int:
        return 1 - self._durable_place if self._twins else 0

    def _step(self) -> None:
        """Write the next step's parts to the places that no commit holds."""
        wait_all(self._writes)
        self._steps += 1
        self._memory[:] = np.random.default_rng(self._steps).bytes(len(self._memory))
        self._writes = []
        view = memoryview(self._memory)
        for number in range(len(SLABS) * PARTS):
            slab, part = divmod(number, PARTS)
            offset = HEADER + (2 * part + self._place) * PART
            self._writes.append(self._slabs[slab].write(view[number * PART :][:PART], offset))

    def _commit(self) -> None:
        self._generation += 1
        self._saved = self._steps, self._place, [zlib.crc32(part) for part in self._parts()]
        self.recording.mark(f"begun {self._generation}")
        for stage in self._stages:
            self._stage(stage)

    def _parts(self) -> list[bytes]:
        return [self._memory[at : at + PART] for at in range(0, len(self._memory), PART)]

    def _path(self, name: str, generation: int | None = None) -> Path:
        return self.directory / name.format(self._generation if generation is None else generation)

    def _stage(self, stage: str) -> None:
        actions: dict[str, Callable[[], object]] = {
            "wait for writes": lambda: wait_all(self._writes),
            "sync slabs": lambda: wait_all([slab.sync() for slab in self._slabs]),
            "sync one slab": lambda: self._slabs[0].sync().wait(),
            "sync again if it fails": self._sync_again,
            "write headers": lambda: self._write_headers(self._disk),
            "write headers unsynced": lambda: self._write_headers(self._careless),
            "checksums": lambda: self._write_checksums(self._disk),
            "checksums unsynced": lambda: self._write_checksums(self._careless),
            "manifest": lambda: self._write_manifest(self._disk),
            "manifest unsynced": lambda: self._write_manifest(self._careless),
            "rename": lambda: self._disk.rename(self._path(".commit-{}.tmp"), self._path("commit-{}")),
            "sync directory": lambda: self._disk.sync_directory(self.directory),
            "report": lambda: self.recording.mark(f"committed {self._generation}"),
            "free old places": self._free_old_places,
            "remove old": self._remove_old,
            "write next step": self._step,
            "release writes": self.faults.release,
        }
        actions[stage]()

    def _sync_again(self) -> None:
        for slab in self._slabs:
            try:
                slab.sync().wait()
            except StorageError:
                slab.sync().wait()

    def _write_headers(self, disk: DiskFiles) -> None:
        if self._generation > 1:
            return
        for slab in SLABS:
            path = self.directory / slab
            with open(path, "r+b") as file:
                disk.write(file.fileno(), path, 0, COMMITTED)
                disk.sync(file.fileno(), path)

    def _write_checksums(self, disk: DiskFiles) -> None:
        disk.create(self._path("commit-{}.safetensors"), json.dumps(self._saved[2]).encode())

    def _write_manifest(self, disk: DiskFiles) -> None:
        step, place, checksums = self._saved
        scalars = self._steps if self._late_scalars else step
        # Padded to several sectors, so that it can be torn.
        body = json.dumps([self._generation, scalars, place, zlib.crc32(json.dumps(checksums).encode())])
        content = body.ljust(1500)
        disk.create(self._path(".commit-{}.tmp"), f"{content}{zlib.crc32(content.encode()):08x}".encode())

    def _free_old_places(self) -> None:
        self._durable_place = self._saved[1]

    def _remove_old(self) -> None:
        for name in ("commit-{}", "commit-{}.safetensors"):
            self._disk.remove(self._path(name, self._generation - 1))


def load(directory: Path) -> tuple[int, str | None]:
    """The generation of the newest valid commit or 0, and what is wrong with its content or None."""
    numbers = [path.name.removeprefix("commit-") for path in directory.glob("commit-*")]
    for generation in sorted((int(number) for number in numbers if number.isdigit()), reverse=True):
        manifest = (directory / f"commit-{generation}").read_bytes()
        body, checksum = manifest[:-8], manifest[-8:]
        if not body or checksum != f"{zlib.crc32(body):08x}".encode():
            continue
        number, step, place, sum_of_checksums = json.loads(body)
        data = directory / f"commit-{generation}.safetensors"
        if not data.exists() or zlib.crc32(data.read_bytes()) != sum_of_checksums:
            continue
        if number != generation or step != generation * STEPS_PER_COMMIT:
            return generation, f"Commit {generation} has the scalars of step {step}."
        return generation, _wrong_part(directory, place, json.loads(data.read_bytes()))
    return 0, None


def _wrong_part(directory: Path, place: int, checksums: list[int]) -> str | None:
    for number, checksum in enumerate(checksums):
        slab, part = divmod(number, PARTS)
        with open(directory / SLABS[slab], "rb") as file:
            if not file.read(HEADER).startswith(COMMITTED):
                return f"{SLABS[slab]} of a commit counts as uncommitted."
            file.seek(HEADER + (2 * part + place) * PART)
            if zlib.crc32(file.read(PART)) != checksum:
                return f"Part {part} of {SLABS[slab]} has other bytes than were committed."
    return None


def check(directory: Path, marks: Sequence[str]) -> str | None:
    """Whether a crash state has the last reported commit or the one begun after it, whole."""
    reached = {"begun": 0, "committed": 0}
    for mark in marks:
        what, number = mark.split()
        reached[what] = int(number)
    generation, wrong = load(directory)
    if wrong is None and generation < reached["committed"]:
        return f"Commit {generation} is loaded, and {reached['committed']} was reported."
    if wrong is None and generation > reached["begun"]:
        return f"Commit {generation} is loaded, and was not begun."
    return wrong
