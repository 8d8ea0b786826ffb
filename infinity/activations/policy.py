"""Policy choice: decides what becomes of activations, by steps without data and by the plans they lead to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from infinity.activations.recomputation import blocks_of, observed, obstacle, recomputing
from infinity.errors import BudgetError
from infinity.planning.fake_step import FakeStep
from infinity.planning.plan import Plan
from infinity.planning.residual_states import KEEP, Residuals, check_policy

_WORTH_RECOMPUTING = 0.05
"""Blocks are recomputed by choice, where all activations fit, if this part of a step is saved."""

Run = Callable[..., FakeStep]
"""Function that runs a step without data, with `within` as in run_fake_step as its one keyword argument."""
Draft = Callable[[Residuals, FakeStep | None], Plan]
"""Function that makes the plan for a policy and its step; None: example inputs were not given."""


class PolicyChoice:
    """Chooses the policy of one model's activations. Each step without data runs once, if needed."""

    def __init__(self, model: nn.Module, asked: str, run: Run | None, *, train: bool) -> None:
        """asked: `activations=` of `infinity.offload`. run: None without example inputs. train: whether there
        is an optimizer; without one autograd saves nothing, and the policy is "keep". Raises ConfigError for
        an unknown `asked`.
        """
        check_policy(asked)
        self._model = model
        self._asked = asked if train else "keep"
        self._run = run
        self._train = train

    def plan(self, draft: Draft, adopts: Callable[[Plan], bool]) -> Plan:
        """Make the plan for the policy that was asked for, or for "auto" the plan with the quickest policy.

        "auto" keeps all activations unless they do not fit, or unless recomputation leaves pages room that
        makes a step at least 5% faster. It keeps them, too, without example inputs, and where only the plan
        that keeps them can adopt the slabs of the commit that is continued (`adopts`). Raises BudgetError if
        the model does not fit with any policy that may be chosen.
        """
        if self._asked == "keep" or self._run is None:
            residuals = self._all if self._asked == "recompute" else KEEP
            return draft(residuals, None if self._run is None else self._kept[0])
        if self._asked == "recompute":
            return draft(*self._recomputed)
        try:
            kept = draft(KEEP, self._kept[0])
        except BudgetError:
            if not self._all.recomputed or not self._recomputed[0].recomputed:
                raise
            residuals, step = self._recomputed
            return draft(replace(residuals, why="because they do not fit"), step)
        return self._quicker(kept, draft, adopts)

    def _quicker(self, kept: Plan, draft: Draft, adopts: Callable[[Plan], bool]) -> Plan:
        """Return `kept`, or the plan that recomputes blocks if that is faster."""
        now = kept.predict(kept.accumulation or 1)
        if now is None or not self._all.recomputed or adopts(kept):
            return kept
        enough = (1 - _WORTH_RECOMPUTING) * now.least
        without = draft(KEEP, replace(self._kept[0], activations=0)).predict(kept.accumulation or 1)
        if without is None or without.least > enough:  # no room that activations leave would be worth it
            return kept
        residuals, step = self._recomputed
        if not residuals.recomputed or step.unknown is not None:
            return kept
        plan = draft(residuals, step)
        other = plan.predict(kept.accumulation or 1)
        assert other is not None
        if other.least > enough:
            return replace(
                kept, residuals=replace(KEEP, why=f"predicted {now.text} s against {other.text} s recomputed")
            )
        why = f"predicted {other.text} s against {now.text} s with all kept"
        return replace(plan, residuals=replace(residuals, why=why))

    @functools.cached_property
    def _all(self) -> Residuals:
        """The policy "recompute" as far as modules tell it without a step."""
        found = {name: obstacle(block) for name, block in blocks_of(self._model).items()}
        return Residuals(
            policy="recompute",
            recomputed=tuple(name for name, reason in found.items() if reason is None),
            left_alone=tuple((name, reason) for name, reason in found.items() if reason is not None),
        )

    @functools.cached_property
    def _kept(self) -> tuple[FakeStep, dict[str, str]]:
        """(the step that keeps all activations, path of a block -> why it must not run again)."""
        assert self._run is not None
        found: list[dict[str, str]] = []

        @contextmanager
        def watching(model: nn.Module) -> Iterator[None]:
            blocks = blocks_of(model)
            with observed({name: blocks[name] for name in self._all.recomputed}) as reasons:
                found.append(reasons)
                yield

        step = self._run(within=watching)
        return step, found[-1] if found else {}

    @functools.cached_property
    def _recomputed(self) -> tuple[Residuals, FakeStep]:
        """(the policy "recompute", its step)."""
        assert self._run is not None
        step, reasons = self._kept
        residuals = replace(
            self._all,
            recomputed=tuple(name for name in self._all.recomputed if name not in reasons),
            left_alone=self._all.left_alone + tuple(reasons.items()),
        )
        if step.unknown is not None or not residuals.recomputed:
            return residuals, step
        return residuals, self._run(within=functools.partial(recomputing, names=residuals.recomputed))
