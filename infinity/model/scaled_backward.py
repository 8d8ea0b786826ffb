"""Scaled backward: autograd's engine, with backwards that start from gradients times the loss scale.

Every backward that Python begins goes through `run_backward` of one object, the engine. While a runtime with
a dynamic loss scale is open in the process, a `ScaledEngine` replaces this object. It searches the graph of
each backward that adds to `.grad`, and scales the backward if it reaches parameters of such a runtime. See
[Note: scaled backwards] in infinity/model/unscaled_hooks.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from infinity.gradients.loss_scale import LossScale
from infinity.model.paged_parameter import PagedParameter
from infinity.model.unscaled_hooks import (
    Replacement,
    ScaledBackward,
    ScaledHook,
    current,
    hook_registration,
    node_hook_registration,
    retained,
    retention,
    running,
    take_older,
    unscaled,
)

_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The type of a node that adds a gradient to the `.grad` of a leaf. The leaf is the node's `variable`."""

_open: weakref.WeakSet[LossScale] = weakref.WeakSet()
"""The dynamic loss scales of all open runtimes of the process."""

_lock = threading.Lock()


def scale_backwards(scale: LossScale) -> Callable[[], None]:
    """Scale the backwards that reach parameters of the runtime with this loss scale, until the returned
    function is called.
    """

    def end() -> None:
        with _lock:
            _open.discard(scale)
            if not _open:
                for each in _REPLACEMENTS:
                    each.take_away()

    with _lock:
        if not _open:
            take_older()
        _open.add(scale)
        for each in _REPLACEMENTS:
            each.put()
    return end


class ScaledEngine:
    """Replaces autograd's engine, and scales backwards that reach parameters of runtimes in `_open`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, roots: Sequence[Any], gradients: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        backward = current()
        if backward is not None and not isinstance(torch._C._current_autograd_node(), BackwardCFunction):
            backward = None  # not a Function that goes on with its gradients, but a recomputed forward
        with ExitStack() as stack:
            if kwargs.get("accumulate_grad") and _open:
                inside, graph = backward, _Graph(roots)
                assert inside is None or isinstance(inside, _Outermost)
                backward = inside or graph.backward()
                if backward is not None:
                    if backward is not inside:
                        stack.callback(backward.end)
                        gradients = tuple(
                            None if each is None else each * backward.scale for each in gradients
                        )
                    inputs = args[2] if len(args) > 2 else kwargs.get("inputs")
                    backward.enter(graph, inputs or ())
                del graph  # else it keeps what nodes free as they run
            stack.enter_context(running(backward))
            return self._engine.run_backward(roots, gradients, *args, **kwargs)


class _Graph:
    """The nodes that a backward from `roots` may run."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self.in_fp16 = any(isinstance(each, torch.Tensor) and each.dtype == torch.float16 for each in roots)
        self.nodes = {
            each.node if isinstance(each, GradientEdge) else get_gradient_edge(each).node
            for each in roots
            if isinstance(each, GradientEdge) or each.requires_grad
        }
        self.leaves: list[Any] = []
        self.checkpointed = False
        """Whether a reentrant checkpoint (of torch or its like) may hide some of the graph's leaves."""
        waiting = list(self.nodes)
        while waiting:
            node = waiting.pop()
            if type(node) is _LEAF:
                self.leaves.append(node)
            elif type(node).__name__ == "CheckpointFunctionBackward":
                self.checkpointed = True
            for following, _ in node.next_functions:
                if following is not None and following not in self.nodes:
                    self.nodes.add(following)
                    waiting.append(following)

    def backward(self) -> _Outermost | None:
        """Return a new scaled backward; None if gradients need no scaling.

        Gradients are scaled if the graph reaches a parameter of a runtime in `_open`, or may reach one
        behind a reentrant checkpoint.
        """
        scales = {scale for leaf in self.leaves if (scale := _scale_of(leaf.variable)) is not None}
        if not scales and self.checkpointed:
            scales = set(_open)
        if not scales:
            return None
        if self.in_fp16:
            for scale in scales:
                scale.limit_to_fp16()
        # With two scales, underflow in one model is a smaller loss than overflow in the other.
        return _Outermost(min(scale.value for scale in scales))


def _may_be_read(leaf: torch.Tensor) -> bool:
    """Whether an autograd Function may have made a leaf, to run a backward and then read the leaf's gradient,
    as torch.utils.checkpoint does.

    False for a leaf with a hook that runs after accumulation: it is the user's, and gets its true gradient.
    """
    return not isinstance(leaf, PagedParameter) and not leaf._post_accumulate_grad_hooks


def _scale_of(leaf: torch.Tensor) -> LossScale | None:
    if not isinstance(leaf, PagedParameter):
        return None
    scale = leaf._place.pager.scale
    return scale if scale in _open else None


class _Outermost(ScaledBackward):
    """A scaled backward that does not run inside another one."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self._handles: list[Any] = []
        self._entered = False
        self._retained: set[tuple[Node, int]] = set()
        """(node, number of its output) of the tensors whose retained gradients are unscaled."""
        self._later: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}
        """id() of a leaf whose gradient is scaled until `end` -> (the leaf, its gradient from before)."""

    def enter(self, graph: _Graph, inputs: Sequence[Any]) -> None:
        """Prepare the nodes of `graph` for this backward, or for a backward that a Function begins inside
        this one. inputs: the argument `inputs` of torch.autograd.backward.
        """
        for leaf in graph.leaves:
            hooks = leaf.variable._backward_hooks
            for key in list(hooks or ()):  # some are older than the runtime
                hooks[key] = unscaled(hooks[key])
            own = _scale_of(leaf.variable)
            wanted = 1.0 if own is None else own.value
            if wanted == self.scale or leaf in self.leaf_scales:
                continue
            if self._entered and _may_be_read(leaf.variable):
                self._divide_later(leaf.variable)
            else:
                self._rescale(leaf, wanted)
        for each in inputs:
            if isinstance(each, torch.Tensor) and not each.is_leaf:
                each.retain_grad()  # as torch's engine does
        for tensor in retained():
            if tensor.grad_fn in graph.nodes:
                self._make_retained_true(tensor)
        self._entered = True

    def end(self) -> None:
        self.ended = True
        for handle in self._handles:
            handle.remove()
        for reference, former in self._later.values():
            leaf = reference()
            if leaf is not None:
                leaf.grad = _sum(former, None if leaf.grad is None else leaf.grad / self.scale)

    def _rescale(self, leaf: Any, scale: float) -> None:
        """Have gradients arrive at the node of a leaf multiplied by `scale`, not by this backward's scale."""
        self.leaf_scales[leaf] = scale

        def rescale(gradients: tuple[torch.Tensor | None, ...]) -> Any:
            if current() is not self:  # a backward in another thread
                return None
            return tuple(None if each is None else each * (scale / self.scale) for each in gradients)

        self._handles.append(leaf.register_prehook(ScaledHook(rescale)))

    def _divide_later(self, leaf: torch.Tensor) -> None:
        """Leave the gradient of a leaf scaled until `end`, which unscales it. Called for a leaf of a graph
        that a Function made in its backward: until then the Function may compute with the scaled gradient.
        """
        noted = self._later.get(id(leaf))
        if noted is None or noted[0]() is not leaf:
            self._later[id(leaf)] = weakref.ref(leaf), leaf.grad
            leaf.grad = None

    def _make_retained_true(self, tensor: torch.Tensor) -> None:
        """Unscale the gradient that `tensor` retains, before the tensor's node runs.

        tensor: not a leaf; it retains its gradient in `.grad`.
        """
        node, output = tensor.grad_fn, tensor.output_nr
        if node is None or (node, output) in self._retained:
            return
        self._retained.add((node, output))
        reference, former = weakref.ref(tensor), tensor.grad

        def replace(gradients: tuple[torch.Tensor | None, ...]) -> None:
            found, gradient = reference(), gradients[output]
            if current() is self and found is not None and gradient is not None:
                found.grad = _sum(former, gradient / self.scale)

        self._handles.append(node.register_prehook(ScaledHook(replace)))


def _sum(former: torch.Tensor | None, fresh: torch.Tensor | None) -> torch.Tensor | None:
    if former is None or fresh is None:
        return fresh if former is None else former
    return former + fresh


_REPLACEMENTS = (
    Replacement(torch.Tensor, "register_hook", hook_registration),
    Replacement(torch.Tensor, "retain_grad", retention),
    Replacement(torch.autograd.Function, "_register_hook", node_hook_registration),
    Replacement(torch.autograd.Variable, "_execution_engine", ScaledEngine),
)
