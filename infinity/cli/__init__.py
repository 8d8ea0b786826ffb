"""Command `infinity`: the command line, with one file for each subcommand."""

from __future__ import annotations

import argparse
import functools
import io
import os
import signal
import sys
from collections.abc import Sequence

from infinity import __version__
from infinity.cli import checkpoint as checkpoint
from infinity.cli import doctor as doctor
from infinity.cli import plan as plan
from infinity.cli import train as train
from infinity.cli import tune as tune
from infinity.cli.command import exit_code, handled, interrupt, stop_code
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
        with handled(interrupt, signal.SIGTERM):  # as Ctrl-C does, so that nothing is left on disk
            code = exit_code(options)
        print(end="", flush=True)
    except KeyboardInterrupt as error:  # outside of the subcommand
        return stop_code(error)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        if sys.stdout is not None:  # Python flushes stdout once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        launcher.record(error)
        raise
    return code
