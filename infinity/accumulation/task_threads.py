"""Task threads: threads that take turns, so that their functions can stop anywhere and go on later.

A generator cannot stop inside another module's forward, nor in the middle of autograd's backward; a thread
can. So a task is a thread that runs only while its owner waits. Torch keeps much of its state per thread, for
example whether autocast is on. A task starts with a copy of its owner's state, and its changes to this state
affect no other thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._device import DeviceContext

from infinity.activations import autograd_hooks


class BrokenOff(BaseException):
    """Raised inside a task to end it. Not an Exception, so that `except Exception` in the task's function
    does not catch it.
    """


class Surroundings:
    """The state that torch keeps for each thread, copied from the thread that makes this object."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        devices = [mode.device for mode in _function_modes() if isinstance(mode, DeviceContext)]
        self._default_device = devices[-1] if devices else None
        self.saved_tensor_hooks = autograd_hooks.top()
        """The pair (pack, unpack) active in the thread, or None."""
        self._threads = torch.get_num_threads()
        self._cuda = torch.cuda.is_initialized()
        self._device = torch.cuda.current_device() if self._cuda else -1
        self._stream = torch.cuda.current_stream() if self._cuda else None
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @staticmethod
    def obstacle() -> str | None:
        """Return why this thread's state cannot be copied to a task, as a sentence; None if it can."""
        if torch._C._len_torch_dispatch_stack():
            return "A TorchDispatchMode is in force, which sees the operations of one thread only."
        if any(not isinstance(mode, DeviceContext) for mode in _function_modes()):
            return "A TorchFunctionMode is in force, which sees the operations of one thread only."
        return None

    def run(self, function: Callable[[], None]) -> None:
        """Call `function` with this object's state as torch's state of the present thread."""
        self._context.copy().run(self._inside, function)

    def _inside(self, function: Callable[[], None]) -> None:
        with self._entered():
            function()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        # OpenMP keeps a number of threads per thread. Torch would set this number in its first parallel loop
        # here, but a matrix product may run earlier, and its bits can depend on the number.
        torch.set_num_threads(self._threads)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            # Backward runs in the task's own thread, also on CUDA. Autograd has only one thread for each
            # device: a task that stopped there would stop the backwards of all other tasks.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._cuda:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            if self._default_device is not None:
                stack.enter_context(torch.device(self._default_device))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._autocast_cache))
            if self.saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
            yield


def _function_modes() -> list[Any]:
    """Return this thread's TorchFunctionModes, the innermost last."""
    return [torch._C._get_function_stack_at(each) for each in range(torch._C._len_torch_function_stack())]


class Task:
    """A function that runs in its own thread, and only while its owner waits in `proceed`; the function calls
    `pause`.
    """

    def __init__(self, function: Callable[[], None], surroundings: Surroundings) -> None:
        self.done = False
        """Whether the function has ended, by a return or an exception."""
        self._function: Callable[[], None] | None = function
        self._surroundings = surroundings
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._entered = False
        self._broken = False

    def proceed(self) -> None:
        """Let the function run to its next `pause` or its end, and wait for that. Raises the function's
        exception, unless that is BrokenOff.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-task", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._broken = True  # the thread, if Ctrl-C came after its start, ends without the function
                self._go.release()
                raise
        self._entered = True
        self._go.release()
        self._back.acquire()
        if self.done:
            self._thread.join()
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # this frame is in its traceback

    def pause(self) -> None:
        """Stop the function until the owner calls `proceed` again. Only the function calls this. Raises
        BrokenOff if the owner has called `break_off`.
        """
        if not self._broken:  # after `break_off` the owner waits for the task's end, not for a pause
            self._back.release()
            self._go.acquire()
        if self._broken:
            raise BrokenOff

    def break_off(self) -> None:
        """End the function by raising BrokenOff in its present or next `pause`. Wait until it has ended.
        Ctrl-C does not end the wait, because the task would then go on without its owner.
        """
        self._broken = True
        self._go.release()
        # Not `join` alone: until Python 3.13, a join that Ctrl-C interrupts takes a running thread for ended.
        while self._entered and not self.done:
            with contextlib.suppress(KeyboardInterrupt):
                self._back.acquire()
        if self._entered and self._thread is not None:
            with contextlib.suppress(KeyboardInterrupt):
                self._thread.join()
        self._error = None

    def _run(self) -> None:
        function, self._function = self._function, None  # the function refers to the owner, so to the task
        assert function is not None
        try:
            self._go.acquire()
            if not self._broken:
                self._surroundings.run(function)
        except BrokenOff:
            pass
        except BaseException as error:
            self._error = error
        finally:
            del function
            self.done = True
            self._back.release()
