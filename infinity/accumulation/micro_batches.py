"""Micro-batches: a group of micro-batches that go through the model together, and the order of their work.

[Note: the same bits] Micro-batches are only stopped and continued. Each runs the user's own forward, and
autograd runs one whole backward over an uncut graph, so every value is the same as in the plain loop, which
runs one micro-batch after the other, whatever the model is made of (residual streams, skips, tied weights). A
model whose order of units cannot be foreseen costs time, not correctness. A parameter's gradients are added
in the order of the micro-batches, ((g0 + g1) + g2) + ..., as in the plain loop: of the micro-batches at the
same part of the model, the one with the lowest number goes on first. If the order of units depends on data
(experts), a gradient waits until the gradients of all micro-batches with lower numbers are added.

[Note: where a backward stops] A backward stops at the tensors that entered a module with pages of its own.
The gradient of such a tensor is complete when the backward of this module, and of all modules after it, is
done. Recomputation in a backward does not stop.

[Note: what micro-batches must not share] While one micro-batch is stopped, another runs the same modules. A
module that stores something in an attribute in its forward for later use (an auxiliary loss) would mix the
micro-batches up. So two checks are made. Before the first backward, the modules' attributes are compared with
their values before the first forward. And no loss may be computed from the graph of another micro-batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.accumulation.task_threads import Surroundings, Task
from infinity.activations import autograd_hooks
from infinity.activations.recomputation import attributes_of, changed_attribute
from infinity.activations.saved_tensors import SavedTensors
from infinity.errors import ConfigError
from infinity.gradients.gradients import Gradients
from infinity.model.paged_parameter import PagedParameter
from infinity.model.pager import Pager

LossFunction = Callable[[Any], torch.Tensor]
"""Function that takes one micro-batch, calls the model, and returns the scalar loss."""

AddGradient = Callable[[int, int, torch.Tensor, int], None]
"""Function (unit, parameter, gradient, number) that adds a new gradient to a parameter's stored gradient.

unit: index of the unit. parameter: the parameter's index in the unit. number: index of the gradient's
micro-batch in its group.
"""

Expect = Callable[[int, Set[tuple[int, int]]], None]
"""Function (number, parameters) that is told which gradients a micro-batch will compute.

number: index of the micro-batch in its group. parameters: (unit, index of the parameter) of each gradient.
"""

_FORWARD, _BACKWARD = 0, 1


class Mixed(Exception):
    """Micro-batches share state, which the message names, so they cannot run together."""


@dataclass(eq=False)
class _MicroBatch:
    number: int
    position: tuple[int, int] = (_FORWARD, -1)
    """Progress: (_FORWARD, stage) in the forward, (_BACKWARD, -stage) in the backward. Stages number the
    parts of the model in the order of the forward. A greater position is further on.
    """
    units: frozenset[int] = frozenset()
    loss: torch.Tensor | None = None
    expected: set[tuple[int, int]] | None = None
    """(unit, parameter) of each gradient that the backward has yet to compute; None in the forward."""
    task: Task = field(init=False)


class Group:
    """Takes a group of micro-batches through the model together, one part of the model after the other, so
    that a page that is fetched serves all of them. batches: the arguments of `loss_fn`, one for each
    micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        pager: Pager,
        gradients: Gradients,
        add: AddGradient,
        expect: Expect,
        *,
        batches: Sequence[Any],
        loss_fn: LossFunction,
    ) -> None:
        self.backward_began = False
        self._in_recomputed = False
        """Whether the model itself recomputes parts of its forward in backward (torch.utils.checkpoint)."""
        self._model = model
        self._pager = pager
        self._gradients = gradients
        self._add = add
        self._expect = expect
        self._loss_fn = loss_fn
        self._course: list[frozenset[int]] = []
        """The units of each stage of the forward, in order. A stage begins where the forward enters a module
        with units that it did not use just before.
        """
        self._makers: dict[torch.autograd.graph.Node, int] = {}
        """Autograd node of a tensor at which a backward stops -> number of the micro-batch whose forward made
        it.
        """
        self._attributes = attributes_of(model)
        self._here = threading.local()
        self._held: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """(unit, parameter) -> number of a micro-batch -> its gradient, which waits until the gradients of
        earlier micro-batches are added.
        """
        surroundings = Surroundings()
        self._outer_hooks = surroundings.saved_tensor_hooks
        self._micro_batches = [_MicroBatch(number) for number in range(len(batches))]
        for micro, batch in zip(self._micro_batches, batches, strict=True):
            micro.task = Task(functools.partial(self._work, micro, batch), surroundings)

    def futility(self) -> str | None:
        """Return, as a sentence, why running the micro-batches together saved no transfers of pages; None if
        it did.
        """
        if self._in_recomputed:
            return (
                "The model recomputes its blocks in backward (torch.utils.checkpoint): turn that off, and "
                "give accumulate recompute=True."
            )
        if len(self._course) < 2:
            return "No forward goes from one module with pages of its own to another."
        return None

    def run(self) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches; returns their losses, detached, in order. Raises the
        exception of a micro-batch that fails, and Mixed if micro-batches share state.
        """
        gradients, last = self._gradients, self._micro_batches[-1]
        chosen = self._micro_batches[0]
        residual = self._pager.residual
        try:
            with nullcontext() if residual is None else residual.in_turn(self._turn):
                while under_way := [each for each in self._micro_batches if not each.task.done]:
                    chosen = min(under_way, key=lambda each: (each.position, each.number))
                    gradients.staged.more_to_come = chosen is not last
                    chosen.task.proceed()
        except BaseException:
            # Begin with the micro-batch that ran: after Ctrl-C it may still be running.
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
        assert micro.expected is not None
        self._expect(micro.number, set(micro.expected))
        loss.backward()
        micro.expected = set()  # no further gradient will come
        with self._pager.lock:
            for unit, parameter in list(self._held):
                self._release(unit, parameter)

    def _turn(self) -> tuple[int, int]:
        """See `ResidualPages.in_turn`."""
        micro: _MicroBatch | None = getattr(self._here, "micro", None)
        return (0, 0) if micro is None else (micro.position[1], -micro.number)

    @property
    def is_here(self) -> bool:
        """Whether this thread runs a micro-batch of the group that is in its backward."""
        micro: _MicroBatch | None = getattr(self._here, "micro", None)
        return micro is not None and micro.expected is not None

    def add(self, unit: int, parameter: int, gradient: torch.Tensor) -> bool:
        """Add a new gradient that the backward in this thread has computed. Hold it first while an earlier
        micro-batch may still bring a gradient for the same parameter.

        unit, parameter: as in AddGradient. Returns False, and does nothing, if this is not the backward of a
        micro-batch of the group.
        """
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
        """Add a parameter's waiting gradients up to the first micro-batch whose gradient is missing."""
        waiting = self._held[unit, parameter]
        for micro in self._micro_batches:
            if micro.number in waiting:
                self._add(unit, parameter, waiting.pop(micro.number), micro.number)
            if micro.expected is None or (unit, parameter) in micro.expected:
                break
        if not waiting:
            del self._held[unit, parameter]

    # --- inside of a forward or backward ---------------------------------------------------------------

    def arrive(self, units: frozenset[int], module: nn.Module, args: Any, kwargs: Any) -> None:
        """Stop the micro-batch of this thread before `module`, until `run` lets the micro-batch go on.

        Called by a forward pre-hook, with the arguments of the module. units: the units of the module. There
        is no stop if the forward has used all of these units just before. Does nothing in a backward, without
        grad mode, or in a thread that runs no micro-batch.
        """
        micro: _MicroBatch | None = getattr(self._here, "micro", None)
        if micro is None or torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        if units <= micro.units:
            return
        if self._recomputes():
            # A stop here would let other micro-batches draw random numbers that recomputation has to repeat.
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
        if stage:  # at the first stage a micro-batch has nothing to wait for
            micro.task.pause()

    def _return(self, micro: _MicroBatch, stage: int, _: torch.Tensor) -> None:
        """Stop `micro` when its backward has done stage `stage` of the model and all later stages.

        Called as a hook of each tensor that entered the first module of the stage; only the first call for a
        stage stops the micro-batch. The last argument, the tensor's gradient, is not used.
        """
        # Without a loss this is a backward inside of the forward, such as a model uses to compute a gradient.
        if micro.loss is not None and micro.position < (_BACKWARD, -stage):
            micro.position = (_BACKWARD, -stage)
            micro.task.pause()

    def _stage(self, micro: _MicroBatch, units: frozenset[int]) -> int | None:
        """Return the number of the stage that begins as `micro` enters a module with the units `units`.

        If no micro-batch has entered a later stage than `micro`, a new stage is added. Otherwise the result
        is the next known stage with exactly these units. If there is none, the result is None, and `micro`
        goes on without a stop.
        """
        now = micro.position[1]
        if now == len(self._course) - 1:
            self._course.append(units)
            return now + 1
        try:
            return self._course.index(units, now + 1)
        except ValueError:
            return None

    def _recomputes(self) -> bool:
        top = autograd_hooks.top()
        if top is None or isinstance(getattr(top[0], "__self__", None), SavedTensors):
            return False
        return self._outer_hooks is None or top[0] is not self._outer_hooks[0]

    def _check(self, micro: _MicroBatch, loss: torch.Tensor) -> None:
        """Check that `micro` shares no state with other micro-batches, and set `micro.expected` from the
        graph of its loss. Raises Mixed; see [Note: what micro-batches must not share].
        """
        if not self.backward_began:
            name = changed_attribute(self._model, self._attributes)
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
                    "The loss of one micro-batch was computed from tensors of another: the model or loss_fn "
                    "keeps tensors from one call to the next."
                )
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, PagedParameter):
                micro.expected.add((variable._place.page.index, variable._place.index))
            self._in_recomputed |= node.name() == "CheckpointFunctionBackward"
            remaining += [each for each, _ in node.next_functions]
