"""Policy choice: decides what becomes of activations, by steps without data and by the plans they lead to.

[Note: the first blocks are recomputed] The backward needs the activations of the last blocks first, and then
frees them. So where not all activations fit, those of the last blocks are kept, and the first blocks run
again. How many these are is the number with the least predicted seconds. For each number the bytes of a step
are estimated: they are those of the step that recomputes all blocks and, from the forward of each kept block
to its backward, what it keeps more than a recomputed one. The step with the chosen number is then run without
data, for its exact bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from infinity.activations.fake_steps import ENDLESS, Run, Steps
from infinity.activations.mixes import Mix, Mixes
from infinity.activations.recomputation import blocks_of, obstacle
from infinity.activations.room_choice import Draft, RoomChoice, first_to_fit, seconds_of, within
from infinity.config import Budget
from infinity.errors import BudgetError, ConfigError
from infinity.planning.headroom import Headroom
from infinity.planning.plan import Plan
from infinity.planning.predict import WORTH_CHOOSING
from infinity.planning.residual_states import KEEP, ResidualBytes, Residuals, check_policy


class PolicyChoice:
    """Chooses the policy of one model's activations. Each step without data runs once, if needed."""

    def __init__(
        self,
        model: nn.Module,
        asked: str,
        run: Run | None,
        *,
        budget: Budget,
        device: torch.device,
        headroom: Headroom,
        train: bool,
    ) -> None:
        """asked: `activations=` of `infinity.offload`. run: None without example inputs. budget, device: of
        the model. headroom: what torch takes beside live tensors on `device`. train: whether there is an
        optimizer; without one autograd saves nothing, and the policy is "keep".

        Raises ConfigError for an unknown `asked`.
        """
        check_policy(asked)
        found = {name: obstacle(block) for name, block in blocks_of(model).items()}
        self._asked = asked if train else "keep"
        self._steps: Steps | None = None
        if run is not None:
            unified, names = budget.is_unified(device), [name for name in found if found[name] is None]
            self._steps = Steps(run, names, device, unified=unified)
            self._rooms = RoomChoice(self._steps, unified, bool(budget.nvme_bytes), headroom)
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
        if self._steps is None:
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
            return within(enough, draft, self._all, step)

        def made(point: tuple[int]) -> Plan:
            return draft(self._recomputing(steps, *point), steps.recomputing(*point))

        return first_to_fit([(count,) for count in range(1, len(steps.blocks) + 1)], seconds, made)

    def _mixed(self, steps: Steps, draft: Draft, enough: float) -> Plan | None:
        """Make the plan with the best mix of blocks that run again, leave or stay; see [Note: mixes of
        blocks]. None if none of them fits, or takes at most `enough` seconds.
        """
        names = tuple(steps.blocks) if _run_again(steps) else ()
        none, every = (steps.step(again, ResidualBytes(ram=ENDLESS)) for again in ((), names))
        if none.step.activations is None or every.step.activations is None:
            return None
        works = [steps.estimate(count).work for count in range(len(names) + 1)]
        nvme = self._rooms.nvme
        mixes = Mixes(names=names, works=works, kept=steps.kept, none=none, every=every, nvme=nvme)

        def policy(mix: Mix) -> Residuals:
            name = "recompute+offload" if mix.again else "offload"
            return replace(self._recomputing(steps, mix.again), policy=name)

        return self._rooms.quickest(mixes, mixes.points, policy, draft, enough)

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


def _run_again(steps: Steps) -> bool:
    """Whether there are blocks that may run again, and the step in which they do could be run."""
    return bool(steps.blocks) and steps.recomputing(None).unknown is None


def _text(plan: Plan) -> str:
    found = plan.predict(plan.accumulation or 1)
    return "unknown" if found is None else found.text
