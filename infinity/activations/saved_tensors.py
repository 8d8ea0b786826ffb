"""Saved tensors: the hooks through which autograd saves references to pages instead of views of pages.

[Note: saved tensors are references] A view of a page in autograd's graph would keep the page in memory from
forward to backward. So a saved tensor whose storage is a page's is packed as a reference: page, position in
the page, shape, strides and version. Unpacking a reference fetches the page. Any other tensor goes to the
saved-tensor hooks that were active before: the user's own, or those of torch.utils.checkpoint, which must see
the same tensors in forward and in recomputation. Without such hooks the tensor is packed as a detached alias,
because the tensor itself would keep its graph alive. PyTorch's check that no saved tensor was edited in place
does not work through hooks, so references and aliases carry the version at which the tensor was saved.
Where the plan has room for them, large tensors are packed as references to residual pages, which may leave
the memory that computes ([Note: residual pages] in infinity/activations/residual_pages.py). What is saved in
a backward, such as by a reentrant torch.utils.checkpoint, is used at once, and stays.

The hooks are active in the root module's forward, because ordinary operations there save views (`w.t()`), and
around every single operation that takes a paged parameter.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from infinity.activations import autograd_hooks
from infinity.activations.autograd_hooks import Pair
from infinity.activations.heap import HeapGuard
from infinity.activations.residual_pages import ResidualPages, ResidualReference
from infinity.pages.parameter_page import ParameterPage, parameter_version
from infinity.system.lock import undivided

autograd_hooks.keep_leaf_hooks()
atexit.register(autograd_hooks.drop_left_tasks)


@dataclass(frozen=True, slots=True)
class PageReference:
    """Represents a saved tensor whose storage is a parameter page."""

    page: ParameterPage
    index: int
    """Index, in the page's unit, of the parameter that the tensor is a view of."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements of `dtype` from the start of the page to the tensor's first element."""
    version: int | None
    """The parameter's version counter when the tensor was saved; None if the tensor was a view with its own
    counter.
    """
    conjugate: bool
    """Whether the tensor is a lazily conjugated view (torch.Tensor.is_conj)."""
    negative: bool
    """Whether the tensor is a lazily negated view (torch.Tensor.is_neg)."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A saved tensor that is not in a page, and its version counter when it was saved."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Delegated:
    """A saved tensor as another pair of hooks has packed it, and the `unpack` of that pair. The pair was
    active when the hooks of this module were installed.
    """

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ReferenceWithin:
    """A saved tensor in a page that was saved within torch.utils.checkpoint, with a marker that was packed by
    the hooks of this checkpoint in its place.

    An operation's backward unpacks its tensors one after the other. If the first one were a view of a page,
    the page could not leave while the second one has all others of the block computed again. So the marker
    is unpacked first, which does this before the page is fetched.
    """

    reference: PageReference
    marker: Delegated


Packed = PageReference | ReferenceWithin | ResidualReference | Alias | Delegated

_MARKER = torch.empty(0)


class SavedBytes:
    """Counts the bytes of the storages, other than pages, that autograd saves in a forward for backward."""

    def __init__(self, heap: HeapGuard) -> None:
        self._heap = heap
        self.guards = heap.guards
        """Whether the heap is kept within a limit, so that memory which is allocated has to be counted."""
        self.peak = 0
        """The most bytes that any one forward has saved."""
        self._seen: dict[int, int] = {}

    def forward_begins(self) -> None:
        self._seen.clear()

    def saved(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._seen[storage.data_ptr()] = storage.nbytes()
        if self.guards:
            self._heap.allocated(storage.nbytes())

    def left(self, nbytes: int) -> None:
        """Count the memory of a saved tensor that became a residual page, or that other hooks were given."""
        if self.guards:
            self._heap.allocated(nbytes)

    def unpacked(self, tensor: torch.Tensor) -> None:
        """Count the gradient that backward makes after it has unpacked `tensor` as allocated memory. No hook
        sees this gradient. It is assumed to be as large as the storage of `tensor`.
        """
        self._heap.allocated(tensor.untyped_storage().nbytes())

    def look(self) -> None:
        """Keep the heap within its limit where nothing is saved, as in evaluation and sampling."""
        self._heap.check()

    def forward_ends(self) -> None:
        self._heap.check()  # also where nothing is saved: evaluation and sampling leave holes, too
        self.peak = max(self.peak, sum(self._seen.values()))
        self._seen.clear()


Find = Callable[[torch.Tensor], PageReference | None]
Fetch = Callable[[PageReference], torch.Tensor]


class SavedTensors:
    """A pair of saved-tensor hooks: `pack` and `unpack`. `saving` makes a new pair for each context."""

    def __init__(
        self,
        find: Find,
        fetch: Fetch,
        tally: SavedBytes,
        outer: Pair | None,
        residual: ResidualPages | None,
    ) -> None:
        self.find = find
        self._fetch = fetch
        self._tally = tally
        self._residual = residual
        self.outer = outer
        """The pair of hooks that was active before; None: there was none."""

    def pack(self, tensor: torch.Tensor) -> Packed:
        found = self.find(tensor)
        if found is not None:
            if self.outer is not None and autograd_hooks.recomputes(self.outer):
                return ReferenceWithin(found, Delegated(self.outer[0](_MARKER), self.outer[1]))
            return found
        if self.outer is not None:
            if self._tally.guards and has_memory(tensor):  # that a recomputed block has just allocated
                self._tally.left(tensor.untyped_storage().nbytes())
            return Delegated(self.outer[0](tensor), self.outer[1])
        if has_memory(tensor):
            if self._residual is not None and torch._C._current_graph_task_id() == -1:
                reference = self._residual.pack(tensor)
                if reference is not None:
                    self._tally.left(reference.page.nbytes)
                    return reference
            self._tally.saved(tensor)
        return Alias(tensor.detach(), tensor._version)

    def unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, ReferenceWithin):
            self.unpack(packed.marker)
            packed = packed.reference
        if isinstance(packed, PageReference):
            if packed.version is not None:
                check_version(
                    packed.page.layout.parameters[packed.index].names[0],
                    packed.version,
                    parameter_version(packed.page.parameters[packed.index]),
                )
            return self._fetch(packed)
        if isinstance(packed, Delegated):
            tensor = packed.unpack(packed.packed)
            if self._tally.guards and has_memory(tensor):
                self._tally.unpacked(tensor)
            return tensor
        if isinstance(packed, ResidualReference):
            assert self._residual is not None
            check_version(f"of shape {list(packed.shape)}", packed.version, packed.counter._version)
            tensor = self._residual.unpack(packed)
            if self._tally.guards:
                self._tally.unpacked(tensor)
            return tensor
        tensor = packed.tensor
        if packed.version != tensor._version:
            check_version(f"of shape {list(tensor.shape)}", packed.version, tensor._version)
        if self._tally.guards and tensor.layout is torch.strided:
            self._tally.unpacked(tensor)
        return tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain and dense, so that its storage has an address. Tensors of torch.func's
    transforms and the zero tangents of forward-mode differentiation have no address.
    """
    return type(tensor) is torch.Tensor and has_bytes(tensor)


def has_bytes(tensor: torch.Tensor) -> bool:
    """As `has_memory`, for tensors of any class, such as those of a step without data."""
    return (
        tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor._is_zerotensor()
    )


def check_version(name: str, saved: int, now: int) -> None:
    """Raise RuntimeError, as PyTorch does, if a saved tensor was edited in place before its backward. name:
    the tensor's name in the message. saved, now: its version counter when it was saved, and now.
    """
    if saved != now:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"the tensor {name} is at version {now}; expected version {saved} instead."
        )


def hooks_are_allowed() -> bool:
    autograd: Any = torch._C._autograd  # has no types for this function
    return bool(autograd._saved_tensors_hooks_is_enabled())


@contextlib.contextmanager
def saving(
    find: Find, fetch: Fetch, tally: SavedBytes, residual: ResidualPages | None = None
) -> Iterator[None]:
    """Context in which this thread packs saved tensors with a pair of SavedTensors hooks.

    find: function that returns the reference for a tensor in a page, and None for any other tensor. fetch:
    function that returns the tensor of a reference. tally: counts the bytes saved. residual: makes pages of
    the other tensors; None: they stay.

    Does nothing if hooks with the same `find` are active already, or if torch forbids hooks, as in
    torch.func.grad. Without hooks autograd saves views of pages, and these views keep the pages in memory.
    """
    if not hooks_are_allowed():
        yield
        return
    outer = autograd_hooks.top()
    around = None if outer is None else getattr(outer[0], "__self__", None)
    if isinstance(around, SavedTensors) and around.find == find:
        yield
        return
    hooks = SavedTensors(find, fetch, tally, outer, residual)
    with _Pushed(hooks, outer) as pushed:
        pushed.push()
        yield


@contextlib.contextmanager
def out_of_the_way() -> Iterator[None]:
    """Context in which this thread's stack of hooks lacks the pairs of SavedTensors that are at its top.
    The pairs are put back at the end.
    """
    pairs = []
    while (top := autograd_hooks.top()) is not None:
        if not isinstance(getattr(top[0], "__self__", None), SavedTensors):
            break
        autograd_hooks.pop()
        pairs.append(top)
    try:
        yield
    finally:
        for pair in reversed(pairs):
            autograd_hooks.push(pair)


class _Pushed:
    """A pair of hooks on torch's stack, and the removal of the pair. Ctrl-C never leaves the pair there."""

    def __init__(self, hooks: SavedTensors, outer: Pair | None) -> None:
        """outer: the pair that is on top of the stack now."""
        self._hooks = hooks
        self._outer = outer
        self._pushed = False
        """Whether the pair is known to have been pushed."""

    def push(self) -> None:
        autograd_hooks.push((self._hooks.pack, self._hooks.unpack))
        self._pushed = True

    def __enter__(self) -> _Pushed:
        return self

    @undivided
    def __exit__(self, *_: object) -> None:
        """Remove the pair, at whatever depth it is, if it is there.

        A context of the user's that pushed `outer` normally ends after the forward. If Ctrl-C ends the
        forward, the context may end first. torch then pops the top pair, which is ours, and `outer` stays on
        the stack. In this case `outer` is removed here.
        """
        above = []
        found = False
        while not found and (top := autograd_hooks.top()) is not None:
            autograd_hooks.pop()
            found = getattr(top[0], "__self__", None) is self._hooks
            if not found:
                above.append(top)
        if not found and self._pushed and self._outer is not None:
            last = next((each for each in above if each[0] is self._outer[0]), None)
            if last is not None:
                above.remove(last)
        for pair in reversed(above):
            autograd_hooks.push(pair)
