"""Model of a rank that copies from another one's RAM, in which all orders of events are tried.

It has what infinity/distributed/windows.py, remote_parts.py and page_service.py do without bytes and threads.
The owner's page has two halves, which it changes one after the other. A mate wants the page as it is after a
change, looks at the board, copies the halves one after the other, and looks again, or asks.

If the page is in the memory of the owner's device, both ranks queue their work on devices, which do it later,
in its order, and whether or not a rank has died meanwhile (infinity/distributed/peer_copies.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

CHANGES = 2
"""Number of times that the owner changes its page: an update or an edit."""


class State(NamedTuple):
    """The state of both ranks. A number of changes is the stamp of the page that has them."""

    at: int = 0
    """Events of the owner's program that have happened."""
    page: tuple[int, int] = (0, 0)
    """Number of changes that each half of the page has."""
    stamp: int = 0
    counts: int = 1
    """Times that the entry was opened or closed: it is open if odd."""
    requests: tuple[tuple[int, bool], ...] = ()
    """(wanted stamp, whether the mate copies) of requests that the owner has not answered."""
    answers: tuple[tuple[int, int] | None, ...] = ()
    """Bytes that are on their way to the mate, or None: it can copy them."""
    wanted: int = 0
    doing: str = "look"
    """What the mate does next: "look", "copy 0", "copy 1", "look again", "await", or "got"."""
    again: bool = False
    """Whether the mate has been told that it can copy."""
    seen: int = 0
    """The count that the mate has seen at its first look."""
    copied: tuple[int, int] = (0, 0)
    dead: bool = False
    writes: tuple[tuple[int, int], ...] = ()
    """(half, changes that it has then) of the work that is queued on the owner's device."""
    copies: tuple[int, ...] = ()
    """Halves whose copies are queued on the mate's device."""


class Model:
    """The events of the two ranks."""

    change = ("close", "write 0", "write 1", "open")
    """What the owner does to change its page. It answers requests before and after, not meanwhile."""

    def owner(self, state: State) -> Iterator[State]:
        """What may happen next on the owner's side."""
        if state.dead:
            return
        between = state.at % len(self.change) == 0
        if state.requests and between and state.requests[0][0] <= state.page[0]:
            wanted, copies = state.requests[0]
            here = state._replace(requests=state.requests[1:])
            if copies and state.counts % 2 and state.stamp == wanted:
                yield here._replace(answers=(None,))
            else:  # its present bytes, or a copy that it has kept
                yield here._replace(answers=((wanted, wanted),))
        if state.at < CHANGES * len(self.change):
            yield self.changed(state._replace(at=state.at + 1), self.change[state.at % len(self.change)])

    def changed(self, state: State, what: str) -> State:
        number = 1 + (state.at - 1) // len(self.change)
        if what == "close":
            return state._replace(counts=state.counts + 1)
        if what == "open":
            return state._replace(counts=state.counts + 1, stamp=number)
        return self.write(state, int(what[-1]), number)

    def write(self, state: State, half: int, number: int) -> State:
        return self.written(state, half, number)

    def copy(self, state: State, half: int) -> State:
        return self.copied(state, half)

    def devices(self, state: State) -> Iterator[State]:
        """What may happen next on the devices of both ranks."""
        if state.writes:
            (half, number), *rest = state.writes
            yield self.written(state._replace(writes=tuple(rest)), half, number)
        if state.copies:
            half, *left = state.copies
            yield self.copied(state._replace(copies=tuple(left)), half)

    def written(self, state: State, half: int, number: int) -> State:
        page = [*state.page]
        page[half] = number
        return state._replace(page=(page[0], page[1]))

    def copied(self, state: State, half: int) -> State:
        copied = [*state.copied]
        copied[half] = state.page[half]
        return state._replace(copied=(copied[0], copied[1]))

    def mate(self, state: State) -> Iterator[State]:
        """What may happen next on the mate's side."""
        what = state.doing
        if what == "look":
            is_open = state.counts % 2 == 1 and state.stamp == state.wanted
            yield state._replace(seen=state.counts, doing="copy 0") if is_open else self.asking(state)
        elif what.startswith("copy"):
            half = int(what[-1])
            yield self.copy(state, half)._replace(doing="look again" if half else "copy 1")
        elif what == "look again" and self.knows_copies(state):
            yield state._replace(doing="got") if self.unchanged(state) else self.asking(state)
        elif what == "await" and state.answers:
            (answer,) = state.answers
            here = state._replace(answers=(), again=True)
            yield here._replace(doing="look") if answer is None else here._replace(copied=answer, doing="got")
        elif what == "got" and state.wanted < CHANGES:
            yield state._replace(wanted=state.wanted + 1, doing="look", again=False)

    def asking(self, state: State) -> State:
        """The mate asks for the bytes. The second time, it has the owner send them."""
        return state._replace(requests=(*state.requests, (state.wanted, not state.again)), doing="await")

    def unchanged(self, state: State) -> bool:
        return state.counts == state.seen

    def knows_copies(self, state: State) -> bool:
        """Whether the mate's host may know that its copies are complete."""
        return not state.copies


def check(model: Model, *, deaths: bool = False) -> int:
    """Try all orders of events, and check what the mate gets. Returns the number of states."""
    found, frontier = {State()}, [State()]
    while frontier:
        state = frontier.pop()
        following = [*model.owner(state), *model.mate(state), *model.devices(state)]
        if deaths and not state.dead:
            following.append(state._replace(dead=True))
        assert state.doing != "got" or state.copied == (state.wanted,) * 2, "the mate got other bytes"
        ended = state.doing == "got" and state.wanted == CHANGES
        # The failure event ends the wait for a rank that is dead.
        assert following or ended or (state.dead and state.doing == "await"), "the mate waits for ever"
        for each in following:
            if each not in found:
                found.add(each)
                frontier.append(each)
    return len(found)


@pytest.mark.parametrize("deaths", [False, True])
def test_a_mate_gets_what_it_wants_in_every_order(deaths: bool) -> None:
    assert check(Model(), deaths=deaths) > 100


class LooksOnce(Model):
    """A mate that does not look at the entry again after its copy."""

    def unchanged(self, state: State) -> bool:
        return True


class LooksForOpen(Model):
    """A mate whose second look is for an open entry with its stamp, whatever has happened meanwhile."""

    def unchanged(self, state: State) -> bool:
        return state.counts % 2 == 1


class ClosesLate(Model):
    """An owner that begins to change its page before it closes the entry."""

    change = ("write 0", "close", "write 1", "open")


class OpensEarly(Model):
    """An owner that opens its entry before all bytes are there."""

    change = ("close", "write 0", "open", "write 1")


@pytest.mark.parametrize("kind", [LooksOnce, LooksForOpen, ClosesLate, OpensEarly])
def test_the_model_notices_a_mistake(kind: type[Model]) -> None:
    with pytest.raises(AssertionError, match="the mate got other bytes"):
        check(kind())


class Devices(Model):
    """Ranks whose pages and copies are on devices."""

    change = ("close", "write 0", "write 1", "know", "open")

    def owner(self, state: State) -> Iterator[State]:
        if state.dead:
            return
        at = state.at % len(self.change)
        if state.requests and at == 0 and not state.writes and state.requests[0][0] <= state.page[0]:
            (wanted, copies), *rest = state.requests
            answer = None if copies else (wanted, wanted)  # None: the board says whether it can be copied
            yield state._replace(requests=tuple(rest), answers=(answer,))
        if state.at < CHANGES * len(self.change) and not (self.change[at] == "know" and state.writes):
            yield self.changed(state._replace(at=state.at + 1), self.change[at])

    def changed(self, state: State, what: str) -> State:
        return state if what == "know" else super().changed(state, what)

    def write(self, state: State, half: int, number: int) -> State:
        return state._replace(writes=(*state.writes, (half, number)))

    def copy(self, state: State, half: int) -> State:
        return state._replace(copies=(*state.copies, half))


@pytest.mark.parametrize("deaths", [False, True])
def test_devices_bring_what_is_wanted_in_every_order(deaths: bool) -> None:
    assert check(Devices(), deaths=deaths) > 500


class LooksBeforeItsCopies(Devices):
    """A mate that does not wait for its device before its second look."""

    def knows_copies(self, state: State) -> bool:
        return True


class DeviceLooksOnce(Devices, LooksOnce):
    """A mate that does not look again."""


class OpensUnwritten(Devices):
    """An owner that does not wait for its device before it opens the entry."""

    change = ("close", "write 0", "write 1", "open", "know")


class ClosesAfterItQueues(Devices):
    """An owner that queues work which changes the page before it closes the entry."""

    change = ("write 0", "close", "write 1", "know", "open")


@pytest.mark.parametrize("kind", [LooksBeforeItsCopies, DeviceLooksOnce, OpensUnwritten, ClosesAfterItQueues])
def test_the_model_notices_a_mistake_on_devices(kind: type[Model]) -> None:
    with pytest.raises(AssertionError, match="the mate got other bytes"):
        check(kind())


WANTS = ((0, 1), (1, 1), (0, 2))
"""(page, stamp) of what a mate wants of other nodes, one after the other."""
BRINGS = 3
"""Number of times that the relay begins to bring parts for other mates."""


class Relayed(NamedTuple):
    """The state of a relay with two pages, and memory for one of them, and of a mate."""

    counts: tuple[int, int] = (0, 0)
    """Times that each page's entry was opened or closed."""
    stamps: tuple[int, int] = (0, 0)
    memory: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))
    """(page, stamp) of the bytes in each half of the memory."""
    held: tuple[int, int] | None = None
    """(page, stamp) for which the memory is used."""
    arrived: int = 2
    """Halves of these parts that have come."""
    brought: int = 0
    wants: int = 0
    """Number of things that the mate has got."""
    doing: str = "look"
    again: bool = False
    seen: int = 0
    copied: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))


class Relay:
    """The events of `NodeCache.bring` and its mate, each of which happens under the lock of its owner."""

    def begin(self, state: Relayed, what: tuple[int, int]) -> Relayed:
        """Take the memory for other parts; all entries of it are closed first."""
        for page in {what[0], state.held[0] if state.held else what[0]}:
            state = self.close(state, page)
        return state._replace(held=what, arrived=0)

    def close(self, state: Relayed, page: int) -> Relayed:
        counts = [*state.counts]
        counts[page] += counts[page] % 2
        return state._replace(counts=(counts[0], counts[1]))

    def open(self, state: Relayed) -> Relayed:
        assert state.held is not None
        page, stamp = state.held
        counts, stamps = [*state.counts], [*state.stamps]
        counts[page] += 1
        stamps[page] = stamp
        return state._replace(counts=(counts[0], counts[1]), stamps=(stamps[0], stamps[1]))

    def complete(self, state: Relayed) -> bool:
        """Whether the parts are offered when this many halves have come."""
        return state.arrived == 2

    def relay(self, state: Relayed) -> Iterator[Relayed]:
        if state.held is not None and state.arrived < 2:
            memory = [*state.memory]
            memory[state.arrived] = state.held
            came = state._replace(memory=tuple(memory), arrived=state.arrived + 1)
            yield self.open(came) if self.complete(came) else came
        elif state.brought < BRINGS:
            for what in {(page, stamp) for page in (0, 1) for stamp in (1, 2)} - {state.held}:
                yield self.begin(state._replace(brought=state.brought + 1), what)

    def unchanged(self, state: Relayed, page: int) -> bool:
        return state.counts[page] == state.seen

    def mate(self, state: Relayed) -> Iterator[Relayed]:
        if state.wants == len(WANTS):
            return
        page, stamp = what = WANTS[state.wants]
        got = state._replace(wants=state.wants + 1, doing="look", again=False)
        refused = state._replace(doing="ask") if not state.again else got  # the owners send the bytes
        if state.doing == "look":
            is_open = state.counts[page] % 2 == 1 and state.stamps[page] == stamp
            yield state._replace(seen=state.counts[page], doing="copy 0") if is_open else refused
        elif state.doing.startswith("copy"):
            half, copied = int(state.doing[-1]), [*state.copied]
            copied[half] = state.memory[half]
            yield state._replace(copied=tuple(copied), doing="look again" if half else "copy 1")
        elif state.doing == "look again" and self.unchanged(state, page):
            assert state.copied == (what, what), "the mate got other bytes"
            yield got
        elif state.doing == "look again":
            yield refused
        elif state.doing == "ask":
            coming = state.arrived < 2
            here = state if coming or state.held == what else self.begin(state, what)
            yield here._replace(doing="await")
        elif state.held != what or state.arrived == 2:  # the relay's answer
            yield state._replace(doing="look", again=True)


def check_relay(model: Relay) -> int:
    """Try all orders of a relay's events and a mate's. Returns the number of states."""
    found, frontier = {Relayed()}, [Relayed()]
    while frontier:
        state = frontier.pop()
        following = [*model.relay(state), *model.mate(state)]
        assert following or state.wants == len(WANTS), "the mate waits for ever"
        for each in set(following) - found:
            found.add(each)
            frontier.append(each)
    return len(found)


def test_a_mate_gets_what_is_relayed_in_every_order() -> None:
    assert check_relay(Relay()) > 500


class ClosesItsPageAlone(Relay):
    """A relay that does not close the entry of the page whose memory it takes."""

    def begin(self, state: Relayed, what: tuple[int, int]) -> Relayed:
        return self.close(state, what[0])._replace(held=what, arrived=0)


class OffersHalf(Relay):
    """A relay that offers parts before the last of them has come."""

    def complete(self, state: Relayed) -> bool:
        return state.arrived == 1


class RelayedLooksOnce(Relay):
    """A mate that does not look again after its copy."""

    def unchanged(self, state: Relayed, page: int) -> bool:
        return True


@pytest.mark.parametrize("kind", [ClosesItsPageAlone, OffersHalf, RelayedLooksOnce])
def test_the_model_notices_a_mistake_of_a_relay(kind: type[Relay]) -> None:
    with pytest.raises(AssertionError, match="the mate got other bytes"):
        check_relay(kind())
