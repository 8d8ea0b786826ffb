"""Fake steps: one model's steps without data, in which blocks run again and saved tensors leave."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from infinity.activations.recomputation import BlockFacts, observed
from infinity.activations.residual_pages import ResidualPages
from infinity.activations.residual_room import FakeRoom
from infinity.activations.saved_tensors import has_bytes
from infinity.config import round_up
from infinity.planning.fake_step import FakeMemory, FakeStep, Ledger
from infinity.planning.residual_states import ResidualBytes
from infinity.tiers import PAGE_ALIGNMENT
from infinity.tiers.link import is_direct

Run = Callable[..., FakeStep]
"""Function that runs a step without data, with `within` and `saving` of run_fake_step as arguments."""

ENDLESS = 1 << 50
"""Bytes of a room that is large enough for any step."""

NO_ROOM = ResidualBytes()


@dataclass(frozen=True)
class StepFacts:
    """What a step without data has shown."""

    step: FakeStep
    blocks: Mapping[str, BlockFacts]
    """Facts on the model's blocks, in the order of their first calls."""
    room: ResidualBytes = NO_ROOM
    """What saved tensors take of the room that they were given."""
    largest: int = 0
    """Bytes of the largest page that has left."""


class Steps:
    """The steps without data of one model. Each runs once."""

    def __init__(self, run: Run, names: Sequence[str], device: torch.device, *, unified: bool) -> None:
        """names: the paths of the blocks that may run again as far as their modules tell. device: where the
        real step runs. unified: whether device and host are the same RAM.
        """
        self._run = run
        self._names = names
        self._device = device if torch.cuda.is_available() else torch.device("cpu")
        self._waits = not is_direct(device)
        self._unified = unified
        self._ran: dict[tuple[tuple[str, ...], ResidualBytes | None], StepFacts] = {}

    def step(self, again: Sequence[str], room: ResidualBytes | None = None) -> StepFacts:
        """The step in which the blocks `again` run again. room: the room for which saved tensors leave, of
        which `kept`, `window`, `ram` and `disk` count; None: all stay. Raises BudgetError if it is too small.
        """
        given = room
        if given is not None and self._unified and not given.disk:
            given = replace(given, window=0)  # nothing is ever on its way
        key = tuple(again), given
        if key not in self._ran:
            self._ran[key] = self._run_once(*key)
        found = self._ran[key]
        return found if room is None else replace(found, room=replace(found.room, window=room.window))

    @property
    def kept(self) -> FakeStep:
        """The step that keeps all activations."""
        return self.step(()).step

    @property
    def facts(self) -> Mapping[str, BlockFacts]:
        """The facts on the blocks that this step calls, in the order of their first calls."""
        return self.step(()).blocks

    @functools.cached_property
    def blocks(self) -> dict[str, BlockFacts]:
        """Those of `facts` whose blocks may run again."""
        return {name: each for name, each in self.facts.items() if each.reason is None}

    def recomputing(self, count: int | None) -> FakeStep:
        """The step that recomputes the first `count` of `blocks`; None: all."""
        return self.kept if self.kept.unknown is not None else self.step([*self.blocks][:count]).step

    def estimate(self, count: int) -> FakeStep:
        """An estimate of `recomputing(count)`, from the steps that recompute no block and all blocks; see
        [Note: the first blocks are recomputed] in infinity/activations/policy.py. Its bytes are too high
        where blocks are called more than once, because it lets these keep theirs to the end.
        """
        if count == 0:
            return self.kept
        every = self.step([*self.blocks])
        assert self.kept.activations is not None
        assert every.step.activations is not None
        facts = every.blocks
        kept = [(name, each.nbytes - facts[name].nbytes) for name, each in [*self.blocks.items()][count:]]
        most, held = every.step.activations, sum(nbytes for _, nbytes in kept)
        if any(each.calls > 1 for each in facts.values()):
            most += held
        for name, nbytes in reversed(kept):
            most = max(most, facts[name].before + held)  # in the backward, until that of the block begins
            held -= nbytes
        work = sum((each.work for each in itertools.islice(self.blocks.values(), count)), self.kept.work)
        return FakeStep(min(self.kept.activations, most), work)

    def _run_once(self, again: tuple[str, ...], room: ResidualBytes | None) -> StepFacts:
        seen: list[dict[str, BlockFacts]] = [{}]
        made: list[tuple[FakeRoom, ResidualPages]] = []

        def saved() -> int:
            return made[-1][1].counts.saved if made else 0

        @contextmanager
        def within(model: nn.Module, ledger: Ledger) -> Iterator[None]:
            with observed(model, self._names, ledger, again, saved) as facts:
                seen.append(facts)
                yield

        def saving(memory: FakeMemory) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
            assert room is not None
            there = FakeRoom(
                room.ram,
                room.disk,
                device=self._device,
                in_place=self._unified,
                waits=self._waits,
                empty=functools.partial(torch.empty, dtype=torch.uint8, device=self._device),
                in_ram=lambda nbytes: memory.uncounted(nbytes, self._device),
            )
            pages = ResidualPages(there, kept_bytes=room.kept, window=room.window, lock=threading.RLock())
            pages.set_aside(each for each in memory.aside if has_bytes(each))
            made.append((there, pages))

            def pack(tensor: torch.Tensor) -> Any:
                reference = pages.pack(tensor) if has_bytes(tensor) else None
                return memory.save(tensor) if reference is None else reference

            def unpack(packed: Any) -> torch.Tensor:
                return packed if isinstance(packed, torch.Tensor) else pages.unpack(packed)

            return pack, unpack

        if room is None:
            return StepFacts(self._run(within=within), seen[-1])
        step = self._run(within=within, saving=saving)
        if not made:  # the step could not begin
            return StepFacts(step, seen[-1], room)
        there, pages = made[-1]
        if there.short is not None:
            raise there.short.again()
        ram = round_up(there.peak, PAGE_ALIGNMENT) if room.ram == ENDLESS else room.ram
        found = replace(room, ram=ram, disk=there.disk_peak, **vars(pages.counts))
        return StepFacts(step, seen[-1], found, there.largest)
