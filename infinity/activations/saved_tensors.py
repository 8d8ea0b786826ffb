"""What autograd saves for backward: references to pages instead of views, aliases for all else.

[Note: saved tensors are references]
A view of a page in a graph would pin the page from forward to backward. So a saved tensor whose storage is a
page's is replaced by (page, place in it, shape, strides, version), and unpacking fetches the page. PyTorch's
own check that nothing saved was edited in place does not see through hooks, so both kinds carry the version
that they were saved at. What is no page's is packed as a detached alias, because the tensor itself would
keep its graph alive, or goes to the hooks that were in force before these: the user's own, or those of
torch.utils.checkpoint, which count on seeing the same tensors in forward and in recomputation.

The hooks are in force in the root module's forward, for the sake of views (`w.t()`) that ordinary operations
save, and around every single operation that takes a paged parameter; nowhere else.
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
    """Of the parameter that it is a view of."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements of `dtype` from the start of the page."""
    version: int | None
    """Of the parameter; None where the view counted its own."""
    conjugate: bool
    negative: bool
    """Whether the tensor stands for the conjugates, or the negatives, of its bytes."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor that is no page's, and the version that it was saved at."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Delegated:
    """What the hooks in force before these made of a tensor."""

    packed: Any
    unpack: Unpack


class SavedBytes:
    """What a forward leaves to backward: bytes of the storages that autograd saves, pages apart."""

    def __init__(self, heap: HeapGuard) -> None:
        self._heap = heap
        self.peak = 0
        """Of all forwards so far."""
        self._seen: dict[int, int] = {}

    def forward_begins(self) -> None:
        self._seen.clear()

    def saved(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._seen[storage.data_ptr()] = storage.nbytes()
        self._heap.allocated(storage.nbytes())

    def unpacked(self, tensor: torch.Tensor) -> None:
        """What backward makes of it is about as large, and nothing else tells of that."""
        self._heap.allocated(tensor.untyped_storage().nbytes())

    def forward_ends(self) -> None:
        if self._seen:
            self._heap.check()
        self.peak = max(self.peak, sum(self._seen.values()))
        self._seen.clear()


Find = Callable[[torch.Tensor], PageReference | None]
Fetch = Callable[[PageReference], torch.Tensor]


class SavedTensors:
    """The pair of hooks, once for every time that they come into force."""

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
    """Raises RuntimeError, as PyTorch does, for a saved tensor that was edited before its backward."""
    if saved != now:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"the tensor {name} is at version {now}; expected version {saved} instead."
        )


@contextlib.contextmanager
def saving(find: Find, fetch: Fetch, tally: SavedBytes) -> Iterator[None]:
    """The hooks are in force inside, in this thread. Nothing happens where they are already."""
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
        if top is not None and getattr(top[0], "__self__", None) is hooks:  # else somebody left out of turn
            torch._C._autograd._pop_saved_tensors_default_hooks()
