"""Python processes that start with torch, pytest and infinity imported: forks of a process that has only
imported them.

Torch, and what it imports for its first optimizer, take 3.5 s of a CPU, and infinity takes 0.3 s. A fork
takes 20 ms. `Popen` here is subprocess.Popen, except that a command of this interpreter with a script, `-c`
or `-m` becomes a fork. The fork has descriptors, a directory, an environment and an import path of its own.
It ends as an interpreter ends, except that it does not free what is torch's, which would take 0.2 s. Its
parent is the process that asked for it, by adoption (see prctl(2), PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
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

_OF_INFINITY = ("infinity", "infinity.cli")
"""Modules that forks have imported from the start, with all that these import."""

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


def _package_of(request: dict[str, Any]) -> str | None:
    """The path of the infinity/__init__.py that a program imports; None if none is where it is looked for."""
    first = request["arguments"][0]
    start = "" if first in ("-c", "-m") else os.path.dirname(first)
    more = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    installed = [sysconfig.get_path(each) for each in ("purelib", "platlib")]
    for each in (start, *filter(None, more), *installed):
        found = os.path.join(request["directory"], each, "infinity", "__init__.py")
        if os.path.exists(found):
            return os.path.abspath(found)
    return None


class _Server:
    """The two processes that fork, as seen by the process that asks for forks.

    The forks of one have the package infinity that this process imports. Those of the other have none, for
    programs that import another one.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._lock = threading.Lock()
        infinity = importlib.util.find_spec("infinity")
        assert infinity is not None and infinity.origin is not None
        self._package = infinity.origin
        self._sockets, theirs = zip(
            *(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)), strict=True
        )
        numbers = [each.fileno() for each in theirs]
        command = [sys.executable, os.path.abspath(__file__), *map(str, numbers), self._package]
        # A test may have set a PYTHONPATH of its own, which the forks of other tests must not lack.
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = _Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL, env=bare)
        for each in theirs:
            each.close()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Have a process forked that runs a program and is a child of this process. Returns its process id.

        request: what the program gets, under the keys "arguments" (those after the interpreter),
        "directory", "environment", "new session" (whether it gets one) and "descriptors" (numbers).
        descriptors: descriptors of this process; each becomes the number at its place in
        request["descriptors"]. Raises OSError where the program cannot be started.
        """
        asked = self._sockets[_package_of(request) == self._package]
        with self._lock:
            socket.send_fds(asked, [json.dumps(request).encode()], descriptors)
            answer = asked.recv(_LONGEST_ANSWER).decode()
        if not answer.isdecimal():
            raise OSError(answer or "the process that forks has ended")
        return int(answer)

    def end(self) -> None:
        for each in self._sockets:
            each.close()
        self.process.wait()


_starting = threading.Lock()
_made = functools.cache(_Server)


def _server() -> _Server:
    with _starting:
        return _made()


def end() -> None:
    """End the processes that fork, if there are any."""
    if _made.cache_info().currsize:
        _made().end()
        _made.cache_clear()


# --- in the process that forks --------------------------------------------------------------------------


def serve(asked: socket.socket, parent: int) -> None:
    """Fork for every request that arrives on `asked`, and run the requested program in the fork.

    parent: id of the process that asks. Returns in a fork only, when the fork's program has ended. The
    process itself exits as soon as the other end of `asked` is closed and its children have ended.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            with contextlib.suppress(ChildProcessError):
                os.wait()
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


def _leave_to_the_kernel() -> None:
    """Have forks end without freeing what is imported by now.

    An interpreter that ends frees the objects that nothing refers to any more: these here stay referred to.
    Then the destructors of shared libraries run, those of the libraries loaded last first. At a call of
    _exit among them the process ends, so that libraries loaded before this call are left as they are.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(gc.get_objects()))
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


def _import_infinity(initial: str) -> None:
    """Import the modules `_OF_INFINITY`. initial: the path of infinity/__init__.py."""
    before = [*sys.path]
    sys.path.insert(0, os.path.dirname(os.path.dirname(initial)))
    for each in _OF_INFINITY:
        importlib.import_module(each)
    sys.path[:] = before


if __name__ == "__main__":
    _BASE = sys.path[1:]
    """The import path that every interpreter of this installation has."""
    import pytest  # noqa: F401

    if sys.dont_write_bytecode and (cache := os.environ.get("XDG_CACHE_HOME")):
        # Forks import the same helpers again and again, so they keep the bytecode, in the tests' own cache.
        sys.dont_write_bytecode, sys.pycache_prefix = False, os.path.join(cache, "bytecode")
    # Not Triton, which torch 2.15 imports as well: at the end it prints all objects that are not freed.
    sys.modules["triton"] = None  # type: ignore[assignment]
    import torch._dynamo  # noqa: F401

    del sys.modules["triton"]
    with contextlib.suppress(ImportError):
        import rich.console
        import rich.progress  # noqa: F401
    _leave_to_the_kernel()
    gc.collect()
    gc.freeze()
    *given, initial = sys.argv[1:]
    kept = [fcntl.fcntl(int(each), fcntl.F_DUPFD_CLOEXEC, _FREE) for each in given]
    for each in given:
        os.close(int(each))
    asking = os.getppid()
    with_infinity = os.fork() == 0
    if with_infinity:
        _import_infinity(initial)
        gc.freeze()
    os.close(kept[not with_infinity])
    serve(socket.socket(fileno=kept[with_infinity]), asking)
