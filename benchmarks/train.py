"""Training steps of a decoder: ours and a peer in turns, beside the limit that this machine sets.

Each contender is a process of its own. While one trains a turn, the others wait, so that all meet the same
minute of a noisy disk; the order is swapped each round, ratios are taken within a round, and between turns
the disk is measured by our engine. The limit of a step is, on the CPU, max(compute + update, disk), and on a
GPU max(compute, update, disk, link): compute is the same model's forward and backward with everything in
memory, before and after the turns; the rest are the step's bytes over what the edges do in this very run.

    python benchmarks/train.py --model 309m --peer-python VENV/bin/python --directory /mnt/nvme0
    python benchmarks/train.py --model 926m --capacity --directory /mnt/nvme0 --json

`--json`: the last line of stdout is one JSON object. `--quick`: a smoke test, its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from limits import Speeds, compute_seconds, limit_of
from machine_facts import machine_facts
from peers.process import ContenderFailed, Process
from peers.task import Task
from training_report import report_of, show

from infinity.lm import decoder as decoder_module
from infinity.lm.decoder import DecoderConfig
from infinity.lm.presets import PRESETS

QUICK = DecoderConfig(width=64, layers=2, heads=2, hidden=192)
BUDGETS: dict[str, tuple[str | None, str]] = {
    "309m": (None, "1GiB"),
    "926m": ("1GiB", "2GiB"),
    "4b": ("2GiB", "4GiB"),
    "7b": ("3GiB", "6GiB"),
}
"""Model -> device and host budgets that leave most of it to the disk; None: the device is the host's RAM."""
OTHERS = (None, "256MiB")
BYTES_OF_STATE = 16
"""On disk for each parameter, at the most: parameter, gradient, the rest of its master, two moments."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    model: str
    peer: str
    peer_mode: str
    peer_python: str
    directory: Path
    device: str
    steps: int
    warm_up: int
    rounds: int
    batch: int
    seq: int
    budget_host: str | None
    budget_device: str | None
    timeout: float
    capacity: bool
    quick: bool
    json: bool

    @property
    def decoder(self) -> DecoderConfig:
        return QUICK if self.quick else PRESETS[self.model].decoder

    def budgets(self) -> dict[str, str | int | None]:
        """Of ours, as Budget takes them."""
        device, host = BUDGETS.get(self.model, OTHERS)
        if self.device == "cuda" and device is None:
            device = host
        nvme = BYTES_OF_STATE * self.decoder.parameters + (256 << 20)
        return {"device": self.budget_device or device, "host": self.budget_host or host, "nvme": nvme}


def parse(argv: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="309m")
    parser.add_argument("--peer", choices=("deepspeed", "torch"), default="deepspeed")
    parser.add_argument(
        "--peer-mode", choices=("nvme", "cpu"), default="nvme", help="where DeepSpeed offloads"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="the peer's interpreter")
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--steps", type=int, default=2, help="timed steps a turn, after one that is not")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the first round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--budget-host", metavar="SIZE")
    parser.add_argument("--budget-device", metavar="SIZE")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds that one turn may take")
    parser.add_argument("--capacity", action="store_true", help="ours alone")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    found = vars(parser.parse_args(argv))
    found["device"] = found["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    if found["quick"]:
        found |= {"steps": 1, "warm_up": 2, "rounds": 2, "seq": 32}
        found["budget_host"] = found["budget_host"] or "4MiB"
    found["directory"] = found["directory"].resolve()
    return Options(**found)


@contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, gone afterwards also when this process is told to end."""

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


class Bench:
    """One run: its contenders, and what it has measured so far."""

    def __init__(self, options: Options, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.text = directory / "text"
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        self.text.write_bytes(b"".join(path.read_bytes() for path in sources)[: 1 << 20])
        self.speeds = Speeds(directory, options.device, quick=options.quick)
        self.compute: list[float] = []
        self.ready: dict[str, dict[str, Any]] = {}
        self.turns: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, str] = {}

    def task(self, contender: str, mode: str, decoder: DecoderConfig | None = None) -> Task:
        """A job in a directory of its own."""
        preset = PRESETS[self.options.model]
        return Task(
            contender=contender,
            mode=mode,
            decoder=asdict(decoder or self.options.decoder),
            decoder_file=str(decoder_module.__file__),
            batch=self.options.batch,
            seq=self.options.seq,
            learning_rate=preset.learning_rate,
            device=self.options.device,
            directory=tempfile.mkdtemp(prefix=f"{contender}-", dir=self.directory),
            text=str(self.text),
            budgets=self.options.budgets(),
        )

    def run(self) -> None:
        """Fills `turns`, `speeds` and `compute`. Raises ContenderFailed only where ours fails."""
        self._measure_compute()
        with ExitStack() as stack:
            contenders = [self._open(stack, "infinity", self.task("ours", ""), sys.executable)]
            if not self.options.capacity:
                contenders += self._open_peer(stack)
            for number in range(self.options.rounds):
                order = contenders if number % 2 == 0 else contenders[::-1]
                for process in order:
                    self.speeds.measure()
                    self._turn(process)
                contenders = [each for each in contenders if each.name not in self.failures]
            self.speeds.measure()
            for process in contenders:
                process.finish()
        if not self.options.quick:
            self._measure_compute()

    def _open(self, stack: ExitStack, name: str, task: Task, python: str) -> Process:
        process = stack.enter_context(Process(name, task, python, self.options.timeout))
        self.ready[name] = process.ready()
        self.turns[name] = []
        process.turn(self.options.warm_up, 0)
        return process

    def _open_peer(self, stack: ExitStack) -> list[Process]:
        options = self.options
        contender, mode = {"deepspeed": ("deepspeed", options.peer_mode), "torch": ("plain", "train")}[
            options.peer
        ]
        name = f"{options.peer} {mode}" if options.peer == "deepspeed" else options.peer
        try:
            return [self._open(stack, name, self.task(contender, mode), options.peer_python)]
        except ContenderFailed as error:
            self._failed(name, error)
            return []

    def _turn(self, process: Process) -> None:
        try:
            self.turns[process.name].append(process.turn(1, self.options.steps))
        except ContenderFailed as error:
            if process.name == "infinity":
                raise
            self._failed(process.name, error)
            return
        last = self.turns[process.name][-1]
        print(f"{process.name:16} {last['seconds']:8.2f} s/step   loss {last['losses'][-1]:.3f}", flush=True)

    def _failed(self, name: str, error: ContenderFailed) -> None:
        self.failures[name] = str(error)
        print(error, file=sys.stderr)

    def _measure_compute(self) -> None:
        """Before and after, so that what the machine's speed does in between is seen."""
        self.compute.append(compute_seconds(self.options.decoder, self.options.device, self._compute_turn))

    def _compute_turn(self, decoder: DecoderConfig) -> float:
        task = self.task("plain", "compute", decoder)
        with Process("compute", task, sys.executable, self.options.timeout) as process:
            process.ready()
            process.turn(self.options.warm_up, 0)
            return statistics.median(process.turn(0, 1)["seconds"] for _ in range(self.options.rounds))


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with fresh_directory(options.directory) as directory:
        bench = Bench(options, directory)
        try:
            bench.run()
        except ContenderFailed as error:
            print(error, file=sys.stderr)
            return 1
    facts = machine_facts()
    if options.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    settings = asdict(options) | {"directory": "", "peer_python": ""}
    report = report_of(
        bench.ready,
        bench.turns,
        limit_of(bench.turns["infinity"], bench.speeds, bench.compute, options.device),
    )
    report = {
        "benchmark": "train",
        "machine": facts,
        "settings": settings,
        "parameters": options.decoder.parameters,
        "budgets": options.budgets(),
        "failures": bench.failures,
    } | report
    show(report)
    if options.json:
        print(json.dumps(report))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
