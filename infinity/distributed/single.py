"""Single rank: what a runtime asks of the ranks of its run, answered where there is one rank.

It keeps all sums and pages, agrees with itself and waits for nobody. Communicator and RankedStep, for several
ranks, extend these classes. Nothing here imports torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from infinity.errors import InfinityError
from infinity.gradients.exact_sum import ExactSum
from infinity.gradients.gradients import Gradients

GRADIENT_CURE = "Change what backward adds, in a hook (p.register_hook), or scale the loss."
"""The cure of errors of user code that sets a gradient."""


class SingleStep:
    """The ranks, as a training step sees them. Called under the runtime's lock, unless a method says so.

    Errors that several ranks add: RankDivergence where ranks call or give different things, and RankFailure.
    """

    updates_elsewhere = False
    """Whether other ranks may begin eager updates before this one does."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._pages = gradients.pages
        self._fresh: tuple[int, ...] = ()
        self.times_zeroed = 0
        """Number of times that this rank has cleared its gradients by zero_grad(set_to_none=False)."""

    @property
    def settled(self) -> bool:
        """Whether it is known which parameters have gradients on all ranks: no backward is under way, and on
        several ranks none has come since they agreed on it.
        """
        return torch._C._current_graph_task_id() == -1

    @property
    def any_stored(self) -> bool:
        """Whether a gradient is stored that has not been dropped."""
        return self._gradients.any_stored

    def settle(
        self,
        call: str,
        groups: Sequence[Mapping[str, Any]],
        failure: InfinityError | None,
        *,
        forgiving: bool = False,
    ) -> ExactSum:
        """Agree that the gradients are complete; returns the sum of squares of all ranks' gradients.

        Afterwards all ranks know which parameters have gradients. call: the user's call, for errors. groups:
        the optimizer's param groups, whose options must be the same on all ranks. failure: an error of this
        rank, by which the call fails on all ranks. forgiving: whether gradients that one of several ranks has
        lost make the sum infinite, and raise nothing.
        """
        if failure is not None:
            raise failure.again()
        return self._gradients.squares()

    def squares_of(self, unit: int, parameter: int, settle: Callable[[str], object]) -> ExactSum:
        """Return the exact sum of squares of a parameter's gradient, over the parts that all ranks keep.

        settle: calls `settle` for the user's call that it is given.
        """
        return self._gradients.squares((unit, parameter))

    def gradient(self, unit: int, parameter: int) -> torch.Tensor | None:
        """Do what `Gradients.read` does for the sum over all ranks."""
        return self._gradients.read(unit, parameter)

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient, as far as this rank knows, which it has not dropped."""
        return self._gradients.has(unit, parameter)

    def check_settable(self, unit: int, parameter: int) -> None:
        """Raise ConfigError if user code cannot set the gradient of a parameter, because ranks sum it up."""

    def add(self, unit: int, parameter: int, gradient: torch.Tensor, later: int) -> bool:
        """Contribute a gradient. Returns False if the caller is to add it to this rank's own sum.

        later: as in `TrainingStep.add`. Raises ConfigError if no gradient may come now.
        """
        self._fresh = (unit,)
        return False

    def take_complete(self) -> Sequence[int]:
        """The units that have got the last gradients of a micro-batch of all ranks since the last call."""
        found, self._fresh = self._fresh, ()
        return found

    def drop(self, unit: int, parameter: int) -> None:
        """Drop a parameter's gradient. Raises ConfigError inside of a backward, on several ranks."""
        self._gradients.drop(unit, parameter)

    def clear(self) -> None:
        """Forget the gradients of this rank."""
        self._gradients.clear()

    def await_cleared(self) -> None:
        """Wait, without the runtime's lock, until gradients may come: all ranks have cleared theirs."""

    def await_room(self, unit: int, parameter: int, gradient: torch.Tensor, *, together: bool) -> None:
        """Wait, without the runtime's lock, until a new gradient of a parameter may come.

        together: whether it is of micro-batches that run together.
        """
        self._gradients.await_room(unit, parameter, gradient)

    def expect(self, later: int, parameters: Set[tuple[int, int]]) -> None:
        """Say to which parameters, (unit, index), a micro-batch contributes once. later: as in `add`."""

    def backward_ended(self, count: int) -> None:
        """Note that this rank has ended `count` backwards."""

    def stepped(self, updated: Callable[[], Sequence[int]]) -> None:
        """Note that a step has been decided that updates the units that `updated` returns."""

    def updated_in_part(self, begun: bool) -> bool:
        """Whether parts of units were updated and others were not, in a step that cannot be completed.

        begun: whether this rank has begun an eager update. One rank updates whole units.
        """
        return False

    def agree(self, call: str) -> None:
        """Wait until all ranks make a call."""

    def agree_on_states(
        self,
        digests: Callable[[], Mapping[tuple[int, int], int]],
        cure: str = "Give all ranks the same states, such as those of one file.",
    ) -> None:
        """Wait until all ranks are about to replace the same optimizer states.

        digests: returns (unit, index of a parameter) -> digest of its new state. cure: for states that
        differ.
        """
