"""A tiny preset for tests of `infinity train` and `infinity plan`, with fixed rates for the machine's speed.

Run as a script, this file is the command `infinity` with the tiny preset.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity import cli
from infinity.checkpoint import commit_files
from infinity.lm.decoder import PRESETS, DecoderConfig, Preset
from infinity.planning.machine_rates import MachineRates

SPEEDS = MachineRates(
    disk={"read": 1e9, "write": 1e9, "mixed": 1e9},
    host_stream=1e10,
    link=None,
    flops={torch.bfloat16: 1e11},
    compute_memory=1e10,
)
PATIENCE = 120.0
"""Seconds after which a command counts as hung."""
DIES = "TINY_JOB_DIES"
"""Environment variable: the rank that dies in the first commit."""
SENTENCE = "The quick brown fox jumps over the lazy dog, and {} of them look on.\n"
JSON_KEYS = {
    "infinity",
    "model",
    "parameters",
    "device",
    "text",
    "steps",
    "seconds",
    "held_out_loss",
    "losses",
    "step_seconds",
    "tokens_per_second",
    "ram",
    "nvme",
    "bytes_moved",
    "sample",
    "exported",
    "resumed",
    "stopped",
    "commit",
}
PLAN_KEYS = {
    "infinity",
    "model",
    "parameters",
    "device",
    "tiers",
    "activations",
    "activations_unknown",
    "smallest_budgets",
    "update",
    "update_reason",
    "traffic",
    "prediction",
    "step_seconds",
}


def make_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the preset "tiny", use fixed rates instead of measuring the machine, compute in bf16 on any CPU,
    and let the sample that `infinity train` prints at its end have 3 tokens.
    """
    monkeypatch.setitem(PRESETS, "tiny", Preset(DecoderConfig(width=16, layers=2, heads=2, hidden=32), 1e-2))
    calls = importlib.import_module("infinity.api")  # the name in the package is the function
    monkeypatch.setattr(calls, "measure_rates", lambda *_: SPEEDS)
    monkeypatch.setattr(cli.job, "multiplies", lambda *_: True)
    monkeypatch.setattr(cli.training_run, "sample_tokens", lambda parameters: 3)


class TinyJob:
    """A folder with a text, a folder for pages, and the command-line options that name both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = folder / "pages"
        self.pages.mkdir()
        data = folder / "data"
        data.mkdir()
        for number in range(8):
            text = "".join(SENTENCE.format(number * line) for line in range(150))
            (data / f"{number}.txt").write_text(text)
        keep = ["--activations", "keep"]  # the choice of "auto" takes longer than most runs
        self.options = ["--data", str(data), "--device", "cpu", *keep, "--batch", "2", "--seq", "32"]

    def arguments(self, command: str, *more: object, model: str = "tiny") -> list[str]:
        """Return the arguments for `infinity`: `command`, the job's options, and those in `more`.

        An option in `more` overrides the same option of the job.
        """
        return [command, "--model", model, *self.options, *map(str, more)]

    def nvme(self, size: object = "64MiB") -> list[str]:
        """Return the option that gives NVMe a budget of `size` in the folder `self.pages`."""
        return ["--budget-nvme", f"{self.pages}:{size}"]

    def smallest(self, capsys: pytest.CaptureFixture[str], *more: object) -> dict[str, int]:
        """Run `infinity plan`, and return the bytes of the smallest budgets that suffice, by the tier's name.

        more: further options.
        """
        roomy = ["--budget-device", "64MiB", "--budget-host", "64MiB", *self.nvme()]
        plan = self.plan(capsys, *roomy, *more)
        found: dict[str, int] = plan["smallest_budgets"]
        return found

    def on_disk(self, capsys: pytest.CaptureFixture[str], *more: object) -> list[str]:
        """Return options that set every tier's budget to the smallest that suffices, so that as many pages as
        possible rest on disk.

        more: the other options of the command, on which these budgets depend.
        """
        smallest = self.smallest(capsys, *more)
        memory = ["--budget-device", str(smallest["device"]), "--budget-host", str(smallest["host"])]
        return [*memory, *self.nvme(smallest["nvme"])]

    def plan(self, capsys: pytest.CaptureFixture[str], *more: object, model: str = "tiny") -> dict[str, Any]:
        """Run `infinity plan` and return the JSON object that it prints. more: further options."""
        return run_json(capsys, self.arguments("plan", "--json", *more, model=model))

    def train(self, capsys: pytest.CaptureFixture[str], *more: object, model: str = "tiny") -> dict[str, Any]:
        """Run `infinity train` and return the JSON object that it prints. more: further options."""
        return run_json(capsys, self.arguments("train", "--json", *more, model=model))

    def start(
        self, *arguments: str, program: Sequence[str] = (__file__,), **how: Any
    ) -> subprocess.Popen[str]:
        """Start `infinity` with `arguments` in a process of its own, and return the process.

        program: what Python runs; by default this file, which adds the preset "tiny" to the models that
        `infinity` knows. how: arguments of subprocess.Popen.
        """
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            **how.pop("env", {}),
        }
        return subprocess.Popen([sys.executable, *program, *arguments], text=True, env=environment, **how)


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process at the end of the `with`, so that it does not outlive a failed test."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_json(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> dict[str, Any]:
    """Run `infinity` with these arguments, and return the JSON object that it prints.

    Asserts that it succeeds and prints one line to stdout.
    """
    capsys.readouterr()
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out.count("\n") == 1
    found: dict[str, Any] = json.loads(captured.out, parse_constant=_no_json)
    return found


def run_error(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[str], code: int
) -> tuple[str, str, dict[str, Any]]:
    """Run `infinity` with these arguments, --json included, and assert that it fails with exit code `code`.

    Returns (last line of stderr, all of stderr, the JSON object that it prints).
    """
    capsys.readouterr()
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert set(found) == {"error", "cause", "cure"}
    last = captured.err.splitlines()[-1]
    assert last == f"{found['error']}: {found['cause']} {found['cure']}"
    return last, captured.err, found


def _die_in_the_first_commit() -> None:
    """Kill this rank before its first manifest, once rank 0 has its own. Once only if torchrun starts it."""
    write = commit_files.write

    def dying(*arguments: Any, **_: Any) -> None:
        directory = Path(arguments[1]).parent / "rank-0"
        while not commit_files.generations(directory):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    commit_files.write = dying if first else write


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


if __name__ == "__main__":
    make_tiny(pytest.MonkeyPatch())
    if os.environ.get(DIES) == os.environ.get("RANK", "0"):
        _die_in_the_first_commit()
    sys.exit(cli.main())
