"""Transforms: lets torch.func's transforms take paged parameters, and run in an offloaded model's forward.

A transform such as torch.func.grad allows no saved-tensor hooks, and its wrappers of tensors take no part in
__torch_function__. Autograd cannot save references to pages there, and would save the Parameter itself, which
refers to its placeholder once its page is evicted. So operations in a transform, and the transforms
themselves, get views of pages in place of paged parameters. Each view keeps its page's memory leased until
the graph that holds it is gone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch.utils._pytree import tree_map_only

from infinity.activations.saved_tensors import hooks_are_allowed, out_of_the_way
from infinity.errors import ConfigError
from infinity.model.paged_parameter import PagedParameter

Function = Callable[..., Any]


@functools.cache
def admit() -> None:
    """Patch functions of torch so that torch.func's transforms accept paged parameters, and work inside the
    forward of an offloaded model.

    Elsewhere, and for other tensors, the functions do what they did before. torch.func.functionalize refuses
    paged parameters with ConfigError. Only the first call in a process does anything.
    """
    _change(eager_transforms, "_wrap_for_grad", _taking_views)  # grad, vjp and jvp wrap tensors with it
    _change(vmap, "_add_batch_dim", _taking_views)
    _change(eager_transforms, "_wrap_functional_tensor", _refusing)
    _change(torch.autograd.graph, "disable_saved_tensors_hooks", _without_hooks)


def in_transform() -> bool:
    """Whether this thread is in a transform of torch.func, or where torch allows no saved-tensor hooks."""
    return torch._C._functorch.peek_interpreter_stack() is not None or not hooks_are_allowed()


def with_views(values: Any) -> Any:
    """Return `values` with a view of its page in place of each paged parameter; the pages are resident."""
    return tree_map_only(PagedParameter, lambda each: each.view_as(each), values)


def _change(module: Any, name: str, change: Callable[[Function], Function]) -> None:
    function = getattr(module, name)
    setattr(module, name, functools.wraps(function)(change(function)))


def _taking_views(wrap: Function) -> Function:
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, PagedParameter):
            with torch._C._DisableFuncTorch():  # a view for the code around the transform
                tensor = tensor.view_as(tensor)
        return wrap(tensor, *args, **kwargs)

    return call


def _refusing(wrap: Function) -> Function:
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, PagedParameter):
            raise ConfigError(
                f"torch.func.functionalize was given the offloaded parameter {tensor._place.name}.",
                "Give its function a copy (p.detach().clone()), or the model's inputs alone.",
            )
        return wrap(tensor, *args, **kwargs)

    return call


def _without_hooks(disable: Function) -> Function:
    @contextlib.contextmanager
    def call(error_message: str) -> Iterator[None]:
        with out_of_the_way(), disable(error_message):
            yield

    return call
