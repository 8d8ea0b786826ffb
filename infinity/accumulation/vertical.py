"""Vertical accumulation: all micro-batches of a step go through the model together, page by page.

The plain loop fetches a model that does not fit once for each micro-batch. In vertical accumulation, a
micro-batch stops wherever its forward or backward is about to go from one unit to the next, and goes on when
all others have come equally far. So a resident page serves all micro-batches before it is evicted (the
layer-major order of GreedySnake, arXiv 2512.17570). infinity/accumulation/micro_batches.py runs the
micro-batches; this module decides whether they run together or in the plain loop.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from infinity.accumulation.micro_batches import AddGradient, Expect, Group, LossFunction, Mixed
from infinity.accumulation.task_threads import Surroundings
from infinity.activations.recomputation import blocks_of, is_recomputed, obstacle, recomputing
from infinity.errors import ConfigError
from infinity.gradients.gradients import Gradients
from infinity.layout.names import named_modules
from infinity.model.hooks import Hook
from infinity.model.pager import Pager
from infinity.planning.headroom import Headroom
from infinity.planning.plan import Plan


class Accumulator:
    """Accumulates gradients over the micro-batches of a step, for one runtime."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        pager: Pager,
        gradients: Gradients,
        *,
        add: AddGradient,
        expect: Expect,
        ended: Callable[[int], None],
    ) -> None:
        """pager: brings the model's pages into memory and evicts them. gradients: the stored gradients.

        add: adds a new gradient to the stored one, in the order of the micro-batches. expect: called before a
        micro-batch's backward. ended: called after all backwards of a group, with its number of
        micro-batches.
        """
        self.model = model
        self.plan = plan
        self.pager = pager
        self.gradients = gradients
        self._add = add
        self._expect = expect
        self._ended = ended
        self._group: Group | None = None
        self._reason: str | None = None
        """Why micro-batches run one after the other from now on, as a sentence; None if they do not."""
        self._mixed_before = False
        self._told: set[str] = set()

    def run(
        self, batches: Iterable[Any], loss_fn: LossFunction, *, together: int | None, recompute: bool
    ) -> list[torch.Tensor]:
        """Run forward and backward of `loss_fn(batch)` for every batch; returns the detached losses.

        The gradients have the same bits as in the plain loop, `for batch in batches:
        loss_fn(batch).backward()`; see [Note: the same bits] in infinity/accumulation/micro_batches.py.
        Random numbers are the same, too, if they are drawn before a forward reaches its second unit. Dropout
        inside blocks draws other random numbers than in the plain loop, but the same numbers in every run.

        together: the most micro-batches that run together; None: as many as the budget has room for, or all
        if the plan does not know the size of activations. Their activations are in memory at the same time,
        except those of the model's head, whose backward follows at once.

        recompute: each block of the model (see `blocks_of`) keeps only its inputs and runs again in backward,
        with the same bits, as with the policy "recompute" of infinity.offload; blocks that must not run again
        are left alone (infinity/activations/recomputation.py). Blocks that the plan recomputes are recomputed
        in any case. Without `together`, all micro-batches then run together.

        The plain loop runs for a single micro-batch, and if all pages fit in memory at the same time. It runs
        with a warning if the budget has no room for two micro-batches, if the model recomputes by itself or
        keeps state from one call to the next, if it has no blocks to recompute, if its forward does not go
        from one module with pages to another, or if a TorchFunctionMode or TorchDispatchMode is active. If
        such a reason is noticed while micro-batches run together, they start again in the plain loop. Tiles
        come once for each micro-batch in any case, because micro-batches stop before modules only. After
        the first backward has begun, ConfigError is raised instead.

        An exception in one micro-batch ends all of them. If backwards had begun, `step` raises ConfigError
        until `zero_grad` is called, because some gradients of the step are missing.
        """
        if together is not None and together < 1:
            raise ConfigError(f"together={together} was asked for.", "Give at least 1, or None.")
        if not self._pays():
            return _plain(batches, loss_fn)
        blocks = self._blocks(recompute)
        reason = Surroundings.obstacle() or self._reason
        if recompute and not blocks:
            reason = (
                reason or "The model has no list of blocks of one type, or none of them may be recomputed."
            )
        if together is None and not recompute:
            together = self._room()
            if together == 1:
                reason = reason or (
                    "The budget has room for the activations of one micro-batch only: give a larger budget, "
                    "or together= to exceed it, or recompute=True."
                )
        if reason is not None:
            self._tell(reason, 4)
            return _plain(batches, loss_fn)
        losses: list[torch.Tensor] = []
        remaining = iter(batches)
        while group := list(itertools.islice(remaining, together)):
            losses += self._run_group(group, loss_fn, blocks) if len(group) > 1 else _plain(group, loss_fn)
        return losses

    def add(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Take a new gradient of a parameter from autograd, to be added to the stored gradient.

        Gradients of micro-batches that run together are held back until they can be added in order. unit: the
        unit's index. parameter: the parameter's index in the unit.
        """
        if self._group is None or not self._group.add(unit, parameter, gradient):
            self._add(unit, parameter, gradient, 0)

    @property
    def together(self) -> bool:
        """Whether this thread runs the backward of a micro-batch in a group."""
        return self._group is not None and self._group.is_here

    def _pays(self) -> bool:
        """Whether running together saves transfers: the parameter pages do not all fit in memory at once."""
        moving = sum(page.nbytes for page in self.pager.pages if not page.permanent)
        return moving > self.plan.resident_bytes

    def _room(self) -> int | None:
        """The number of micro-batches whose activations fit in the budget together; None if unknown."""
        if not self.plan.activations:
            return None
        activations, room = self.plan.activations, self.plan.residuals.room
        # The gradients of tied tiles of one micro-batch alone leave.
        each = activations + Headroom.of(self.plan.device).one_more(activations) + self.plan.tile_sum_bytes
        found = 1 + max(0, self.plan.free(self.plan.computes_in)) // each
        return found if room is None else min(found, room.together)

    def _blocks(self, recompute: bool) -> dict[str, nn.Module]:
        """The blocks to recompute, by path: those of the plan and, with `recompute`, all that may be."""
        blocks = blocks_of(self.model)
        left = dict(self.plan.residuals.left_alone)
        return {
            path: block
            for path, block in blocks.items()
            if is_recomputed(block) or (recompute and path not in left and obstacle(block) is None)
        }

    def _run_group(
        self, batches: Sequence[Any], loss_fn: LossFunction, blocks: Mapping[str, nn.Module]
    ) -> list[torch.Tensor]:
        if self._reason is not None:  # found by an earlier group of this call
            return _plain(batches, loss_fn)
        devices = [self.plan.device] if self.plan.device.type == "cuda" else []
        random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        group = self._group = Group(
            self.model,
            self.pager,
            self.gradients,
            self._add,
            self._expect,
            batches=batches,
            loss_fn=loss_fn,
        )
        try:
            with self._hooked(group, blocks):
                losses = group.run()
            self._ended(len(batches))
        except Mixed as mixed:
            self._mixed(str(mixed), lost=group.backward_began)
        else:
            self._reason = group.futility()
            if self._reason is not None:
                self._tell(self._reason, 5)
            return losses
        finally:
            self._group = None
        torch.set_rng_state(random[0])
        for device, state in zip(devices, random[1:], strict=True):
            torch.cuda.set_rng_state(state, device)
        return _plain(batches, loss_fn)

    def _mixed(self, reason: str, *, lost: bool) -> None:
        """Record that micro-batches which ran together shared state, so their results cannot be used.

        reason: the cause as a sentence. lost: whether a backward had begun, so that the gradients of the step
        are lost; then ConfigError is raised. After a second call, or a first with `lost`, micro-batches run
        one after the other. A first call without `lost` has no such effect, because its cause may be a cache
        that a module fills in its first forward.
        """
        if lost or self._mixed_before:
            self._reason = reason
        self._mixed_before = True
        if lost:
            raise ConfigError(
                f"Micro-batches were mixed up, and the gradients of this step are lost. {reason}",
                "Call runtime.optimizer.zero_grad() and repeat the step: accumulate() runs the plain loop "
                "from now on.",
            ) from None
        if self._reason is not None:
            self._tell(self._reason, 6)

    @contextmanager
    def _hooked(self, group: Group, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Context in which the micro-batches of `group` stop before each module that `_stops` returns, and
        backward recomputes `blocks`.
        """
        with ExitStack() as stack:
            for module, units in self._stops(blocks.values()).items():
                hook = Hook(functools.partial(group.arrive, units))
                handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(recomputing(self.model, blocks, self.pager.saving))
            yield

    def _stops(self, blocks: Iterable[nn.Module]) -> dict[nn.Module, frozenset[int]]:
        """The modules before which micro-batches stop, each with the units whose pages the module uses.

        A module in `blocks` uses the units of all its parameters, and any other module the units of the
        parameters that it holds itself. Units whose parameter page is never evicted do not count, and modules
        without other units are not listed.
        """
        units: dict[nn.Module, set[int]] = {}
        modules = dict(named_modules(self.model, remove_duplicate=False))
        for path, found in self.plan.layout.module_units.items():
            moving = (unit for unit in found if not self.pager.pages[unit].permanent)
            units.setdefault(modules[path], set()).update(moving)
        for block in blocks:
            inside = [units[each] for each in block.modules() if each in units]
            units[block] = set().union(*inside)
        return {module: frozenset(found) for module, found in units.items() if found}

    def _tell(self, reason: str, stacklevel: int) -> None:
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(
                f"accumulate() runs the plain loop, and parameters move once for each micro-batch. {reason}",
                stacklevel=stacklevel,
            )


def _plain(batches: Iterable[Any], loss_fn: LossFunction) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        loss = loss_fn(batch)
        loss.backward()
        losses.append(loss.detach())
        del loss
    return losses
