"""Saving tasks: contenders of the benchmarks of saves, each in a process of its own, ready to train."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from peers.process import Process
from peers.task import Task
from turns import QUICK, the_text

from infinity.lm import decoder as decoder_module
from infinity.lm.decoder import PRESETS, DecoderConfig

BYTES_ON_DISK = 32
"""Most bytes on disk for each element of a parameter with commits on: 4 for its gradient, and two places of
14 bytes for its value, master and moments."""
SETTLED = 4
"""Number of untimed steps of a process before its first turn."""


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the benchmarks of saves and of ranks share."""
    parser.add_argument("--directory", type=Path, required=True, help="a directory on the disk to use")
    parser.add_argument("--model", choices=PRESETS, default="309m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument(
        "--clip", type=float, default=1.0, help="norm to which gradients are clipped; 0: not clipped"
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one start or turn may take")
    parser.add_argument("--quick", action="store_true", help="a smoke test, whose figures mean nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def decoder_of(options: argparse.Namespace) -> DecoderConfig:
    """The sizes of the model that the options name."""
    return QUICK if options.quick else PRESETS[options.model].decoder


@contextlib.contextmanager
def running(
    options: argparse.Namespace,
    top: Path,
    mode: str,
    *,
    contender: str = "ours",
    commits: bool = False,
    python: str = sys.executable,
) -> Iterator[tuple[Process, Task]]:
    """Context with a contender that has trained `SETTLED` steps; yields its process and its task.

    top: the benchmark's directory. mode: of the contender; for infinity one of budgets.WORDS. commits:
    whether infinity's commits are on; they go to `Task.checkpoint`. python: the contender's interpreter.
    Raises ContenderFailed.
    """
    task = task_of(options, top, contender, mode)
    if commits:
        task = replace(task, checkpoint=f"{task.directory}/checkpoint")
    with Process(f"{contender}:{mode}", task, python, options.timeout) as process:
        process.ready()
        process.turn(SETTLED, 0)
        yield process, task
        process.finish()


def task_of(options: argparse.Namespace, top: Path, contender: str, mode: str) -> Task:
    """The task of a contender, on one rank and without commits, with a new directory in `top` for its files.

    options: those of `add_task_options`. top: the benchmark's directory, where the text is made if it is not
    there yet.
    """
    text = top / "text"
    if not text.exists():
        text.write_bytes(the_text())
    decoder = decoder_of(options)
    return Task(
        contender=contender,
        mode=mode,
        decoder=asdict(decoder),
        decoder_file=str(decoder_module.__file__),
        batch=options.batch,
        seq=options.seq,
        learning_rate=PRESETS[options.model].learning_rate,
        clip=options.clip or None,
        device="cpu",
        directory=tempfile.mkdtemp(prefix=f"{contender}-", dir=top),
        text=str(text),
        budgets={
            "device": None,
            "host": None,
            "nvme": BYTES_ON_DISK * decoder.parameters + (256 << 20),
        },
        states="fp32",
        update="lazy",
    )
