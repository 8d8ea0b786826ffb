"""Command: code that all commands share: output, errors, signals, exit codes, and the end of all ranks."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch.distributed as dist
from rich.console import Console

from infinity import __version__
from infinity.api import several_ranks
from infinity.config import parse_size
from infinity.errors import BudgetError, ConfigError, InfinityError, RankDivergence, RankFailure
from infinity.ranks import SingleRank
from infinity.system import launcher

# --- output -----------------------------------------------------------------------------------------------


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json, which every command has."""
    text = "print one JSON object as the last line of stdout"
    parser.add_argument("--json", action="store_true", help=text)


class Output:
    """Printer of a command's lines for people and, with --json, of its results as one JSON object. With
    --json the lines for people go to stderr.

    quiet: whether to print nothing, for ranks other than 0.
    """

    def __init__(self, options: argparse.Namespace, *, quiet: bool = False) -> None:
        self.console = Console(stderr=options.json, quiet=quiet)
        self._options, self._quiet = options, quiet

    def say(self, line: str) -> None:
        """Print a text of one or more lines unchanged."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def json(self, found: Mapping[str, Any], *, results: bool = True) -> None:
        """Print `found` as a JSON object if --json was given. results: whether to add the version of
        infinity.
        """
        if self._options.json and not self._quiet:
            print(json.dumps({"infinity": __version__, **found} if results else found), flush=True)


# --- errors -----------------------------------------------------------------------------------------------


def exit_code(options: argparse.Namespace) -> int:
    """Run a command and return its exit code, one of those of `infinity.cli.main`. If a signal interrupts
    the command, rather than letting it end in order, --json prints the signal's name.
    """
    try:
        code: int = options.run(options)
    except InfinityError as error:
        return report(error, options)
    except KeyboardInterrupt as error:
        Output(options, quiet=not leads()).json({"stopped": signal_of(error).name}, results=False)
        return stop_code(error)
    return code


def report(error: InfinityError, options: argparse.Namespace) -> int:
    """Print an error, or one short line if another rank prints the cause, and return the exit code."""
    launcher.record(error)
    kind, cure, code = type(error).__name__, _cure(error, options), 2 if isinstance(error, ConfigError) else 1
    rank, first, cause = _rank(), *first_error(error)
    if rank != first and (isinstance(error, RankFailure | RankDivergence) or cause == _text(error)):
        print(f"rank {rank} ends with rank {first} ({cause.partition(':')[0]})", file=sys.stderr)
        return code
    print(f"{kind}: {error.cause} {cure}", file=sys.stderr, flush=True)
    Output(options).json({"error": kind, "cause": error.cause, "cure": cure}, results=False)
    return code


def first_error(error: BaseException) -> tuple[int, str]:
    """Return (rank, text of its error) of the rank that was the first to call this. If there is one rank, or
    the others cannot be reached, this rank counts as the first.
    """
    mine = _rank(), _text(error)
    if not (dist.is_available() and dist.is_initialized()):
        return mine
    from infinity.distributed.mesh import first_to_tell

    try:
        rank, text = json.loads(first_to_tell("infinity/first error", json.dumps(mine)))
    except (RuntimeError, TimeoutError):  # the process that has the store is gone, or cut off
        return mine
    return rank, text


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return signal_of(error).name
    return f"{type(error).__name__}: {error}"


def _rank() -> int:
    try:
        return launcher.rank()
    except ConfigError:  # which is the error that is reported
        return 0


def _cure(error: InfinityError, options: argparse.Namespace) -> str:
    """The cure of an error. For a budget that is too small, it names the option with a sufficient size."""
    if not isinstance(error, BudgetError) or error.tier is None or error.needed is None:
        return error.cure
    if not hasattr(options, f"budget_{error.tier}"):
        return error.cure
    size = _enough(error.needed)
    if error.tier == "nvme":
        return f"Give --budget-nvme PATH:{size}."
    other = ""
    if error.with_nvme is not None:
        less = f"give --budget-{error.tier} {_enough(error.with_nvme)} and" if error.with_nvme else "add"
        other = f", or {less} --budget-nvme PATH:SIZE, to which pages can go"
    if error.smaller_batch and hasattr(options, "batch"):
        other += ", or lower --batch or --seq"
    return f"Give --budget-{error.tier} {size}{other}."


def _enough(nbytes: int) -> str:
    """`nbytes` as text that a budget option takes, such as "160MiB": rounded up by an eighth at most."""
    for unit, least in (("TiB", 1024), ("GiB", 1024), ("MiB", 8), ("KiB", 8)):
        factor = parse_size(f"1{unit}")
        if nbytes >= least * factor:
            return f"{-(-nbytes // factor)}{unit}"
    return str(nbytes)


# --- signals ----------------------------------------------------------------------------------------------


class Interrupted(KeyboardInterrupt):
    """Raised by `interrupt` at the place where a signal arrives."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of a signal, for `signal.signal`: raises Interrupted."""
    raise Interrupted(number)


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """Return the signal that raised `error`: the signal of an Interrupted, and SIGINT for every other
    KeyboardInterrupt, because Python's own handler handles no other signal.
    """
    return error.signal if isinstance(error, Interrupted) else signal.SIGINT


def stop_code(error: KeyboardInterrupt) -> int:
    """The exit code of a command that a signal has ended: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signal_of(error)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Context in which `handler` handles the signals `numbers`. Does nothing outside of the main thread."""
    before = {}
    try:
        for number in numbers:
            with contextlib.suppress(ValueError):  # not the main thread: the caller handles signals
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


class Stopped(Exception):
    """Raised by `StopFlag.check` after a signal."""


class StopFlag:
    """Remembers the first SIGTERM or SIGINT. A second one raises Interrupted at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def check(self) -> None:
        """Raise Stopped if a signal has arrived."""
        if self.signal is not None:
            raise Stopped

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the flag handles SIGTERM and SIGINT."""
        return handled(self._arrived, signal.SIGTERM, signal.SIGINT)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            interrupt(number, frame)
        self.signal = signal.Signals(number)


# --- ranks ------------------------------------------------------------------------------------------------


def leads() -> bool:
    """Whether this process prints and writes the results: rank 0, or the only one. Raises ConfigError."""
    return not several_ranks(None) or launcher.rank() == 0


@contextlib.contextmanager
def ending_together(ranks: SingleRank, options: argparse.Namespace) -> Iterator[None]:
    """Context in which an error or interruption ends the run on all ranks, so that no rank waits for another.

    With several ranks, an InfinityError is printed and SystemExit is raised in its place. It is printed here
    because torchrun ends all ranks once one has ended, perhaps before this one has closed its files. Enter
    this context inside of contexts that close what connects the ranks, such as the runtime. With one rank,
    errors pass unchanged.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        first_error(error)  # before the others hear of it
        if ranks.fail(error) and isinstance(error, InfinityError):
            raise SystemExit(report(error, options)) from None
        raise
