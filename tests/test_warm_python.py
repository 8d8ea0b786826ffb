"""Tests of `warm_python.Popen`, whose processes have torch and infinity imported from the start: their
environment, descriptors, exit codes and parent are those of processes that subprocess.Popen starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm_python

FACTS = """
import json, os, sys
facts = {
    "name": __name__,
    "argv": sys.argv,
    "path": sys.path,
    "directory": os.getcwd(),
    "environment": dict(os.environ),
    "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
    "lines": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "stdin": sys.stdin.read(),
    "parent": os.getppid(),
    "leads a session": os.getsid(0) == os.getpid(),
    "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd")),
    "threads": len(os.listdir("/proc/self/task")),
}
print(json.dumps(facts))
print("on stderr", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scripts")
    (directory / "facts.py").write_text(FACTS)
    return directory / "facts.py"


def facts(kind: Callable[..., Any], *arguments: str, **options: Any) -> tuple[Any, str]:
    """Run the program FACTS in a new process, and return (the facts that it prints, its stderr).

    kind: warm_python.Popen or subprocess.Popen. arguments: the command line after the interpreter, which says
    how FACTS is run. options: of Popen.
    """
    process = kind(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    out, err = process.communicate("given", timeout=60)
    assert process.returncode == 0, err
    return json.loads(out), err


@pytest.mark.parametrize("how", ["script", "code", "module"])
def test_it_finds_what_a_new_interpreter_finds(how: str, script: Path, tmp_path: Path) -> None:
    program = {"script": [str(script)], "code": ["-c", FACTS], "module": ["-m", "facts"]}[how]
    reading, writing = os.pipe()
    set_here = {"PYTHONPATH": str(tmp_path), "OF": "its own", "PYTHONIOENCODING": "latin-1"}
    options: dict[str, Any] = {
        "cwd": script.parent,
        "env": {**os.environ, **set_here, "PYTHONUNBUFFERED": "1" if how == "code" else ""},
        "pass_fds": [writing],
        "start_new_session": how == "script",
    }
    try:
        new, warm = (
            facts(kind, *program, "--option", "a b", **options)
            for kind in (subprocess.Popen, warm_python.Popen)
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert warm[1] == new[1]
    assert {key: (warm[0][key], value) for key, value in new[0].items() if warm[0][key] != value} == {}
    assert warm[0]["parent"] == os.getpid()


FREED = """
class Last:
    def __del__(self, write=__import__("os").write):
        write(1, b"freed\\n")
last = Last()
"""

ENDS = {
    "": (0, "", ""),
    "import sys; sys.exit(3)": (3, "", ""),
    "import sys; sys.exit('a message')": (1, "", "a message"),
    "raise ValueError('a reason')": (1, "", "ValueError: a reason"),
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (-9, "", ""),
    "import atexit; atexit.register(lambda: print('at the end'))": (0, "at the end\n", ""),
    FREED: (0, "freed\n", ""),
    "import threading; threading.Thread(target=lambda: print('a thread')).start()": (0, "a thread\n", ""),
}
"""Programs, each with the (exit code, standard output, last line of standard error) that it must have."""


def test_it_ends_as_interpreters_end() -> None:
    pipe = subprocess.PIPE
    for program, wanted in ENDS.items():
        process = warm_python.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, text=True)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.strip().rpartition("\n")[2]) == wanted, program


def test_a_program_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    for kind in (subprocess.Popen, warm_python.Popen):
        with pytest.raises(OSError, match="No such file"):
            kind([sys.executable, "-c", ""], cwd=tmp_path / "none")


def test_signals_reach_it_and_nobody_is_left() -> None:
    program = "import sys, time; print('ready', flush=True); time.sleep(600)"
    for number in (signal.SIGINT, signal.SIGTERM):
        process = warm_python.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == -number
        assert not Path(f"/proc/{process.pid}").exists()
        process.stdout.close()


def test_a_program_has_the_package_of_its_own_import_path(warm: None, tmp_path: Path) -> None:
    (tmp_path / "infinity").mkdir()
    (tmp_path / "infinity" / "__init__.py").write_text("name = 'another'\n")
    program = (
        "import sys, infinity; print(infinity.name, *(each for each in sys.modules if 'infinity.' in each))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "another\n"


@pytest.mark.parametrize("arguments", [["-X", "dev", "-c", "import sys; print(sys.flags.dev_mode)"], ["-V"]])
def test_what_needs_another_interpreter_gets_one(arguments: list[str], warm: None) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout in ("True\n", f"Python {sys.version.split()[0]}\n")
