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
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from infinity.activations.mixes import Mix
from infinity.activations.recomputation import BlockFacts, blocks_of, observed, obstacle
from infinity.activations.room_choice import RoomChoice, seconds_of
from infinity.errors import BudgetError, ConfigError
from infinity.planning.fake_step import FakeStep, Ledger
from infinity.planning.plan import Plan
from infinity.planning.predict import WORTH_CHOOSING
from infinity.planning.residual_states import KEEP, Residuals, check_policy, quickest_first

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

        "auto" keeps all activations unless they do not fit, or unless a step is at least 5% faster with the
        best number of recomputed blocks, or with the best mix of blocks that run again, leave or stay. A mix
        in turn has to be 5% faster than recomputation alone. "auto" keeps all activations, too, without
        example inputs, and where the plan that keeps them can adopt the slabs of the commit that is continued
        (`adopts`). Raises BudgetError if the model does not fit with any policy that may be chosen.
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
        if steps.kept.unknown is not None:
            return draft(KEEP, steps.kept)
        failure: BudgetError | None = None
        tried: dict[str, Plan] = {}
        try:
            tried[_KEPT] = draft(KEEP, steps.kept)
        except BudgetError as error:
            failure = error.again()
        else:
            if seconds_of(tried[_KEPT]) == math.inf or adopts(tried[_KEPT]):  # nothing is to be chosen
                return tried[_KEPT]
        best, bound = _KEPT, self._bound(steps, draft)
        for how, attempt in ("if none leave", self._quickest), ("if some leave", self._mixed):
            enough = (1 - WORTH_CHOOSING) * seconds_of(tried[best]) if tried else math.inf
            if bound <= enough and (not tried or enough < math.inf):
                plan = attempt(steps, draft, enough)
                if plan is not None:
                    tried[how] = plan
                    best = how if seconds_of(plan) <= enough else best
        if failure is not None and not tried:
            return self._smaller(steps, draft, failure)
        plan, why = tried.pop(best), ["because not all activations fit"] * (failure is not None)
        if tried:
            others = " and ".join(f"{_text(each)} s {how}" for how, each in tried.items())
            why.append(f"predicted {_text(plan)} s against {others}")
        return replace(plan, residuals=replace(plan.residuals, why=", ".join(why)))

    def _bound(self, steps: Steps, draft: Draft) -> float:
        """Seconds that a step takes at least, whatever becomes of its activations."""
        try:
            return seconds_of(draft(KEEP, replace(steps.kept, activations=0)))
        except BudgetError:
            return math.inf

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
        """Make the plan with the first policy that fits of those that take ever less memory. error: of the
        plan that keeps all. If no policy fits, the error that asks for the smallest budget is raised.
        """
        why = "because not all activations fit"
        attempts: list[Callable[[], Plan]] = [lambda: self._leaving("offload", draft, why)]
        if _run_again(steps):
            every = replace(self._recomputing(steps, None), why=why)
            attempts.insert(0, lambda: draft(every, steps.recomputing(None)))
            attempts.insert(1, lambda: self._leaving("recompute+offload", draft, why))
        errors = [error]
        for attempt in attempts:
            try:
                return attempt()
            except BudgetError as found:
                errors.append(found.again())
        tier = errors[-1].tier
        raise min((each for each in errors if each.tier == tier), key=lambda each: each.needed or 0)

    def _quickest(self, steps: Steps, draft: Draft, enough: float) -> Plan | None:
        """Make the plan that recomputes the first blocks, as many as are best, but at least one; see
        [Note: the first blocks are recomputed]. None if none of them fits, or takes at most `enough` seconds.
        """
        if not _run_again(steps):
            return None

        def seconds(some: Sequence[tuple[int]]) -> float | None:
            step = replace(steps.estimate(max(some)[0]), work=steps.estimate(min(some)[0]).work)
            return _within(enough, draft, self._all, step)

        counts = [(count,) for count in range(1, len(steps.blocks) + 1)]
        for (count,) in itertools.islice(quickest_first(counts, seconds), _TRIES):
            try:
                return draft(self._recomputing(steps, count), steps.recomputing(count))
            except BudgetError:  # the estimate was too low by some bytes
                continue
        return None

    def _mixed(self, steps: Steps, draft: Draft, enough: float) -> Plan | None:
        """Make the plan with the best mix of blocks that run again, leave or stay; see [Note: mixes of
        blocks]. None if none of them fits, or takes at most `enough` seconds.
        """
        assert self._rooms is not None
        names = list(steps.blocks) if _run_again(steps) else []
        works = [steps.estimate(count).work for count in range(len(names) + 1)]
        mixes = self._rooms.mixes(names, works, steps.kept)
        if mixes is None:
            return None

        def seconds(some: Sequence[Mix]) -> float | None:
            demand = mixes.least(some)
            return _within(enough, draft, replace(self._all, room=demand.room), demand.step)

        for mix in itertools.islice(quickest_first(mixes.points, seconds), _TRIES):
            try:
                return self._rooms.mixed(mixes, mix, self._recomputing(steps, mix.again), draft)
            except BudgetError:
                continue
        return None

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


_KEPT = "with all kept"
_TRIES = 3
"""Number of times that the quickest of those ways is run whose estimates fit."""


def _run_again(steps: Steps) -> bool:
    """Whether there are blocks that may run again, and the step in which they do could be run."""
    return bool(steps.blocks) and steps.recomputing(None).unknown is None


def _text(plan: Plan) -> str:
    found = plan.predict(plan.accumulation or 1)
    return "unknown" if found is None else found.text


def _within(enough: float, draft: Draft, residuals: Residuals, step: FakeStep) -> float | None:
    """Seconds of a step; None if it does not fit, or takes more than `enough`."""
    try:
        found = seconds_of(draft(residuals, step))
    except BudgetError:
        return None
    return found if found <= enough else None


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
                again = [*self.blocks][:count] if count else []
                with observed(model, self._names, ledger, again, lambda: 0) as facts:
                    found.append(facts)
                    yield

            self._ran[count] = self._run(within=within), found[-1] if found else {}
        return self._ran[count]
