"""Tasks that take turns: each a function that can stop anywhere and go on later, one of them at a time.

A generator cannot stop inside of somebody else's forward, nor in the middle of autograd's backward; a thread
can. So a task is a thread that runs only while its owner waits for it. Much of torch's state is kept by
thread: a task starts with its owner's, and what it changes (an autocast region, say) stays its own.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._device import DeviceContext


class BrokenOff(BaseException):
    """Ends a task from inside. No Exception, so that no handler of the task's own functions takes it."""


class Surroundings:
    """What torch keeps by thread, as it is in the thread that makes this."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._default_device = torch.get_default_device() if torch._C._len_torch_function_stack() else None
        self.saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        """(pack, unpack) of those in force, or None."""
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
        """Why a task could not be given what is in force in this thread, as a sentence; None if it can."""
        if torch._C._len_torch_dispatch_stack():
            return "A TorchDispatchMode is in force, which sees the operations of one thread only."
        depth = torch._C._len_torch_function_stack()
        modes = [torch._C._get_function_stack_at(each) for each in range(depth)]
        if any(not isinstance(mode, DeviceContext) for mode in modes):
            return "A TorchFunctionMode is in force, which sees the operations of one thread only."
        return None

    def run(self, function: Callable[[], None]) -> None:
        """Call it in this thread as in the one where this was made."""
        self._context.copy().run(self._inside, function)

    def _inside(self, function: Callable[[], None]) -> None:
        with self._entered():
            function()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        # OpenMP's number is the thread's own. Torch would set it in its first parallel loop here; a product
        # may ask earlier, and with another number of threads some have other bits.
        torch.set_num_threads(self._threads)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            # Backward in the task's own thread also on CUDA. Autograd has one thread a device for all else,
            # and a task that stops in it would stop every other task's backward with it.
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


class Task:
    """A function in a thread of its own. `proceed` and `break_off` are its owner's, `pause` the task's."""

    def __init__(self, function: Callable[[], None], surroundings: Surroundings) -> None:
        self.done = False
        """Whether the function has returned, or raised."""
        self._function: Callable[[], None] | None = function
        self._surroundings = surroundings
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._broken = False

    def proceed(self) -> None:
        """Let it run to its next `pause` or its end. Raises what it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-task", daemon=True)
            self._thread.start()
        else:
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
        """Called by the function itself: wait for the next `proceed`. Raises BrokenOff where none comes."""
        if not self._broken:  # else the owner waits for the end, not for this
            self._back.release()
            self._go.acquire()
        if self._broken:
            raise BrokenOff

    def break_off(self) -> None:
        """Have it end where it pauses, or at its next pause if it runs, and wait until it has.

        Ctrl-C does not cut the wait short: what the task does would go on behind the owner's back.
        """
        self._broken = True
        self._go.release()
        while self._thread is not None and self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt:
                continue
        self._error = None

    def _run(self) -> None:
        function, self._function = self._function, None  # which knows its owner, and so the task
        assert function is not None
        try:
            self._surroundings.run(function)
        except BrokenOff:
            pass
        except BaseException as error:
            self._error = error
        finally:
            del function
            self.done = True
            self._back.release()
