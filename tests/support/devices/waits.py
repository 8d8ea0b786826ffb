"""The waits of a runtime on an emulated device, one by one: who waits, and for what."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from emulated_device import EmulatedDevice

import infinity
from infinity.tiers.copy_streams import CopyStreams, EventTransfer, Order
from infinity.tiers.driver import Event, Stream

PACKAGE = Path(infinity.__file__).parent
_LINK = ("tiers/copy_streams.py", "tiers/link.py")
_COPIES = ("copy_up", "copy_down", "copy_all_down", "copy_from_device", "copy_on_device")
"""Methods of Store that only pass a copy on to the link."""


class Wait(NamedTuple):
    """Where the package waits for an event, or asks whether it has happened.

    recorded: the function that had the event recorded, or "copy by" the function that began the copy before
    it, or "elsewhere": in the link, or by an update thread. awaited: the function that waits or asks, or has
    an update thread do so. Functions are written FILE:NAME; those of the link, and those that only pass a
    copy on, do not count.
    """

    order: Order
    asks: bool
    recorded: str
    awaited: str


@contextlib.contextmanager
def waits_seen(device: EmulatedDevice, without: Callable[[Wait], bool]) -> Iterator[set[Wait]]:
    """Yield a set to which every wait of the link within the `with` statement is added.

    without: which of them are hidden from the checker of `device`, as by `EmulatedDevice.without`.
    """
    seen: set[Wait] = set()
    recorded: dict[int, tuple[Event, str]] = {}  # the events are kept, so that no other gets their place
    record, copy, awaited = CopyStreams.record, CopyStreams._copy, CopyStreams._awaited
    wait, ask = CopyStreams._wait, CopyStreams._ask

    def records(link: CopyStreams) -> Event:
        event = record(link)
        recorded[id(event)] = event, _caller()
        return event

    def copies(link: CopyStreams, *arguments: Any) -> EventTransfer:
        transfer = copy(link, *arguments)
        recorded[id(transfer.event)] = transfer.event, f"copy by {_caller()}"
        return transfer

    def met(order: Order, event: Event, *, asks: bool) -> bool:
        _, source = recorded.get(id(event), (event, "elsewhere"))
        found = Wait(order, asks, source, _caller())
        seen.add(found)
        return without(found)

    def waits(link: CopyStreams, order: Order, event: Event, waiter: Stream | None) -> None:
        with device.unseen() if met(order, event, asks=False) else contextlib.nullcontext():
            wait(link, order, event, waiter)

    def asking(link: CopyStreams, order: Order, event: Event) -> bool:
        with device.unseen() if met(order, event, asks=True) else contextlib.nullcontext():
            return ask(link, order, event)

    def gives(link: CopyStreams, order: Order, event: Event) -> Event | None:
        return None if met(order, event, asks=False) else awaited(link, order, event)

    patched = {"record": records, "_copy": copies, "_wait": waits, "_ask": asking, "_awaited": gives}
    with mock.patch.multiple(CopyStreams, **patched):
        yield seen


def _caller() -> str:
    """FILE:NAME of the innermost function of the package that counts."""
    frame = sys._getframe(2)
    while frame is not None:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if file.is_relative_to(PACKAGE) and not name.startswith("<"):
            place = file.relative_to(PACKAGE).as_posix()
            if place not in _LINK and (place, name) not in {("pages/store.py", each) for each in _COPIES}:
                return f"{place}:{name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "nowhere"
