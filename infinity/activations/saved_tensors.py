"""Saved tensors: the hooks with which autograd saves references to pages, and aliases of all other tensors.

[Note: saved tensors are references]
A view of a page in a graph would pin the page from forward to backward. So a saved tensor whose storage is a
page's is replaced by (page, place in it, shape, strides, version), and unpacking fetches the page. PyTorch's
own check that no saved tensor was edited in place does not see through hooks, so both kinds carry the version
at which they were saved. Other tensors go to the hooks that were in force before these: the user's own, or
those of torch.utils.checkpoint, which rely on seeing the same tensors in forward and in recomputation.
Without such hooks they are packed as a detached alias, because the tensor itself would keep its graph alive.

The hooks are in force in the root module's forward, because ordinary operations there save views (`w.t()`),
and around every single operation that takes a paged parameter; nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from infinity.activations.heap import HeapGuard
from infinity.pages.parameter_page import ParameterPage, parameter_version

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PageReference:
    """A tensor that lies in a parameter page."""

    page: ParameterPage
    index: int
    """Index of the parameter that the tensor is a view of."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements of `dtype` from the start of the page."""
    version: int | None
    """Version of the parameter; None if the view had a version counter of its own."""
    conjugate: bool
    negative: bool
    """Whether the tensor is a lazy negative of its bytes; `conjugate`: a lazy conjugate."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor that is not in a page, and the version at which it was saved."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Delegated:
    """The result of the hooks that were in force before these, and their unpack function."""

    packed: Any
    unpack: Unpack


class SavedBytes:
    """Counter of the bytes of storages that autograd saves in a forward for backward, without pages."""

    def __init__(self, heap: HeapGuard) -> None:
        self._heap = heap
        self.peak = 0
        """Most bytes that any forward so far has saved."""
        self._seen: dict[int, int] = {}

    def forward_begins(self) -> None:
        self._seen.clear()

    def saved(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._seen[storage.data_ptr()] = storage.nbytes()
        self._heap.allocated(storage.nbytes())

    def unpacked(self, tensor: torch.Tensor) -> None:
        """Count the gradient that backward makes next, which is about as large; no hook sees it."""
        self._heap.allocated(tensor.untyped_storage().nbytes())

    def forward_ends(self) -> None:
        if self._seen:
            self._heap.check()
        self.peak = max(self.peak, sum(self._seen.values()))
        self._seen.clear()


Find = Callable[[torch.Tensor], PageReference | None]
Fetch = Callable[[PageReference], torch.Tensor]


class SavedTensors:
    """The pair of hooks; one object for each time that they come into force."""

    def __init__(
        self, find: Find, fetch: Fetch, tally: SavedBytes, outer: tuple[Pack, Unpack] | None
    ) -> None:
        self.find = find
        self._fetch = fetch
        self._tally = tally
        self._outer = outer

    def pack(self, tensor: torch.Tensor) -> PageReference | Alias | Delegated:
        found = self.find(tensor)
        if found is not None:
            return found
        if self._outer is not None:
            return Delegated(self._outer[0](tensor), self._outer[1])
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            self._tally.saved(tensor)
        return Alias(tensor.detach(), tensor._version)

    def unpack(self, packed: PageReference | Alias | Delegated) -> torch.Tensor:
        if isinstance(packed, PageReference):
            if packed.version is not None:
                check_version(
                    packed.page.layout.parameters[packed.index].names[0],
                    packed.version,
                    parameter_version(packed.page.parameters[packed.index]),
                )
            return self._fetch(packed)
        if isinstance(packed, Delegated):
            return packed.unpack(packed.packed)
        check_version(f"of shape {list(packed.tensor.shape)}", packed.version, packed.tensor._version)
        if packed.tensor.layout is torch.strided:
            self._tally.unpacked(packed.tensor)
        return packed.tensor


def check_version(name: str, saved: int, now: int) -> None:
    """Raises RuntimeError, as PyTorch does, if a saved tensor was edited before its backward."""
    if saved != now:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"the tensor {name} is at version {now}; expected version {saved} instead."
        )


@contextlib.contextmanager
def saving(find: Find, fetch: Fetch, tally: SavedBytes) -> Iterator[None]:
    """Context in which the hooks are in force, in this thread. Does nothing if they are already."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    around = None if outer is None else getattr(outer[0], "__self__", None)
    if isinstance(around, SavedTensors) and around.find == find:
        yield
        return
    hooks = SavedTensors(find, fetch, tally, outer)
    torch._C._autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
    try:
        yield
    finally:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None and getattr(top[0], "__self__", None) is hooks:  # else closed out of order
            torch._C._autograd._pop_saved_tensors_default_hooks()
