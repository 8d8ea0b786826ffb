"""Prefetch engine: brings parameter pages to the device before they are used, within the budget.

A demand names the units that one operation or module needs. The engine records them in the trace, starts to
fetch the missing pages, and then the pages that the trace expects next, as far as the budget allows. It waits
for the missing pages only. A page is evicted when its room is needed, in the order that the schedule chooses.

[Note: pages of ranks]
This rank's bytes of a page arrive from its home, bytes that other ranks own from those ranks. There are three
kinds of homes. They differ in which bytes are outdated after a step of all ranks:

- A home with this rank's bytes alone (parameters partitioned). Pages that arrived before the step are
  outdated after it, so `stepped` evicts all pages.
- A home with the whole page, of which other ranks update chunks. After a step these chunks still have the
  values from before it. The next arrival, or for a permanent page a refresh in place, brings the new values.
- A home with the whole page, all of which this rank updates, as one rank does: nothing is outdated.

Pages of the first two kinds are fetched ahead within a step only, because they change at its end.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from infinity.aio import wait_for_dropped
from infinity.config import format_size
from infinity.errors import BudgetError, InfinityError
from infinity.layout.shards import Span
from infinity.pages.edits import EditTracker
from infinity.pages.parameter_page import ParameterPage, Presence
from infinity.pages.remote import Leg, PeerTransfer, RemotePages
from infinity.pages.store import Store
from infinity.planning.budgets import resident_budget
from infinity.prefetch.arrival import Arrival
from infinity.prefetch.schedule import HORIZON, schedule, victims
from infinity.prefetch.trace import Access, AccessKind, Trace
from infinity.telemetry.meter import Meter
from infinity.tiers import Lease, Tier
from infinity.tiers.link import Transfer, User

_NAMED = 4
_MOMENT = 0.0005
"""Seconds between looks whether another thread has dropped a transit buffer."""
_LOOKED_AT = 64
"""Number of coming uses that are searched for permanent pages to refresh."""
_OUTDATED = -1
"""`ParameterPage.filled_at` of a page whose bytes in memory, if any, must not be used."""
_REFRESHED_AHEAD = 2
"""The most permanent pages that are refreshed before they are used."""


class _Refresh(NamedTuple):
    """Bytes of other ranks on their way into a permanent page."""

    transfer: Transfer
    parts: list[tuple[torch.Tensor, torch.Tensor]]
    """(destination, a view of the memory with which the model computes, uint8; where the bytes arrive, in
    RAM: in the page's home if that is in RAM, which may be the destination itself).
    """
    peers: list[tuple[Span, PeerTransfer]]
    """(range of the page, its copy from another rank's device)."""


class Updates:
    """Operations on optimizer updates that the engine calls, so that parameters are used with their new
    values.

    infinity/optim/scheduler.py implements them. This class serves a model that is not trained: it has no
    updates.
    """

    def pending(self, unit: int) -> bool:
        """Whether the unit has an update that is decided and not finished yet."""
        return False

    def begun(self, unit: int) -> bool:
        return False

    def tentative(self, unit: int) -> bool:
        """Whether a speculative update of the unit is not confirmed. Its page should not be fetched then: the
        bytes at home are to be replaced, or `complete` undoes the update.
        """
        return False

    def complete(self, unit: int) -> None:
        """Finish the unit's pending update. Raises StorageError."""

    def release(self, unit: int) -> None:
        """Wait until no update and no copy uses the device memory of the unit's page. Called before the page
        is evicted from this memory, and before it arrives in new memory.
        """

    def finish_copies(self) -> None:
        """Wait for all copies of updated parameters into the device memory of their pages."""

    def complete_awaited(self) -> None:
        """Finish all updates for which a pending commit waits. Raises StorageError."""

    def advance(self) -> None:
        """Do as much of the pending updates as is possible without waiting."""


class PrefetchEngine:
    """Decides which parameter pages are resident, and moves pages from their homes to the device.

    PRESENT, ARRIVING and AWAY are values of Presence: in device memory, on its way, or at home only. Methods
    are called under the runtime's lock.
    """

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        store: Store,
        trace: Trace,
        *,
        meter: Meter,
        updates: Updates,
        edits: EditTracker,
        remote: RemotePages,
        resumed: bool,
    ) -> None:
        """remote: brings bytes of pages that other ranks own. resumed: whether this rank's homes have values
        only in its own chunks now, as after a resumption.
        """
        self.pages = pages
        self.store = store
        self.trace = trace
        self.meter = meter
        self._sizes = [0 if page.permanent else page.nbytes for page in pages]
        self._moves = any(self._sizes)
        """Whether at least one page is not permanently on the device."""
        self._resident: OrderedDict[int, None] = OrderedDict()
        """Units whose pages are PRESENT or ARRIVING and can be evicted, least recently used first: an ordered
        set.
        """
        self._arrivals: dict[int, Arrival] = {}
        self._held: dict[int, int] = {}
        """Unit -> number of calls of `hold` that `let_go` has not ended yet."""
        self._current: tuple[int, ...] = ()
        """The units of the most recent demand in this step, followed by its AccessKind; empty before the
        first.
        """
        self._deferred = False
        """Whether the last attempt to fetch ahead left out a page with an unfinished update or write."""
        self.updates = updates
        self._edits = edits
        share = store.plan.share
        self.whole = share.whole_states
        """Whether each home has the present values of its whole page at any time: no other rank updates
        chunks of it.
        """
        self._remote = remote
        self._parts = not share.whole_parameters
        """Whether homes have only this rank's ranges of the pages."""
        self._behind: set[int] = set()
        """Units whose home has the whole page, but other ranks' chunks as they were before the last step."""
        self._busy: Counter[int] = Counter()
        """Unit -> number of operations that compute with its page while other threads may have the runtime's
        lock.
        """
        self._refreshes: dict[int, _Refresh] = {}
        """Unit of a permanent page -> bytes of other ranks on their way into the page."""
        self._copies: list[Transfer] = []
        """Copies of such bytes to the device that may be under way, and keep the memory that they read."""
        if resumed:
            self._others_have_changed(range(len(pages)))

    def demand(self, units: Sequence[int], kind: AccessKind) -> None:
        """Bring the pages of all `units` to the device, wait for them, and begin to fetch the next pages.

        All these pages are PRESENT at the same time. kind: the purpose of the use, for the trace. Raises
        BudgetError, with a sufficient budget in bytes in `needed`, if the pages do not fit together, and
        StorageError. Pages that have no room or cannot be read are AWAY then.
        """
        for _ in range(len(units) + 8):
            self._demand_outside(units, kind)
            if self._behind:
                for unit in units:
                    self._refresh(unit)
            if self.whole or self.present(units):
                return
            self._current = ()  # another thread has taken the room during a wait for other ranks
        raise self._does_not_fit({*units, *self._held})

    def _demand_outside(self, units: Sequence[int], kind: AccessKind) -> None:
        if torch._C._functorch.peek_interpreter_stack() is None:
            self._demand(units, kind)
        else:  # inside of a transform of torch.func, which would wrap the memory of pages, too
            with torch._C._DisableFuncTorch():
                self._demand(units, kind)

    def _demand(self, units: Sequence[int], kind: AccessKind) -> None:
        if self._current == (*units, kind) and self.present(units):
            if self._deferred:
                self._look_ahead(units, {*units, *self._held})
            else:
                self._advance()
            return
        self._current = (*units, kind)
        self.store.link.mark(self.store.resident.returns)
        self.store.poll()
        for unit in units:
            self.trace.record(Access(unit, kind))
            self._touch(unit)
            self.meter.accessed(self.pages[unit].presence is not Presence.AWAY or self.updates.begun(unit))
        pinned = {*units, *self._held}
        for _ in range(2):  # twice, because making room for the last unit may have evicted the first
            for unit in units:
                if self.pages[unit].presence is Presence.AWAY:
                    with self.meter.faulting():
                        self._start(unit, pinned)
        if any(self.pages[unit].presence is Presence.AWAY for unit in units):
            raise self._does_not_fit(pinned)
        self._look_ahead(units, pinned)
        for unit in units:
            with self.meter.faulting():
                self.land(unit)
            self.updates.complete(unit)
            if unit not in self._refreshes:
                self._note_use(unit)

    def hold(self, units: Sequence[int], kind: AccessKind) -> None:
        """Bring the pages of all `units` to the device as `demand` does, and evict them last until `let_go`.

        A held page is evicted only if another demand has no room otherwise. User code's edits of the page are
        then written home, and the next operation on the page brings it back. kind: the purpose of the use,
        for the trace. Raises the errors of `demand`.
        """
        self.demand(units, kind)
        for unit in units:
            self._held[unit] = self._held.get(unit, 0) + 1
            self.pages[unit].holds += 1

    def let_go(self, units: Sequence[int]) -> None:
        """End one earlier call of `hold` for each of these units."""
        for unit in units:
            self._held[unit] -= 1
            self.pages[unit].holds -= 1
            if not self._held[unit]:
                del self._held[unit]
        for unit in units:
            if self.pages[unit].filled_at < 0 and not self.pages[unit].permanent:
                self._evict(unit)  # its edits were refused

    def yielding(self, function: Callable[..., Any], units: Sequence[int], lock: Any) -> Callable[..., Any]:
        """Return a function that calls `function` without the runtime's lock, `lock`, so that other ranks get
        pages of this rank even if the call takes long. The pages of `units` stay present meanwhile.
        """

        def call(*arguments: Any, **options: Any) -> Any:
            self._busy.update(units)
            try:
                with lock.released():
                    return function(*arguments, **options)
            finally:
                self._busy.subtract(units)

        return call

    def present(self, units: Sequence[int]) -> bool:
        """Whether the pages of all `units` are PRESENT and none of these units has a pending update."""
        for unit in units:
            if self.pages[unit].presence is not Presence.PRESENT or self.updates.pending(unit):
                return False
        return self._behind.isdisjoint(units)

    def settle_for_user(self, units: Sequence[int]) -> None:
        """Wait until user code may change the pages of `units` without changing what a pending commit holds.

        The updates of the commit's step are finished too, so that a changed page can be written home. Writes
        that read the memory of these pages, and the checksums of their bytes, are complete on return.
        """
        self.updates.complete_awaited()
        for unit in units:
            page = self.pages[unit]
            if page.permanent:  # user code may change the home itself
                page.home.withdraw(0, page.home.nbytes)
            self.store.settle_for_user(page.home)
            if not page.shard.others:
                continue
            if page.permanent:
                self._remote.keep(page)
            elif self.store.device.shares_host:
                # An update is written home from the memory that user code may change now. The home, and so
                # other ranks, must not get edits that the other ranks have not made.
                page.home.settle(0, page.home.nbytes, writing=False)

    def land_all(self) -> None:
        """Wait until every page that is ARRIVING is PRESENT. Raises StorageError."""
        for unit in list(self._arrivals):
            self.land(unit)
        for unit in list(self._refreshes):
            self._refresh(unit)

    def step_done(self) -> None:
        """Tell the trace that the step has ended, and begin to fetch pages for the next step."""
        self.next_step()
        self.look_ahead()

    def next_step(self) -> list[int]:
        """Tell the trace that the step has ended. Returns the units in the order of their expected first use
        in the next step.
        """
        self.trace.step_done()
        self._current = ()
        return list(dict.fromkeys(access.unit for access in self.trace.learned))

    def look_ahead(self) -> None:
        """Start to fetch the pages that the trace expects next, as far as the budget allows."""
        self._look_ahead((), set(self._held))

    def exposed(self) -> list[int]:
        """The units whose pages will be outdated after a step, and of which user code has views."""
        return [] if self.whole else [page.index for page in self.pages if self._edits.exposed(page.index)]

    def stepped(self, updated: Collection[int]) -> None:
        """Evict the pages whose next use needs bytes that other ranks have updated. updated: the units that
        the step updates on all ranks.
        """
        self._others_have_changed(updated)
        for unit in list(self._resident):
            if self._parts or unit in self._behind:
                self._evict(unit)

    def homes_replaced(self) -> None:
        """Note that all homes have the values of another run now. No page may be on its way. Pages of which
        other ranks own chunks are evicted; see `bring_exposed`.
        """
        self._behind.clear()  # homes with whole pages have got all of them
        self._remote.replaced()
        if self._parts:
            for unit in list(self._resident):
                self._evict(unit)
            for page in self.pages:
                page.filled_at = _OUTDATED

    def bring_exposed(self) -> None:
        """Bring back the pages that `homes_replaced` has evicted while user code holds views of their bytes,
        so that the views have the new values. Called when all ranks have replaced their homes.
        """
        for page in self.pages if self._parts else ():
            if page.living() is not None:
                self.demand([page.index], AccessKind.UPDATE)

    def abandon(self) -> None:
        """Stop fetching: pages that are ARRIVING become AWAY. Waits until no transfer to the device runs."""
        for unit in list(self._arrivals):
            self._turn_back(unit)

    def _touch(self, unit: int) -> None:
        if unit in self._resident:
            self._resident.move_to_end(unit)

    def _start(self, unit: int, pinned: set[int], ahead: int | None = None) -> None:
        """Start to fetch the page of a unit that is AWAY. If views have kept its newest bytes in device
        memory, nothing is fetched, and the page is PRESENT at once.

        pinned: units whose pages are evicted last. ahead: as in `Arrival`.
        """
        page = self.pages[unit]
        if self.store.device.shares_host and not (self._parts and page.home.in_place):
            self.updates.release(unit)
        else:
            self.updates.complete(unit)
        kept = page.living()
        if kept is not None and self._up_to_date(page):
            page.arrive()
            page.land(kept)
            self._resident[unit] = None
            return
        into = self._lease(unit, pinned) if kept is None else kept
        page.filled_at = self._remote.step
        pulled = self._parts or unit in self._behind
        arrival = Arrival(page, into, self.store, self._remote, ahead=ahead, pulled=pulled)
        page.arrive()
        self._arrivals[unit], self._resident[unit] = arrival, None
        try:
            arrival.start()
        except InfinityError:
            self._turn_back(unit)
            raise
        if self.store.device.shares_host:
            assert arrival.local is not None
            page.incoming = (arrival.residency, arrival.local)

    def _up_to_date(self, page: ParameterPage) -> bool:
        """Whether an evicted page need not be fetched again, because its bytes in device memory, which views
        keep alive, are still its newest values.
        """
        if page.filled_at < 0:
            return False  # its edits were refused
        if self._parts:
            return page.filled_at == self._remote.step
        return page.index not in self._behind

    def land(self, unit: int, *, for_host: bool = False) -> None:
        """Wait until the unit's page is PRESENT, if it is ARRIVING; else do nothing. Raises StorageError.

        for_host: also block the CPU until the copy from the page's home has ended, so that the CPU may write
        to the home.
        """
        arrival = self._arrivals.get(unit)
        if arrival is None:
            return
        try:
            with self.meter.stalling(arrival.edge):
                while arrival.waits_for_buffer():  # other arrivals have all transit buffers
                    if not any(each.advance(block=True) for each in self._arrivals.values()):
                        time.sleep(_MOMENT)  # the thread that ended a transfer has not dropped its buffer yet
                residency = arrival.finish()
                if for_host and arrival.final is not None:
                    arrival.final.wait()
        except InfinityError:
            self._turn_back(unit)
            raise
        if self._arrivals.get(unit) is arrival:  # else another thread has ended it, while this one waited
            self.pages[unit].land(residency)
            del self._arrivals[unit]
            if unit in self._behind and not self.pages[unit].permanent:
                self._keep_others(self.pages[unit])

    def _turn_back(self, unit: int) -> None:
        """Give up the fetch of an ARRIVING page, which is AWAY afterwards."""
        self.updates.release(unit)
        if unit in self._arrivals:
            self._arrivals[unit].abandon()
        if self._arrivals.pop(unit, None) is not None:  # else another thread has ended it meanwhile
            self.pages[unit].turn_back()
            self._resident.pop(unit, None)

    def _evict(self, unit: int) -> None:
        if self._busy[unit] > 0:
            return
        page = self.pages[unit]
        if page.presence is Presence.ARRIVING:
            self._turn_back(unit)
        elif page.presence is Presence.PRESENT:
            self.updates.release(unit)
            self._edits.write_back(page)
            self._note_use(unit)
            page.leave()
        self._resident.pop(unit, None)

    def _note_use(self, unit: int) -> None:
        """Tell the memory checker, which tests use, that computation reads the unit's page."""
        residency = self.pages[unit].residency
        if residency is not None:
            self.store.link.uses(User.COMPUTE, residency, writes=False, label="page")

    def _upcoming(self, units: Sequence[int]) -> Iterator[int]:
        yield from units
        for access in self.trace.upcoming(HORIZON, wrap=self.whole or not self.trace.trains):
            if access.kind is not AccessKind.UPDATE:
                yield access.unit

    def _look_ahead(self, units: Sequence[int], pinned: set[int]) -> None:
        if self._behind:
            coming = list(dict.fromkeys(islice(self._upcoming(units), _LOOKED_AT)))
            for unit in coming[: _REFRESHED_AHEAD + len(units)]:
                if self.pages[unit].permanent:
                    self._begin_refresh(unit)
        if self._moves:
            self._fetch_upcoming(units, pinned)
        self._advance()

    def _fetch_upcoming(self, units: Sequence[int], pinned: set[int]) -> None:
        pool = self.store.resident
        plan = schedule(self._upcoming(units), self._sizes, self._resident, pinned, pool.nbytes)
        for unit in plan.evict:
            self._evict(unit)
        self._deferred = False
        for place, unit in enumerate(plan.fetch):
            page = self.pages[unit]
            if page.presence is not Presence.AWAY:
                continue
            outdated = not self.store.device.shares_host and self.updates.pending(unit)
            outdated = outdated or self.updates.tentative(unit)
            if outdated or page.home.busy(0, page.nbytes, writing=False):
                self._deferred = True
                continue
            if page.living() is None and pool.largest_free < page.nbytes:
                break  # views or fragmentation take the room, and only a demand may evict more pages
            if page.home.failure is None:
                self._start(unit, pinned, ahead=place)

    def _advance(self) -> None:
        for under_way in self._arrivals.values():
            under_way.advance(block=False)
        self.updates.advance()

    def _lease(self, unit: int, pinned: set[int]) -> Lease:
        """Lease device memory for the unit's page, making room step by step. pinned: evicted last."""
        pool, nbytes = self.store.resident, self.pages[unit].nbytes
        if pool.largest_free < nbytes:
            free = pool.nbytes - pool.leased
            spare = victims(nbytes - free, self._upcoming(()), self._sizes, self._resident, pinned)
            for victim in spare:
                self._evict(victim)
        ways = (
            self._evict_others,
            self._settle_transfers,
            self._reclaim,
            self._collect,
            self._evict_pinned,
        )
        for make_room in ways:
            if pool.largest_free >= nbytes:
                break
            make_room(pinned)
        try:
            return pool.lease(nbytes)
        except BudgetError as error:
            raise self._does_not_fit(pinned) from error

    def _evict_others(self, pinned: set[int]) -> None:
        for unit in list(self._resident):
            if unit not in pinned:
                self._evict(unit)

    def _settle_transfers(self, pinned: set[int]) -> None:
        self.store.settle()  # a write to a home keeps the memory that it reads from
        self.updates.finish_copies()  # a copy to the device keeps the memory that it writes to

    def _reclaim(self, pinned: set[int]) -> None:
        self._edits.reclaim()

    def _collect(self, pinned: set[int]) -> None:
        gc.collect()  # tracebacks leave views in reference cycles
        wait_for_dropped()  # and requests that nobody waits for, whose buffers are in use
        self._edits.reclaim()

    def _evict_pinned(self, pinned: set[int]) -> None:
        """Evict the pinned pages too. `demand` then fetches the pages that it needs into the emptied pool."""
        for unit in [each for each in self._resident if each in pinned]:
            self._evict(unit)

    def _does_not_fit(self, units: set[int]) -> BudgetError:
        """Make the error for units whose pages do not fit together although all other pages were evicted.

        The error's `needed` is normally a budget that has room for the pages of any set of units that has as
        many units as `units`. If views or autograd's graph keep evicted pages in memory, `needed` is a budget
        for all parameters, because more and more pages might be kept, as by a list of views of all
        parameters. The cure then also names a smaller budget, for `units` and the pages kept now, if there is
        one.
        """
        pool, plan, tier = self.store.resident, self.store.plan, self.store.plan.computes_in.value
        held = pool.leased - sum(self._sizes[unit] for unit in self._resident)
        if held <= 0:
            needed = resident_budget(plan, self._names(units))
            kept, other = "", "use fewer parameters together"
        else:
            living = {unit for unit in range(len(self.pages)) if self._is_kept(unit)}
            exported = {unit for unit in living if self._edits.lent(unit)}
            holder = (
                "views that your code holds"
                if exported
                else "autograd's graph, or by views made in a forward"
            )
            kept = f", of which {format_size(held)} are kept by {holder} ({self._named(exported or living)})"
            needed = resident_budget(plan, None)
            now = resident_budget(plan, self._names(units | living))
            other = "let go of such views"
            if needed is not None and now is not None and now < needed:
                other = f"one of {format_size(now)} ({now} bytes) if no more is kept, or {other}"
        cure = f"{other[0].upper()}{other[1:]}."
        if needed is not None:
            whole = ", with which all parameters stay there" if held > 0 else ""
            cure = f"Give a {tier} budget of {format_size(needed)} ({needed} bytes){whole}, or {other}."
        return BudgetError(
            f"One operation takes the parameters of {self._named(units)} together, "
            f"{format_size(sum(self._sizes[unit] for unit in units))}, but the {tier} budget has "
            f"{format_size(pool.nbytes)} for resident parameters{kept}.",
            cure,
            needed=needed,
            tier=tier,
        )

    def _is_kept(self, unit: int) -> bool:
        """Whether views or autograd's graph keep the bytes of an evicted page in device memory."""
        if not self._sizes[unit] or unit in self._resident:
            return False
        return self.pages[unit].living() is not None

    def _names(self, units: Collection[int]) -> set[str]:
        return {name for unit in units for each in self.pages[unit].layout.parameters for name in each.names}

    def _named(self, units: Collection[int]) -> str:
        layouts = [self.pages[unit].layout for unit in sorted(units)]
        tiles = [each.parameters[0] if each.parameters[0].tile_of else None for each in layouts]
        names = [
            each.name or "the root's own" if tile is None else tile.names[0]
            for each, tile in zip(layouts, tiles, strict=True)
        ]
        others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + others

    # --- parts of others in whole homes -----------------------------------------------------------------

    def _others_have_changed(self, units: Collection[int]) -> None:
        """Note that other ranks have updated their chunks of `units`.

        If homes have whole pages, the values of these chunks in this rank's homes are now out of date.
        """
        if not self._parts and not self.whole:
            self._behind.update(units)
            self._remote.published([self.pages[unit] for unit in units])

    def _keep_others(self, page: ParameterPage) -> None:
        """Write the bytes that an arrival has pulled from other ranks to the page's home."""
        assert page.residency is not None
        for span in page.shard.others_trained:
            source = page.residency[span.start : span.start + span.nbytes]
            self.store.write(page.home, span.start, self.store.copied_to_host(source))
        self._behind.discard(page.index)

    def _begin_refresh(self, unit: int) -> None:
        """Begin to bring the bytes that other ranks own into a permanent page, if they are outdated there."""
        if unit not in self._behind or unit in self._refreshes:
            return
        page, others, peers = self.pages[unit], [], []
        assert page.residency is not None
        for span in page.shard.others_trained:
            peer = None
            if page.home.tier is Tier.DEVICE:
                leg = Leg(span.owner, span.start, page.residency[span.start : span.start + span.nbytes])
                peer = self._remote.bring(page, leg, self._overwrite)
            if peer is None:
                others.append(span)
            else:
                peers.append((span, peer))
        self._refreshes[unit] = _Refresh(*self._fetch(page, others), peers)

    def _overwrite(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Begin to copy bytes of another device over bytes that kernels may still use."""
        self.store.link.follow_compute()
        return self.store.link.to_device(into, source, 0)

    def _fetch(
        self, page: ParameterPage, spans: Sequence[Span]
    ) -> tuple[Transfer, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Fetch ranges of a permanent page. Returns (transfer, `_Refresh.parts`)."""
        parts, legs = [], []
        assert page.residency is not None
        for span in spans:
            here = there = page.residency[span.start : span.start + span.nbytes]
            if page.index in self.store.plan.mirrored:
                here = page.home.view(span.start, span.nbytes)
            elif not self.store.link.direct and page.home.tier is Tier.DEVICE:
                here = torch.empty(there.nbytes, dtype=torch.uint8, device="cpu")
            parts.append((there, here))
            legs.append(Leg(span.owner, span.start, here))
        return self._remote.fetch(page, legs), parts

    def _refresh(self, unit: int) -> None:
        """Pull the bytes of a permanent page that other ranks have updated, and wait for them. Does nothing
        if the page is not permanent or is up to date.
        """
        page = self.pages[unit]
        if unit not in self._behind or not page.permanent:
            return
        self._begin_refresh(unit)
        self._copies = [each for each in self._copies if not each.done()]
        with self.meter.faulting():
            try:
                transfer, parts, peers = self._refreshes[unit]
                for _, peer in peers:
                    peer.wait()
                late = self._fetch(page, [span for span, peer in peers if not peer.here])
                for each in (transfer, late[0]):
                    each.wait()
                for there, here in [*parts, *late[1]]:
                    if here is not there:
                        self.store.link.uses(User.HOST, here, writes=True, label="from a rank")
                        self.store.link.follow_compute()
                        copy = self.store.copy_up(there, here)
                        self.store.link.fence(copy)
                        self._copies.append(copy)
            finally:
                self._refreshes.pop(unit, None)
        self._behind.discard(unit)
        self._note_use(unit)
