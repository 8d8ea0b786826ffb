"""Pager: fetches parameter pages before modules and operations use them, tracks exported views, and knows
which calls (forwards, state_dicts) are open in each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from infinity.activations.heap import HeapGuard
from infinity.activations.residual_pages import ResidualPages
from infinity.activations.saved_tensors import PageReference, SavedBytes, has_memory, saving
from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError
from infinity.gradients.loss_scale import LossScale
from infinity.model.paged_parameter import PagedParameter, Place, is_rounded
from infinity.model.transforms import in_transform, with_views
from infinity.pages.edits import EditTracker
from infinity.pages.health import Health
from infinity.pages.parameter_page import ParameterPage, parameter_version
from infinity.prefetch.engine import PrefetchEngine
from infinity.prefetch.trace import AccessKind
from infinity.system.lock import RuntimeLock
from infinity.telemetry.stats import Phase

if TYPE_CHECKING:
    from infinity.training_step import TrainingStep


class OpenCalls:
    """The open calls of each thread, innermost last, each with the stack frame that made it and context
    managers to exit at its end. Once the frame has left the thread's stack, the call is over, even if no hook
    has recorded its end.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def begin(self, caller: FrameType, *inside: AbstractContextManager[Any] | None) -> None:
        """Record that a call begins in this thread, after ending calls that are over (`prune`). caller: the
        frame that made the call. inside: context managers to enter now and exit when the call ends.
        """
        self.prune()
        stack = ExitStack()
        for each in inside:
            if each is not None:
                stack.enter_context(each)
        self._calls.append((caller, stack))

    def end(self) -> None:
        """End this thread's innermost open call, if there is one, and exit its context managers."""
        if self._calls:
            self._calls.pop()[1].close()

    def prune(self) -> None:
        """End those calls of this thread whose caller's frame has been left. No hook has recorded the end of
        such a call.
        """
        calls = self._calls
        while calls and _is_left(calls[-1][0]):
            self.end()

    def __bool__(self) -> bool:
        """Whether this thread has an open call. Calls that are over are ended first."""
        self.prune()
        return bool(self._calls)

    @property
    def _calls(self) -> list[tuple[FrameType, ExitStack]]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        calls: list[tuple[FrameType, ExitStack]] = self._local.calls
        return calls


def _is_left(frame: FrameType) -> bool:
    """Whether the function of a frame has returned or raised; if so, the frame's variables are dropped.

    frame: not a generator's. The test is to clear the frame, which Python refuses while the function runs.
    """
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


class Pager:
    """Gives modules, operations and autograd access to the parameter pages of one runtime, under its lock."""

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        addresses: dict[int, ParameterPage],
        prefetch_engine: PrefetchEngine,
        edits: EditTracker,
        *,
        scale: LossScale,
        health: Health,
        heap: HeapGuard,
        lock: RuntimeLock,
        residual: ResidualPages | None = None,
    ) -> None:
        """pages: the parameter pages, by index of the unit. addresses: see the attribute. edits: writes user
        code's changes of parameters to the pages' homes. scale: the loss scale of the gradients that arrive
        at parameters. health: raises an error once the runtime is closed or lost. heap: counts the bytes of
        saved activations. lock: the runtime's. residual: makes pages of tensors that autograd saves, if any.
        """
        self.pages = pages
        self.addresses = addresses
        """Address of the memory where a page is resident -> the page. The entry of freed memory stays until
        another page becomes resident there.
        """
        self.prefetch_engine = prefetch_engine
        self.edits = edits
        self.lock = lock
        self.saved_bytes = SavedBytes(heap)
        self.residual = residual
        self.forwards = OpenCalls()
        """The open calls of the root module's forward."""
        self.copies = OpenCalls()
        """The open calls of state_dict. In them `p.detach()` of a paged parameter returns a copy in RAM."""
        self.scale = scale
        self.refuse = health.check
        self.gradients: TrainingStep | None = None
        """The gradients of the model's parameters; None for inference."""
        self.read_master: Callable[[Place], torch.Tensor] | None = None
        """Function that copies a parameter's fp32 master or values to RAM, in fp32; None for inference."""
        self._exact = threading.local()

    # --- called by modules and operations --------------------------------------------------------------

    def access(self, units: Sequence[int]) -> None:
        """Fetch the pages of `units`, which a module that is about to run will use, and wait for them. Raises
        BudgetError if the pages do not fit together, and StorageError if a page cannot be read.
        """
        if not torch.is_grad_enabled():
            self.saved_bytes.look()
        with self.lock:
            self.refuse()
            self.prefetch_engine.demand(units, _kind_now())

    def run(self, function: Callable[..., Any], places: Sequence[Place], args: Any, kwargs: Any) -> Any:
        """Fetch the pages of `places`, then run `function(*args, **kwargs)` and return its result.

        The pages stay resident until the function returns. Later edits through a view in the result are
        noticed. places: the places of the paged parameters among the arguments. Raises BudgetError if the
        pages do not fit together, and StorageError if a page cannot be read.
        """
        with self.lock:
            self.refuse()
            units = list(dict.fromkeys(place.page.index for place in places))
            if not self.prefetch_engine.present(units):
                self.prefetch_engine.demand(units, _kind_now())
            if self._reads_masters and any(is_rounded(place) for place in places):
                return self._run_on_masters(function, args, kwargs)
            inside, graphs = self.inside, torch.is_grad_enabled()
            # Models keep what they detach, and may change it at any time.
            exports = not inside or function is torch.Tensor.detach
            written: Sequence[Place] = ()
            if exports or not graphs:  # else no operation may change a parameter
                self._settle(places)
                written = self._watch(function, args, kwargs)
            if inside and not self.prefetch_engine.whole:
                function = self.prefetch_engine.yielding(function, units, self.lock)
            with torch._C.DisableTorchFunctionSubclass():
                if in_transform():
                    args, kwargs = with_views((args, kwargs))
                if graphs:
                    with self.saving():
                        result = function(*args, **kwargs)
                else:
                    result = function(*args, **kwargs)
                if written:
                    self.edits.follow()
                if exports:
                    return self._export_views(result, places)
                pending = self.prefetch_engine.store.ledger.pending
                if pending is not None and any(_views(result, places)):
                    self._settle(places)
        return result

    @contextmanager
    def views(self, parameters: Sequence[torch.Tensor | None]) -> Iterator[list[torch.Tensor | None]]:
        """Context with a list of `parameters`, in which each paged parameter is replaced by a view of it.

        A view is a plain tensor. Gradients flow from the view to the parameter, and autograd saves a
        reference to the page instead of the view. All pages are fetched together. Raises BudgetError if they
        do not fit together, and StorageError if a page cannot be read.
        """
        with self.lock:
            self.refuse()
            paged = [each for each in parameters if isinstance(each, PagedParameter)]
            self.prefetch_engine.demand(
                list(dict.fromkeys(each._place.page.index for each in paged)), _kind_now()
            )
            with torch._C.DisableTorchFunctionSubclass():
                views = [
                    each.view_as(each) if isinstance(each, PagedParameter) else each for each in parameters
                ]
        with self.saving():
            yield views

    def _watch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> list[Place]:
        """Prepare for an operation that may change parameters of this runtime, in place or as its `out`.

        Their values are remembered, so that elements that do not change keep their fp32 masters. Returns the
        places of these parameters.
        """
        name = getattr(function, "__name__", "")
        in_place = name.startswith(("__i", "__setitem")) or (name.endswith("_") and name[-2:] != "__")
        changed = [kwargs.get("out"), next(iter((*args, *kwargs.values())), None) if in_place else None]
        found = [
            each._place for each in changed if isinstance(each, PagedParameter) and each._place.pager is self
        ]
        if found:
            for place in found:
                self.edits.check(place.page, place.index)
            self.edits.follow()
            for place in found:
                self.edits.watch(place.page, place.index)
        return found

    def _run_on_masters(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation with copies of fp32 masters in place of parameters; see `masters`."""
        copies: dict[int, torch.Tensor] = {}

        def copied(parameter: PagedParameter) -> torch.Tensor:
            place = parameter._place
            if place.pager is not self or not is_rounded(place):
                return parameter
            if id(parameter) not in copies:
                device = "cpu" if self.copying else parameter.device
                copies[id(parameter)] = self.master(place, device=device)
            return copies[id(parameter)]

        args, kwargs = tree_map_only(PagedParameter, copied, (args, kwargs))
        versions = [copy._version for copy in copies.values()]
        result = function(*args, **kwargs)
        if [copy._version for copy in copies.values()] != versions:
            raise _no_edit()
        return result

    def reads_masters(self, place: Place) -> bool:
        """Whether this thread's reads of the parameter give its fp32 master, as in `masters`."""
        return self._reads_masters and is_rounded(place)

    @property
    def _reads_masters(self) -> bool:
        return getattr(self._exact, "depth", 0) > 0

    @contextmanager
    def masters(self) -> Iterator[None]:
        """Context in which this thread's reads of parameters give copies of their fp32 masters, or of their
        values in fp32 if they have none, and in which no gradients are computed.
        """
        self.refuse()
        self._exact.depth = getattr(self._exact, "depth", 0) + 1
        try:
            with torch.no_grad():
                yield
        finally:
            self._exact.depth -= 1

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer, so that trained parameters have fp32 masters."""
        return self.read_master is not None

    def master(
        self, place: Place, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return a copy of a parameter's fp32 master, or of its values if it has no master. Raises
        BudgetError if the copy, of the parameter's shape and strides, does not fit.
        """
        found = self.copy(place, "cpu") if self.read_master is None else self.read_master(place)
        if found.dtype == dtype and found.device == torch.device(device):
            return found
        return _copied(place, found, dtype, device)

    @property
    def inside(self) -> bool:
        """Whether this thread is in the root module's forward, or in a backward."""
        return bool(self.forwards) or torch._C._current_graph_task_id() != -1

    @property
    def copying(self) -> bool:
        """Whether this thread is in a call of state_dict."""
        return bool(self.copies)

    def begin_forward(self, caller: FrameType, inside: AbstractContextManager[Any] | None = None) -> None:
        """Record the beginning of a forward of the root module. caller: the frame that called it. inside: a
        context manager to enter until the forward ends.
        """
        if self._reads_masters:
            raise ConfigError(
                "The model was called in runtime.masters(), where its parameters are fp32 copies.",
                "Call it outside, or call a copy of it that deepcopy makes there.",
            )
        if not self.forwards:
            self.saved_bytes.forward_begins()
            self.prefetch_engine.meter.entered(Phase.FORWARD)
        self.forwards.begin(caller, self.saving(), inside)

    def end_forward(self) -> None:
        self.forwards.end()
        if not self.forwards:
            self.saved_bytes.forward_ends()
            self.prefetch_engine.meter.entered(Phase.BETWEEN)

    @contextmanager
    def whole(self, units: Sequence[int]) -> Iterator[None]:
        """Context in which the pages of all `units` stay resident.

        At its end, edits of their parameters are written to the pages' homes. Raises ConfigError then if
        other ranks made different edits (`EditTracker.publish`). The runtime's lock is not held in the
        context, because autograd's threads, for which code in the context may wait, have to fetch pages too.
        """
        with ExitStack() as ends:
            with self.lock:
                self.refuse()
                self.prefetch_engine.hold(units, AccessKind.FORWARD)
                ends.callback(self._let_go, units)
                self.prefetch_engine.settle_for_user(units)
            yield
            with self.lock:
                self.edits.publish([self.pages[unit] for unit in units])

    def _let_go(self, units: Sequence[int]) -> None:
        with self.lock:
            self.prefetch_engine.let_go(units)

    def copy(self, place: Place, device: str | None = None) -> torch.Tensor:
        """Return a copy of a parameter's values, with the parameter's shape and strides.

        device: where the copy is made; None: on the parameter's device. Raises BudgetError if a CUDA device
        has no room for the copy.
        """
        with self.lock:
            self.refuse()
            self.prefetch_engine.demand([place.page.index], AccessKind.FORWARD)
            assert place.page.residency is not None
            view = place.page.view(place.index, place.page.residency)
            return _copied(place, view, view.dtype, device or view.device)

    def values(self, place: Place, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Return a parameter's elements [first, first + count), (count,) in memory order, in RAM: a view of
        its page, or a copy, with all edits of user code.

        count: number of elements; None: all from `first` on. The caller holds the lock.
        """
        page = place.page
        self.prefetch_engine.demand([page.index], AccessKind.FORWARD)
        assert page.residency is not None
        found = page.flat(place.index, page.residency)[first : None if count is None else first + count]
        return self.prefetch_engine.store.copied_to_host(found)

    def copied_values(self, place: Place, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Return a copy in RAM of a parameter's elements [first, first + count), (count,) in memory order.
        count: None: all elements from `first` on. The copy has all edits that were written to the home.
        """
        if not self.prefetch_engine.whole:  # the home lacks parts of other ranks, or has outdated ones
            return self.values(place, first, count).clone()
        page, layout = place.page, place.page.layout.parameters[place.index]
        size, numel = layout.dtype.itemsize, layout.numel - first if count is None else count
        start = page.start(place.index) + first * size
        return self.prefetch_engine.store.fetch(page.home, start, numel * size).view(layout.dtype)

    def exported_data(self, place: Place) -> torch.Tensor:
        """Return the value of `p.data`: a view of the parameter, with a version counter of its own, through
        which the runtime notices edits. In a call of state_dict, return a copy in RAM.
        """
        with self.lock:
            self.refuse()
            if self.reads_masters(place):
                device = "cpu" if self.copying else place.page.parameters[place.index].device
                return self.master(place, device=device)
            if self.copying:
                return self.copy(place, "cpu")
            self.prefetch_engine.demand([place.page.index], _kind_now())
            self._settle([place])
            with torch._C.DisableTorchFunctionSubclass():
                parameter = place.page.parameters[place.index]
                # With several ranks, edits through `data` must count as edits of the parameter.
                data = parameter.data if self.edits.is_free(place.page) else parameter.detach()
            self.edits.keep_loan(place.page, place.index, data)
            return data

    def replace_data(self, place: Place, value: torch.Tensor) -> None:
        """Carry out `p.data = value` by copying `value` into the parameter's page."""
        with self.lock:
            self.refuse()
            if self.reads_masters(place):
                raise _no_edit()
            page = place.page
            self.edits.check(page, place.index)
            self.prefetch_engine.demand([page.index], _kind_now())
            self._settle([place])
            assert page.residency is not None
            present = page.view(place.index, page.residency)
            if value.data_ptr() != present.data_ptr() or value.stride() != present.stride():
                self.edits.follow()
                self.edits.watch(page, place.index)
                with torch.no_grad():
                    present.copy_(value.clone() if _shares(value, present) else value)
                self.edits.replaced(page, place.index)
                self.edits.follow()

    def _settle(self, places: Sequence[Place]) -> None:
        """Wait until the pending commit holds the values of parameters that user code may change next."""
        self.prefetch_engine.settle_for_user([place.page.index for place in places])

    def _export_views(self, result: Any, places: Sequence[Place]) -> Any:
        """Track each tensor in `result` that is a view of a page, so that later edits through it are noticed,
        and return `result`. In a call of state_dict, return a copy of a view in RAM instead. places: the
        places of the operation's parameters.
        """
        for place, view in _views(result, places):
            if self.copying and view is result:
                return self.copy(place, "cpu")
            self.edits.keep_loan(place.page, place.index, view)
        return result

    def forget(self) -> None:
        """At the end of the runtime, stop tracking exported views, and drop the entries of `addresses`."""
        self.gradients = None
        self.read_master = None
        self.edits.forget()
        self.addresses.clear()

    # --- saved tensors ---------------------------------------------------------------------------------

    def saving(self) -> AbstractContextManager[None]:
        """Context in which this thread's autograd saves references in place of views of pages."""
        return saving(self._find, self._fetch, self.saved_bytes, self.residual)

    def _find(self, tensor: torch.Tensor) -> PageReference | None:
        if isinstance(tensor, PagedParameter):
            place = tensor._place
            if place.pager is not self:
                return None
            byte = place.page.start(place.index)
        elif has_memory(tensor) and tensor.numel():
            found = self.addresses.get(tensor.untyped_storage().data_ptr())
            if found is None:
                return None
            byte = int(tensor.storage_offset()) * tensor.itemsize
            paged: Any = found.parameters[found.parameter_at(byte)]
            place = paged._place
        else:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            version = tensor._version
            return PageReference(
                page=place.page,
                index=place.index,
                dtype=tensor.dtype,
                shape=tensor.shape,
                stride=tensor.stride(),
                offset=byte // tensor.dtype.itemsize,
                version=version if version == parameter_version(place.page.parameters[place.index]) else None,
                conjugate=tensor.is_conj(),
                negative=tensor.is_neg(),
            )

    def _fetch(self, reference: PageReference) -> torch.Tensor:
        with self.lock:
            self.refuse()
            page = reference.page
            self.prefetch_engine.meter.entered(Phase.BACKWARD)
            self.prefetch_engine.demand([page.index], AccessKind.BACKWARD)
            assert page.residency is not None
            with torch.inference_mode(False), torch.no_grad():
                view = page.residency.view(reference.dtype).as_strided(
                    reference.shape, reference.stride, reference.offset
                )
                view = view.conj() if reference.conjugate else view
                return torch._neg_view(view) if reference.negative else view


def _copied(
    place: Place, values: torch.Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return a copy of a parameter's values, with their shape and strides. Raises BudgetError."""
    with torch.inference_mode(False), torch.no_grad():
        try:
            copy = torch.empty_strided(values.shape, values.stride(), dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"A copy of {place.name} ({format_size(values.numel() * dtype.itemsize)}) was asked for, and "
                f"{device} has no room for it.",
                "Take the model's state_dict(), which is in RAM, or give pages less of the device.",
            ) from error
        return copy.copy_(values)


def _no_edit() -> ConfigError:
    return ConfigError(
        "A parameter was edited in runtime.masters(), where parameters are copies; it is unchanged.",
        "Edit it outside, under torch.no_grad() or in runtime.full_parameters(module).",
    )


def _kind_now() -> AccessKind:
    return AccessKind.FORWARD if torch._C._current_graph_task_id() == -1 else AccessKind.BACKWARD


def _views(result: Any, places: Sequence[Place]) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield (place, view) for each tensor of an operation's result that is a view of a page of `places`."""
    for place in places:
        base, parameter = place.page.residency, place.page.parameters[place.index]
        for each in result if isinstance(result, (list, tuple)) else (result,):
            plain = isinstance(each, torch.Tensor) and each is not parameter
            if base is not None and plain and _shares(each, base):
                yield place, each


def _shares(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False  # views made by torch.func's transforms do not outlive them
    return tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
