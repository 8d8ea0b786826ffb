"""Machine facts: a description of the machine and the software on which a result was measured."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path

import torch

from infinity import cpu_adam
from infinity.system import machine


def machine_facts() -> dict[str, object]:
    """Date, commit, processor, memory and versions of software, by name."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    cpu = machine.cpu()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "cpu": cpu.model,
        "cpus": cpu.allowed,
        "isa": cpu_adam.runnable_isas()[0],
        "memory_gib": round(machine.memory().total / 2**30, 1),
        "kernel": machine.kernel(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
