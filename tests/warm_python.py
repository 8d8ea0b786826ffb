"""Python processes that start with torch imported: forks of a process that has only imported torch.

Torch, and what it imports for its first optimizer, take 3.5 s of a CPU. A fork takes 20 ms. `Popen` here is
subprocess.Popen, except that a command of this interpreter with a script, `-c` or `-m` becomes a fork. The
fork has descriptors, a directory, an environment and an import path of its own, and ends as an interpreter
ends. Its parent is the process that asked for it, by adoption (see prctl(2), PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import functools
import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from types import ModuleType
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
MOST_BYTES = 1 << 17
"""Largest size in bytes of a request for a fork, which holds program, arguments and environment."""
MOST_DESCRIPTORS = 16
_LONGEST_ANSWER = 4096
_FREE = 256
"""A number above all descriptor numbers that a fork's program is to have. The process that forks keeps its
socket at this number or above, and a fork first moves the descriptors that it has received there, so that a
descriptor which gets its own number overwrites none of them.
"""

_Popen = subprocess.Popen


class Popen(_Popen[Any]):
    """subprocess.Popen that runs a command of this interpreter in a fork in which torch is imported already.

    Other commands (see `_can_be_warm`), and those with a shell or a preexec_fn, are started as usual.
    """

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:  # type: ignore[override]
        preexec, _, pass_fds, cwd, env, _, _, shell, *pipes = rest[:14]
        stdin, _, _, stdout, _, stderr = pipes
        new_session = rest[19]
        if preexec or shell or not _can_be_warm(args) or max(pass_fds, default=0) >= _FREE:
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        standard = [number if number >= 0 else at for at, number in enumerate((stdin, stdout, stderr))]
        request = {
            "arguments": [os.fspath(each) for each in args[1:]],
            "directory": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "descriptors": [0, 1, 2, *pass_fds],
            "new session": bool(new_session),
        }
        try:
            self.pid = _server().fork(request, [*standard, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _can_be_warm(args: Any) -> bool:
    """Whether a fork can run the command `args`.

    It must be a command of this interpreter, without options that change how the interpreter runs.
    """
    if isinstance(args, (str, bytes)) or len(args) < 2 or args[0] != sys.executable:
        return False
    return args[1] in ("-c", "-m") or not str(args[1]).startswith("-")


class _Server:
    """The process that forks, as seen by the process that asks for forks."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno())]
            # A test may have set a PYTHONPATH of its own, which the forks of other tests must not lack.
            bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            self.process = _Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=bare)

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Have a process forked that runs a program and is a child of this process. Returns its process id.

        request: what the program gets, under the keys "arguments" (those after the interpreter),
        "directory", "environment", "new session" (whether it gets one) and "descriptors" (numbers).
        descriptors: descriptors of this process; each becomes the number at its place in
        request["descriptors"]. Raises OSError where the program cannot be started.
        """
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(_LONGEST_ANSWER).decode()
        if not answer.isdecimal():
            raise OSError(answer or "the process that forks has ended")
        return int(answer)

    def end(self) -> None:
        self._socket.close()
        self.process.wait()


_starting = threading.Lock()
_made = functools.cache(_Server)


def _server() -> _Server:
    with _starting:
        return _made()


def end() -> None:
    """End the process that forks, if there is one."""
    if _made.cache_info().currsize:
        _made().end()
        _made.cache_clear()


# --- in the process that forks --------------------------------------------------------------------------


def serve(asked: socket.socket) -> None:
    """Fork for every request that arrives on `asked`, and run the requested program in the fork.

    Returns in a fork only, when the fork's program has ended. The process itself exits as soon as the other
    end of `asked` is closed.
    """
    parent = os.getppid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            request = json.loads(message)
            try:
                if os.fork() != 0:
                    os._exit(0)
                while os.getppid() != parent:
                    time.sleep(0.0005)
                _become(request, descriptors)
            except BaseException as error:  # or the process that asked would wait for ever
                asked.send(f"{type(error).__name__}: {error}".encode()[:_LONGEST_ANSWER])
                os._exit(1)
            asked.send(str(os.getpid()).encode())
            asked.close()
            _run(request["arguments"])
            return
        for each in descriptors:
            os.close(each)
        os.waitpid(between, 0)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Give this process the session, directory, environment and descriptors that the request asks for.

    descriptors: open descriptors, each of which gets the number at its place in request["descriptors"].
    """
    if request["new session"]:
        os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    apart = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FREE) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(apart, request["descriptors"], strict=True):
        os.dup2(each, number, inheritable=True)
        os.close(each)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    encoding = codecs.lookup(encoding).name
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding=encoding)
    for name, number, how in (("stdout", 1, errors or "strict"), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        file = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
            encoding=encoding,
            errors=how,
            line_buffering=not unbuffered and (name == "stderr" or raw.isatty()),
            write_through=unbuffered,
        )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _run(arguments: list[str]) -> None:
    """Run a program in this process as a new interpreter with these command line arguments would."""
    first, *rest = arguments
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if first in ("-c", "-m"):
        program, *rest = rest
        sys.path[:] = ["" if first == "-c" else os.getcwd(), *paths, *_BASE]
        sys.argv = [first, *rest]
        if first == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            return
        main = ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(program, "<string>", "exec"), vars(main))
        return
    sys.path[:] = [os.path.dirname(os.path.abspath(first)), *paths, *_BASE]
    sys.argv = [first, *rest]
    runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _BASE = sys.path[1:]
    """The import path that every interpreter of this installation has."""
    import torch._dynamo  # noqa: F401

    with contextlib.suppress(ImportError):
        import rich.console
        import rich.progress  # noqa: F401
    gc.collect()
    gc.freeze()
    given = int(sys.argv[1])
    kept = fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, _FREE)
    os.close(given)
    serve(socket.socket(fileno=kept))
