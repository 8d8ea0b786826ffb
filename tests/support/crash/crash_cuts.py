"""Crash cuts: what the disks of several ranks may hold together after all of them have lost power.

Nodes lose power at different moments, so each disk has a boundary of its own (see crash_states.py). A **cut**
is one boundary a disk. Not all cuts are possible: where a rank has heard something, the others have said it.
Each rank's recording marks "sent X" before others can hear X from it, and "heard X" when it has heard X from
all others. A cut is possible if for each "heard X" before one disk's boundary "sent X" is before the
boundaries of all others.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from crash_states import Disk, State

Cut = list[int]
"""A boundary for each disk."""
Check = Callable[[list[dict[str, Path]], list[list[str]]], str | None]
"""Looks at one crash state of each disk. Is given, by rank, the directories in which the state lies and the
marks from before the crash, as the `Check` of a single disk is. Returns None, or what is wrong in words.
"""


class Cuts:
    """The possible cuts of a run of several ranks, and the crash states there.

    disks: by rank. Raises ValueError if a rank has heard what another has not sent.
    """

    def __init__(self, disks: Sequence[Disk]) -> None:
        self._disks = disks
        self._moments: list[list[int]] = []
        """Rank -> the numbers at which it has heard something, in order."""
        self._needed: list[list[Cut]] = []
        """Rank -> for each of these, the least boundaries of all ranks that are possible from there on."""
        sent = [_marked(disk, "sent ") for disk in disks]
        for rank, disk in enumerate(disks):
            heard = _marked(disk, "heard ")
            needed = [-1] * len(disks)
            self._moments.append(list(heard.values()))
            self._needed.append([])
            for what in heard:
                for other in set(range(len(disks))) - {rank}:
                    if what not in sent[other]:
                        raise ValueError(f"Rank {rank} has heard {what}, and rank {other} has not sent it.")
                    needed[other] = max(needed[other], sent[other][what])
                self._needed[rank].append(list(needed))

    def raised(self, cut: Cut) -> Cut:
        """The earliest possible cut in which no boundary is before that in `cut`."""
        raised, before = list(cut), None
        while raised != before:
            before = list(raised)
            for rank, moments in enumerate(self._moments):
                heard = bisect.bisect_right(moments, raised[rank])
                if heard:
                    raised = [max(pair) for pair in zip(raised, self._needed[rank][heard - 1], strict=True)]
        return raised

    def lowered(self, cut: Cut) -> Cut:
        """The latest possible cut in which no boundary is behind that in `cut`."""
        lowered, before = list(cut), None
        while lowered != before:
            before = list(lowered)
            for rank, needed in enumerate(self._needed):
                for other, boundary in enumerate(lowered):
                    unheard = bisect.bisect_right(needed, boundary, key=lambda each, at=other: each[at])
                    if unheard < len(needed):
                        lowered[rank] = min(lowered[rank], self._moments[rank][unheard] - 1)
        return lowered

    def around(self, rank: int, boundary: int, rng: np.random.Generator) -> Cut:
        """Draw a possible cut with this boundary of a rank: the others lose power as early as is possible, as
        late, or at any moment between.
        """
        cut = [disk.boundaries[0] for disk in self._disks]
        cut[rank] = boundary
        earliest = self.raised(cut)
        cut = [disk.boundaries[-1] for disk in self._disks]
        cut[rank] = boundary
        latest = self.lowered(cut)
        how = rng.integers(3)
        if how < 2:
            return latest if how else earliest
        return self.raised(
            [int(rng.integers(*span, endpoint=True)) for span in zip(earliest, latest, strict=True)]
        )

    def sample(self, count: int, seed: int) -> Iterator[tuple[Cut, list[State]]]:
        """About `count` possible cuts with a crash state of each disk, from early ones to late ones.

        The boundaries of each rank lead in turn, as many times as `Disk.allotted` says.
        """
        rng = np.random.default_rng(seed)
        leading = []
        for rank, disk in enumerate(self._disks):
            allotted = disk.allotted(count // len(self._disks))
            own = [boundary for boundary, number in allotted for _ in range(number)]
            leading += [(at / len(own), rank, boundary) for at, boundary in enumerate(own)]
        for _, rank, boundary in sorted(leading):
            cut = self.around(rank, boundary, rng)
            yield cut, [disk.drawn(at, rng) for disk, at in zip(self._disks, cut, strict=True)]

    def first_violation(self, check: Check, where: Path, *, count: int, seed: int = 0) -> str | None:
        """Write about `count` crash states of all disks below `where` and check them. Returns what is wrong
        first, if anything.

        A mistake of the run itself is wrong before any state is.
        """
        mistakes = [mistake for disk in self._disks for mistake in disk.mistakes]
        if mistakes:
            return mistakes[0]
        for cut, states in self.sample(count, seed):
            places = [state.write_to(where / str(rank)) for rank, state in enumerate(states)]
            marks = [disk.marks(boundary) for disk, boundary in zip(self._disks, cut, strict=True)]
            wrong = check(places, marks)
            if wrong is not None:
                how = "; ".join(f"rank {rank}: {state.how}" for rank, state in enumerate(states))
                return f"{wrong} [crash at {cut}, {how}]"
        return None


def _marked(disk: Disk, word: str) -> dict[str, int]:
    """What a rank has sent or heard -> when it did first, in order."""
    found: dict[str, int] = {}
    for number, text in disk.marked:
        if text.startswith(word):
            found.setdefault(text.removeprefix(word), number)
    return found
