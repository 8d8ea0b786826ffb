"""Unscaled hooks: gives the user's hooks true gradients in a backward that runs with a loss scale.

[Note: scaled backwards] In fp16, a backward that reaches parameters of a runtime starts from gradients that
are multiplied by the runtime's loss scale (infinity/model/scaled_backward.py). So all gradients in it are
larger by this factor, however the loss was computed from the parameters. Where user code gets a gradient, it
is unscaled:

- A hook gets gradients that are divided by the scale, in their own dtype. What it returns, and what it
  changes in place, is multiplied by the scale. A gradient that the hook does not change keeps its bits, some
  of which would underflow without the scale.
- The gradient of a leaf that is not a parameter of the runtime is divided before it is added to `.grad`, and
  so is the gradient that a tensor retains.
- torch.autograd.grad is not scaled at all.

The backward of a torch.autograd.Function gets scaled gradients, as with torch.amp.GradScaler. That is right
if its results are linear in these gradients. Without the scale, its results in fp16 would underflow.

Hooks of tensors and hooks of autograd's nodes are unscaled. torch makes hooks on the backward of modules from
hooks of nodes, and those of torch.autograd.graph.register_multi_grad_hook from hooks of tensors.

Hooks also run in threads of autograd, and a backward may run in a hook or a Function of another backward. So
the running backward is stored in the thread-local state of torch, which autograd hands on to its threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node

from infinity.model.paged_parameter import PagedParameter

_KEY = "infinity.scaled_backward"


class ScaledBackward:
    """A running backward with scaled gradients, and the backwards that its Functions begin."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        """The factor by which gradients are larger than true ones: a power of two."""
        self.leaf_scales: dict[Node, float] = {}
        """Node of a leaf -> the factor of the gradients that leave the node, where it is not `scale`."""
        self.ended = False


def current() -> ScaledBackward | None:
    """Return the scaled backward that runs in this thread; None if there is none."""
    if not torch._C._is_key_in_tls(_KEY):
        return None
    found: ScaledBackward | None = torch._C._get_obj_in_tls(_KEY)
    return None if found is None or found.ended else found  # an interrupted `running` may have left it


@contextmanager
def running(backward: ScaledBackward | None) -> Iterator[None]:
    """Context in which `current` returns `backward`, also in autograd's threads."""
    before = current()
    _note(backward)
    try:
        yield
    finally:
        _note(before)


def _note(backward: ScaledBackward | None) -> None:
    if backward is None and hasattr(torch._C, "_remove_obj_from_tls"):  # which older torch lacks
        if torch._C._is_key_in_tls(_KEY):
            torch._C._remove_obj_from_tls(_KEY)
        return
    if _steals():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backward))
    torch._C._stash_obj_in_tls(_KEY, backward)


@functools.cache
def _steals() -> bool:
    """Whether torch releases more references to a stored object than it acquires, as older torch does."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(f"{_KEY}.probe", probe)
    steals = sys.getrefcount(probe) == before
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    elif hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(f"{_KEY}.probe")
    return steals


class UnscaledHook:
    """A hook that calls `hook` with true gradients; see [Note: scaled backwards]."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *gradients: Any) -> Any:
        backward = current()
        if backward is None:
            return self._hook(*gradients)
        scale = backward.scale
        if len(gradients) == 2:  # the hook runs after a node
            scale = backward.leaf_scales.get(torch._C._current_autograd_node(), scale)
        scaled_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id() of a true gradient -> (scaled gradient, true gradient)."""

        def unscale(scaled: torch.Tensor) -> torch.Tensor:
            true = scaled / scale
            scaled_of[id(true)] = scaled, true
            return true

        def rescale(true: torch.Tensor) -> torch.Tensor:
            return scaled_of[id(true)][0] if id(true) in scaled_of else true * scale

        given = _map_tensors(unscale, gradients)
        with running(None):
            result = self._hook(*given)
        for scaled, true in scaled_of.values():
            if true._version:  # the hook has changed it in place
                scaled.copy_(true * scale)
        return _map_tensors(rescale, result)


class ScaledHook:
    """A hook that calls `hook` with the gradients of a scaled backward, not unscaled."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *gradients: Any) -> Any:
        return self._hook(*gradients)


def unscaled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls `hook` with true gradients. An UnscaledHook or ScaledHook is returned
    unchanged.
    """
    return hook if isinstance(hook, (UnscaledHook, ScaledHook)) else UnscaledHook(hook)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Replace each tensor in `values`, the arguments or the result of a hook, by function(tensor)."""
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, (tuple, list)):
        return tuple(_map_tensors(function, each) for each in values)
    return values


# --- in place of torch's functions ---------------------------------------------------------------------

_retained: list[weakref.ref[torch.Tensor]] = []


def retained() -> list[torch.Tensor]:
    """Return the living tensors, other than leaves, whose gradients autograd retains in `.grad`."""
    found = [(each, each()) for each in _retained]
    _retained[:] = [each for each, tensor in found if tensor is not None]
    return [tensor for _, tensor in found if tensor is not None]


def retain(tensor: torch.Tensor) -> None:
    _retained.append(weakref.ref(tensor))


def _is_made(found: object) -> bool:
    """Whether an object is a tensor that an operation made, and not a leaf."""
    with contextlib.suppress(RuntimeError):  # torch 2.6 has tensor objects without a tensor
        return issubclass(type(found), torch.Tensor) and not found.is_leaf  # type: ignore[attr-defined]
    return False


def take_older() -> None:
    """Treat the tensors that exist already like later ones: their hooks get true gradients from now on, and
    those that retain gradients are added to the list that `retained` reads.

    This finds living tensors other than leaves. It does not find hooks of autograd's nodes, or hooks of a
    tensor that is gone while its graph still exists. The hooks of leaves are found in each backward.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            if _is_made(each):
                for key in list(each._backward_hooks or ()):
                    each._backward_hooks[key] = unscaled(each._backward_hooks[key])
                if each.retains_grad:
                    retain(each)


def hook_registration(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a substitute for torch.Tensor.register_hook, whose hooks get true gradients."""

    @functools.wraps(original)
    def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return _as_plain(original, self, unscaled(hook))

    return register_hook


def node_hook_registration(original: Callable[..., Any]) -> Any:
    """Return a substitute for torch.autograd.Function._register_hook, whose hooks get true gradients. torch
    calls that function for register_hook and register_prehook of every node, those in C++ included.
    """

    @functools.wraps(original)
    def _register_hook(hooks: Any, hook: Callable[..., Any]) -> Any:
        return original(hooks, unscaled(hook))

    return staticmethod(_register_hook)


def retention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a substitute for torch.Tensor.retain_grad, which also lists the tensor for `retained`."""

    @functools.wraps(original)
    def retain_grad(self: torch.Tensor) -> None:
        _as_plain(original, self)
        if not self.is_leaf:
            retain(self)

    return retain_grad


def _as_plain(function: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Any:
    """Return function(tensor, *args) without fetching the page of a paged parameter."""
    if not isinstance(tensor, PagedParameter):
        return function(tensor, *args)
    with torch._C.DisableTorchFunctionSubclass():
        return function(tensor, *args)


class Replacement:
    """Replaces an attribute of a class of torch by a substitute, and restores the attribute."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """owner: the class. name: the attribute. make: returns a substitute for the attribute's value."""
        self._owner = owner
        self._name = name
        self._make = make
        self._before: Any = None
        self._mine: Any = None

    def put(self) -> None:
        """Set the substitute, unless it is set."""
        if self._mine is not None and vars(self._owner).get(self._name) is self._mine:
            return
        self._before = vars(self._owner).get(self._name)
        self._mine = self._make(getattr(self._owner, self._name))
        setattr(self._owner, self._name, self._mine)

    def take_away(self) -> None:
        """Restore the attribute, unless someone else has set another value."""
        if vars(self._owner).get(self._name) is not self._mine:
            return
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
