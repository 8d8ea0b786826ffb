"""Parameters as pages: brings them before they are used, tells edits from reads, and hooks into the model.

[Note: loans]
A view of a page that code outside asked for (`p.detach()`, `p.data`, `p[0]` between steps) may be written to
later, by torch, when nobody looks. So the runtime keeps an alias of each such view, a loan, and looks again
before the page leaves, before an update, and when memory is short: whether a version counter has moved, and
whether anybody else still holds the storage. Edits go home and become the master; a loan that nobody else
holds is forgotten, and the bytes return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from infinity.activations import PageReference, SavedBytes, saving
from infinity.calls import OpenCalls
from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError
from infinity.heap import HeapGuard
from infinity.page import ParameterPage, parameter_version
from infinity.parameter import PagedParameter, Place
from infinity.prefetch.engine import Engine
from infinity.prefetch.trace import AccessKind
from infinity.scaling import LossScale
from infinity.store import Store
from infinity.telemetry import Phase


@dataclass(slots=True)
class _Loan:
    """An alias of a view that code outside holds, or held."""

    alias: torch.Tensor
    version: int
    index: int
    """Of the parameter."""


class Paging:
    """The parameter pages of one runtime. One lock orders all that changes where they are."""

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        addresses: dict[int, ParameterPage],
        engine: Engine,
        store: Store,
        heap: HeapGuard,
    ) -> None:
        self.pages = pages
        self.addresses = addresses
        """Address of a residency -> its page. Entries of memory let go are overwritten, not removed."""
        self.engine = engine
        self.lock = threading.RLock()
        self.saved_bytes = SavedBytes(heap)
        self.forwards = OpenCalls()
        """Of the root module."""
        self.copies = OpenCalls()
        """Of state_dict: `p.detach()` copies inside, into RAM."""
        self.scale = LossScale(dynamic=False)
        """Of the gradients that arrive at parameters."""
        self.refuse: Callable[[], None] = _accept
        """Raises where no page may be used any more."""
        self.edited: Callable[[int, int], None] = _ignore_edit
        """Told (unit, parameter) of every edit."""
        self.gradient_of: Callable[[int, int], bool] = _no_gradient
        self.drop_gradient_of: Callable[[int, int], None] = _ignore_edit
        self._store = store
        self._loans: dict[int, list[_Loan]] = {}
        self._replaced: dict[int, set[int]] = {}
        """unit -> parameters whose present page was given values that no version tells of."""
        engine.keeper = self

    # --- what modules and operations ask for -----------------------------------------------------------

    def access(self, units: Sequence[int]) -> None:
        """A module is about to run: bring the pages of its own parameters."""
        with self.lock:
            self.refuse()
            self.engine.demand(units, _kind_now())

    def run(self, function: Callable[..., Any], places: Sequence[Place], args: Any, kwargs: Any) -> Any:
        """Run an operation with the pages of `places` present. See infinity.parameter.Pager."""
        with self.lock:
            self.refuse()
            units = list(dict.fromkeys(place.page.index for place in places))
            if not self.engine.present(units):
                self.engine.demand(units, _kind_now())
            with torch._C.DisableTorchFunctionSubclass():
                if torch.is_grad_enabled():
                    with saving(self._find, self._fetch, self.saved_bytes):
                        if self.scale.dynamic and not self.inside:
                            args, kwargs = tree_map_only(PagedParameter, self.scale.borrowed, (args, kwargs))
                        result = function(*args, **kwargs)
                else:
                    result = function(*args, **kwargs)
                if not self.inside:
                    return self._lend(result, places)
        return result

    @property
    def inside(self) -> bool:
        """Whether this thread is in the root module's forward, or in a backward."""
        return bool(self.forwards) or torch._C._current_graph_task_id() != -1

    @property
    def copying(self) -> bool:
        """Whether this thread is in a state_dict."""
        self.copies.prune()
        return bool(self.copies)

    def begin_forward(self, caller: FrameType) -> None:
        """The root module's forward begins, called in the frame `caller`."""
        if not self.forwards:
            self.saved_bytes.forward_begins()
            self.engine.meter.entered(Phase.FORWARD)
        self.forwards.begin(caller, saving(self._find, self._fetch, self.saved_bytes))

    def end_forward(self) -> None:
        """The innermost forward of the root module is over."""
        self.forwards.end()
        if not self.forwards:
            self.saved_bytes.forward_ends()
            self.engine.meter.entered(Phase.BETWEEN)

    @contextmanager
    def whole(self, units: Sequence[int]) -> Iterator[None]:
        """All `units` stay present inside, and what is edited is seen at the end.

        Without the lock: threads that are waited for inside, as autograd's are, take pages too.
        """
        with self.lock:
            self.refuse()
            self.engine.hold(units, AccessKind.FORWARD)
        try:
            yield
            with self.lock:
                for unit in units:
                    self.write_back(self.pages[unit])
        finally:
            with self.lock:
                self.engine.let_go(units)

    def copy(self, place: Place, device: str | None = None) -> torch.Tensor:
        """A parameter's values in memory of their own, with its shape and strides; by default on its device.

        Raises BudgetError where a CUDA device has no room for it.
        """
        with self.lock:
            self.refuse()
            self.engine.demand([place.page.index], AccessKind.FORWARD)
            assert place.page.residency is not None
            view = place.page.view(place.index, place.page.residency)
            with torch.inference_mode(False), torch.no_grad():
                try:
                    copy = torch.empty_strided(
                        view.shape, view.stride(), dtype=view.dtype, device=device or view.device
                    )
                except torch.OutOfMemoryError as error:
                    raise BudgetError(
                        f"A copy of {place.name} ({format_size(view.nbytes)}) was asked for, and "
                        f"{view.device} has no room for it.",
                        "Take the model's state_dict(), which is in RAM, or give pages less of the device.",
                    ) from error
                return copy.copy_(view)

    def lend_data(self, place: Place) -> torch.Tensor:
        """`p.data`: a view with a version counter of its own."""
        with self.lock:
            self.refuse()
            if self.copying:
                return self.copy(place, "cpu")
            self.engine.demand([place.page.index], _kind_now())
            with torch._C.DisableTorchFunctionSubclass():
                data = place.page.parameters[place.index].data
            self._keep_loan(place, data)
            return data

    def replace_data(self, place: Place, value: torch.Tensor) -> None:
        """`p.data = value`: the values are taken over, not the storage."""
        with self.lock:
            self.refuse()
            page = place.page
            self.engine.demand([page.index], _kind_now())
            assert page.residency is not None
            present = page.view(place.index, page.residency)
            if value.data_ptr() != present.data_ptr() or value.stride() != present.stride():
                with torch.no_grad():
                    present.copy_(value.clone() if _shares(value, present) else value)
                self._replaced.setdefault(page.index, set()).add(place.index)

    def unscale(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as it is without the loss scale."""
        return gradient / self.scale.value if self.scale.dynamic else gradient

    def has_gradient(self, place: Place) -> bool:
        return self.gradient_of(place.page.index, place.index)

    def drop_gradient(self, place: Place) -> None:
        self.drop_gradient_of(place.page.index, place.index)

    # --- edits (engine.Keeper) -------------------------------------------------------------------------

    def write_back(self, page: ParameterPage) -> None:
        """Take what was edited in the page's bytes home. Raises ConfigError for an edit that was lost."""
        edited = set(page.edits()) | self._replaced.pop(page.index, set())
        for loan in self._loans.get(page.index, ()):
            if loan.alias._version != loan.version:
                edited.add(loan.index)
                loan.version = loan.alias._version
        if edited:
            memory = page.living()
            if memory is None:
                names = ", ".join(page.layout.parameters[index].names[0] for index in sorted(edited))
                page.acknowledge()
                raise ConfigError(
                    f"An edit of {names} was made through a view that its forward had kept, and is lost.",
                    "Edit the parameter itself, under torch.no_grad() or in runtime.full_parameters(module).",
                )
            for index in edited:
                self._take_home(page, index, memory)
            page.acknowledge()
        self._forget_loans(page)

    def exposed(self, unit: int) -> bool:
        """Whether code outside sees the bytes of a unit's page without asking for them."""
        page = self.pages[unit]
        if self.engine.holds(unit):
            return True
        if page.residency is None:
            return page.living() is not None
        return self._held_outside(page, page.residency)

    def sync_edits(self) -> None:
        """Take every edit home."""
        for page in self.pages:
            self.write_back(page)

    def updated(self, unit: int | None = None) -> None:
        """All pages were updated, or one: versions that views share with parameters moved by no edit."""
        for loans in self._loans.values() if unit is None else [self._loans.get(unit, [])]:
            for loan in loans:
                loan.version = loan.alias._version

    def reclaim(self) -> None:
        """Forget the loans that nobody else holds."""
        for unit in list(self._loans):
            self.write_back(self.pages[unit])

    def _take_home(self, page: ParameterPage, index: int, memory: torch.Tensor) -> None:
        if memory is not page.home.memory:
            self._store.patch(
                page.home, page.start(index), self._store.brought_down(page.flat(index, memory))
            )
        self.edited(page.index, index)

    def _lend(self, result: Any, places: Sequence[Place]) -> Any:
        """Keep track of results that are views of pages; copies while a state_dict is made."""
        for place in places:
            base = place.page.residency
            if base is None:
                continue
            if isinstance(result, torch.Tensor):
                if result is not place.page.parameters[place.index] and _shares(result, base):
                    if self.copying:
                        return self.copy(place, "cpu")
                    self._keep_loan(place, result)
            elif isinstance(result, (list, tuple)):
                for each in result:
                    if isinstance(each, torch.Tensor) and _shares(each, base):
                        self._keep_loan(place, each)
        return result

    def _keep_loan(self, place: Place, view: torch.Tensor) -> None:
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            alias = view.detach()
        loans = self._loans.setdefault(place.page.index, [])
        if len(loans) > 4 * len(place.page.parameters):
            self._forget_loans(place.page)
            loans = self._loans.setdefault(place.page.index, [])
        loans.append(_Loan(alias, alias._version, place.index))

    def _forget_loans(self, page: ParameterPage) -> None:
        """Forget them if nobody outside holds the storage any more."""
        loans = self._loans.get(page.index)
        if not loans:
            return
        if not self._held_outside(page, loans[0].alias):
            del self._loans[page.index]

    def _held_outside(self, page: ParameterPage, memory: torch.Tensor) -> bool:
        """Whether anybody but the runtime holds the storage of `memory`, bytes of the page."""
        storage = memory.untyped_storage()
        ours = len(self._loans.get(page.index, ())) + 1  # the wrapper above
        if page.residency is not None:
            ours += 1 + len(page.parameters)
        return torch._C._storage_Use_Count(storage._cdata) > ours

    def forget(self) -> None:
        """Let go of every alias."""
        self._loans.clear()
        self._replaced.clear()
        self.addresses.clear()

    # --- saved tensors ---------------------------------------------------------------------------------

    def _find(self, tensor: torch.Tensor) -> PageReference | None:
        if isinstance(tensor, PagedParameter):
            place = tensor._place
            if place.pager is not self:
                return None
            byte = place.page.start(place.index)
        elif type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel():
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
            self.engine.meter.entered(Phase.BACKWARD)
            self.engine.demand([page.index], AccessKind.BACKWARD)
            assert page.residency is not None
            with torch.inference_mode(False), torch.no_grad():
                view = page.residency.view(reference.dtype).as_strided(
                    reference.shape, reference.stride, reference.offset
                )
                view = view.conj() if reference.conjugate else view
                return torch._neg_view(view) if reference.negative else view


def _kind_now() -> AccessKind:
    return AccessKind.FORWARD if torch._C._current_graph_task_id() == -1 else AccessKind.BACKWARD


def _shares(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False  # torch.func's transforms make no views that outlive them
    return tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def _accept() -> None:
    return None


def _ignore_edit(unit: int, parameter: int) -> None:
    return None


def _no_gradient(unit: int, parameter: int) -> bool:
    return False
