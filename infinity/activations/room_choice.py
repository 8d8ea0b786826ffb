"""Room choice: decides how many bytes of each tier saved tensors get that leave the memory that computes."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from infinity.activations.mixes import PARTS, Away, Mix, Mixes
from infinity.activations.recomputation import BlockFacts, observed
from infinity.activations.residual_pages import ResidualPages
from infinity.activations.residual_room import FakeRoom
from infinity.activations.saved_tensors import has_bytes
from infinity.config import Budget, round_up
from infinity.errors import BudgetError, ConfigError
from infinity.planning.fake_step import FakeMemory, FakeStep, Ledger
from infinity.planning.headroom import Headroom
from infinity.planning.plan import Plan
from infinity.planning.predict import Work
from infinity.planning.residual_states import ResidualBytes, Residuals, window_of
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.tiers.link import is_direct

_ENDLESS = 1 << 50


@dataclass(frozen=True, kw_only=True)
class RoomChoice:
    """Chooses the room of one model's saved tensors, by steps without data and the plans they lead to."""

    run: Callable[..., FakeStep]
    """Function that runs a step without data, with `within` and `saving` of run_fake_step as arguments."""
    device: torch.device
    """Where the step runs."""
    unified: bool
    """Whether device and host are the same RAM."""
    waits: bool
    """Whether copies between host and device go on after their call."""
    nvme: bool
    """Whether there is an NVMe tier."""
    headroom: Headroom
    """What torch takes beside live tensors where the model computes."""

    @staticmethod
    def of(
        run: Callable[..., FakeStep], budget: Budget, device: torch.device, headroom: Headroom
    ) -> RoomChoice:
        """The choice for a model that computes on `device` within `budget`. run, headroom: the attributes."""
        return RoomChoice(
            run=run,
            device=device if torch.cuda.is_available() else torch.device("cpu"),
            unified=budget.is_unified(device),
            waits=not is_direct(device),
            nvme=bool(budget.nvme_bytes),
            headroom=headroom,
        )

    def plan(self, residuals: Residuals, draft: Callable[[Residuals, FakeStep], Plan]) -> Plan:
        """Make the plan with which all saved tensors leave, but those for which the computing tier has room
        in the end. draft: makes the plan for a policy and its step; may raise BudgetError.

        All of them get RAM if there is room. With an NVMe tier, less RAM is tried as long as the model does
        not fit, and as long as pages are on NVMe and a step gets faster. Raises BudgetError if nothing fits;
        its `needed` has RAM for all of them. Raises ConfigError if a step cannot be run without data.
        """
        names = residuals.recomputed
        found = self._step(names, ResidualBytes(ram=_ENDLESS))
        all_of_them, unknown = found.room, found.step.unknown
        if unknown is not None:
            raise ConfigError(
                f"Activations cannot be offloaded: their bytes are unknown. {unknown[:1].upper()}"
                f"{unknown[1:]}.",
                'Give activations="keep" or "recompute".',
            )
        window = window_of(all_of_them.saved)
        best: Plan | None = None
        failure: BudgetError | None = None
        for part in PARTS if self.nvme else (1,):
            ram = round_up(all_of_them.ram // part, PAGE_ALIGNMENT)
            room = ResidualBytes(window=window, ram=ram, disk=_ENDLESS if part > 1 else 0)
            try:
                found = self._step(names, room)
            except BudgetError:  # less RAM will not do either
                break
            try:
                plan = draft(replace(residuals, room=found.room), found.step)
            except BudgetError as error:
                failure = failure or error
                continue
            if best is not None and seconds_of(plan) >= seconds_of(best):
                break
            best = plan
            if not plan.home_bytes[Tier.NVME]:
                break
        if best is None:
            assert failure is not None
            raise failure.again()
        return self._for_more(best if self.unified else self._with_kept(best, draft), all_of_them)

    def mixed(
        self,
        mixes: Mixes,
        mix: Mix,
        residuals: Residuals,
        draft: Callable[[Residuals, FakeStep], Plan],
    ) -> Plan:
        """Make the plan with a mix of `mixes`. residuals: the policy, with the reasons for it; its blocks are
        replaced. draft: as in `plan`. Raises BudgetError if that does not fit.
        """
        names = mixes.names
        policy = "recompute+offload" if mix.again else "offload"
        residuals = replace(residuals, policy=policy, recomputed=names[: mix.again])
        plan = self._fitted(residuals, mixes.demand(mix).room, draft, names)
        return self._for_more(plan if self.unified else self._with_kept(plan, draft, names), mixes.none.room)

    def mixes(self, names: Sequence[str], works: Sequence[Work], kept: FakeStep) -> Mixes | None:
        """The mixes of what may become of the blocks `names`, and what a step takes with each of them; None
        if a step cannot be run without data.

        names: the blocks that may run again. works: the work of steps in which the first n of them do, for
        each n from 0. kept: the step that keeps all.
        """
        none, every = (self._step(again, ResidualBytes(ram=_ENDLESS), names) for again in ((), names))
        if none.step.activations is None or every.step.activations is None:
            return None
        return Mixes(names=tuple(names), works=works, kept=kept, none=none, every=every, nvme=self.nvme)

    def _fitted(
        self,
        residuals: Residuals,
        room: ResidualBytes,
        draft: Callable[[Residuals, FakeStep], Plan],
        names: Sequence[str] = (),
    ) -> Plan:
        """Make the plan with this much room. names: blocks of which the plan says whether they leave."""
        room = replace(room, disk=_ENDLESS) if room.disk else replace(room, ram=_ENDLESS)
        again = residuals.recomputed
        found = self._step(again, room, names)
        rest = list(names[len(again) :])
        begins = [0, *(found.facts[name].saved for name in names)]
        left = [name for name, begin in zip(names, begins, strict=False) if begin < found.room.down]
        leaving = tuple(name for name in rest if name in left)
        kept = tuple(name for name in rest if name not in left)
        return draft(replace(residuals, room=found.room, leaving=leaving, kept=kept), found.step)

    def _with_kept(
        self, plan: Plan, draft: Callable[[Residuals, FakeStep], Plan], names: Sequence[str] = ()
    ) -> Plan:
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

    def _step(self, again: Sequence[str], room: ResidualBytes, names: Sequence[str] = ()) -> Away:
        """Run a step without data in which the blocks `again` are recomputed. Returns it, the room that it
        needs of the room it was given, and the facts of the blocks `names`. Raises BudgetError if the room
        was too small.
        """
        seen: list[dict[str, BlockFacts]] = []
        largest = 0
        made: list[tuple[FakeRoom, ResidualPages]] = []

        @contextmanager
        def within(model: nn.Module, ledger: Ledger) -> Iterator[None]:
            with observed(model, names, ledger, again, lambda: made[-1][1].counts.saved) as facts:
                seen.append(facts)
                yield

        def saving(memory: FakeMemory) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
            def in_ram(nbytes: int) -> torch.Tensor:
                nonlocal largest
                largest = max(largest, nbytes)
                return memory.uncounted(nbytes, self.device)

            found = FakeRoom(
                room.ram,
                room.disk,
                device=self.device,
                in_place=self.unified,
                waits=self.waits,
                empty=functools.partial(torch.empty, dtype=torch.uint8, device=self.device),
                in_ram=in_ram,
            )
            pages = ResidualPages(found, kept_bytes=room.kept, window=room.window, lock=threading.RLock())
            pages.set_aside(each for each in memory.aside if has_bytes(each))
            made.append((found, pages))

            def pack(tensor: torch.Tensor) -> Any:
                reference = pages.pack(tensor) if has_bytes(tensor) else None
                return memory.save(tensor) if reference is None else reference

            def unpack(packed: Any) -> torch.Tensor:
                return packed if isinstance(packed, torch.Tensor) else pages.unpack(packed)

            return pack, unpack

        step = self.run(within=within, saving=saving)
        if not made or not seen:
            return Away(step, room, {}, largest)
        found, pages = made[-1]
        if found.short is not None:
            raise found.short.again()
        counts = pages.counts
        room = replace(
            room,
            ram=round_up(found.peak, PAGE_ALIGNMENT) if room.ram == _ENDLESS else room.ram,
            disk=found.disk_peak,
            saved=counts.saved,
            down=counts.down,
            up=counts.up,
            written=counts.written,
            read=counts.read,
        )
        return Away(step, room, seen[-1], largest)


def seconds_of(plan: Plan) -> float:
    """The predicted seconds of a step; infinity if they are unknown."""
    found = plan.predict(plan.accumulation or 1)
    return math.inf if found is None else found.least
