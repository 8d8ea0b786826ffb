"""Leaf hooks: keeps the hooks of a leaf that a torch.autograd.Function saves, which older torch removes.

Where saved-tensor hooks are active, such a Function's `ctx.saved_tensors` gives a second tensor in place of
the leaf, with the same AccumulateGrad node. Older torch (2.6, for example) removes all hooks from this node
and from the leaf when the second tensor's Python object is destroyed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

_saved_tensors: Any = BackwardCFunction.saved_tensors


def keep() -> None:
    """Have every torch.autograd.Function keep the hooks of leaves, if this torch removes them."""
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
    """Return the saved tensors, with a view in place of each second tensor of a leaf. The view holds the
    second tensor in C++, so no Python object of it is destroyed.
    """
    with torch.enable_grad():
        return tuple(each.view_as(each) if _is_second(each) else each for each in _saved_tensors.__get__(ctx))


def _is_second(tensor: torch.Tensor | None) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # a paged parameter's page is not needed
        if tensor is None or not tensor.is_leaf or not tensor.requires_grad:
            return False
        node: Any = get_gradient_edge(tensor).node
        return node.variable is not tensor
