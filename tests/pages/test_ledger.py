"""Tests of parts and of the ledger: which place a commit holds, and who ends the commit."""

from __future__ import annotations

import torch

from infinity.errors import ConfigError
from infinity.pages.home import Home
from infinity.pages.ledger import Ledger
from infinity.pages.twins import Label, Part, Twins
from infinity.tiers import Tier
from infinity.tiers.link import ARRIVED

FAILURE = ConfigError("A cause.", "A cure.")


def part_in_ram(begun: list[bool] | None = None) -> Part:
    home = Home(Tier.HOST, 4096, torch.zeros(4096, dtype=torch.uint8), True)
    rows = [((0, 4096, 4096), Label("weight", "values", 0))]
    part = Part(0, 4096, (0, 8192), rows, home, chunk_index=0, begun=begun)
    home.twins = Twins([part])
    return part


def part_on_a_device() -> Part:
    part = part_in_ram()
    part.home.tier, part.home.in_place = Tier.DEVICE, False
    return part


def ledger_of(part: Part) -> Ledger:
    ledger = Ledger()
    ledger.set_parts({(0, 0): [part]})
    return ledger


def test_new_bytes_go_to_the_place_that_no_commit_holds() -> None:
    part = part_in_ram()
    assert part.target() == 0
    part.durable = 0
    assert part.target() == 1
    part.pending = 1
    assert part.target() is None


def test_only_one_ends_a_commit() -> None:
    ledger = ledger_of(part_in_ram())
    pending = ledger.begin([], [], [])
    assert ledger.take(pending)
    assert not ledger.take(pending)


def test_places_of_a_failed_commit_are_free_and_those_of_another_are_durable() -> None:
    part = part_in_ram()
    ledger = ledger_of(part)
    for failure, durable in ((FAILURE, None), (None, 0)):
        pending = ledger.begin([], [], [])
        assert ledger.next_flush(block=True) is part
        ledger.flushed(part)
        assert part.pending == 0
        ledger.end(pending, failure)
        assert (part.pending, part.durable, ledger.pending) == (None, durable, None)


def test_a_write_or_an_update_that_comes_after_the_commit_has_failed_is_not_of_the_commit() -> None:
    part = part_in_ram()
    ledger = ledger_of(part)
    pending = ledger.begin([(0, 0)], [], [])
    assert ledger.wants(part)
    assert ledger.awaited_units() == [0]
    ledger.end(pending, FAILURE)
    ledger.written(part, ARRIVED)
    ledger.updated((0, 0))
    assert part.pending is None
    assert not ledger.wants(part)
    assert ledger.awaited_units() == []


def test_a_flush_says_whether_the_part_had_begun_at_save() -> None:
    begun = [False]
    part = part_in_ram(begun)
    ledger = ledger_of(part)
    pending = ledger.begin([], [], [])
    begun[0] = True  # the next step is decided before the flush
    ledger.next_flush(block=True)
    ledger.flushed(part)
    assert pending.captured[part][2] is False


def test_a_part_on_a_device_is_held_as_save_has_copied_it() -> None:
    part = part_on_a_device()
    ledger = ledger_of(part)
    pending = ledger.begin([], [], [])
    assert ledger.next_flush(block=True) is None
    assert part.pending == 0
    assert list(pending.captured) == [part]
