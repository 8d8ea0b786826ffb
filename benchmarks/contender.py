"""Process of one contender of train.py: builds the model, then trains as many steps as the parent asks for.

Only peers/process.py starts this program. Its argument is the number of the file descriptor to which it
writes its replies, each a line of JSON. The first line of stdin is the task (peers/task.py). Each further
line asks for a turn, which is a number of steps: {"lead": untimed steps, "steps": timed steps}. A line with
the key "do" asks for another kind of turn, by a name in WAYS, and has the arguments of its function. The
first reply comes when the model is built, and then one reply after each turn. The process ends when stdin
ends, or when its parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peers import ranked, rss, saving
from peers.task import Batches, Contender, Task

PR_SET_PDEATHSIG = 1
WAYS = {"commit": saving.commit_turn, "save": saving.save_turn, "ranked": ranked.ranked_turn}
"""Name -> function that runs a turn of another kind: (contender, batches, **arguments) -> reply."""


def main() -> int:
    die_with_parent()
    with os.fdopen(int(sys.argv[1]), "w") as replies:

        def reply(**fields: Any) -> None:
            print(json.dumps(fields), file=replies, flush=True)

        parent_line = sys.stdin.readline()
        if not parent_line:
            return 0
        task = Task.from_json(parent_line)
        module = importlib.import_module(f"peers.{task.contender}")
        before = rss.read("VmRSS")
        contender: Contender = module.open_contender(task)
        batches = Batches(task)
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()  # building may take more memory than training
        reply(torch=torch.__version__, threads=torch.get_num_threads(), rss_before=before, **usage())
        for line in sys.stdin:
            request = json.loads(line)
            way = WAYS.get(request.pop("do", None))
            if way is None:
                reply(**turn(task, contender, batches, **request))
            else:
                reply(**way(contender, batches, **request))
        contender.close()
    return 0


def turn(task: Task, contender: Contender, batches: Batches, lead: int, steps: int) -> dict[str, Any]:
    """Train `lead` untimed steps and then `steps` timed steps, and return the reply to the parent process.

    The reply is a dict. "losses": the losses of all steps, untimed ones first. "seconds": mean seconds of a
    timed step. "bytes": mean "read_bytes" and "write_bytes" of a timed step. "rss_peak", "device_peak": as in
    `usage`. "facts": what the contender tells about itself. Untimed steps let the first timed step start as
    in an endless run, with pages that the step before has prefetched.
    """
    losses = [contender.step(*batches.next()) for _ in range(lead)]
    finish(task)
    before, start = usage(), time.perf_counter()
    for _ in range(steps):
        losses.append(contender.step(*batches.next()))
        finish(task)
    seconds, after = (time.perf_counter() - start) / max(1, steps), usage()
    moved = {name: (after[name] - before[name]) // max(1, steps) for name in ("read_bytes", "write_bytes")}
    return {
        "seconds": seconds,
        "losses": losses,
        "bytes": moved,
        "rss_peak": after["rss_peak"],
        "device_peak": after["device_peak"],
        "facts": contender.facts(),
    }


def finish(task: Task) -> None:
    """Wait until the device has finished all work that was queued. Returns at once if it is the CPU."""
    if task.device == "cuda":
        torch.cuda.synchronize()


def usage() -> dict[str, int]:
    """Return the bytes that this process has moved so far, and the peaks of its memory in bytes.

    "read_bytes", "write_bytes": bytes read from and written to storage. "rss_peak": sum of the peak RSS of
    this process and its descendants. "device_peak": peak of torch's CUDA memory, 0 without CUDA.
    """
    moved = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {
        "read_bytes": int(moved["read_bytes"]),
        "write_bytes": int(moved["write_bytes"]),
        "rss_peak": sum(rss.read("VmHWM", process) for process in family()),
        "device_peak": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0,
    }


def family(process: str = "self") -> list[str]:
    """Return the ids of a process and of all its descendants. process: its id, or "self"."""
    found = [process]
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in thread.read_text().split():
                found += family(child)
    return found


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends for any reason."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    raise SystemExit(main())
