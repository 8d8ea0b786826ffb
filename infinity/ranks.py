"""Ranks: a runtime's view of the processes that train one model together. These classes serve one rank, the
usual case.

One rank keeps all sums and pages, agrees with itself and waits for nobody. infinity/distributed/ extends
these classes for several ranks; it is not imported for one rank.
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
"""The cure in errors that refuse a gradient set by user code."""

Given = tuple[int, int, Mapping[str, torch.Tensor]]
"""Unit, index of a parameter in the unit, and the parameter's state, as in OptimizerCore.write_state."""
Present = Callable[[int, int, int, int], torch.Tensor]
"""Function (unit, parameter, first, count) that returns elements [first, first + count) of a parameter's
present values, which this rank must have at home: (count,) in memory order, in the parameter's dtype.
"""

Take = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Function (parameter, first, count) that returns rank 0's values of elements [first, first + count) of a
parameter, flat in the order of memory, in RAM.
"""
Give = Callable[[int, int, int], torch.Tensor]
"""Function (number, first, count) that returns this rank's values of elements [first, first + count) of
tensor `number`: flat, contiguous and in RAM. Any thread may call it.
"""


class SingleExchange:
    """An exchange, in which ranks copy elements of each other's tensors while runtimes are made. Each tensor
    has a number. This class serves one rank, which copies nothing.
    """

    def take(self, number: int, first: int, into: torch.Tensor, *, server: int = 0) -> None:
        """Fill `into` with elements of tensor `number` of the rank `server`, from element `first` on.

        into: flat, contiguous, in RAM, in the dtype that the server gives.
        """
        raise AssertionError("there is no other rank")

    def end(self) -> None:
        """End this rank's copying, and wait until all ranks have ended theirs."""


class SingleVotes:
    """Agrees with the other ranks on each commit: when it begins, and whether it counts. This class serves
    one rank, which agrees with itself.
    """

    def begin(self, last: int, now: str, failure: InfinityError | None) -> tuple[int, str]:
        """Wait until all ranks begin a commit. Returns the commit's number, and its time, which rank 0 gives.

        last: number of this rank's last commit. now: this rank's time. failure: why this rank cannot begin a
        commit; None if it can. Raises `failure`, or the error of another rank that cannot begin. Called by
        the training thread.
        """
        if failure is not None:
            raise failure.again()
        return last + 1, now

    def refuse(self, failure: BaseException) -> bool:
        """Tell all ranks that the commit that has begun fails on this rank. failure: the reason.

        Returns False, and does nothing, if this rank has voted already or no commit has begun. Called by the
        training thread or by the commit's thread.
        """
        return False

    def decide(self, number: int, wanted: Callable[[], bool]) -> InfinityError | None:
        """Tell all ranks that this rank is ready, and wait until all have voted on whether the commit counts.

        Called by the commit's thread, without the runtime's lock. wanted: function that returns whether this
        rank's program waits for the commit now; the other ranks then complete the updates that their own
        rank commits need. Returns None if all ranks are ready, else the error of a rank that is not.
        Raises RankFailure if a rank is lost.
        """
        return None


class SingleRank(Closing):
    """A runtime's connection to all ranks of its run, and the runtime's lock. This class serves one rank."""

    closes_dropped = True
    """Whether runtimes that nothing refers to are closed. False with several ranks, which collect garbage at
    different times.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        share: Share = ALONE,
        place: RankLocation | None = None,
    ) -> None:
        """device: where the model computes; None: the plan chooses. share: the number and the share of the
        rank that is planned for, if the run has several ranks. place: where the rank runs; by default alone
        on its node.
        """
        self.device = device
        self.share = share
        self.place = RankLocation(0, 0, 1) if place is None else place
        """The index of this rank on its node, and the number of ranks there."""
        self.mates: Sequence[int] = ()
        """The ranks of this node that read this rank's host arena, while this rank reads theirs."""
        self.unreached = 0
        """Number of mates with parameters on devices that this rank's device cannot reach."""
        self.meter = Meter()
        """The runtime's meter. It exists before the runtime, because ranks send bytes before."""
        self.lock = RuntimeLock()

    def released(self) -> AbstractContextManager[None]:
        """A context that gives the runtime's lock up, for waits for other ranks."""
        return nullcontext()

    def gather(self, call: str, fact: Any, patient: Callable[[], bool] = lambda: False) -> dict[int, Any]:
        """Send a fact, any value that JSON can hold, to all ranks. Returns rank -> that rank's fact.

        call: the call in which all ranks gather, for errors. patient: function that is called after every
        time-out; returns whether to wait longer for other ranks.
        """
        return {0: fact}

    def agree(self, call: str, **facts: Any) -> dict[int, dict[str, Any]]:
        """Call `gather` with a dict of facts by name."""
        return self.gather(call, facts)

    def same(self, call: str, **facts: Any) -> None:
        """Check that `facts`, by name, are equal on all ranks. Raises RankDivergence if a fact differs."""

    @contextmanager
    def phase(self, name: str, *, first: bool = False) -> Iterator[dict[str, object]]:
        """A context whose end all ranks reach together; see [Note: copies of ranks] in
        infinity/checkpoint/copies.py.

        Yields a dict for facts that must be equal on all ranks. name: the name of the phase, for errors.
        first: whether this is the first phase of a call. Other ranks may then not have made the call, so the
        wait for them ends with the time-out. In later phases ranks are waited for as long as they live.

        If the phase fails on another rank, an error of the same class is raised here. Raises RankDivergence
        if a fact differs or a rank does not come, and RankFailure if a rank is lost.
        """
        yield {}

    def fail(self, error: BaseException) -> bool:
        """Tell all ranks that this rank has failed, which ends all waits of other ranks for this rank, and of
        this rank for others. Returns whether there are other ranks.
        """
        return False

    def leave(self) -> None:
        """Wait until all ranks close their runtimes, and serve the other ranks until then. Errors are
        ignored.

        Does not wait for a rank that fails or makes another call. If ranks close several runtimes of a
        process in different orders, they wait for each other; the time-out ends such a wait.
        """

    def close(self) -> None:
        """Leave the other ranks. A second call does nothing."""

    def timeline(self, path: str) -> Timeline:
        """Open the file of a timeline. The timelines of several ranks count from the same moment."""
        return Timeline(path)

    def node_share(self, items: Sequence[_T]) -> Sequence[_T]:
        """Return this rank's share of `items`, such as CPUs, which are divided among the ranks on its node.
        The share has at least one item.
        """
        _, place, count = self.place
        return items[len(items) * place // count : len(items) * (place + 1) // count] or items[:1]

    # --- while a runtime is made --------------------------------------------------------------------------

    def check_equal(self, model: Any, optimizer: torch.optim.Optimizer | None, **options: Any) -> None:
        """Check that all ranks offload the same model with the same optimizer and options. Values of
        parameters and buffers may differ. options: arguments of `offload` by name. Raises RankDivergence.
        """

    def agreed_plan(
        self, budget: Budget, draft: Callable[[Division | None], Plan], adopts: Callable[[Plan], bool]
    ) -> Plan:
        """Make this rank's plan. All ranks call this, and divide the model alike.

        draft: function that makes a plan under `budget`; its argument is the division that the plan should
        have if possible, or None. adopts: function that returns whether the slabs of a commit can be the
        slabs of a plan. Raises the errors of infinity.distributed.agreed_plan.
        """
        return draft(None)

    def name_of_run(self) -> str | None:
        """A name that all ranks of a new run have, and no other run; None where no rank needs it."""
        return None

    def remote_pages(self, room: Pool | None, block_bytes: int) -> RemotePages:
        """Make the object that brings bytes of pages that other ranks own. room: the pool in which bytes from
        other nodes are kept for all ranks of this node; None: they are not kept. block_bytes: the most bytes
        that are requested at once.
        """
        return RemotePages()

    def exchange(self, label: str, give: Give) -> SingleExchange:
        """Begin an exchange. label: a name for the tensors, for errors. give: function that returns this
        rank's elements.
        """
        return SingleExchange()

    def initial_values(self, model: nn.Module) -> AbstractContextManager[Take | None]:
        """A context in which pages get their first values: on all ranks the values of rank 0's model, even if
        an initialiser draws them at random. Yields None if this rank uses its own values.
        """
        return nullcontext()

    def write_states(self, states: States, given: Sequence[Given], present: Present) -> None:
        """Write the optimizer states that were given on rank 0 to the optimizer pages of this rank.

        states: the optimizer pages, which have the masters of the initial values already. given: the states
        of the optimizer on this rank; those of other ranks than rank 0 are ignored. present: function that
        returns a parameter's values. A given master is used only if all of its elements round to the
        parameter's present values. Raises ConfigError for the state of a frozen parameter.
        """
        for unit, parameter, state in given:
            states.write(unit, parameter, state)
            if "master" in state:
                count = states.pages[unit].layout.parameters[parameter].numel
                states.restore(unit, parameter, present(unit, parameter, 0, count), state["master"])

    def commit_votes(self) -> SingleVotes:
        """Make the object by which all ranks agree on commits."""
        return SingleVotes()

    def edited_freely(self, units: int) -> Collection[int]:
        """The units whose parameters this rank may edit at any time, without the other ranks. units: number
        of all units.
        """
        return range(units)

    # --- a runtime's ----------------------------------------------------------------------------------------

    def serve(self, parts: Components) -> SingleStep | None:
        """Begin to answer requests of other ranks. Returns the training step's view of the ranks; None for
        inference.
        """
        return None if parts.gradients is None else SingleStep(parts.gradients)


class SingleStep:
    """A training step's view of the ranks. Called under the runtime's lock, unless a method says otherwise.

    With several ranks, methods also raise RankFailure, and RankDivergence where ranks make different calls or
    give different arguments.
    """

    updates_elsewhere = False
    """Whether other ranks may begin eager updates before this one does."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._pages = gradients.pages
        self._fresh: tuple[tuple[int, Sequence[int]], ...] = ()
        self.times_zeroed = 0
        """Number of times that this rank has cleared its gradients by zero_grad(set_to_none=False)."""

    @property
    def settled(self) -> bool:
        """Whether all ranks know which parameters have gradients: no backward is under way and, with several
        ranks, no gradient has come since they agreed.
        """
        return torch._C._current_graph_task_id() == -1

    @property
    def any_stored(self) -> bool:
        """Whether any gradient is stored that was not dropped."""
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
        rank, by which the call fails on all ranks. forgiving: if True, gradients that were lost on one of
        several ranks make the sum infinite, instead of raising an error.
        """
        if failure is not None:
            raise failure.again()
        return self._gradients.squares()

    def squares_of(self, unit: int, parameter: int, settle: Callable[[str], object]) -> ExactSum:
        """Return the exact sum of squares of a parameter's gradient, summed over all ranks.

        settle: function that takes the name of the user's call, and calls `SingleStep.settle` with it.
        """
        return self._gradients.squares((unit, parameter))

    def gradient(self, unit: int, parameter: int) -> torch.Tensor | None:
        """Return a copy of a parameter's gradient, added up over all ranks, as `Gradients.read` does."""
        return self._gradients.read(unit, parameter)

    def has(self, unit: int, parameter: int) -> bool:
        """Whether, as far as this rank knows, a parameter has a gradient that this rank has not dropped."""
        return self._gradients.has(unit, parameter)

    def check_settable(self, unit: int, parameter: int) -> None:
        """Raise ConfigError if user code cannot set the gradient of a parameter, because ranks sum it up."""

    def add(self, unit: int, parameter: int, gradient: torch.Tensor, later: int) -> bool:
        """Offer a new gradient to the rank that adds up the gradients of its parameter.

        Returns False if the caller must add it to this rank's stored gradient. later: as in
        `TrainingStep.add`. Raises ConfigError if no gradient may come now.
        """
        self._fresh = ((unit, (parameter,)),)
        return False

    def take_complete(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Return the units, and the indices of their parameters, to which the last rank's gradient of a
        micro-batch, or of a piece of it, has been added since the last call.
        """
        found, self._fresh = self._fresh, ()
        return found

    def drop(self, unit: int, parameter: int) -> None:
        """Drop a parameter's gradient. With several ranks, raises ConfigError inside of a backward."""
        self._gradients.drop(unit, parameter)

    def clear(self) -> None:
        """Forget the gradients of this rank."""
        self._gradients.clear()

    def await_cleared(self) -> None:
        """Wait, without the runtime's lock, until all ranks have cleared their gradients, so that new ones
        may come.
        """

    def await_room(self, unit: int, parameter: int, gradient: torch.Tensor, *, together: bool) -> None:
        """Wait, without the runtime's lock, until there is room for a new gradient of a parameter, where it
        waits for other ranks.

        together: whether it comes from micro-batches that run together.
        """

    def expect(self, later: int, parameters: Set[tuple[int, int]]) -> None:
        """Announce for which parameters a micro-batch brings a gradient, exactly one each.

        parameters: (unit, index of the parameter in the unit). later: as in `add`.
        """

    def backward_ended(self, count: int) -> None:
        """Note that this rank has ended `count` backwards."""

    def stepped(self, updated: Callable[[], Sequence[int]]) -> None:
        """Note that a step has been decided. updated: function that returns the units it updates."""

    def offer(self, unit: int) -> None:
        """Let ranks of this node copy a unit's page by themselves, though user code has views of it.

        Before user code may write to the page, `PrefetchEngine.settle_for_user` is called again.
        """

    def updated_in_part(self, begun: bool) -> bool:
        """Whether a step that cannot be completed has updated, on any rank, some chunks of a unit and not its
        other chunks. All ranks call this.

        begun: whether this rank has begun an eager update. Always False with one rank, which updates all
        chunks of a unit or none.
        """
        return False

    def agree(self, call: str) -> None:
        """Wait until all ranks have made the same call. call: its name, for errors."""

    def agree_on_states(self, digests: Callable[[], Mapping[tuple[int, int], int]], cure: str) -> None:
        """Wait until all ranks are about to replace the same optimizer states.

        digests: function that returns (unit, index of a parameter) -> digest of its new state. cure: the cure
        in the error for states that differ.
        """
