"""RSS: resident bytes of a process, and their peak, as the kernel counts them.

Nothing here imports infinity, because peers may have an interpreter without it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def read(field: str, process: str = "self") -> int:
    """Read a size from /proc/PID/status; returns bytes, or 0 if the process has ended or lacks the field.

    field: name of the line, for example "VmHWM". process: id of the process.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def restart_peak() -> None:
    """Have this process's peak ("VmHWM") start anew. Where the kernel does not allow it, nothing changes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
