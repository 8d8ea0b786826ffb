"""Tests of which moments of several ranks may be at the same time, against all that there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from crash_cuts import Cut, Cuts
from crash_states import Disk, Event

Marks = Sequence[str]
"""The texts of a rank's marks, which have the numbers 1, 2 and so on."""
HANDSHAKE: list[Marks] = [["begun", "sent a", "heard a", "done"], ["sent a", "written", "heard a"]]
POSSIBLE = {(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)}
"""The cuts of HANDSHAKE: rank 0 hears at 3 what rank 1 says at 1, and rank 1 at 3 what rank 0 says at 2."""


def cuts_of(ranks: Sequence[Marks]) -> Cuts:
    return Cuts([Disk([mark(*each) for each in enumerate(marks, 1)], {"/d": {}}) for marks in ranks])


def mark(number: int, text: str) -> Event:
    return Event("mark", text, "", 0, b"", number, number, True, 0, False)


def moments(ranks: Sequence[Marks]) -> Iterator[Cut]:
    """All cuts, whether they are possible or not."""
    return map(list, itertools.product(*(range(len(marks) + 1) for marks in ranks)))


def is_possible(cut: Cut, ranks: Sequence[Marks]) -> bool:
    known = [marks[:boundary] for marks, boundary in zip(ranks, cut, strict=True)]
    return all(
        text.replace("heard", "sent") in other
        for marks in known
        for text in marks
        if text.startswith("heard")
        for other in known
    )


def agreeing(count: int, rng: np.random.Generator) -> list[list[str]]:
    """Marks of ranks that hear of each other twice, with other marks between."""
    found: list[list[str]] = [[] for _ in range(count)]
    for what in "ab":
        for marks in found:
            for text in (f"sent {what}", f"heard {what}"):
                marks.extend([*["other"] * int(rng.integers(2)), text])
    return found


def test_a_cut_has_what_was_said_before_it_was_heard() -> None:
    cuts = cuts_of(HANDSHAKE)
    assert {tuple(each) for each in moments(HANDSHAKE) if all(each) and cuts.raised(each) == each} == POSSIBLE
    assert {
        tuple(each) for each in moments(HANDSHAKE) if all(each) and cuts.lowered(each) == each
    } == POSSIBLE
    assert cuts.raised([1, 3]) == [2, 3]
    assert cuts.lowered([1, 3]) == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_raised_and_lowered_cuts_are_the_nearest_possible_ones(seed: int) -> None:
    ranks = agreeing(3, np.random.default_rng(seed))
    cuts, possible = cuts_of(ranks), [each for each in moments(ranks) if is_possible(each, ranks)]
    for cut in moments(ranks):
        above = [each for each in possible if all(a >= b for a, b in zip(each, cut, strict=True))]
        below = [each for each in possible if all(a <= b for a, b in zip(each, cut, strict=True))]
        assert cuts.raised(cut) == [min(numbers) for numbers in zip(*above, strict=True)]
        assert cuts.lowered(cut) == [max(numbers) for numbers in zip(*below, strict=True)]


def test_all_possible_cuts_are_drawn_and_no_others() -> None:
    cuts, rng = cuts_of(HANDSHAKE), np.random.default_rng(0)
    for rank, marks in enumerate(HANDSHAKE):
        for boundary in range(1, len(marks) + 1):
            drawn = {tuple(cuts.around(rank, boundary, rng)) for _ in range(60)}
            assert drawn == {each for each in POSSIBLE if each[rank] == boundary}


def test_states_of_all_disks_are_checked_with_the_marks_before_each_boundary(tmp_path: Path) -> None:
    seen = set()

    def check(places: list[dict[str, Path]], marks: list[list[str]]) -> str | None:
        assert [list(each) for each in places] == [["/d"], ["/d"]]
        seen.add(tuple(map(len, marks)))
        return "There." if len(marks[1]) == 3 else None

    wrong = cuts_of(HANDSHAKE).first_violation(check, tmp_path, count=40)
    assert wrong is not None
    assert wrong.startswith("There. [crash at [")
    assert seen <= POSSIBLE
    assert len(seen) > 3


def test_what_was_heard_must_have_been_sent() -> None:
    with pytest.raises(ValueError, match="Rank 0 has heard b, and rank 1 has not sent it"):
        cuts_of([["sent a", "heard b"], ["sent a"]])
