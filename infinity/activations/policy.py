"""Policy choice: decides what becomes of activations, by steps without data and by the plans they lead to.

[Note: the first blocks are recomputed] The backward needs the activations of the last blocks first, and then
frees them. So where not all activations fit, those of the last blocks are kept, and the first blocks run
again. How many these are is the number with the least predicted seconds. For each number the bytes of a step
are estimated: they are those of the step that recomputes all blocks and, from the forward of each kept block
to its backward, what it keeps more than a recomputed one. The step with the chosen number is then run without
data, for its exact bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from infinity.activations.recomputation import BlockFacts, blocks_of, observed, obstacle, recomputing
from infinity.activations.room_choice import RoomChoice
from infinity.errors import BudgetError, ConfigError
from infinity.planning.fake_step import FakeStep, Ledger
from infinity.planning.plan import Plan
from infinity.planning.predict import WORTH_CHOOSING
from infinity.planning.residual_states import KEEP, Residuals, check_policy, quickest_count

Run = Callable[..., FakeStep]
"""Function that runs a step without data, with `within` as in run_fake_step as its one keyword argument."""
Draft = Callable[[Residuals, FakeStep | None], Plan]
"""Function that makes the plan for a policy and its step; None: example inputs were not given."""


class PolicyChoice:
    """Chooses the policy of one model's activations. Each step without data runs once, if needed."""

    def __init__(
        self, model: nn.Module, asked: str, run: Run | None, rooms: RoomChoice | None, *, train: bool
    ) -> None:
        """asked: `activations=` of `infinity.offload`. run, rooms: None without example inputs.

        train: whether there is an optimizer; without one autograd saves nothing, and the policy is "keep".
        Raises ConfigError for an unknown `asked`.
        """
        check_policy(asked)
        found = {name: obstacle(block) for name, block in blocks_of(model).items()}
        self._asked = asked if train else "keep"
        self._rooms = rooms
        self._steps = None if run is None else Steps(run, [name for name in found if found[name] is None])
        self._all = Residuals(
            policy="recompute",
            recomputed=tuple(name for name, reason in found.items() if reason is None),
            left_alone=tuple((name, reason) for name, reason in found.items() if reason is not None),
        )
        """The policy "recompute" as far as modules tell it without a step."""

    def plan(self, draft: Draft, adopts: Callable[[Plan], bool]) -> Plan:
        """Make the plan for the policy that was asked for, or for "auto" the plan with the quickest policy.

        "auto" keeps all activations unless they do not fit, or unless recomputation leaves pages room that
        makes a step at least 5% faster. It keeps them, too, without example inputs, and where the plan that
        keeps them can adopt the slabs of the commit that is continued (`adopts`). Raises BudgetError if the
        model does not fit with any policy that may be chosen.
        """
        if self._asked.endswith("offload"):
            return self._leaving(self._asked, draft)
        steps = self._steps
        if steps is None:
            return draft(self._all if self._asked == "recompute" else KEEP, None)
        if self._asked == "recompute":
            return draft(self._recomputing(steps, None), steps.recomputing(None))
        return draft(KEEP, steps.kept) if self._asked == "keep" else self._auto(steps, draft, adopts)

    def _auto(self, steps: Steps, draft: Draft, adopts: Callable[[Plan], bool]) -> Plan:
        """Make the plan of "auto"; see `plan`."""
        try:
            kept = draft(KEEP, steps.kept)
        except BudgetError as error:
            if steps.kept.unknown is not None:
                raise
            return self._smaller(steps, draft, error.again())
        now = kept.predict(kept.accumulation or 1)
        if now is None or not steps.blocks or adopts(kept):  # or nothing is to be chosen
            return kept
        enough = (1 - WORTH_CHOOSING) * now.least
        bound = draft(KEEP, replace(steps.kept, activations=0)).predict(kept.accumulation or 1)
        worth = bound is not None and bound.least <= enough
        if not worth or steps.recomputing(None).unknown is not None:
            return kept
        plan = self._quickest(steps, draft, f"predicted faster than {now.text} s with all kept")
        other = plan.predict(kept.accumulation or 1)
        if other is not None and other.least <= enough:
            return plan
        why = "predicted slower otherwise" if other is None else f"predicted {other.text} s otherwise"
        return replace(kept, residuals=replace(KEEP, why=why))

    def _leaving(self, policy: str, draft: Draft, why: str = "") -> Plan:
        """Make the plan for one of the policies with which saved tensors leave the memory that computes. why:
        the reason for the plan's text.
        """
        if self._rooms is None or self._steps is None:
            raise ConfigError(
                f'activations="{policy}" was asked for without example_inputs: their bytes are unknown.',
                "Give infinity.offload example_inputs=: the arguments of a forward of the largest size.",
            )
        residuals = Residuals() if policy == "offload" else self._recomputing(self._steps, None)
        return self._rooms.plan(replace(residuals, policy=policy, why=why), draft)

    def _smaller(self, steps: Steps, draft: Draft, error: BudgetError) -> Plan:
        """Make the plan where not all activations fit: with the first policy that fits of those that take
        ever less memory. error: of the plan that keeps all. If no policy fits, the error that asks for the
        smallest budget is raised.
        """
        why = "because not all activations fit"
        attempts: list[Callable[[], Plan]] = [lambda: self._leaving("offload", draft, why)]
        if steps.blocks and steps.recomputing(None).unknown is None:
            attempts.insert(0, lambda: self._quickest(steps, draft, why))
            attempts.insert(1, lambda: self._leaving("recompute+offload", draft, why))
        errors = [error]
        for attempt in attempts:
            try:
                return attempt()
            except BudgetError as found:
                errors.append(found.again())
        tier = errors[-1].tier
        raise min((each for each in errors if each.tier == tier), key=lambda each: each.needed or 0)

    def _quickest(self, steps: Steps, draft: Draft, why: str) -> Plan:
        """Make the plan that recomputes the first blocks, as many as are best, but at least one; see
        [Note: the first blocks are recomputed]. why: the reason for the plan's text. Raises BudgetError if
        the model does not fit with all blocks recomputed.
        """
        every = replace(self._recomputing(steps, None), why=why)
        plan = draft(every, steps.recomputing(None))
        if plan.speeds is None:
            return plan
        rates, micro_batches = plan.speeds, plan.accumulation or 1

        def floor(count: int) -> float:
            return micro_batches * steps.estimate(count).work.seconds(rates)

        @functools.cache
        def seconds(count: int) -> float | None:
            try:
                found = draft(every, steps.estimate(count)).predict(micro_batches)
            except BudgetError:
                return None
            return floor(count) if found is None else found.least

        best = quickest_count(len(steps.blocks), seconds, floor)
        for count in () if best is None else range(max(1, best), min(best + 2, len(steps.blocks))):
            try:
                return draft(replace(self._recomputing(steps, count), why=why), steps.recomputing(count))
            except BudgetError:  # the estimate was too low by some bytes
                continue
        return plan

    def _recomputing(self, steps: Steps, count: int | None) -> Residuals:
        """The policy that recomputes the first `count` blocks; None: all blocks that may run again."""
        names = tuple(steps.blocks)
        found = tuple((name, each.reason) for name, each in steps.facts.items() if each.reason is not None)
        if steps.kept.unknown is not None:
            return self._all
        return replace(
            self._all,
            recomputed=names[:count],
            kept=names[count:] if count is not None else (),
            left_alone=self._all.left_alone + found,
        )


class Steps:
    """The steps without data of one model, with some of its blocks recomputed."""

    def __init__(self, run: Run, names: list[str]) -> None:
        """names: the paths of the blocks that may be recomputed as far as their modules tell."""
        self._run = run
        self._names = names
        self._ran: dict[int, tuple[FakeStep, dict[str, BlockFacts]]] = {}

    @property
    def kept(self) -> FakeStep:
        """The step that keeps all activations."""
        return self._step(0)[0]

    @property
    def facts(self) -> dict[str, BlockFacts]:
        """The facts of the blocks that the step calls, in the order of their first calls."""
        return self._step(0)[1]

    @functools.cached_property
    def blocks(self) -> dict[str, BlockFacts]:
        """Those of `facts` whose blocks may run again."""
        return {name: each for name, each in self.facts.items() if each.reason is None}

    def recomputing(self, count: int | None) -> FakeStep:
        """The step that recomputes the first `count` of `blocks`; None: all."""
        if self.kept.unknown is not None:
            return self.kept
        return self._step(len(self.blocks) if count is None else count)[0]

    def estimate(self, count: int) -> FakeStep:
        """An estimate of `recomputing(count)`, from the steps that recompute no block and all blocks; see
        [Note: the first blocks are recomputed]. Its bytes are too high where blocks are called more than
        once, because it lets these keep theirs to the end.
        """
        if count == 0:
            return self.kept
        every, facts = self._step(len(self.blocks))
        assert self.kept.activations is not None
        assert every.activations is not None
        kept = [(name, each.nbytes - facts[name].nbytes) for name, each in [*self.blocks.items()][count:]]
        most, held = every.activations, sum(nbytes for _, nbytes in kept)
        if any(each.calls > 1 for each in facts.values()):
            most += held
        for name, nbytes in reversed(kept):
            most = max(most, facts[name].before + held)  # in the backward, until that of the block begins
            held -= nbytes
        work = sum((each.work for each in itertools.islice(self.blocks.values(), count)), self.kept.work)
        return FakeStep(min(self.kept.activations, most), work)

    def _step(self, count: int) -> tuple[FakeStep, dict[str, BlockFacts]]:
        if count not in self._ran:
            found: list[dict[str, BlockFacts]] = []

            @contextmanager
            def within(model: nn.Module, ledger: Ledger) -> Iterator[None]:
                every = blocks_of(model)
                again = [*self.blocks][:count] if count else []
                watched = {name: every[name] for name in self._names}
                with observed(watched, ledger) as facts, recomputing(model, again):
                    found.append(facts)
                    yield

            self._ran[count] = self._run(within=within), found[-1] if found else {}
        return self._ran[count]
