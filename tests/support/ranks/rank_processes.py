"""Ranks: fresh processes that run one function of a script together, as torchrun would start them.

A script is a file in tests/ with functions of no arguments, each of which returns something for JSON. Its
last lines are `if __name__ == "__main__": rank_processes.serve(globals())`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import two_nodes
from warm_python import Popen

from infinity.errors import InfinityError

PROGRAMS = Path(__file__).parent
_HELPERS = [str(each) for each in sorted(PROGRAMS.parent.iterdir()) if each.is_dir()]
_MARK = "result of this rank: "


class Outcome(NamedTuple):
    """How a rank ended."""

    code: int
    """Exit status; negative: the signal that ended it."""
    result: Any
    """What the function returned; None if it raised or was killed."""
    error: str
    """Name of the typed error's class, "" if there was none."""
    text: str
    """The typed error's text, or else all that the rank wrote."""
    written: str = ""
    """All that the rank wrote."""


def run(
    script: str,
    function: str,
    *,
    size: int,
    timeout: float = 90.0,
    environment: Mapping[str, str] | None = None,
    nodes: Sequence[Mapping[str, str]] = (),
) -> list[Outcome]:
    """Run `function` of tests/`script` in `size` processes. Returns their outcomes in the order of ranks.

    nodes: by rank, more environment variables, such as those of `two_nodes`.

    timeout: seconds after which all that still run are killed (they are then seen as killed by SIGKILL).
    A rank that was stopped (SIGSTOP) is killed once all others have ended.
    """
    more = {
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        **(environment or {}),
    }
    with contextlib.ExitStack() as stack:
        # Files, for a pipe that nobody reads meanwhile holds up a rank that writes more than 64 KiB.
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(size)]
        processes = [
            _start(script, function, rank, {**more, **(nodes[rank] if nodes else {})}, output)
            for rank, output in enumerate(outputs)
        ]
        try:
            until = time.monotonic() + timeout
            while any(_runs(each) for each in processes) and time.monotonic() < until:
                time.sleep(0.01)
        finally:
            for each in processes:
                with contextlib.suppress(ProcessLookupError):
                    each.send_signal(signal.SIGKILL)
        return [_outcome(each, output) for each, output in zip(processes, outputs, strict=True)]


def serve(functions: Mapping[str, Any]) -> None:
    """Run the function that the command line names, and print its outcome."""
    two_nodes.enter()
    try:
        outcome = {"result": functions[sys.argv[1]]()}
    except InfinityError as error:
        outcome = {"error": type(error).__name__, "text": str(error)}
    print(_MARK + json.dumps(outcome), flush=True)


def free_port() -> int:
    """A TCP port of this machine that nothing uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _start(script: str, function: str, rank: int, more: Mapping[str, str], output: IO[str]) -> Any:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "PYTHONPATH": os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), *_HELPERS]),
        **more,
    }
    command = [sys.executable, str(PROGRAMS / script), function]
    return Popen(command, cwd=PROGRAMS, env=environment, stdout=output, stderr=-2, text=True)


def _runs(process: Any) -> bool:
    """Whether it has neither ended nor been stopped."""
    if process.poll() is not None:
        return False
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T"
    return True


def _outcome(process: Any, output: IO[str]) -> Outcome:
    process.wait()
    output.seek(0)
    written = output.read()
    said = [line for line in written.splitlines() if line.startswith(_MARK)]
    found = json.loads(said[-1].removeprefix(_MARK)) if said else {}
    return Outcome(
        process.returncode, found.get("result"), found.get("error", ""), found.get("text", written), written
    )
