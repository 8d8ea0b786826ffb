"""Turns: contenders (processes that train the same model with infinity or with a peer) train one after
another, round by round. The machine's speeds are measured between the turns.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from limits import Speeds, compute_bytes, compute_seconds
from peers.process import ContenderFailed, Process
from peers.task import Task
from specs import Spec

from infinity.lm import decoder as decoder_module
from infinity.lm.decoder import PRESETS, DecoderConfig
from infinity.system import machine

QUICK = DecoderConfig(width=64, layers=2, heads=2, hidden=192)
BYTES_OF_STATE = 16
"""Most bytes on disk for each element of a parameter: 2 for its bf16 value, 2 for the low 16 bits of its fp32
master that bf16 lacks, 4 for the gradient, and 4 for each of two moments."""
_SHARE_OF_MEMORY = 0.9
"""Fraction of the usable memory up to which the peaks of all processes may add up if the processes are to be
kept alive between rounds."""
_LEAST_TIMEOUT = 15.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of the benchmark: the model, the contenders, and the numbers of steps and rounds."""

    model: str
    specs: tuple[Spec, ...]
    directory: Path
    device: str
    steps: int
    """Number of timed steps in a turn, after one untimed step."""
    warm_up: int
    """Number of untimed steps that a process trains after its start, before its first turn."""
    rounds: int
    batch: int
    seq: int
    clip: float
    """Norm to which all gradients together are clipped; 0 if they are not clipped."""
    timeout: float
    """Seconds that the start of a process, or one turn, may take."""
    seconds: float
    """Seconds after the start of the benchmark after which no further turn begins. The report then has what
    was measured until then."""
    peer_python: str
    processes: str
    """How long processes live. "kept": through all rounds. "fresh": for one turn. "auto": for one turn in the
    first round, and through all later rounds if the peaks of all processes fit in memory together."""
    quick: bool

    @property
    def decoder(self) -> DecoderConfig:
        """The sizes of the model: those of the preset `model`, or smaller ones if `quick` is set."""
        return QUICK if self.quick else PRESETS[self.model].decoder


@contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    """Context with a new directory in `parent`, which is removed at the end, even after SIGTERM or SIGHUP."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    made = Path(tempfile.mkdtemp(prefix="infinity-train-", dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def the_text() -> bytes:
    """The bytes that contenders train on: 1 MiB of the sources of Python's standard library."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    return b"".join(path.read_bytes() for path in sources)[: 1 << 20]


class Bench:
    """One run of the benchmark: its contenders (processes that train with infinity or with a peer), and the
    measurements so far.
    """

    def __init__(self, job: Job, directory: Path) -> None:
        """Prepare the run in `directory`."""
        self.job = job
        self._directory = directory
        self._text = directory / "text"
        self._text.write_bytes(the_text())
        self.speeds = Speeds(directory, job.device, quick=job.quick)
        self.compute: list[float] = []
        self.ready: dict[str, dict[str, Any]] = {}
        self.turns: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, str] = {}
        self.kept = job.processes == "kept"
        """Whether processes stay alive from one round to the next round."""
        self._deadline = time.monotonic() + job.seconds
        self._alive: dict[str, Process] = {}
        self._until_the_end = ExitStack()

    def run(self) -> None:
        """Run all rounds, and collect the measurements.

        `ready` and `turns` get, by a contender's name, its reply when its model is built and its replies
        after its turns. `failures` gets the error message of each contender that failed. `speeds` gets the
        machine's speeds, and `compute` the seconds of a forward and backward in memory.
        """
        with self._until_the_end:
            for number in range(self.job.rounds):
                if number == 0 or (self.job.device == "cpu" and not self.job.quick and self._left() > 0):
                    self._measure_compute()
                order = self.job.specs if number % 2 == 0 else self.job.specs[::-1]
                for spec in order:
                    if spec.name not in self.failures and self._left() > 0:
                        self._turn(number, spec)
                if number == 0 and self.job.processes == "auto":
                    self.kept = self._fit_together()
            self.speeds.measure()
            for process in [*self._alive.values()]:
                with self._failures(process.name):
                    process.finish()
        if self._left() <= 0:
            print(f"{self.job.seconds:.0f} s are over: no further turn was begun", file=sys.stderr)
        elif not self.job.quick:
            self._measure_compute()

    @contextmanager
    def computing(self, decoder: DecoderConfig) -> Iterator[Process]:
        """Context that yields a process which has run its warm-up steps and can be asked for turns.

        A step of this process is a forward and backward of `decoder` without an update, with everything in
        memory.
        """
        task = self._task(Spec(name="compute", contender="plain", mode="compute"), decoder)
        with Process("compute", task, sys.executable, self._timeout()) as process:
            process.ready()
            process.turn(self.job.warm_up, 0)
            yield process

    @property
    def complete(self) -> bool:
        """Whether every contender has trained and no contender has failed."""
        return not self.failures and all(spec.name in self.turns for spec in self.job.specs)

    def _left(self) -> float:
        """Seconds that are left until no further turn may begin."""
        return self._deadline - time.monotonic()

    def _turn(self, number: int, spec: Spec) -> None:
        if spec.ours or not self.speeds.mixed:
            self.speeds.measure()
        with self._failures(spec.name), ExitStack() as this_turn:
            process = self._alive.get(spec.name)
            if process is None:
                process = (self._until_the_end if self.kept else this_turn).enter_context(self._process(spec))
                self.ready[spec.name] = process.ready()
                process.timeout = self._timeout()
                process.turn(self.job.warm_up, 0)
                if self.kept:
                    self._alive[spec.name] = process
            process.timeout = self._timeout()
            turn = process.turn(1, self.job.steps) | {"round": number}
            self.turns.setdefault(spec.name, []).append(turn)
            print(f"{spec.name:32} {turn['seconds']:8.2f} s/step   loss {turn['losses'][-1]:.3f}", flush=True)
            if not self.kept:
                process.finish()

    @contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        """Context that catches ContenderFailed and records it in `failures` under the contender's `name`. The
        contender gets no further turns.
        """
        try:
            yield
        except ContenderFailed as error:
            self.failures[name] = str(error)
            print(error, file=sys.stderr)
            failed = self._alive.pop(name, None)
            if failed is not None:
                failed.__exit__()  # frees its memory for the other contenders

    def _fit_together(self) -> bool:
        """Whether the processes of all contenders fit in memory together, by their peaks in their last turns.

        If the CPU computes, room is left for the process that measures forward and backward in memory. No
        process may be alive when this method is called.
        """
        last = [turns[-1] for turns in self.turns.values()]
        room = _SHARE_OF_MEMORY * machine.memory().usable
        if self.job.device == "cpu":
            room -= compute_bytes(self.job.decoder)
        fits = sum(turn["rss_peak"] for turn in last) <= room
        if self.job.device == "cuda":
            free = torch.cuda.mem_get_info()[0]
            fits = fits and sum(turn["device_peak"] for turn in last) <= _SHARE_OF_MEMORY * free
        return fits

    def _process(self, spec: Spec) -> Process:
        python = sys.executable if spec.ours else self.job.peer_python
        return Process(spec.name, self._task(spec), python, self._timeout())

    def _timeout(self) -> float:
        """Seconds to wait for a reply of a process: the time that is left to the run, but at least 15 s and
        at most `job.timeout`.
        """
        return min(self.job.timeout, max(self._left(), _LEAST_TIMEOUT))

    def _task(self, spec: Spec, decoder: DecoderConfig | None = None) -> Task:
        """Make the task that tells a contender's process what to train, and a new directory for its files.

        spec: the contender, its mode and its budgets. decoder: sizes of the model, by default the job's.
        """
        decoder = decoder or self.job.decoder
        most = str(BYTES_OF_STATE * decoder.parameters + (256 << 20))
        return Task(
            contender=spec.contender,
            mode=spec.mode,
            decoder=asdict(decoder),
            decoder_file=str(decoder_module.__file__),
            batch=self.job.batch,
            seq=self.job.seq,
            learning_rate=PRESETS[self.job.model].learning_rate,
            clip=self.job.clip or None,
            device=self.job.device,
            directory=tempfile.mkdtemp(prefix=f"{spec.contender}-", dir=self._directory),
            text=str(self._text),
            budgets={
                "device": spec.device,
                "host": spec.host,
                "nvme": None if spec.nvme == "none" else spec.nvme or most,
            },
            states=spec.states,
            update=spec.update,
        )

    def _measure_compute(self) -> None:
        """Measure the seconds of forward and backward in memory once more, and append them to `compute`.

        This is done before and after the run, so that a change of the machine's speed shows. The speed of a
        CPU that others share changes within minutes, so on a CPU it is done before every round, too.
        """
        self.compute.append(compute_seconds(self.job.decoder, self.job.device, self._compute_turn))

    def _compute_turn(self, decoder: DecoderConfig) -> float:
        with self.computing(decoder) as process:
            return statistics.median(process.turn(0, 1)["seconds"] for _ in range(self.job.rounds))
