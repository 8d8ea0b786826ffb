"""Ranked step: what a training step does together with other ranks: gradient shards, agreements, the step's
end.

Two calls of a step are agreements: clip_grad_norm_ and step(). Each has two barriers. At the first, every
rank says that it has no more gradients to contribute, and tells the facts that must be equal on all ranks. At
the second, when all sums are complete, every rank tells the exact sum of squares of the gradients that it
keeps. So all ranks get the same norm, which is that of a single rank.

[Note: clearing]
Another rank may still ask for sums of gradients when this one clears them. So the pages forget their
gradients when all ranks have called zero_grad(), and a rank's next gradient waits until then.

[Note: after a failed step]
A step may fail on all ranks alike, for instance because options differ, and user code may catch the error and
continue with the same call, further backwards, or zero_grad(). By then owners count missing shards as absent.
So the shards of all backwards before the call are added first, as in a step that succeeds. If that is
impossible, because ranks are in different calls or steps, every later call raises the same error.

[Note: dropped gradients]
`p.grad = None` drops a parameter's gradient on all ranks, or on none: a rank's gradients may be in a sum
already, and nothing can be subtracted from a sum. The ranks agree on it when the step ends, and then forget
the sum. So a rank adds nothing to a parameter between its `p.grad = None` and this agreement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import astuple
from typing import Any

import torch

from infinity.distributed.agreed_plan import digest, option_digests
from infinity.distributed.barrier import Barrier, Heard, check_same
from infinity.distributed.gradient_shards import GradientShards
from infinity.distributed.message import MessageKind
from infinity.distributed.page_service import PageService
from infinity.distributed.remote_parts import RemoteParts
from infinity.distributed.whole_gradients import WholeGradients
from infinity.distributed.wire import Wire
from infinity.errors import ConfigError, InfinityError, RankDivergence, named_ranks, rank_failure
from infinity.gradients.exact_sum import ExactSum
from infinity.gradients.gradients import Gradients
from infinity.layout.chunks import OwnedRange
from infinity.layout.shards import Share
from infinity.pages.gradient_page import GradientPage
from infinity.prefetch.engine import PrefetchEngine
from infinity.ranks import GRADIENT_CURE, SingleStep

_OPTIONS = "options of the param groups"
_MEMBERS = "parameters of the param groups"
_FACTOR = "factor of the gradients"
_TIMES_CLEARED = "number of zero_grad calls"
_TIMES_ZEROED = "number of zero_grad(set_to_none=False) calls"
_EQUAL = (_OPTIONS, _MEMBERS, _FACTOR, _TIMES_CLEARED, _TIMES_ZEROED)
"""Names of the facts that must be equal on all ranks when a step ends, as errors say them."""
_SAME_VALUES = "Make the same calls with the same values on all ranks."


class RankedStep(SingleStep):
    """A training step's view of the other ranks, for a run with several ranks."""

    updates_elsewhere = True

    def __init__(
        self,
        share: Share,
        wire: Wire,
        *,
        barrier: Barrier,
        shards: GradientShards | None,
        whole: WholeGradients | None,
        service: PageService,
        remote: RemoteParts,
        engine: PrefetchEngine,
        gradients: Gradients,
    ) -> None:
        """shards: sends gradients to the ranks that own their sums; None at stages 0 and 1, where every rank
        keeps all gradients. whole: sums up all ranks' gradients at the end of a step; None at stages 2 and 3.
        """
        super().__init__(gradients)
        self.shards = shards
        self._whole = whole
        self._share = share
        self._wire = wire
        self._cleared = [0] * share.ranks
        """Number of times that each rank has cleared its gradients."""
        self._forgotten = 0
        """Number of times that all ranks have cleared theirs, and this rank's pages have forgotten them."""
        self._settled = False
        self._squares: dict[str, ExactSum] | None = None
        """"unit index" of each parameter -> its sum of squares over all ranks, as of the last agreement in
        `squares_of`; None after a new gradient.
        """
        self._added: set[tuple[int, int]] = set()
        """Parameters, (unit, index), to which this rank has contributed since its last zero_grad()."""
        self._dropped: dict[tuple[int, int], bool] = {}
        """(unit, index) of each parameter whose `p.grad` was set to None since the last agreement -> whether
        this rank had contributed to it; see [Note: dropped gradients].
        """
        self._barrier = barrier
        self._service = service
        self._remote = remote
        self._engine = engine

    @property
    def settled(self) -> bool:
        return self._settled

    def settle(
        self,
        call: str,
        groups: Sequence[Mapping[str, Any]],
        failure: InfinityError | None,
        *,
        forgiving: bool = False,
    ) -> ExactSum:
        """Agree that all gradients are complete; see SingleStep.settle and [Note: after a failed step]."""
        self._engine.land_all()  # no rank may ask for bytes that the update of this step replaces
        if self.shards is not None:
            self.shards.pause(self._cleared[self._share.rank])
        members = [
            [getattr(getattr(each, "_place", None), "name", "") for each in group["params"]]
            for group in groups
        ]
        facts = {
            _OPTIONS: digest(option_digests(groups)),
            _MEMBERS: digest(members),
            _FACTOR: repr(self._gradients.unscale),
            _TIMES_CLEARED: self._cleared[self._share.rank],
            _TIMES_ZEROED: self.times_zeroed,
            "content": [sorted(page.content) for page in self._pages.values()],
            "zeros": [sorted(page.zeros) for page in self._pages.values()],
            **self._contributed(),
            "dropped": [[*place, had] for place, had in sorted(self._dropped.items())],
            "failure": None if failure is None else str(failure),
            "lost": self._gradients.lost,
        }
        heard = self._barrier.agree(call, facts)
        try:
            self._check_failures(call, heard, failure)
            check_same(call, heard, _SAME_VALUES, _EQUAL)
            dropped = self._agreed_drops(call, {rank: said["dropped"] for rank, said in heard.items()})
        except InfinityError as error:
            self._end_failed(call, heard, error)
            raise
        self._await_forgotten()  # a barrier may overtake the message that a rank has called zero_grad()
        for said in heard.values():
            for page, content, zeros in zip(
                self._pages.values(), said["content"], said["zeros"], strict=True
            ):
                page.content.update(content)
                page.zeros.update(zeros)
        self._settled = True
        if forgiving and any(said["lost"] for said in heard.values()):
            self._complete_contributions(heard)
            return ExactSum(nonfinite=math.inf)
        squares = self._agreed_squares(call, functools.partial(self._complete, heard, dropped))
        if self._whole is not None and not self._whole.summed:
            if self._share.whole_states:
                self._agreed_squares(call, self._whole.share_sums)
            self._whole.summed = True
        return squares

    def _agreed_drops(
        self, call: str, heard: Mapping[int, Sequence[tuple[int, int, bool]]]
    ) -> list[tuple[int, int]]:
        """Return the (unit, index) of all parameters whose gradients all ranks dropped, and forget the drops.

        heard: rank -> (unit, index, whether the rank had contributed). Raises RankDivergence if only some
        ranks dropped a gradient.
        """
        told = {rank: {(unit, index) for unit, index, _ in each} for rank, each in heard.items()}
        found = sorted({(unit, index) for each in heard.values() for unit, index, had in each if had})
        for place in found:
            lacking = [rank for rank, each in told.items() if place not in each]
            if lacking:
                raise RankDivergence(
                    f"At {call} the gradient of {self._name(*place)} was dropped (p.grad = None) on "
                    f"{named_ranks([rank for rank in told if rank not in lacking])}, and not on "
                    f"{named_ranks(lacking)}.",
                    "Set p.grad = None on all ranks, or on none.",
                )
        self._dropped.clear()
        self._added.difference_update(found)
        return found

    def _end_failed(self, call: str, heard: Heard, error: InfinityError) -> None:
        """Complete the shards of a step that fails by `error`; see [Note: after a failed step]."""
        if len({said[_TIMES_CLEARED] for said in heard.values()}) > 1:
            self._barrier.end(error)
            return
        try:
            self._await_forgotten()
            self._await_contributions(heard)
            # A rank that goes on may contribute again, which would come to one that has not ended the step.
            self._barrier.agree(f"the end of {call}")
        except InfinityError:  # a rank may have left with the error already
            self._barrier.end(error)

    def _contributed(self) -> dict[str, Any]:
        """Return what this rank says in an agreement: the number of backwards that it has ended, and for each
        rank the number of shards that it has offered to that rank.
        """
        shards, ranks = self.shards, range(self._share.ranks)
        if shards is None or self._outdated:
            # The counters may still be those of the former gradients. Until all ranks have cleared theirs,
            # this one contributes nothing.
            return {"backwards": 0, "offered": [0 for _ in ranks]}
        return {"backwards": shards.ended, "offered": [shards.offered[rank] for rank in ranks]}

    def _complete(self, heard: Heard, dropped: Sequence[tuple[int, int]]) -> None:
        """Complete the sums that this rank owns, and forget the gradients `dropped`, (unit, index)."""
        self._complete_contributions(heard)
        if self._whole is not None:
            self._whole.sum_up({rank: said["content"] for rank, said in heard.items()})
        for unit, parameter in dropped:
            self._gradients.drop(unit, parameter)

    def _complete_contributions(self, heard: Heard) -> None:
        """Call `_await_contributions`. If it raises an error, every later agreement raises this error."""
        try:
            self._await_contributions(heard)
        except InfinityError as error:
            self._barrier.end(error)
            raise

    def _await_contributions(self, heard: Heard) -> None:
        """Wait until this rank has added and sent all shards of the backwards before the agreement.

        heard: rank -> what it said in the agreement; see `_contributed`.
        """
        if self.shards is None:
            return
        rank = self._share.rank
        self.shards.close_step(
            {each: said["backwards"] for each, said in heard.items()},
            {each: said["offered"][rank] for each, said in heard.items() if each != rank},
        )

    def _agreed_squares(self, call: str, work: Callable[[], object]) -> ExactSum:
        """Do `work`, wait for all ranks to do theirs, and return the sum of all squared gradients."""
        squares, failure = ExactSum(), None
        try:
            work()
            squares = self._gradients.squares()
        except InfinityError as error:
            failure = error.again()
        said = {"squares": astuple(squares), "failure": None if failure is None else str(failure)}
        heard = self._barrier.agree(call, said, anyway=True)  # also to tell of an error that ends all
        self._check_failures(call, heard, failure)
        total = ExactSum()
        for each in heard.values():
            total.merge(ExactSum(*each["squares"]))
        return total

    def squares_of(self, unit: int, parameter: int, settle: Callable[[str], object]) -> ExactSum:
        """Return the sum of squares of a parameter's gradient; see SingleStep.squares_of.

        The first call after a new gradient is an agreement on the sums of all parameters, so ranks may ask
        for different parameters. Raises ConfigError inside of a backward.
        """
        if torch._C._current_graph_task_id() != -1:
            raise ConfigError(
                f"The norm of the gradient of {self._name(unit, parameter)} was asked for inside of a "
                "backward, before other ranks have added theirs.",
                "Ask for it after the backward, on all ranks.",
            )
        if self._squares is None:
            call = "a norm of p.grad"
            settle(call)
            mine = {
                f"{unit} {index}": astuple(self._gradients.squares((unit, index)))
                for unit, page in self._pages.items()
                for index in sorted(page.content)
            }
            found: dict[str, ExactSum] = {}
            for said in self._barrier.agree(call, mine).values():
                for key, each in said.items():
                    found.setdefault(key, ExactSum()).merge(ExactSum(*each))
            self._squares = found
        return self._squares.get(f"{unit} {parameter}", ExactSum())

    def updated_in_part(self, begun: bool) -> bool:
        return any(self._barrier.agree("step()", begun).values())

    def check_settable(self, unit: int, parameter: int) -> None:
        raise ConfigError(
            f"The gradient of {self._name(unit, parameter)} was set, but it is a sum over ranks, of which "
            "each keeps a part.",
            GRADIENT_CURE,
        )

    def clear(self) -> None:
        """Clear this rank's gradients; see [Note: clearing]."""
        if self.shards is not None:
            self.shards.offer_all()  # an owner that hears of them later takes them for the next ones
        for page in self._pages.values():
            page.content.clear()
        self._gradients.forgive()
        self._settled = False
        self._squares = None
        self._dropped.clear()
        self._added.clear()
        rank = self._share.rank
        self._cleared[rank] += 1
        self._wire.post(self._wire.peers, MessageKind.CLEARED, self._cleared[rank])
        self._forget()

    def cleared(self, source: int, count: int) -> None:
        """Note that another rank has cleared its gradients `count` times. Called by the service thread."""
        self._cleared[source] = count
        self._forget()

    def _forget(self) -> None:
        """Forget the gradients in the pages once for each time that every rank has cleared its gradients,
        unless this has been done.
        """
        while self._forgotten < min(self._cleared):
            self._forgotten += 1
            self._gradients.clear()
            if self.shards is not None:
                self.shards.renew()
            if self._whole is not None:
                self._whole.summed = False
            self._wire.failure_event.notify()

    def add(self, unit: int, parameter: int, gradient: torch.Tensor, later: int) -> bool:
        self._gradients.check_addition(unit, parameter)
        if self._whole is not None:
            self._whole.check()
        self._settled = False
        self._squares = None
        if self._dropped.get((unit, parameter)):
            raise ConfigError(
                f"A backward adds to the gradient of {self._name(unit, parameter)}, which was dropped "
                "(p.grad = None) before other ranks have agreed to it.",
                "Call runtime.optimizer.zero_grad() on all ranks to forget gradients between backwards.",
            )
        self._dropped.pop((unit, parameter), None)
        self._added.add((unit, parameter))
        if self.shards is None:
            return False
        self.shards.offer(unit, parameter, gradient, self.shards.ended + later)
        return True

    def drop(self, unit: int, parameter: int) -> None:
        """Drop a parameter's gradient; see [Note: dropped gradients].

        Does nothing for a parameter that was frozen in offload. Raises ConfigError inside of a backward.
        """
        if unit not in self._pages or not self._pages[unit].layout.parameters[parameter].trainable:
            return
        if torch._C._current_graph_task_id() != -1:
            raise ConfigError(
                f"The gradient of {self._name(unit, parameter)} was dropped (p.grad = None) inside of a "
                "backward, from which other ranks may have got it.",
                "Set p.grad = None after the backward, on all ranks.",
            )
        if self._whole is not None and not self._whole.summed and not self._outdated:
            self._gradients.drop(unit, parameter)
        self._dropped[unit, parameter] = (unit, parameter) in self._added

    def has(self, unit: int, parameter: int) -> bool:
        if not self._gradients.has(unit, parameter):
            return False
        return parameter in self._pages[unit].zeros or (unit, parameter) not in self._dropped

    @property
    def _outdated(self) -> bool:
        """Whether the pages still have gradients that this rank has cleared. They are kept until all ranks
        have cleared them.
        """
        return self._forgotten < self._cleared[self._share.rank]

    @property
    def any_stored(self) -> bool:
        return any(
            (unit, parameter) not in self._dropped
            for unit, page in reversed(self._pages.items())
            for parameter in page.content
        )

    def gradient(self, unit: int, parameter: int) -> torch.Tensor | None:
        """Return the sum of all ranks' gradients of a parameter; see SingleStep.gradient.

        At stages 0 and 1 this is an agreement until the step ends: all ranks call it for the same parameter,
        or it raises RankDivergence.
        """
        if unit not in self._pages:
            return None
        cleared = self._cleared[self._share.rank]
        if self._whole is not None and not (self._whole.summed and self._forgotten == cleared):
            # Also right after zero_grad(), though nothing has come then: how soon others have called
            # zero_grad() must not decide which of this rank's calls are agreements.
            call = f"grad({self._name(unit, parameter)})"
            check_same(call, self._barrier.agree(call, {_TIMES_CLEARED: cleared}), _SAME_VALUES)
            self._await_forgotten()
            found = self._gradients.read(unit, parameter, self._sum_of)
            self._barrier.agree(call, {})  # no rank goes on while another one still reads its gradients
            return found
        if self._outdated or (unit, parameter) in self._dropped:
            return self._gradients.zeros(unit, parameter)
        return self._gradients.read(unit, parameter, self._sum_of)

    def _sum_of(self, page: GradientPage, parameter: int, wanted: OwnedRange) -> torch.Tensor | None:
        if self.shards is not None:
            return self.shards.sum_of(page, parameter, wanted)
        assert self._whole is not None
        return self._whole.sum_of(page, parameter, wanted)

    def expect(self, later: int, parameters: Set[tuple[int, int]]) -> None:
        if self.shards is not None:
            self.shards.expect(self.shards.ended + later, parameters)

    def agree_on_states(self, digests: Callable[[], Mapping[tuple[int, int], int]], cure: str) -> None:
        said = {f"state of {self._name(*place)}": each for place, each in sorted(digests().items())}
        call = "a change of optimizer states"
        check_same(call, self._barrier.agree(call, said), cure)

    def agree(self, call: str) -> None:
        self._barrier.agree(call, {})

    def await_cleared(self) -> None:
        self._barrier.check()
        self._await_forgotten()

    def await_room(self, unit: int, parameter: int, gradient: torch.Tensor, *, together: bool) -> None:
        self.await_cleared()
        if self.shards is not None and not together:
            # Micro-batches that run together reach parameters in an order that may depend on data, so that
            # ranks could wait for each other's later gradients: they wait for no room.
            self.shards.await_room(gradient.nbytes)

    def _await_forgotten(self) -> None:
        """Wait, without the runtime's lock, until all ranks have cleared gradients as often as this one."""
        rank = self._share.rank
        if not self._wire.wait_for_step(lambda: self._forgotten == self._cleared[rank], "zero_grad()"):
            raise RankDivergence(
                f"Rank {self._cleared.index(min(self._cleared))} has not called zero_grad() for "
                f"{self._wire.failure_event.timeout:g} s after other ranks have.",
                "Call runtime.optimizer.zero_grad() equally often on all ranks.",
            )

    def take_complete(self) -> Sequence[tuple[int, Sequence[int]]]:
        if self.shards is None:
            return []
        found = [(unit, sorted(fresh)) for unit, fresh in sorted(self.shards.fresh.items())]
        self.shards.fresh.clear()
        return found

    def backward_ended(self, count: int) -> None:
        if self.shards is not None:
            self.shards.backward_ended(count)

    def stepped(self, updated: Callable[[], Sequence[int]]) -> None:
        self._remote.step += 1
        self._engine.stepped(updated())
        self._service.offer()
        self._service.stepped()

    def offer(self, unit: int) -> None:
        self._service.offer([unit])

    def _name(self, unit: int, parameter: int) -> str:
        return self._pages[unit].layout.parameters[parameter].names[0]

    def _check_failures(self, call: str, heard: Heard, failure: InfinityError | None) -> None:
        if failure is not None:
            raise failure.again()
        for rank, said in heard.items():
            if said["failure"] is not None:
                raise rank_failure(rank, f"could not take part in {call}: {said['failure'].rstrip('.')}")
