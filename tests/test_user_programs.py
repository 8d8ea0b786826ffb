"""Tests that random programs of users do the same offloaded as in plain PyTorch, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from user_programs import Program, compare, offloaded, plain, program_of

DEFAULT = 20
MANY = 200


def check(program: Program, directory: Path) -> bool:
    """Compare a program's two runs. Returns whether it was offloaded, and False if it was refused."""
    got = offloaded(program, directory)
    assert compare(program, plain(program), got) == [], f"{program}, {got.refusal}"
    assert list(directory.iterdir()) == []
    return got.refusal is None


@pytest.mark.sweep(most=5)
@pytest.mark.parametrize("number", range(DEFAULT))
def test_a_program_is_right_or_refused(number: int, tmp_path: Path) -> None:
    check(program_of(number), tmp_path)


@pytest.mark.slow
def test_two_hundred_programs_are_right_or_refused(tmp_path: Path) -> None:
    done = [check(program_of(1000 + number), tmp_path) for number in range(MANY)]
    assert sum(done) >= 0.9 * MANY
