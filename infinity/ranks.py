"""Ranks: the processes that train one model together, as a runtime sees them; here one, the usual case.

One rank keeps all sums and pages, agrees with itself and waits for nobody. infinity/distributed/ extends
these classes for several ranks, and is not imported by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from infinity.config import Budget
from infinity.errors import InfinityError
from infinity.gradients.exact_sum import ExactSum
from infinity.gradients.gradients import Gradients
from infinity.layout.chunks import Division
from infinity.layout.shards import ALONE, Share
from infinity.pages.optimizer_page import States
from infinity.pages.remote import RemotePages
from infinity.planning.plan import Plan
from infinity.system.closing import Closing
from infinity.system.launcher import RankLocation
from infinity.system.lock import RuntimeLock
from infinity.telemetry.meter import Meter
from infinity.telemetry.timeline import Timeline
from infinity.tiers import Pool

if TYPE_CHECKING:
    from infinity.build import Components

_T = TypeVar("_T")

GRADIENT_CURE = "Change what backward adds, in a hook (p.register_hook), or scale the loss."
"""The cure of errors of user code that sets a gradient."""

Given = tuple[int, int, Mapping[str, torch.Tensor]]
"""Unit, index of a parameter in the unit, and the parameter's state, as in OptimizerCore.write_state."""
Present = Callable[[int, int, int, int], torch.Tensor]
"""Function (unit, parameter, first, count) that returns elements [first, first + count) of a parameter's
present values: (count,) in the order of memory, in the parameter's dtype. This rank's home has them.
"""

Part = Callable[[int, int, int], torch.Tensor]
"""Function (number, first, count) that returns what a rank gives of elements [first, first + count) of a
tensor: flat, contiguous and in RAM. It may be called by another thread.
"""


class SingleExchange:
    """An exchange in which ranks take what they need of each other's tensors, which have numbers, while
    runtimes are made. One rank has nobody to take from.
    """

    def take(
        self, number: int, first: int, into: torch.Tensor, count: int | None = None, *, server: int = 0
    ) -> None:
        """Bring what a rank has for elements [first, first + count) of tensor `number`.

        into: contiguous, in RAM and of the dtype that the server gives. count: by default the number of
        elements of `into`.
        """
        raise AssertionError("there is no other rank")

    def end(self) -> None:
        """Take nothing more, and wait until no rank does."""


class SingleVotes:
    """Makes commits together with the other ranks: with one rank, by itself."""

    def begin(self, last: int, now: str, failure: InfinityError | None) -> tuple[int, str]:
        """Wait until all ranks begin a commit. Returns its number and its time, which is rank 0's.

        last: number of this rank's last commit. now: the time here. failure: why this rank cannot. Called by
        the thread that trains. Raises it, or the reason of another rank that cannot.
        """
        if failure is not None:
            raise failure.again()
        return last + 1, now

    def refuse(self, failure: BaseException) -> bool:
        """Tell all ranks that this one is not ready for the commit that is begun, and will not be.

        Returns False, and does nothing, if this rank has voted already or no commit is begun. Called by the
        thread that trains or by that of the commit.
        """
        return False

    def decide(self, number: int, wanted: Callable[[], bool]) -> InfinityError | None:
        """Tell all ranks that this one is ready, and wait until it is known whether the commit counts.

        Called by the thread of the commit, without the runtime's lock. wanted: returns whether a caller on
        this rank waits for the commit now; the other ranks then complete the updates for which their parts
        wait. Returns None if all ranks are ready, else the reason of one that is not. Raises RankFailure if a
        rank is lost.
        """
        return None


class SingleRank(Closing):
    """What connects a runtime with the ranks of its run, and the runtime's lock."""

    closes_dropped = True
    """Whether runtimes that nothing refers to are closed. Ranks collect garbage at different times."""

    def __init__(
        self, device: torch.device | str | None = None, *, share: Share = ALONE, on_node: int = 1
    ) -> None:
        """device: where the model computes; None: chosen by the plan. share, on_node: of the rank for which a
        run is planned; `on_node` ranks share its node.
        """
        self.device = device
        self.share = share
        self.place = RankLocation(0, 0, on_node)
        """Where this rank runs."""
        self.meter = Meter()
        """The runtime's: bytes cross between ranks before that is made."""
        self.lock = RuntimeLock()

    def released(self) -> AbstractContextManager[None]:
        """Context without the lock, for waits for other ranks."""
        return nullcontext()

    def gather(self, call: str, fact: Any, patient: Callable[[], bool] = lambda: False) -> dict[int, Any]:
        """Tell all ranks a fact, anything that JSON can hold. Returns what each has told in the same call.

        patient: asked after every time-out whether to go on waiting for other ranks.
        """
        return {0: fact}

    def agree(self, call: str, **facts: Any) -> dict[int, dict[str, Any]]:
        """Do what `gather` does with facts by name."""
        return self.gather(call, facts)

    def same(self, call: str, **facts: Any) -> None:
        """Check that `facts`, by name, are equal on all ranks. Raises RankDivergence if one is not."""

    @contextmanager
    def phase(self, name: str, *, first: bool = False) -> Iterator[dict[str, object]]:
        """Context of a phase, which all ranks end together; see [Note: copies of ranks] in
        infinity/checkpoint/copies.py.

        name: for errors. first: whether it is the first phase of a call, to which other ranks may not come;
        in a later one they are waited for as long as they live. Yields a dict for what must be equal on all
        ranks. Raises an error of the same class for one that another rank has had, RankDivergence for a fact
        that differs or a rank that does not come, and RankFailure.
        """
        yield {}

    def fail(self, error: BaseException) -> bool:
        """Tell all ranks that this one cannot go on, so that none waits for it, and it for none. Returns
        whether there are others.
        """
        return False

    def leave(self) -> None:
        """Wait until all ranks close their runtimes, so that they are served until then. Errors are ignored:
        a rank that fails or does something else is not waited for, nor, after the time-out, one that closes
        another runtime first: it waits for this rank there.
        """

    def close(self) -> None:
        """Leave the other ranks. A second call does nothing."""

    def timeline(self, path: str) -> Timeline:
        """Open the file of a timeline. Those of several ranks have one time zero."""
        return Timeline(path)

    def node_share(self, items: Sequence[_T]) -> Sequence[_T]:
        """The part of `items`, such as CPUs, that belongs to this rank of its node: at least one item."""
        return items

    # --- while a runtime is made --------------------------------------------------------------------------

    def check_equal(self, model: Any, optimizer: torch.optim.Optimizer | None, **options: Any) -> None:
        """Check that all ranks offload the same model with the same optimizer and options. Values of
        parameters and buffers may differ. options: those of `offload`. Raises RankDivergence.
        """

    def agreed_plan(
        self, budget: Budget, draft: Callable[[Division | None], Plan], adopts: Callable[[Plan], bool]
    ) -> Plan:
        """Make this rank's plan. All ranks call this, and divide the model alike.

        draft: makes a plan under `budget`, with a preferred division if there is one. adopts: whether the
        slabs of a plan are there already. Raises the errors of infinity.distributed.agreed_plan.
        """
        return draft(None)

    def name_of_run(self) -> str | None:
        """A name that all ranks of a new run have, and no other run; None where no rank needs it."""
        return None

    def remote_pages(self, room: Pool | None) -> RemotePages:
        """What brings the parts of pages that other ranks own. room: in which parts from other nodes are kept
        for the ranks of this one; None: none are.
        """
        return RemotePages()

    def exchange(self, label: str, part: Part) -> SingleExchange:
        """Begin an exchange. label: what the tensors are, for errors. part: gives what this rank has."""
        return SingleExchange()

    def initial_values(self, model: nn.Module) -> AbstractContextManager[Callable[..., torch.Tensor] | None]:
        """Context in which pages get their first values: on all ranks those of rank 0's model, also where
        these are drawn. Yields a function (tensor, first, count) that returns rank 0's elements
        [first, first + count) of a parameter; None: this rank's own values count.
        """
        return nullcontext()

    def write_states(self, states: States, given: Sequence[Given], present: Present) -> None:
        """Write rank 0's optimizer states to the optimizer pages, as far as this rank keeps them.

        states: the pages, which have the masters of the initial values already. given: the states of this
        rank's optimizer, which count on rank 0. A master is used only if all of its elements round to the
        parameter's present values. Raises ConfigError for the state of a frozen parameter.
        """
        for unit, parameter, state in given:
            states.write(unit, parameter, state)
            if "master" in state:
                count = states.pages[unit].layout.parameters[parameter].numel
                states.restore(unit, parameter, present(unit, parameter, 0, count), state["master"])

    def commit_votes(self) -> SingleVotes:
        """What makes commits together with the other ranks."""
        return SingleVotes()

    def edited_freely(self, units: int) -> Collection[int]:
        """Those of so many units whose parameters this rank may edit at any time, without the others."""
        return range(units)

    # --- a runtime's ----------------------------------------------------------------------------------------

    def serve(self, parts: Components) -> SingleStep | None:
        """Begin to answer requests of other ranks. Returns the object by which a training step works with the
        ranks; None for inference.
        """
        return None if parts.gradients is None else SingleStep(parts.gradients)


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
