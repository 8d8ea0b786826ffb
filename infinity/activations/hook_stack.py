"""Hook stack: this thread's stack of saved-tensor hooks, of which autograd calls the pair at the top.

torch 2.6 has no function that returns this pair. There torch's `push` and `pop` are replaced by functions
that record the pairs. Torch's own contexts look both functions up by name, so their pairs are recorded, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Functions (pack, unpack), as `torch.autograd.graph.saved_tensors_hooks` takes them."""


class _Recorded(threading.local):
    """The pairs on this thread's stack, the top one last."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []


def _record_pairs() -> Callable[[], Pair | None]:
    """Have torch's `push` and `pop` record the pairs. Returns a function that returns the top pair."""
    recorded = _Recorded()
    push_pair = torch._C._autograd._push_saved_tensors_default_hooks
    pop_pair = torch._C._autograd._pop_saved_tensors_default_hooks

    def push(*pair: Any) -> None:
        push_pair(*pair)
        recorded.pairs.append(pair)

    def pop() -> None:
        pop_pair()
        if recorded.pairs:  # hooks that are older than this module are not recorded
            recorded.pairs.pop()

    setattr(torch._C._autograd, push_pair.__name__, push)
    setattr(torch._C._autograd, pop_pair.__name__, pop)
    return lambda: recorded.pairs[-1] if recorded.pairs else None


_top = None if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks") else _record_pairs()


def top() -> Pair | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) if _top is None else _top()


def push(pair: Pair) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def pop() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()
