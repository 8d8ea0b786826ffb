"""Ranked engine: the prefetch engine of a rank among several, which hold parts of each other's pages.

A page arrives from two sides: this rank's part from its home, the other parts from the ranks that own them.
Two kinds of homes differ in what makes a page outdated:

- A home with this rank's part alone (parameters partitioned). Whatever arrived before a step is outdated
  after it, so `stepped` evicts all pages.
- A home with the whole page. After a step the parts of other ranks there are those of the step before. The
  next arrival, or for a permanent page a refresh in place, brings these parts once.

Pages are fetched ahead within a step only, because they change at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from infinity.layout.shards import Span
from infinity.pages.parameter_page import ParameterPage, Presence
from infinity.pages.remote import RemotePages
from infinity.prefetch.engine import PrefetchEngine
from infinity.prefetch.schedule import HORIZON
from infinity.prefetch.trace import AccessKind
from infinity.tiers import Tier
from infinity.tiers.link import Transfer

_LOOKED_AT = 64
"""Number of coming uses that are searched for permanent pages to refresh."""
_OUTDATED = -1
"""`ParameterPage.filled_at` of a page whose bytes in memory, if any, must not be used."""
_REFRESHED_AHEAD = 2
"""The most permanent pages that are refreshed before they are used."""


class _Part(NamedTuple):
    """Bytes of another rank on their way into a permanent page."""

    there: torch.Tensor
    """Their destination: a view of the page's home, uint8."""
    here: torch.Tensor
    """Where they arrive, in RAM: the destination itself, if the CPU can write it."""
    transfer: Transfer


class RankedEngine(PrefetchEngine):
    def __init__(self, *arguments: Any, remote: RemotePages, own_parts: bool, **options: Any) -> None:
        """remote: brings the parts of pages that other ranks own. own_parts: whether homes with whole pages
        have values in this rank's own parts alone now, as after a resumption. arguments, options: of
        PrefetchEngine.
        """
        super().__init__(*arguments, **options)
        self._others = remote
        self._remote = remote
        self._whole = self.store.plan.share.whole_parameters
        self._parts = not self._whole
        self._behind: set[int] = set()
        """Units whose home has the whole page, with parts of other ranks from before the last step."""
        self._busy: Counter[int] = Counter()
        """Unit -> number of operations that compute with its page while other threads may have the runtime's
        lock.
        """
        self._refreshes: dict[int, list[_Part]] = {}
        """Unit of a permanent page -> parts of other ranks on their way into it."""
        if own_parts:
            self._others_have_changed(range(len(self.pages)))

    def _others_have_changed(self, units: Collection[int]) -> None:
        """Note that homes with whole pages have outdated parts of other ranks in these units."""
        if self._whole and not self.store.plan.share.whole_states:
            self._behind.update(units)
            self._others.published([self.pages[unit] for unit in units])

    def stepped(self, updated: Collection[int]) -> None:
        """Evict the pages whose next use needs bytes that other ranks have updated. updated: the units that
        the step updates on all ranks.
        """
        self._others_have_changed(updated)
        for unit in list(self._resident):
            if not self._whole or unit in self._behind:
                self._evict(unit)

    def homes_replaced(self) -> None:
        self._behind.clear()  # homes with whole pages have got all of them
        self._others.replaced()
        if not self._whole:
            for unit in list(self._resident):
                self._evict(unit)
            for page in self.pages:
                page.filled_at = _OUTDATED

    def bring_exposed(self) -> None:
        if not self._whole:
            for page in self.pages:
                if page.living() is not None:
                    self.demand([page.index], AccessKind.UPDATE)

    def demand(self, units: Sequence[int], kind: AccessKind) -> None:
        for _ in range(len(units) + 8):
            super().demand(units, kind)
            for unit in units:
                self._refresh(unit)
            if self.present(units):  # else another thread has taken the room during a wait for other ranks
                return
            self._current = ()
        raise self._does_not_fit({*units, *self._held})

    def present(self, units: Sequence[int]) -> bool:
        return self._behind.isdisjoint(units) and super().present(units)

    def yielding(self, function: Callable[..., Any], units: Sequence[int], lock: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._busy.update(units)
            try:
                with lock.released():  # an operation may take long, and other ranks wait for this one's pages
                    return function(*arguments, **options)
            finally:
                self._busy.subtract(units)

        return call

    def _evict(self, unit: int) -> None:
        if self._busy[unit] <= 0:
            super()._evict(unit)

    def land(self, unit: int, *, for_host: bool = False) -> None:
        super().land(unit, for_host=for_host)
        page = self.pages[unit]
        if unit in self._behind and page.presence is Presence.PRESENT and not page.permanent:
            self._keep_others(page)

    def land_all(self) -> None:
        super().land_all()
        for unit in list(self._refreshes):
            self._refresh(unit)

    def let_go(self, units: Sequence[int]) -> None:
        super().let_go(units)
        for unit in units:
            if self.pages[unit].filled_at < 0 and not self.pages[unit].permanent:
                self._evict(unit)  # its edits were refused

    def settle_for_user(self, units: Sequence[int]) -> None:
        super().settle_for_user(units)
        for unit in units:
            page = self.pages[unit]
            if page.permanent:
                self._others.keep(page)
            elif self.store.device.shares_host:
                # An update is written home from the memory that user code may change now. The home, and so
                # other ranks, must not get edits that the other ranks have not made.
                page.home.settle(0, page.home.nbytes, writing=False)

    def _up_to_date(self, page: ParameterPage) -> bool:
        if page.filled_at < 0:
            return False  # its edits were refused
        if self._whole:
            return page.index not in self._behind
        return page.filled_at == self._others.step

    def _remote_for(self, page: ParameterPage) -> RemotePages | None:
        page.filled_at = self._others.step
        return self._others if not self._whole or page.index in self._behind else None

    def _upcoming(self, units: Sequence[int]) -> Iterator[int]:
        yield from units
        for access in self.trace.upcoming(HORIZON, wrap=not self.trace.trains):
            if access.kind is not AccessKind.UPDATE:
                yield access.unit

    def _look_ahead(self, units: Sequence[int], pinned: set[int]) -> None:
        if self._behind:
            coming = list(dict.fromkeys(islice(self._upcoming(units), _LOOKED_AT)))
            for unit in coming[: _REFRESHED_AHEAD + len(units)]:
                if self.pages[unit].permanent:
                    self._begin_refresh(unit)
        super()._look_ahead(units, pinned)

    # --- parts of others in whole homes -----------------------------------------------------------------

    def _keep_others(self, page: ParameterPage) -> None:
        """Write to the home what an arrival brought from other ranks, so that later arrivals read it
        there.
        """
        assert page.residency is not None
        for span in page.shard.others_chunks:
            source = page.residency[span.start : span.start + span.nbytes]
            self.store.write(page.home, span.start, self.store.copied_to_host(source))
        self._behind.discard(page.index)

    def _begin_refresh(self, unit: int) -> None:
        """Begin to bring the parts of other ranks into a permanent page, if they are outdated there."""
        if unit not in self._behind or unit in self._refreshes:
            return
        page = self.pages[unit]
        chunks = page.shard.others_chunks
        self._refreshes[unit] = [each for span in chunks for each in self._fetch(page, span)]

    def _fetch(self, page: ParameterPage, span: Span) -> Iterator[_Part]:
        most = self.store.plan.exchange_block_bytes
        for start in range(span.start, span.start + span.nbytes, most):
            there = page.home.view(start, min(most, span.start + span.nbytes - start))
            here = there
            if not self.store.link.direct and page.home.tier is Tier.DEVICE:
                here = torch.empty(there.nbytes, dtype=torch.uint8, device="cpu")
            yield _Part(there, here, self._others.fetch(span.owner, page, start, here))

    def _refresh(self, unit: int) -> None:
        """Bring the parts of other ranks into a permanent page, if they are outdated there, and wait for
        them.
        """
        page = self.pages[unit]
        if unit not in self._behind or not page.permanent:
            return
        self._begin_refresh(unit)
        with self.meter.faulting():
            try:
                for part in self._refreshes[unit]:
                    part.transfer.wait()
                    if part.here is not part.there:
                        self.store.link.follow_compute()
                        self.store.link.fence(self.store.copy_up(part.there, part.here))
            finally:
                self._refreshes.pop(unit, None)
        self._behind.discard(unit)
