"""Step log: the file of --log, with one JSON object a step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import TextIO

from infinity.errors import storage_errors
from infinity.lm.loop import StepReport


@contextlib.contextmanager
def open_log(path: str | None, *, after: int | None = None) -> Iterator[TextIO | None]:
    """Context that gives the log file of a run, opened to be written, or None if `path` is None.

    after: the step from which the run continues: lines of steps up to this one stay, and the others go. None:
    a new run, for which the file is emptied. Raises StorageError if the file cannot be opened or rewritten.
    """
    if path is None:
        yield None
        return
    if after is not None:
        _cut(path, after)
    with storage_errors("open", path):
        log = open(path, "w" if after is None else "a", encoding="utf-8")  # noqa: SIM115 (closed below)
    try:
        yield log
    finally:
        with contextlib.suppress(OSError):  # a line that could not be written has raised already
            log.close()


def write_step(log: TextIO | None, report: StepReport) -> None:
    """Write a step as one line of JSON, and flush the line, so that a reader of the file sees whole steps."""
    if log is None:
        return
    line = {
        "step": report.step,
        "loss": finite(report.loss),
        "norm": finite(report.norm),
        "lr": report.learning_rate,
        "tokens": report.tokens,
        "seconds": report.seconds,
        "stall_seconds": report.stats.stall_seconds,
        "bytes": {edge.value: each.bytes for edge, each in report.stats.edges.items()},
    }
    with storage_errors("write", log.name):
        log.write(json.dumps(line) + "\n")
        log.flush()


def finite(number: float | None) -> float | None:
    """`number`, or None if it is NaN or infinite, which JSON cannot express. Steps in fp16 can have NaN."""
    return number if number is not None and math.isfinite(number) else None


def _cut(path: str, last: int) -> None:
    """Drop from a log what is no line of a step up to `last`. The file is replaced whole or not at all."""
    path = os.path.realpath(path)  # what a link names is replaced, not the link
    with storage_errors("rewrite", path):
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return
        except FileNotFoundError:
            return
        with contextlib.ExitStack() as undo:
            # A log has the mode that the user gave it, which mkstemp does not know.
            descriptor, beside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".infinity-log-")
            undo.callback(os.unlink, beside)
            with open(descriptor, "wb") as kept, open(path, "rb") as log:
                kept.writelines(line for line in log if _is_kept(line, last))
                kept.flush()
                os.fchmod(descriptor, stat.S_IMODE(os.stat(path).st_mode))
                os.fsync(descriptor)
            os.replace(beside, path)
            undo.pop_all()


def _is_kept(line: bytes, last: int) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # such as a line that a crash tore
        return False
    step = found.get("step") if isinstance(found, dict) else None
    return isinstance(step, int) and step <= last and line.endswith(b"\n")
