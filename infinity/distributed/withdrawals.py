"""Withdrawals: what this rank has withdrawn of its gradients, and the agreement of all ranks on it.

[Note: withdrawing]
`p.grad = None` withdraws this rank's gradients of a parameter. They may be in a sum over ranks already, from
which nothing can be taken away. So all ranks withdraw them, and the sum is forgotten; else the next agreement
raises RankDivergence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from infinity.errors import RankDivergence, named_ranks


@dataclass(slots=True)
class _Withdrawal:
    """That this rank has withdrawn its gradients of a parameter."""

    after: int
    """Number of backwards that this rank had ended since its last zero_grad(); 0 where it does not count."""
    again: bool = False
    """Whether it has contributed to the parameter since."""


class Withdrawals:
    """This rank's last withdrawals since the last agreement, by parameter."""

    def __init__(self, name: Callable[[int, int], str]) -> None:
        """name: of a parameter, from its unit and its index there."""
        self._name = name
        self._made: dict[tuple[int, int], _Withdrawal] = {}

    def note(self, unit: int, parameter: int, after: int) -> None:
        """Note that this rank has withdrawn a parameter's gradients of its first `after` backwards."""
        self._made[unit, parameter] = _Withdrawal(after)

    def contributed(self, unit: int, parameter: int) -> None:
        """Note that this rank contributes to a parameter, which it may have withdrawn before."""
        if (unit, parameter) in self._made:
            self._made[unit, parameter].again = True

    def clear(self) -> None:
        """Forget all: this rank has cleared its gradients."""
        self._made.clear()

    def stands(self, unit: int, parameter: int) -> bool:
        """Whether this rank has withdrawn a parameter's gradient, and not contributed to it since."""
        made = self._made.get((unit, parameter))
        return made is not None and not made.again

    def after(self, unit: int, parameter: int) -> int:
        """Number of backwards of which this rank has withdrawn a parameter's gradients."""
        made = self._made.get((unit, parameter))
        return 0 if made is None else made.after

    def nothing_since(self, unit: int, parameter: int, ended: int | None) -> bool:
        """Whether this rank has withdrawn a parameter's gradient, and no backward has ended since.

        ended: number of backwards that have ended; None where they are not counted.
        """
        made = self._made.get((unit, parameter))
        return made is not None and (ended is None or ended <= made.after)

    def told(self) -> list[list[Any]]:
        """The withdrawals as JSON can hold them."""
        return [[*place, *astuple(each)] for place, each in sorted(self._made.items())]

    def agreed(self, call: str, heard: Mapping[int, Sequence[Sequence[Any]]]) -> list[tuple[int, int]]:
        """The parameters, (unit, index), whose gradients all ranks have withdrawn, and have no new ones of.

        call: the agreement. heard: rank -> what it has told. Raises RankDivergence if a rank has not
        withdrawn what another one has, or after another backward.
        """
        said = {
            rank: {(unit, index): _Withdrawal(*others) for unit, index, *others in each}
            for rank, each in heard.items()
        }
        dropped = []
        for place in sorted({place for mine in said.values() for place in mine}):
            having = {rank: mine[place] for rank, mine in said.items() if place in mine}
            if len(having) < len(said):
                lacking = [rank for rank in said if rank not in having]
                told = f"on {named_ranks(having)}, and not on {named_ranks(lacking)}"
            elif not any(each.again for each in having.values()):
                dropped.append(place)
                continue
            elif len({each.after for each in having.values()}) == 1:
                continue
            else:
                told = ", ".join(
                    f"after backward {each.after} on rank {rank}" for rank, each in having.items()
                )
            raise RankDivergence(
                f"At {call} the gradient of {self._name(*place)} was withdrawn (p.grad = None) {told}.",
                "Set p.grad = None on all ranks, after the same backward, or on none.",
            )
        self._made.clear()
        return dropped
