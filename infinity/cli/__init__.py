"""Command `infinity`: the command line, with one file for each subcommand."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from infinity import __version__
from infinity.cli import checkpoint as checkpoint
from infinity.cli import doctor as doctor
from infinity.cli import plan as plan
from infinity.cli import train as train
from infinity.cli import tune as tune
from infinity.cli.failure import Told, report
from infinity.cli.ranks import leads
from infinity.cli.signals import interrupt, signal_of
from infinity.errors import InfinityError
from infinity.system import launcher

COMMANDS = (train, plan, tune, doctor, checkpoint)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments`, by default those of the process, and return the exit code.

    0: success. 1: failure. 2: the arguments cannot be used. 130: ended by SIGINT (Ctrl-C). 143: ended by
    SIGTERM. An InfinityError is printed without a traceback.
    """
    parser = argparse.ArgumentParser(prog="infinity", description="Virtual memory for training.")
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the stream cannot encode become "?"
            stream.reconfigure(errors="replace")
    options = parser.parse_args(arguments)
    options.again = functools.partial(parser.parse_args, arguments)  # after a change of defaults
    try:
        with _terminable():
            code = _run(options)
        print(end="", flush=True)
    except KeyboardInterrupt as error:  # outside of the subcommand
        return 128 + signal_of(error)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        if sys.stdout is not None:  # Python flushes stdout once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        launcher.record(error)
        raise
    return code


def _run(options: argparse.Namespace) -> int:
    """Run a subcommand and return its exit code. An InfinityError is printed, with --json also as JSON. Of a
    signal that ends the subcommand at once, --json prints the name, and nothing else does. With several ranks
    the one that has the error prints it; of a signal, rank 0 prints the name.
    """
    try:
        code: int = options.run(options)
    except InfinityError as error:
        return report(error, options)
    except Told as told:
        return told.code
    except KeyboardInterrupt as error:
        number = signal_of(error)
        if options.json and leads():
            print(json.dumps({"stopped": number.name}))
        return 128 + number
    return code


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Context in which SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that nothing is left on disk."""
    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
