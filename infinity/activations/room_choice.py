"""Room choice: decides how many bytes of each tier saved tensors get that leave the memory that computes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from infinity.activations.recomputation import recomputing
from infinity.activations.residual_pages import ResidualPages
from infinity.activations.residual_room import FakeRoom
from infinity.activations.saved_tensors import has_bytes
from infinity.config import Budget, round_up
from infinity.errors import BudgetError, ConfigError
from infinity.planning.fake_step import FakeMemory, FakeStep
from infinity.planning.headroom import Headroom
from infinity.planning.plan import Plan
from infinity.planning.residual_states import LARGEST_WINDOW, ResidualBytes, Residuals
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.tiers.link import is_direct

_ENDLESS = 1 << 50
_PARTS = (1, 2, 4, 8, 16, 32, 64)
"""RAM has room for all saved tensors divided by one of these numbers."""
_WINDOWS = 8
"""A window has at most the bytes of all saved tensors divided by this number."""


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

    @staticmethod
    def of(run: Callable[..., FakeStep], budget: Budget, device: torch.device) -> RoomChoice:
        """The choice for a model that computes on `device` within `budget`. run: see the attribute."""
        return RoomChoice(
            run=run,
            device=device if torch.cuda.is_available() else torch.device("cpu"),
            unified=device.type == "cpu" and budget.device_bytes is None,
            waits=not is_direct(device),
            nvme=bool(budget.nvme_bytes),
        )

    def plan(self, residuals: Residuals, draft: Callable[[Residuals, FakeStep], Plan]) -> Plan:
        """Make the plan with which all saved tensors leave, but those for which the computing tier has room
        in the end. draft: makes the plan for a policy and its step; may raise BudgetError.

        All of them get RAM if there is room. With an NVMe tier, less RAM is tried as long as the model does
        not fit, and as long as pages are on NVMe and a step gets faster. Raises BudgetError if nothing fits;
        its `needed` has RAM for all of them. Raises ConfigError if a step cannot be run without data.
        """
        names = residuals.recomputed
        step, all_of_them = self._step(names, ResidualBytes(ram=_ENDLESS))
        if step.unknown is not None:
            raise ConfigError(
                f"Activations cannot be offloaded: their bytes are unknown. {step.unknown[:1].upper()}"
                f"{step.unknown[1:]}.",
                'Give activations="keep" or "recompute".',
            )
        window = min(LARGEST_WINDOW, round_up(all_of_them.saved // _WINDOWS, PAGE_ALIGNMENT))
        best: Plan | None = None
        failure: BudgetError | None = None
        for part in _PARTS if self.nvme else (1,):
            ram = round_up(all_of_them.ram // part, PAGE_ALIGNMENT)
            found = ResidualBytes(window=window, ram=ram, disk=_ENDLESS if part > 1 else 0)
            try:
                step, found = self._step(names, found)
            except BudgetError:  # less RAM will not do either
                break
            try:
                plan = draft(replace(residuals, room=found), step)
            except BudgetError as error:
                failure = failure or error
                continue
            if best is not None and _seconds(plan) >= _seconds(best):
                break
            best = plan
            if not plan.home_bytes[Tier.NVME]:
                break
        if best is None:
            assert failure is not None
            raise failure.again()
        newest = all_of_them.saved - all_of_them.down  # it stays, unless further micro-batches save more
        each = all_of_them.ram + round_up(newest, PAGE_ALIGNMENT)
        return self._for_more(best if self.unified else self._with_kept(best, draft), each)

    def _fitted(
        self, residuals: Residuals, room: ResidualBytes, draft: Callable[[Residuals, FakeStep], Plan]
    ) -> Plan:
        step, room = self._step(residuals.recomputed, room)
        return draft(replace(residuals, room=room), step)

    def _with_kept(self, plan: Plan, draft: Callable[[Residuals, FakeStep], Plan]) -> Plan:
        """Return the plan with as many tensors kept as the computing tier has bytes left."""
        room = plan.residuals.room
        assert room is not None
        kept = min(plan.free(plan.computes_in) // PAGE_ALIGNMENT * PAGE_ALIGNMENT, room.saved)
        if kept <= 0:
            return plan
        disk = _ENDLESS if room.disk else 0
        try:
            found = self._fitted(plan.residuals, replace(room, kept=kept, disk=disk), draft)
        except BudgetError:
            return plan
        return replace(found, smallest=plan.smallest)  # with which nothing is kept

    def _for_more(self, plan: Plan, each: int) -> Plan:
        """Return the plan with RAM that is left for the activations of further micro-batches of a step, which
        may run together. each: bytes of RAM for all saved tensors of one of them, none of which is kept.
        """
        room, more = plan.residuals.room, (plan.accumulation or 1) - 1
        if room is None or not room.down or not more:
            return plan
        live = plan.activations or 0
        beside = live + Headroom.of(plan.device).one_more(live) if self.unified else 0
        more = min(more, max(0, plan.free(Tier.HOST)) // (each + beside))
        room = replace(room, ram=room.ram + more * each, together=1 + more)
        return replace(plan, residuals=replace(plan.residuals, room=room))

    def _step(self, names: tuple[str, ...], room: ResidualBytes) -> tuple[FakeStep, ResidualBytes]:
        """Run a step without data. Returns it, and the room that it needs of the room it was given. Raises
        BudgetError if that was too small.
        """
        made: list[tuple[FakeRoom, ResidualPages]] = []

        def saving(memory: FakeMemory) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
            found = FakeRoom(
                room.ram,
                room.disk,
                device=self.device,
                in_place=self.unified,
                waits=self.waits,
                empty=functools.partial(torch.empty, dtype=torch.uint8, device=self.device),
                in_ram=lambda nbytes: memory.uncounted(nbytes, self.device),
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

        step = self.run(within=lambda model, _: recomputing(model, names), saving=saving)
        if not made:
            return step, room
        found, pages = made[-1]
        if found.short is not None:
            raise found.short.again()
        counts = pages.counts
        return step, replace(
            room,
            ram=round_up(found.peak, PAGE_ALIGNMENT) if room.ram == _ENDLESS else room.ram,
            disk=found.disk_peak,
            saved=counts.saved,
            down=counts.down,
            up=counts.up,
            written=counts.written,
            read=counts.read,
        )


def _seconds(plan: Plan) -> float:
    found = plan.predict(plan.accumulation or 1)
    return 0.0 if found is None else found.least
