"""Left tasks: nodes that an error in a backward leaves in autograd's queue.

Autograd keeps them in the thread's queue, with their saved tensors, until a later backward runs. At the end
of the process the main thread's queue is destroyed after Python. Torch 2.15 then asks for the GIL to destroy
the hooks of these tensors, and crashes.
"""

from __future__ import annotations

import atexit
import contextlib
import threading

import torch


def drop_at_exit() -> None:
    """Empty the main thread's queue when Python ends."""
    made: list[torch.Tensor] = []
    # Each thread numbers its own nodes. The first of a new thread has the lowest number, so autograd runs it
    # after those that are left.
    thread = threading.Thread(target=lambda: made.append(torch.zeros((), requires_grad=True).mul(1.0)))
    thread.start()
    thread.join()

    @atexit.register
    def drop() -> None:
        with contextlib.suppress(RuntimeError):  # a fork of a process that used CUDA can run no backward
            made[0].backward()
