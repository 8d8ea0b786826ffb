"""Room choice: decides how many bytes of each tier saved tensors get that leave the memory that computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from infinity.activations.fake_steps import ENDLESS, Steps
from infinity.activations.mixes import Mix, Mixes
from infinity.config import round_up
from infinity.errors import BudgetError, ConfigError
from infinity.planning.fake_step import FakeStep
from infinity.planning.headroom import Headroom
from infinity.planning.plan import Plan
from infinity.planning.residual_states import Point, ResidualBytes, Residuals, quickest_first, window_of
from infinity.tiers import PAGE_ALIGNMENT, Tier

Draft = Callable[[Residuals, FakeStep | None], Plan]
"""Function that makes the plan for a policy and its step; None: example inputs were not given. Raises
BudgetError.
"""

_TRIES = 3
"""Number of times that the quickest of several ways is run whose estimates fit."""


@dataclass(frozen=True)
class RoomChoice:
    """Chooses the room of one model's saved tensors, by steps without data and the plans they lead to."""

    steps: Steps
    unified: bool
    """Whether device and host are the same RAM."""
    nvme: bool
    """Whether there is an NVMe tier."""
    headroom: Headroom
    """What torch takes beside live tensors where the model computes."""

    def plan(self, residuals: Residuals, draft: Draft) -> Plan:
        """Make the plan with which all saved tensors leave, but those for which the computing tier has room
        in the end.

        All of them get RAM if there is room. With an NVMe tier, they get less if the model does not fit
        otherwise, or if pages are on NVMe and a step gets faster. Raises BudgetError if nothing fits; its
        `needed` has RAM for all of them. Raises ConfigError if a step cannot be run without data.
        """
        room = ResidualBytes(ram=ENDLESS)
        found = self.steps.step(residuals.recomputed, room)
        if found.step.unknown is not None:
            unknown = found.step.unknown
            raise ConfigError(
                f"Activations cannot be offloaded: their bytes are unknown. {unknown[:1].upper()}"
                f"{unknown[1:]}.",
                'Give activations="keep" or "recompute".',
            )
        found = self.steps.step(residuals.recomputed, replace(room, window=window_of(found.room.saved)))
        failure, nvme = None, self.nvme
        try:
            nvme = bool(draft(replace(residuals, room=found.room), found.step).home_bytes[Tier.NVME])
        except BudgetError as error:
            failure = error.again()
        mixes = Mixes(works=[found.step.work], kept=found.step, none=found, every=found, nvme=nvme)
        for points in (mixes.points, *([mix] for mix in mixes.of(0, 1))):  # the least RAM is tried last
            plan = self.quickest(mixes, points, lambda _: residuals, draft)
            if plan is not None:
                return plan
        assert failure is not None
        raise failure

    def quickest(
        self,
        mixes: Mixes,
        points: Sequence[Mix],
        policy: Callable[[Mix], Residuals],
        draft: Draft,
        enough: float = math.inf,
    ) -> Plan | None:
        """Make the plan with the quickest of `points`, mixes of `mixes`; None if none of them fits, or takes
        at most `enough` seconds. policy: returns the policy of a mix.
        """

        def seconds(some: Sequence[Mix]) -> float | None:
            demand = mixes.least(some)
            return within(enough, draft, replace(policy(some[0]), room=demand.room), demand.step)

        def made(mix: Mix) -> Plan:
            plan = self._fitted(policy(mix), mixes.demand(mix).room, draft, mixes.names)
            plan = plan if self.unified else self._with_kept(plan, draft, mixes.names)
            return self._for_more(plan, mixes.none.room)

        return first_to_fit(points, seconds, made)

    def _fitted(self, residuals: Residuals, room: ResidualBytes, draft: Draft, names: Sequence[str]) -> Plan:
        """Make the plan with this much room. names: blocks of which the plan says whether they leave."""
        again, disk = residuals.recomputed, bool(room.disk)
        ram = room.ram if disk else ENDLESS
        found = self.steps.step(
            again, ResidualBytes(kept=room.kept, window=room.window, ram=ram, disk=ENDLESS * disk)
        )
        rest = list(names[len(again) :])
        begins = [0, *(found.blocks[name].saved for name in names)]
        left = [name for name, begin in zip(names, begins, strict=False) if begin < found.room.down]
        leaving = tuple(name for name in rest if name in left)
        kept = tuple(name for name in rest if name not in left)
        return draft(replace(residuals, room=found.room, leaving=leaving, kept=kept), found.step)

    def _with_kept(self, plan: Plan, draft: Draft, names: Sequence[str]) -> Plan:
        """Return the plan with as many tensors kept as the computing tier has bytes left."""
        room = plan.residuals.room
        assert room is not None
        free = self.headroom.live_within(plan.free(plan.computes_in))
        kept = min(room.kept + free // PAGE_ALIGNMENT * PAGE_ALIGNMENT, room.saved)
        if kept <= room.kept:
            return plan
        try:
            found = self._fitted(plan.residuals, replace(room, kept=kept), draft, names)
        except BudgetError:
            return plan
        return replace(found, smallest=plan.smallest)  # with which less is kept

    def _for_more(self, plan: Plan, most: ResidualBytes) -> Plan:
        """Return the plan with RAM that is left for the activations of further micro-batches of a step, which
        may run together. most: what one of them takes at most, with nothing kept.
        """
        room, more = plan.residuals.room, (plan.accumulation or 1) - 1
        if room is None or not room.down or not more:
            return plan
        live = plan.activations or 0
        beside = live + self.headroom.one_more(live) if self.unified else 0
        newest = most.saved - most.down  # it stays, unless further micro-batches save more
        each = most.ram + round_up(newest, PAGE_ALIGNMENT)
        more = min(more, max(0, plan.free(Tier.HOST)) // (each + beside))
        room = replace(room, ram=room.ram + more * each, together=1 + more)
        return replace(plan, residuals=replace(plan.residuals, room=room))


def first_to_fit(
    points: Sequence[Point],
    seconds: Callable[[Sequence[Point]], float | None],
    made: Callable[[Point], Plan],
) -> Plan | None:
    """Make the plan of the quickest point that fits; None if none of the first _TRIES does. points, seconds:
    as in `quickest_first`, by estimates. made: makes the plan of a point, or raises BudgetError.
    """
    for point in itertools.islice(quickest_first(points, seconds), _TRIES):
        try:
            return made(point)
        except BudgetError:  # the estimate was too low by some bytes
            continue
    return None


def within(enough: float, draft: Draft, residuals: Residuals, step: FakeStep) -> float | None:
    """Seconds of a step; None if it does not fit, or takes more than `enough`."""
    try:
        found = seconds_of(draft(residuals, step))
    except BudgetError:
        return None
    return found if found <= enough else None


def seconds_of(plan: Plan) -> float:
    """The predicted seconds of a step; infinity if they are unknown."""
    found = plan.predict(plan.accumulation or 1)
    return math.inf if found is None else found.least
