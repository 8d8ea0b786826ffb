"""Communicator: connects one rank with the others, from before its runtime is made until it is closed."""

from __future__ import annotations

import atexit
import sys
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from infinity.config import Budget
from infinity.distributed.agreed_plan import agreed_plan, check_equal
from infinity.distributed.barrier import Barrier, CommitVotes, check_same, error_of, told
from infinity.distributed.exchange import Exchange, InitialStates, initial_values
from infinity.distributed.failure_event import FailureEvent
from infinity.distributed.gradient_shards import GradientShards
from infinity.distributed.mesh import Ranks
from infinity.distributed.message import MessageKind
from infinity.distributed.page_service import PageService
from infinity.distributed.ranked_step import RankedStep
from infinity.distributed.remote_parts import RemoteParts
from infinity.distributed.service_thread import ServiceThread
from infinity.distributed.whole_gradients import WholeGradients
from infinity.distributed.wire import Wire
from infinity.errors import InfinityError, RankFailure, rank_failure
from infinity.layout.chunks import Division
from infinity.layout.shards import Share
from infinity.pages.optimizer_page import States
from infinity.planning.plan import Plan
from infinity.ranks import Give, Given, Present, SingleRank, Take
from infinity.system import launcher
from infinity.system.launcher import RankLocation
from infinity.telemetry.timeline import Timeline
from infinity.tiers import Pool

if TYPE_CHECKING:
    from infinity.build import Components

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
"""The communicators of this process that are not closed."""


class Communicator(SingleRank):
    """One rank's connections to the others: wire and barriers; and the runtime's lock."""

    closes_dropped = False

    def __init__(self, mesh: DeviceMesh | None, stage: int, device: torch.device) -> None:
        """Connect to the other ranks. Raises ConfigError, RankDivergence and RankFailure.

        mesh: a one-dimensional mesh of the ranks; None: all ranks. stage: the stage of ZeRO, 0 to 3. device:
        where the model computes.
        """
        self.ranks = Ranks.of(mesh, cuda=device.type == "cuda")
        rank, nodes = self.ranks.rank, self.ranks.nodes
        node = nodes[rank]
        super().__init__(
            device,
            share=Share(rank, len(nodes), stage, _on_each(nodes)),
            place=launcher.location() or RankLocation(node, nodes[:rank].count(node), nodes.count(node)),
        )
        self.planned = 0
        """Rank 0's time.time_ns() when it made its plan, equal on all ranks; 0 before."""
        self.failure_event = FailureEvent()
        self.wire = Wire(self.ranks, self.failure_event, self.meter, self.lock.released)
        self.barrier = Barrier(self.ranks, self.wire)
        self.service_thread = ServiceThread(self.wire, self.lock)
        self.mates = self.ranks.mates
        relays_for_itself = self.share.on_node == 1
        self._windows = self.ranks.windows if self.mates or relays_for_itself else None
        if self.ranks.mailbox is not None:
            self.service_thread.read_mail(self.ranks.mailbox)
        self._closed = False
        self._alone = False
        """Whether this rank has left without waiting for the others."""
        _open.add(self)
        atexit.register(self._end)
        launcher.record_at_exit()

    def released(self) -> AbstractContextManager[None]:
        return self.lock.released()

    def gather(self, call: str, fact: Any, patient: Callable[[], bool] = lambda: False) -> dict[int, Any]:
        return self.barrier.agree(call, fact, patient=patient)

    def same(self, call: str, **facts: Any) -> None:
        check_same(
            call,
            self.agree(call, **facts),
            "Start all ranks with the same program, model, optimizer and versions.",
        )

    @contextmanager
    def phase(self, name: str, *, first: bool = False) -> Iterator[dict[str, object]]:
        same: dict[str, object] = {}
        try:
            yield same
        except InfinityError as error:
            with suppress(InfinityError):  # another rank's error, or its loss: this one has its own
                self.gather(name, {"failure": told(error)}, lambda: not first)
            raise
        except BaseException as error:
            self.fail(error)
            raise
        heard = self.gather(name, {"failure": None, **same}, lambda: not first)
        for rank, said in heard.items():
            if said["failure"] is not None:
                raise error_of(f"Rank {rank} failed in {name}", said["failure"])
        check_same(name, heard, "Give all ranks the same copy.")

    def fail(self, error: BaseException) -> bool:
        if self._closed or isinstance(error, RankFailure):  # the others have heard of the rank that failed
            return True
        text = str(error) if isinstance(error, InfinityError) else f"{type(error).__name__}: {error}"
        what = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {text.rstrip('.')}"
        self.wire.declare(what)
        self.failure_event.fail(rank_failure(self.ranks.rank, what))
        return True

    def leave(self) -> None:
        if self._windows is not None:
            self._windows.leave_devices()
        if self.failure_event.failure is None:
            try:
                self.wire.post(self.ranks.peers, MessageKind.LEAVING)
                self.barrier.agree("close()", {}, patient=lambda: not self._awaited_elsewhere(), anyway=True)
            except InfinityError:
                self._alone = True

    def _awaited_elsewhere(self) -> bool:
        """Whether another rank is closing another runtime of this process, and so waits for this rank."""
        return any(each.wire.leaving for each in tuple(_open) if each is not self)

    def _end(self) -> None:
        """Close this runtime when the process ends while the runtime is open. If an error ended the program,
        tell the other ranks of it; otherwise leave them in order.
        """
        error = getattr(sys, "last_value", None)
        if error is None:
            self.leave()
        else:
            self.fail(error)
        self.close()

    def timeline(self, path: str) -> Timeline:
        return Timeline(path, rank=self.share.rank, since=self.planned)

    # --- while a runtime is made --------------------------------------------------------------------------

    def check_equal(self, model: Any, optimizer: torch.optim.Optimizer | None, **options: Any) -> None:
        check_equal(self, model, optimizer, **options)

    def agreed_plan(
        self, budget: Budget, draft: Callable[[Division | None], Plan], adopts: Callable[[Plan], bool]
    ) -> Plan:
        found, self.planned = agreed_plan(self, budget, draft, adopts=adopts)
        messages = self.ranks.endpoint.described()
        return replace(found, mates=(self.place.ranks - 1, len(self.mates)), messages=messages)

    def name_of_run(self) -> str:
        found: str = self.gather("offload()", uuid.uuid4().hex)[0]
        return found

    @property
    def reads_all_mates(self) -> bool:
        """Whether this rank and all others of its node read each other's RAM."""
        return self._windows is not None and len(self.mates) == (self.share.on_node or self.share.ranks) - 1

    def remote_pages(self, room: Pool | None, block_bytes: int) -> RemoteParts:
        self.remote = RemoteParts(self.wire, self.share, block_bytes, self._windows, room)
        return self.remote

    def exchange(self, label: str, give: Give) -> Exchange:
        return Exchange(self, label, give)

    def initial_values(self, model: torch.nn.Module) -> AbstractContextManager[Take | None]:
        return initial_values(self, model)

    def write_states(self, states: States, given: Sequence[Given], present: Present) -> None:
        InitialStates(self, states, given, present).write()

    def edited_freely(self, units: int) -> Collection[int]:
        return ()

    # --- a runtime's ----------------------------------------------------------------------------------------

    def commit_votes(self) -> CommitVotes:
        return CommitVotes(self.ranks, self.wire, self.barrier)

    def serve(self, parts: Components) -> RankedStep | None:
        store, wire, remote = parts.store, self.wire, self.remote
        assert store.exchange is not None
        service = PageService(
            wire,
            remote,
            pages=parts.pages,
            states={} if parts.states is None else parts.states.pages,
            gradients=parts.gradients,
            scheduler=parts.scheduler,
            store=store,
            room=store.exchange.outgoing,
            lock=self.lock,
            health=parts.health,
        )
        step = None
        if parts.gradients is not None and parts.scheduler is not None:
            shards, whole = None, None
            if self.share.whole_gradients:
                whole = WholeGradients(self.share, parts.gradients, parts.scheduler, remote)
            else:
                shards = GradientShards(
                    wire,
                    self.share,
                    gradients=parts.gradients,
                    scheduler=parts.scheduler,
                    pools=store.exchange,
                    windows=self._windows,
                    block_bytes=store.plan.exchange_block_bytes,
                    released=self.released,
                )
            step = RankedStep(
                self.share,
                wire,
                barrier=self.barrier,
                shards=shards,
                whole=whole,
                service=service,
                remote=remote,
                engine=parts.prefetch_engine,
                gradients=parts.gradients,
            )
        self._open_windows(parts)
        service.offer()
        drive = None if parts.committer is None else parts.committer.wanted
        self.service_thread.attach(service, step, drive)
        return step

    def _open_windows(self, parts: Components) -> None:
        """Let ranks of this node read this rank's memory, and read theirs. All ranks call this."""
        store = parts.store
        if store.host.region.descriptor < 0:
            self._windows = None  # a rank that is alone on its node and relays nothing
        windows = self._windows
        told = None if windows is None else windows.tell_memory(store, parts.pages)
        heard = self.gather("offload()", told)
        reads: tuple[list[int], ...] = [], [], []
        if windows is not None:
            arenas = windows.read_memory(heard, store.device.device)
            reads = arenas, windows.devices, sorted(store.plan.updated_on_device)
        readers = self.gather("offload()", reads)
        if windows is not None:
            windows.note_readers(readers)
            self.unreached = windows.unreached
            store.host.region.close_descriptor()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        atexit.unregister(self._end)
        self.service_thread.stop()
        self.barrier.leave()
        orderly = self.failure_event.failure is None
        self.wire.close(patience=1.0 if self._alone else 10.0)
        if self._windows is not None:
            self._windows.close()
        self.ranks.close(orderly=orderly and self.failure_event.failure is None)


def _on_each(nodes: Sequence[int]) -> int:
    """Return the number of ranks on each node, if each of several nodes has equally many, consecutive ranks;
    otherwise 0. nodes: as in `Ranks`.
    """
    count, several = nodes.count(0), len(set(nodes))
    alike = several > 1 and [*nodes] == [node for node in range(several) for _ in range(count)]
    return count if alike else 0
