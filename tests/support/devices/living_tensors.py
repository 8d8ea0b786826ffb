"""The bytes of the tensors that are alive, for tests of how little RAM something takes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Living(TorchDispatchMode):
    """A mode that counts the bytes of the tensors that are made while it is active.

    `now`: bytes of these tensors that are alive. `peak`: the largest value that `now` has had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_iter(args) if isinstance(each, torch.Tensor)}
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                self._count(each.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in given or key in self._known:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes
