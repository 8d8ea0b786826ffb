"""Micro-batches that are under way together: where they stop, which goes on, whose gradient is added next.

[Note: the same bits]
Micro-batches are only stopped, not changed: each runs the user's own forward, and autograd its own backward
over one uncut graph. So every value, whatever the model is made of (residual streams, skips, tied weights),
is the plain loop's. A model whose order of units cannot be foreseen costs time, not correctness. A
parameter's gradients are added in the order of the micro-batches, ((g0 + g1) + g2) + ..., as in the plain
loop: of the micro-batches that are equally far, the first goes on first. If the order depends on data
(experts), a later micro-batch can reach a parameter before an earlier one: its gradient then waits for the
earlier one's.

[Note: where a backward stops]
A backward stops at the tensors that entered a module with pages of its own. The gradient of such a tensor is
complete when the backward of that module, and of all after it, is done. Recomputation in a backward does not
stop.

[Note: what micro-batches must not share]
While one micro-batch stops, another runs the same modules. A module that keeps something on itself in its
forward for later use (an auxiliary loss) would mix them up. So before the first backward the modules'
attributes are compared with those before the first forward, and no loss may lie on a graph of another
micro-batch.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.accumulation.task_threads import Surroundings, Task
from infinity.activations.saved_tensors import SavedTensors
from infinity.errors import ConfigError
from infinity.gradients.host import Gradients
from infinity.model.paged_parameter import PagedParameter
from infinity.model.pager import Pager

LossFunction = Callable[[Any], torch.Tensor]
"""Function of one micro-batch that calls the model, and returns the scalar loss."""

AddGradient = Callable[[int, int, torch.Tensor], None]
"""Function that adds a new gradient to that of (unit, parameter)."""

_FORWARD, _BACKWARD = 0, 1

_OF_TORCH = frozenset(nn.Module().__dict__)
"""Names of the attributes that torch itself keeps on every module."""


class Mixed(Exception):
    """This model, or loss function, does not let its micro-batches run together; str() says why."""


@dataclass(eq=False)
class _MicroBatch:
    """One micro-batch under way."""

    number: int
    position: tuple[int, int] = (_FORWARD, -1)
    """Progress, which grows: (_FORWARD, stage), later (_BACKWARD, -stage)."""
    units: frozenset[int] = frozenset()
    """The units that the micro-batch uses now."""
    loss: torch.Tensor | None = None
    expected: set[tuple[int, int]] | None = None
    """(unit, parameter) of the gradients that its backward has yet to bring; None before it has a loss."""
    task: Task = field(init=False)


class Group:
    """Micro-batches that go through the model together."""

    def __init__(
        self,
        model: nn.Module,
        pager: Pager,
        gradients: Gradients,
        add: AddGradient,
        *,
        batches: Sequence[Any],
        loss_fn: LossFunction,
    ) -> None:
        self.backward_began = False
        self._in_recomputed = False
        """Whether the model itself recomputes a part of its forward in backward."""
        self._model = model
        self._pager = pager
        self._gradients = gradients
        self._add = add
        self._loss_fn = loss_fn
        self._course: list[frozenset[int]] = []
        """The units of every stage."""
        self._makers: dict[torch.autograd.graph.Node, int] = {}
        """Node that made a tensor at which a backward stops -> the number of the tensor's micro-batch."""
        self._attributes = _attributes(model)
        self._here = threading.local()
        self._held: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """(unit, parameter) -> number of a micro-batch -> its gradient, which waits for earlier ones."""
        surroundings = Surroundings()
        self._outer_hooks = surroundings.saved_tensor_hooks
        self._micro_batches = [_MicroBatch(number) for number in range(len(batches))]
        for micro, batch in zip(self._micro_batches, batches, strict=True):
            micro.task = Task(functools.partial(self._work, micro, batch), surroundings)

    def futility(self) -> str | None:
        """Why parameters moved as often as in the plain loop, as a sentence; None if they moved less."""
        if self._in_recomputed:
            return (
                "The model recomputes its blocks in backward (torch.utils.checkpoint): turn that off, and "
                "give accumulate recompute=True."
            )
        if len(self._course) < 2:
            return "No forward goes from one module with pages of its own to another."
        return None

    def run(self) -> list[torch.Tensor]:
        """Run forward and backward of all; returns the losses. Raises what one of them raises, and Mixed."""
        gradients, last = self._gradients, self._micro_batches[-1]
        chosen = self._micro_batches[0]
        try:
            while under_way := [each for each in self._micro_batches if not each.task.done]:
                chosen = min(under_way, key=lambda each: (each.position, each.number))
                gradients.staged.more_to_come = chosen is not last
                chosen.task.proceed()
        except BaseException:
            # End the one that ran first, because after Ctrl-C it may still be running.
            for each in sorted(self._micro_batches, key=lambda each: each is not chosen):
                each.task.break_off()
            if self.backward_began:
                gradients.break_off()
            raise
        finally:
            gradients.staged.more_to_come = False
            self._makers.clear()
            self._held.clear()
        with self._pager.lock:
            gradients.staged.finish()
        return [each.loss for each in self._micro_batches if each.loss is not None]

    def _work(self, micro: _MicroBatch, batch: Any) -> None:
        self._here.micro = micro
        loss = self._loss_fn(batch)
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"loss_fn returned {type(loss).__name__}, not a tensor.", "Return the scalar loss."
            )
        self._check(micro, loss)
        micro.loss = loss.detach()
        self.backward_began = True
        loss.backward()
        micro.expected = set()  # no further gradient will come
        with self._pager.lock:
            for unit, parameter in list(self._held):
                self._release(unit, parameter)

    def add(self, unit: int, parameter: int, gradient: torch.Tensor) -> bool:
        """Take a gradient from a backward; returns False if it is of none of these micro-batches."""
        micro: _MicroBatch | None = getattr(self._here, "micro", None)
        if micro is None or micro.expected is None:
            return False
        micro.expected.discard((unit, parameter))
        waiting = self._held.setdefault((unit, parameter), {})
        if micro.number in waiting:  # gradients come in parts from reentrant checkpoints
            gradient = waiting[micro.number] + gradient
        waiting[micro.number] = gradient
        self._release(unit, parameter)
        return True

    def _release(self, unit: int, parameter: int) -> None:
        """Add the gradients of a parameter that need not wait any more."""
        waiting = self._held[unit, parameter]
        for micro in self._micro_batches:
            if micro.number in waiting:
                self._add(unit, parameter, waiting.pop(micro.number))
            if micro.expected is None or (unit, parameter) in micro.expected:
                break
        if not waiting:
            del self._held[unit, parameter]

    # --- inside of a forward or backward ---------------------------------------------------------------

    def arrive(self, units: frozenset[int], module: nn.Module, args: Any, kwargs: Any) -> None:
        """Stop this thread's micro-batch before a module with other units. units: those of the module."""
        micro: _MicroBatch | None = getattr(self._here, "micro", None)
        if micro is None or torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        if units <= micro.units:
            return
        if self._recomputes():
            # A stop here would let others draw random numbers that recomputation expects to draw again.
            self._in_recomputed = True
            return
        micro.units = units
        stage = self._stage(micro, units)
        if stage is None:
            return
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                self._makers[tensor.grad_fn] = micro.number
                tensor.register_hook(functools.partial(self._return, micro, stage))
        micro.position = (_FORWARD, stage)
        if stage:  # before its first unit a micro-batch has nothing to wait for
            micro.task.pause()

    def _return(self, micro: _MicroBatch, stage: int, _: torch.Tensor) -> None:
        """Stop a micro-batch whose backward of this stage, and of all after it, is done."""
        # Without a loss this is a backward inside of the forward, which computes a gradient by itself.
        if micro.loss is not None and micro.position < (_BACKWARD, -stage):
            micro.position = (_BACKWARD, -stage)
            micro.task.pause()

    def _stage(self, micro: _MicroBatch, units: frozenset[int]) -> int | None:
        """The number of the stage that starts now; None if not all micro-batches come to it."""
        now = micro.position[1]
        if now == len(self._course) - 1:
            self._course.append(units)
            return now + 1
        try:
            return self._course.index(units, now + 1)
        except ValueError:
            return None

    def _recomputes(self) -> bool:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is None or isinstance(getattr(top[0], "__self__", None), SavedTensors):
            return False
        return self._outer_hooks is None or top[0] is not self._outer_hooks[0]

    def _check(self, micro: _MicroBatch, loss: torch.Tensor) -> None:
        """Check that micro-batches share nothing, and find the gradients to expect. Raises Mixed.

        See [Note: what micro-batches must not share].
        """
        if not self.backward_began:
            name = _changed(self._model, self._attributes)
            if name is not None:
                raise Mixed(
                    f"The model keeps {name} from its forward, which the next micro-batch overwrites."
                )
        micro.expected = set()
        seen: set[torch.autograd.graph.Node] = set()
        remaining = [loss.grad_fn]
        while remaining:
            node = remaining.pop()
            if node is None or node in seen:
                continue
            if self._makers.get(node, micro.number) != micro.number:
                raise Mixed(
                    "The loss of one micro-batch was computed from tensors of another: something keeps them "
                    "from one call of the model to the next."
                )
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, PagedParameter):
                micro.expected.add((variable._place.page.index, variable._place.index))
            self._in_recomputed |= node.name() == "CheckpointFunctionBackward"
            remaining += [each for each, _ in node.next_functions]


def _attributes(model: nn.Module) -> dict[str, Any]:
    """The modules' attributes by name, without parameters and those of torch."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in itertools.chain(module.__dict__.items(), module._buffers.items()):
            if name not in _OF_TORCH and name != "forward":
                found[f"{path}.{name}" if path else name] = value
    return found


def _changed(model: nn.Module, before: dict[str, Any]) -> str | None:
    """The name of the first attribute with another value; None if there is none. Ignores edits in place."""
    for name, value in _attributes(model).items():
        if name not in before:
            return name
        old = before[name]
        simple = isinstance(value, (bool, int, float, str)) and type(old) is type(value)
        if old is not value and not (simple and old == value):
            return name
    return None
