"""The command `infinity`: one file a subcommand. No traceback for a user's error."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from infinity import __version__
from infinity.cli import doctor as doctor
from infinity.errors import ConfigError, InfinityError

COMMANDS = (doctor,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 failed, 2 asked for something impossible."""
    parser = argparse.ArgumentParser(prog="infinity", description="Virtual memory for training.")
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except InfinityError as error:
        kind = type(error).__name__
        print(f"{kind}: {error}", file=sys.stderr)
        if options.json:
            print(json.dumps({"error": kind, "cause": error.cause, "cure": error.cure}))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return code
