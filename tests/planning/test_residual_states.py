"""Tests of the policy of activations: how many blocks are recomputed, and what the plan says of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

import infinity
from infinity.planning.residual_states import POLICIES, Residuals, check_policy, quickest_count


@dataclass(frozen=True)
class Machine:
    """A random model of blocks, on a random machine with a random budget."""

    kept: list[int]
    """Bytes that each block keeps, beyond those of a recomputed one."""
    seconds: list[float]
    """Seconds of the forward of each block."""
    compute: float
    least: int
    """Bytes of activations if all blocks are recomputed."""
    pages: int
    budget: int
    rate: float
    """Bytes of pages a second, for those that find no room beside activations."""

    @staticmethod
    def drawn(draw: random.Random) -> Machine:
        blocks = draw.randrange(13)
        kept = [draw.randrange(1, 100) for _ in range(blocks)]
        return Machine(
            kept,
            [draw.choice([0.0, draw.random()]) for _ in range(blocks)],
            compute=draw.uniform(0.1, 5),
            least=draw.randrange(1, 100),
            pages=draw.randrange(1, 500),
            budget=draw.randrange(1, 1000),
            rate=draw.uniform(10, 500),
        )

    def floor(self, count: int) -> float:
        return self.compute + sum(self.seconds[:count])

    def step(self, count: int) -> float | None:
        room = self.budget - self.least - sum(self.kept[count:])
        if room < 0:
            return None
        return max(self.floor(count), max(0, self.pages - room) / self.rate)


def test_the_number_of_recomputed_blocks_is_the_best_of_all() -> None:
    draw, nothing, some, every, between = random.Random(4), 0, 0, 0, 0
    for _ in range(1000):
        machine = Machine.drawn(draw)
        blocks = len(machine.kept)
        found = {count: machine.step(count) for count in range(blocks + 1)}
        fitting = {count: seconds for count, seconds in found.items() if seconds is not None}
        best = min(fitting, key=lambda count: (fitting[count], count)) if fitting else None
        assert quickest_count(blocks, machine.step, machine.floor) == best
        nothing += best is None
        some += best is not None and 0 < best < blocks
        every += best == blocks > 0
        between += bool(fitting) and best not in (None, min(fitting))
    assert min(nothing, some, every, between) > 30


def test_the_lines_of_a_plan() -> None:
    assert list(Residuals().lines) == []
    found = Residuals(
        policy="recompute", recomputed=("a", "b"), kept=("c",), left_alone=(("d", "is compiled"),)
    )
    assert list(found.lines) == [
        "activations: 2 blocks run again in backward, and the last keeps its activations",
        "activations of d are kept: the block is compiled",
    ]
    assert found.as_dict()["kept"] == ["c"]


def test_policies() -> None:
    for each in POLICIES:
        check_policy(each)
    with pytest.raises(infinity.ConfigError, match='Give one of "auto"'):
        check_policy("none")
