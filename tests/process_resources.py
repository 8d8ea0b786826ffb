"""What this process holds of the kernel's: descriptors and threads, to be compared before and after."""

import gc
import os
from pathlib import Path

EXITING = 0x4
"""PF_EXITING of Linux' include/linux/sched.h, among the flags in proc_pid_stat(5)."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Those that have not begun to exit.

    A join returns when the kernel lets go of the thread's memory, and on a busy machine its task is listed
    for a while after that: counted, it would look like one that nobody had joined.
    """
    return sum(not _exiting(task) for task in Path("/proc/self/task").iterdir())


def resources() -> tuple[int, int]:
    """(descriptors, threads), without those that only garbage holds."""
    gc.collect()
    return descriptors(), threads()


def _exiting(task: Path) -> bool:
    try:
        stat = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    flags = stat[stat.rindex(")") :].split()[7]  # the ninth of all; a name may have spaces and brackets
    return bool(int(flags) & EXITING)
