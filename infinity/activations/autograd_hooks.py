"""Autograd's hooks: access to a thread's stack of saved-tensor hooks, whose top pair autograd calls, and
workarounds for two faults of torch: lost hooks of leaves, and a crash at the end of the process.

torch 2.6 has no function that returns the pair at the top. There torch's `push` and `pop` are replaced by
functions that record the pairs. Torch's own contexts look both functions up by name, so their pairs are
recorded, too.

Where saved-tensor hooks are active, the `ctx.saved_tensors` of a torch.autograd.Function gives a second
tensor in place of a leaf, with the same AccumulateGrad node. Older torch (2.6, for example) removes all
hooks from this node and from the leaf when the second tensor's Python object is destroyed.

An error in a backward leaves nodes, with their saved tensors, in the thread's queue until a later backward
of this thread runs, such as that of `drop_left_tasks`; no other thread can reach the queue. At the end of the
process the main thread's queue is destroyed after Python. Torch 2.15 then asks for the GIL to destroy the
hooks of these tensors, and crashes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Functions (pack, unpack), as `torch.autograd.graph.saved_tensors_hooks` takes them."""


class _Recorded(threading.local):
    """The pairs of hooks on this thread's stack, the top pair last."""

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


def recomputes(pair: Pair) -> bool:
    """Whether a pair of hooks is of torch.utils.checkpoint (non-reentrant), in forward or recomputation."""
    return getattr(pair[0], "__qualname__", "").startswith(("_checkpoint_hook.", "_recomputation_hook."))


_saved_tensors: Any = BackwardCFunction.saved_tensors


def keep_leaf_hooks() -> None:
    """Have torch.autograd.Functions keep the hooks of leaves, if the installed torch removes them."""
    if _forgotten():
        setattr(BackwardCFunction, "saved_tensors", property(_views))  # noqa: B010 - mypy knows no such attribute


def _forgotten() -> bool:
    # No backward: autograd's threads, which it starts, do not survive a fork.
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(0, device="cpu", requires_grad=True)
        leaf.register_hook(lambda _: None)
        hooks: Any = leaf._backward_hooks
        before = sys.getrefcount(hooks)
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            node: Any = (leaf**2).grad_fn
        node._saved_self  # noqa: B018 - makes a second tensor, which goes at once
        return sys.getrefcount(hooks) < before


def _views(ctx: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the saved tensors of the context `ctx`. A tensor that is a second Python object of a leaf is
    replaced by a view. The view holds the second tensor in C++, so its Python object is not destroyed.
    """
    with torch.enable_grad():
        return tuple(each.view_as(each) if _is_second(each) else each for each in _saved_tensors.__get__(ctx))


def _is_second(tensor: torch.Tensor | None) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # a paged parameter's page is not needed
        if tensor is None or not tensor.is_leaf or not tensor.requires_grad:
            return False
        node: Any = get_gradient_edge(tensor).node
        return node.variable is not tensor


def drop_left_tasks() -> None:
    """Have autograd remove the nodes that a failed backward has left in this thread's queue."""
    with contextlib.suppress(RuntimeError):  # a fork of a process that used CUDA can run no backward
        torch.zeros((), device="cpu", requires_grad=True).backward()
