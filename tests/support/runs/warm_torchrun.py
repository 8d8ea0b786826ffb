"""torchrun, except that its ranks are forks with torch imported: see warm_python.py."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Sequence
from typing import Any

import warm_python


class Popen(warm_python.Popen):
    """A rank. torchrun gives it the option -u, which forks cannot have; PYTHONUNBUFFERED says the same."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        super().__init__([each for each in args if each != "-u"], **options)


if __name__ == "__main__":
    os.environ["PYTHONUNBUFFERED"] = "1"
    subprocess.Popen = Popen  # type: ignore[misc]
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    finally:
        warm_python.end()
