"""Trial: functions that yield findings, run in processes of their own for a limited time.

A trial that hangs or crashes, in the kernel or in a driver, ends as a finding, and the next one begins. The
processes are forks of one that has only imported this package, so that a trial begins within milliseconds,
and no process has used a device before its trial does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from infinity.cli.finding import Finding
from infinity.errors import InfinityError

START = "forkserver"
"""How processes are started, as for multiprocessing.get_context. Tests inject faults into forks of theirs."""

_REPORT = "Report this, with the text at the end."
_LOG_BYTES = 16000
"""The most bytes of a trial's own output that its finding quotes: the last ones."""
_AFTER = 2.0
"""Seconds after its time-out when a process is killed that has not ended by itself."""


@dataclass(frozen=True)
class Trial:
    """Functions that try one thing together, each in a process of its own."""

    section: str
    name: str
    functions: Sequence[Callable[[], Iterable[Finding]]]
    """They can be pickled. An InfinityError becomes a finding of this trial."""
    seconds: float = 20.0
    """Seconds after which the processes are ended."""


def run(trials: Iterable[Trial], *, seconds: float) -> Iterator[Finding]:
    """Run the trials one after the other, and yield what they find as soon as it is found.

    seconds: the time for all. Trials that have no time left are not begun, which is a failure.
    """
    until = time.monotonic() + seconds
    context: Any = multiprocessing.get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload(["infinity.cli", "torch._dynamo"])  # the first optimizer imports it
    for trial in trials:
        left = min(trial.seconds, until - time.monotonic())
        if left <= 0:
            yield _failure(trial, "not tried", f"The {seconds:.0f} s for all trials were over.")
        else:
            yield from _run(context, trial, left)


def _run(context: Any, trial: Trial, seconds: float) -> Iterator[Finding]:
    waiting: dict[Connection, Any] = {}
    with _log() as (log, place):
        try:
            for function in trial.functions:
                receiver, sender = context.Pipe(duplex=False)
                part = replace(trial, functions=[function], seconds=seconds)
                process = context.Process(target=_process, args=(part, sender, place), daemon=True)
                process.start()
                sender.close()
                waiting[receiver] = process
            begun = time.monotonic()  # the first start waits until what is forked has been imported
            while waiting:
                ready = wait([*waiting], max(0.0, begun + seconds + _AFTER - time.monotonic()))
                if not ready:
                    yield _failure(trial, "hangs", f"It did not end within {seconds:.0f} s.", log)
                    return
                for each in ready:
                    assert isinstance(each, Connection)
                    try:
                        found = each.recv()
                    except (EOFError, OSError):  # the process has ended without a last word
                        process = waiting.pop(each)
                        process.join(_AFTER)
                        late = time.monotonic() - begun >= seconds
                        what = f"did not end within {seconds:.0f} s" if late else _end(process.exitcode)
                        yield _failure(trial, "hangs" if late else "crashes", f"Its process {what}.", log)
                        continue
                    if found is None:
                        waiting.pop(each)
                    else:
                        yield found
        finally:
            for process in waiting.values():
                process.kill()


def _process(part: Trial, sender: Connection, log: str) -> None:
    """Run this process's part of a trial, one function, and send its findings, and None at the end. Ends the
    process after `part.seconds`, and writes to the log where it was. log: a path for all output.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started this one ends it
    faulthandler.dump_traceback_later(part.seconds, exit=True, file=2)
    try:
        for function in part.functions:
            for finding in function():
                sender.send(finding)
    except InfinityError as error:
        sender.send(Finding.of(error, part.section, part.name, "fails"))
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        kind = {"error": type(error).__name__, "log": traceback.format_exc()[-_LOG_BYTES:]}
        sender.send(Finding(part.section, part.name, "fails", kind, True, text, _REPORT))
    sender.send(None)


@contextlib.contextmanager
def _log() -> Iterator[tuple[int | None, str]]:
    """Make a file in memory for what processes write. Yields (descriptor, path); (None, "") without one."""
    try:
        descriptor = os.memfd_create("infinity-trial")
    except OSError:
        yield None, ""
        return
    try:
        yield descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _failure(trial: Trial, found: str, cause: str, log: int | None = None) -> Finding:
    figures = {"error": "TrialFailed"}
    if log is not None:
        size = os.fstat(log).st_size
        figures["log"] = os.pread(log, _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace")
    return Finding(trial.section, trial.name, found, figures, True, cause, _REPORT)


def _end(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"
