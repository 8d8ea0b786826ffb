"""Failure of a command: how an error is printed, by one rank where several have it."""

from __future__ import annotations

import argparse
import json
import sys

import torch.distributed as dist

from infinity.cli.signals import signal_of
from infinity.config import parse_size
from infinity.errors import BudgetError, ConfigError, InfinityError, RankDivergence, RankFailure
from infinity.system import launcher


class Told(Exception):
    """Raised in place of an error that `report` has printed already."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
        """The exit code."""


def report(error: InfinityError, options: argparse.Namespace) -> int:
    """Print an error, with --json also as JSON, and return the exit code.

    Where another rank prints the cause, only a short line is printed.
    """
    launcher.record(error)
    kind, cure, code = type(error).__name__, _cure(error, options), 2 if isinstance(error, ConfigError) else 1
    rank, first, cause = _rank(), *first_error(error)
    if rank != first and (isinstance(error, RankFailure | RankDivergence) or cause == _text(error)):
        print(f"rank {rank} ends with rank {first} ({cause.partition(':')[0]})", file=sys.stderr)
        return code
    print(f"{kind}: {error.cause} {cure}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"error": kind, "cause": error.cause, "cure": cure}), flush=True)
    return code


def first_error(error: BaseException) -> tuple[int, str]:
    """(the rank that was the first to call this, the text of its error): this rank's where none was before,
    where there is one rank only, and where the others cannot be reached.
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
    """Return the sentence to print on how to cure an error.

    If a larger budget cures it, the sentence names the option that sets the budget, with a sufficient size.
    """
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
    """Return `nbytes` as text that a budget option takes, such as "160MiB".

    It is rounded up to whole TiB from 1024 TiB on, to whole GiB from 1024 GiB on, to whole MiB from 8 MiB on,
    and to whole KiB from 8 KiB on. Below 8 KiB it is exact.
    """
    for unit, least in (("TiB", 1024), ("GiB", 1024), ("MiB", 8), ("KiB", 8)):
        factor = parse_size(f"1{unit}")
        if nbytes >= least * factor:
            return f"{-(-nbytes // factor)}{unit}"
    return str(nbytes)
