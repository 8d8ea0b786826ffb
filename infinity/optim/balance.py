"""Balance: which share of chunks the device updates, so that CPU and link are busy for equally long. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infinity.planning.predict import LEAST_SHARE

_IDLE = 0.02
"""If the CPU had no update for more than this part of a step, the link limits the step."""
_FORGOTTEN = 0.2
"""The part of the link's pause that is forgotten in a step that the CPU limits, where it cannot be seen."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured in a step, from one to the next, or while its lazy updates ran."""

    there: int
    """Elements that the device updated."""
    here: int
    """Elements that the CPU updated."""
    computed: int
    """Elements whose update by the CPU ended, of this step or the one before."""
    busy: float
    """Seconds in which the CPU had updates to do."""
    link: float
    """Bytes that the link brings home in a second."""
    seconds: float
    """Seconds of the step, or of all its lazy updates."""


class Balance:
    """The share of chunks that visit the device, step by step.

    The time of the CPU's updates follows the bytes of host RAM that updates and copies move. The link's time
    follows the bytes of its busier direction, and it has pauses. A step takes the longer of the two. How long
    the pauses are is seen in steps that the link limits.

    Eager updates run all through a step. More comes home than goes up, and the link pauses while no gradients
    come, as in forwards. Lazy updates begin when all gradients are home. More goes up then.
    """

    def __init__(self, *, parameters: int, gradients: int, states: int, lazy: bool) -> None:
        """parameters, gradients, states: bytes of the pages of all chunks that may visit. lazy: whether
        updates are lazy.
        """
        self.share = 0.5
        """The share of elements that visit, from 0 to 1."""
        self._pause = 0.0
        updated = 2 * parameters + gradients + 2 * states  # host RAM that the CPU reads and writes
        self._by_cpu = updated + parameters + gradients, gradients
        self._there = parameters + 2 * states, parameters + states
        """(bytes of host RAM, bytes of the link) if the CPU updates all chunks, and if the device does."""
        if lazy:
            self._by_cpu = updated + parameters, parameters
            self._there = parameters + gradients + 2 * states, gradients + states

    def stepped(self, step: Measured) -> None:
        """Choose the share for the next step from what the last one has measured."""
        cpu, there, elements = self._by_cpu, self._there, step.here + step.there
        beside = step.there * min(1.0, step.busy / step.seconds)
        scale = step.busy * elements / (cpu[0] * step.computed + there[0] * beside)
        link = (cpu[1] * step.here + there[1] * step.there) / elements / step.link
        if step.busy < (1 - _IDLE) * step.seconds:
            self._pause = max(0.0, step.seconds - link)
        else:
            self._pause *= 1 - _FORGOTTEN
        ahead = scale * cpu[0] - cpu[1] / step.link - self._pause
        steeper = (there[1] - cpu[1]) / step.link - scale * (there[0] - cpu[0])
        found = min(1 - LEAST_SHARE, max(LEAST_SHARE, ahead / steeper))
        self.share += (found - self.share) / 2


def busy_seconds(times: Iterable[tuple[int, int]]) -> float:
    """Seconds in which at least one job ran. times: (nanosecond of a job's begin, of its end)."""
    busy = last = 0
    for began, ended in sorted(times):
        busy += max(0, ended - max(began, last))
        last = max(last, ended)
    return busy / 1e9
