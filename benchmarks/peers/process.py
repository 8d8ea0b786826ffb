"""Process: starts a contender in a process of its own (contender.py), and talks to it.

A contender is infinity or another program, training the same model in the same benchmark. Its process ends
when the parent process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.task import Task

_CHILD = Path(__file__).parents[1] / "contender.py"
_LAST_WORDS = 2000


class ContenderFailed(Exception):
    """Error: a contender's process ended early or took too long. The text has the end of its output."""


class Process:
    """A contender in a process of its own, to be used in a `with` statement.

    The end of the statement kills the process and removes the directory `task.directory`. name: the name of
    the contender in error messages. task: the training job. python: path of the interpreter that runs the
    contender. timeout: seconds to wait for a reply. environment: variables of the process, by name, besides
    those of this process. command: words before the interpreter, which start it elsewhere.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        python: str,
        timeout: float,
        *,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.timeout = timeout
        """Seconds to wait for a reply, or for the end of the process."""
        self._directory = Path(task.directory)
        self._log = self._directory / "log"
        self._left = False
        reading, writing = os.pipe()
        # Extensions that are compiled at first use call tools by name: the tools of the contender's own
        # interpreter must come first.
        variables = (
            os.environ
            | (environment or {})
            | {
                "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            }
        )
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*command, python, str(_CHILD), str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                env=variables,
                start_new_session=True,  # the parent alone handles Ctrl-C
            )
        os.close(writing)
        self._replies = os.fdopen(reading)
        self._send(task.to_json())

    def ready(self) -> dict[str, Any]:
        """Wait until the contender has built its model, and return its first reply. Raises ContenderFailed.

        The reply has the version of torch ("torch"), the number of torch's threads ("threads"), the RSS
        before the model was built ("rss_before"), and the entries of `usage` in contender.py.
        """
        return self._reply()

    def turn(self, lead: int, steps: int) -> dict[str, Any]:
        """Have the contender train `lead` untimed and then `steps` timed steps, and return its reply.

        The reply is the result of `turn` in contender.py. Raises ContenderFailed if the process has ended
        or does not reply in time.
        """
        self._send(json.dumps({"lead": lead, "steps": steps}))
        return self._reply()

    def ask(self, way: str, **arguments: Any) -> dict[str, Any]:
        """Have the contender run a turn of the kind `way`, a name in WAYS of contender.py; return its reply.

        Raises ContenderFailed as `turn` does.
        """
        self._send(json.dumps({"do": way} | arguments))
        return self._reply()

    def finish(self) -> None:
        """Ask the contender to close and end. Raises ContenderFailed if it fails or does not end in time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            raise self._failed("did not end") from None
        if code != 0:
            raise self._failed(f"ended with {code}")

    def kill(self) -> None:
        """Kill the process. Whoever waits for its reply, in another thread, gets ContenderFailed."""
        self._process.kill()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._left:
            return
        self._left = True
        self._process.kill()
        for process in _session(self._process.pid):  # compilers that it started have other process groups
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        self._replies.close()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None

    def _reply(self) -> dict[str, Any]:
        if not select.select([self._replies], [], [], self.timeout)[0]:
            raise self._failed(f"did not answer in {self.timeout:.0f} s")
        line = self._replies.readline()
        if not line:
            raise self._failed(f"ended with {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failed(self, what: str) -> ContenderFailed:
        words = self._log.read_text(errors="replace")[-_LAST_WORDS:].strip()
        return ContenderFailed(f"{self.name} {what}. Its last words:\n{words}")


def _session(leader: int) -> list[int]:
    """Return the ids of the processes in a session. leader: id of the process that leads the session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            # PID (name) state parent group session; the name may contain any characters
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(stat.parent.name))
    return found
