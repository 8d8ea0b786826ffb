"""Command: what all commands share: output, errors, signals, exit codes, and ranks that end together."""

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
    """What a command prints: lines for people, to stderr with --json, and one JSON object of its results.

    quiet: whether to print nothing, as ranks from 1 on.
    """

    def __init__(self, options: argparse.Namespace, *, quiet: bool = False) -> None:
        self.console = Console(stderr=options.json, quiet=quiet)
        self._options, self._quiet = options, quiet

    def say(self, line: str) -> None:
        """Print a line, or several, as they are."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def json(self, found: Mapping[str, Any], *, results: bool = True) -> None:
        """Print the object of --json, of results with the version of infinity; nothing without the option."""
        if self._options.json and not self._quiet:
            print(json.dumps({"infinity": __version__, **found} if results else found), flush=True)


# --- errors -----------------------------------------------------------------------------------------------


def exit_code(options: argparse.Namespace) -> int:
    """Run a command and return its exit code, as `infinity.cli.main` says. --json prints the name of a signal
    that ends the command at once.
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
    """Print an error, in short where another rank prints the cause, and return the exit code."""
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
    """(the rank that was the first to call this, the text of its error); this rank's where there is one rank
    only, and where the others cannot be reached.
    """
    mine = _rank(), _text(error)
    if not (dist.is_available() and dist.is_initialized()):
        return mine
    from infinity.distributed.mesh import first_to_tell

    try:
        rank, text = json.loads(first_to_tell("infinity/first error", json.dumps(mine)))
    except RuntimeError:  # the process that has the store is gone, or cut off
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
    """The cure of an error: the option that sets a sufficient budget, if that cures it."""
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
    """The signal that raised `error`: SIGINT if `interrupt` did not, for Python's own handler is left."""
    return error.signal if isinstance(error, Interrupted) else signal.SIGINT


def stop_code(error: KeyboardInterrupt) -> int:
    """The exit code of a command that a signal has ended: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signal_of(error)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Context in which `handler` takes the signals. Changes nothing outside of the main thread."""
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
        """Context in which the flag takes the signals."""
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
    """Context whose error, or interruption, ends the run on all ranks; no rank waits for another one then.

    An InfinityError is printed, and SystemExit is raised in its place: torchrun ends all ranks once one has
    ended, which could be before this one has closed its files. Use the context inside of those that close
    what other ranks need. With one rank nothing is changed.
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
