"""Tests of the policy of activations: how many blocks are recomputed, and what the plan says of it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

import infinity
from infinity.activations.fake_steps import StepFacts
from infinity.activations.mixes import PARTS, Demand, Mix, Mixes
from infinity.activations.recomputation import BlockFacts
from infinity.planning.fake_step import FakeStep
from infinity.planning.predict import Work
from infinity.planning.residual_states import (
    POLICIES,
    ResidualBytes,
    Residuals,
    check_policy,
    quickest_first,
    window_of,
)

PAGE, MIB = 4096, 1 << 20


@dataclass(frozen=True)
class Machine:
    """A random model of blocks, on a random machine with random budgets. All sizes are in pages."""

    inputs: list[int]
    """What each block saves if it runs again. `saved`: what it saves otherwise."""
    saved: list[int]
    tail: int
    """What is saved after the last block."""
    seconds: list[float]
    """Seconds of the forward of each block."""
    compute: float
    before: list[int]
    """The most that is in use, beside what is kept, before the second run of each block."""
    none: int
    """Peak if all leaves. `every`: if besides all blocks run again."""
    every: int
    pages: int
    device: int
    ram: int
    disk: int
    link: float
    disk_rate: float
    nvme: bool

    @staticmethod
    def drawn(draw: random.Random) -> Machine:
        blocks, nvme = draw.randrange(7), draw.random() < 0.4
        saved = [draw.randrange(8, 100) for _ in range(blocks)]
        every = draw.randrange(1, 100)
        return Machine(
            inputs=[draw.randrange(1, 8) for _ in range(blocks)],
            saved=saved,
            tail=draw.randrange(20),
            seconds=[draw.choice([0.0, draw.random() / 2]) for _ in range(blocks)],
            compute=draw.uniform(0.1, 5),
            before=[draw.randrange(every + 1) for _ in range(blocks)],
            none=draw.randrange(1, 100),
            every=every,
            pages=draw.randrange(1, 400),
            device=draw.randrange(1, 700),
            ram=draw.randrange(1, 300 if nvme else 600),
            disk=draw.randrange(1, 900),
            link=draw.uniform(10, 200),
            disk_rate=draw.uniform(20, 500),
            nvme=nvme,
        )

    def step(self, taken: Demand) -> float | None:
        """Seconds of a step. Pages that find no room beside activations move over the link, twice."""
        room = taken.room
        free = self.device - (taken.step.activations or 0) / PAGE
        ram = self.ram - room.ram / PAGE
        away = max(0.0, self.pages - free)
        if free < 0 or ram < away or room.disk / PAGE > self.disk * self.nvme:
            return None
        over_link = 2 * away + max(room.down, room.up) / PAGE
        disk = (room.written + room.read) / PAGE
        return max(taken.step.work.nbytes / 1e6, over_link / self.link, disk / self.disk_rate)

    @property
    def mixes(self) -> Mixes:
        """The mixes of this model."""
        names = [str(number) for number in range(len(self.saved))]

        def away(ends: list[int], activations: int, before: list[int]) -> StepFacts:
            facts = {
                name: BlockFacts(calls=1, saved=PAGE * end, before=PAGE * most)
                for name, end, most in zip(names, itertools.accumulate(ends), before, strict=True)
            }
            nbytes = PAGE * (sum(ends) + self.tail)
            room = ResidualBytes(saved=nbytes, down=nbytes, ram=nbytes)
            return StepFacts(FakeStep(PAGE * activations, Work({}, 0)), facts, room, PAGE)

        return Mixes(
            names=tuple(names),
            works=[self.work(count) for count in range(len(names) + 1)],
            kept=FakeStep(1 << 50, Work({}, 0)),
            none=away(self.saved, self.none, [0] * len(names)),
            every=away(self.inputs, self.every, self.before),
            nvme=self.nvme,
        )

    def work(self, count: int) -> Work:
        return Work({torch.float32: 0}, round(1e6 * (self.compute + sum(self.seconds[:count]))))

    def best(self) -> tuple[float, Mix] | None:
        """The best mix and its seconds, by a loop over all of them; None if none fits."""
        best, blocks = None, len(self.saved)
        for again, away in itertools.product(range(blocks + 1), range(blocks + 2)):
            for part in PARTS if self.nvme else PARTS[:1]:
                found = None if again + away > blocks + 1 else self.step_of(again, away, part)
                if found is not None and (best is None or found < best[0]):
                    best = found, Mix(again, away, part)
        return best

    def step_of(self, again: int, away: int, part: int) -> float | None:
        stays = [*self.saved, self.tail][again + away :]
        left = sum(self.inputs[:again]) + sum([*self.saved, self.tail][again : again + away])
        total = left + sum(stays)
        ram = -(-(PAGE * left // part) // PAGE) if part > 1 else left
        window = window_of(PAGE * total) // PAGE
        if not left or (part > 1 and ram < window + 2):
            return None
        peaks = ([self.every] if again else []) + ([self.none] if away or not again else [])
        most = max(peaks)
        live = max(peaks)
        for block, before in enumerate(self.before):  # the backward, until this block begins
            held = sum(self.saved[again + away : block + 1])
            live = max(live, before + (sum(stays) if block + 1 == len(self.before) else held))
        live = min(live, most + sum(stays)) if self.before else most + sum(stays)
        read = max(0, left - ram) if part > 1 else 0
        written = min(left, read + window) if part > 1 else 0
        room = ResidualBytes(
            ram=PAGE * ram,
            disk=PAGE * written,
            down=PAGE * left,
            up=PAGE * left,
            written=PAGE * written,
            read=PAGE * read,
        )
        return self.step(Demand(FakeStep(PAGE * live, self.work(again)), room))


def test_the_mix_of_blocks_is_the_best_of_all() -> None:
    draw, kinds, tries = random.Random(4), Counter[str](), 0
    for _ in range(1000):
        machine = Machine.drawn(draw)
        mixes, best = machine.mixes, machine.best()

        def seconds(some: Sequence[Mix], machine: Machine = machine, mixes: Mixes = mixes) -> float | None:
            nonlocal tries
            tries += 1
            return machine.step(mixes.least(some))

        found = next(quickest_first(mixes.points, seconds), None)
        assert found == (None if best is None else best[1])
        if found is None:
            kinds["nothing"] += 1
            continue
        assert machine.step(mixes.demand(found)) == best[0]
        blocks = len(machine.saved)
        kinds["again" * bool(found.again) + " away" * bool(found.away)] += 1
        kinds["three"] += bool(found.again and found.away and found.again + found.away < blocks)
        kinds["disk"] += found.part > 1
    assert min(kinds[each] for each in ("nothing", "again", " away", "again away", "three", "disk")) > 20
    assert tries < 40_000


def test_points_come_in_the_order_of_their_seconds() -> None:
    draw = random.Random(5)
    for size in (0, 1, 30):
        costs = {(row, column): draw.randrange(5) for row in range(size) for column in range(size)}
        points = list(costs)

        def seconds(some: Sequence[tuple[int, int]], costs: dict[tuple[int, int], int] = costs) -> float:
            return min(costs[each] for each in some)

        assert list(quickest_first(points, seconds)) == sorted(points, key=lambda each: (costs[each], each))


def test_the_lines_of_a_plan() -> None:
    assert list(Residuals().lines) == []
    found = Residuals(
        policy="recompute", recomputed=("a", "b"), kept=("c",), left_alone=(("d", "is compiled"),)
    )
    assert list(found.lines) == [
        "activations: 2 blocks run again in backward, and the last keeps its activations",
        "activations: d does not run again: the block is compiled",
    ]
    assert found.as_dict()["kept"] == ["c"]
    room = ResidualBytes(saved=8 * MIB, down=5 * MIB)
    found = Residuals(
        policy="recompute+offload",
        recomputed=("a",),
        leaving=("b", "c"),
        kept=("d", "e"),
        room=room,
        why="predicted 1 s against 2 s with all kept",
    )
    assert list(found.lines) == [
        "activations: 1 block runs again in backward, saved tensors of 2 blocks leave, and the last 2 keep "
        "their activations, predicted 1 s against 2 s with all kept",
        "activations: 5 MiB of 8 MiB saved for backward leave for RAM",
    ]
    assert found.as_dict()["leaving"] == ["b", "c"]
    assert list(Residuals(policy="offload", room=room, why="as it is").lines) == [
        "activations: 5 MiB of 8 MiB saved for backward leave for RAM, as it is"
    ]
    assert list(Residuals(why="as it is").lines) == ["activations: all are kept, as it is"]


def test_policies() -> None:
    for each in POLICIES:
        check_policy(each)
    with pytest.raises(infinity.ConfigError, match='Give one of "auto"'):
        check_policy("none")
