"""Tests of parts and of the ledger: which place a commit holds, and who ends the commit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from infinity.errors import ConfigError
from infinity.pages.home import Home
from infinity.pages.ledger import Commit, CommitState, Ledger
from infinity.pages.parts import Label, PageParts, Part
from infinity.tiers import Tier
from infinity.tiers.link import ARRIVED

FAILURE = ConfigError("A cause.", "A cure.")


def part_in_ram(begun: list[bool] | None = None) -> Part:
    home = Home(Tier.HOST, 4096, torch.zeros(4096, dtype=torch.uint8), True)
    rows = [((0, 4096, 4096), Label("weight", "values", 0))]
    part = Part(0, 4096, (0, 8192), rows, home, chunk_index=0, begun=begun)
    home.parts = PageParts([part])
    return part


def part_on_a_device() -> Part:
    part = part_in_ram()
    part.home.tier, part.home.in_place = Tier.DEVICE, False
    return part


def ledger_of(part: Part) -> Ledger:
    ledger = Ledger()
    ledger.set_parts({(0, 0): [part]})
    return ledger


def pending_of(ledger: Ledger, outstanding: Sequence[tuple[int, int]] = ()) -> Commit:
    commit = Commit(1, lambda _: None)
    ledger.begin(commit, outstanding, [], [])
    return commit


def test_new_bytes_go_to_the_place_that_no_commit_holds() -> None:
    part = part_in_ram()
    assert part.free_slot() == 0
    part.durable = 0
    assert part.free_slot() == 1
    part.pending = 1
    assert part.free_slot() is None


def test_a_commit_that_is_given_up_fails_by_the_reason_and_waits_for_no_flush() -> None:
    ledger = ledger_of(part_in_ram())
    for reason, said in ((FAILURE, "A cause"), (None, "its runtime ended")):
        commit = pending_of(ledger)
        ledger.give_up(reason)
        ledger.give_up(ConfigError("Another.", "Cure."))
        assert not commit.done
        assert ledger.next_flush(block=True) is None
        with pytest.raises(ConfigError, match=said) as raised:
            ledger.complete(commit)
        ledger.end(commit, raised.value)
        assert commit.state is CommitState.FAILED
        for _ in range(2):
            with pytest.raises(ConfigError, match=said):
                commit.wait()
        commit.report()


def test_a_commit_whose_manifest_is_being_written_is_not_given_up() -> None:
    ledger = ledger_of(part_on_a_device())
    commit = pending_of(ledger)
    ledger.complete(commit)
    ledger.give_up(FAILURE)
    assert commit.state is CommitState.WRITING
    ledger.end(commit, None)
    assert (commit.state, commit.failure) == (CommitState.DURABLE, None)
    commit.wait()


def test_the_places_of_a_commit_that_fails_with_its_name_stay_held() -> None:
    part = part_on_a_device()
    ledger = ledger_of(part)
    for state in (CommitState.UNKNOWN, CommitState.FAILED):
        commit = pending_of(ledger)
        ledger.complete(commit)
        if state is CommitState.UNKNOWN:
            commit.state = CommitState.NAMED
        ledger.end(commit, FAILURE)
        assert (commit.state, part.pending, ledger.unknown) == (state, 0, FAILURE)


def test_an_error_is_reported_once() -> None:
    ledger = ledger_of(part_in_ram())
    commit = pending_of(ledger)
    commit.report()
    ledger.end(commit, FAILURE)
    with pytest.raises(ConfigError):
        commit.report()
    commit.report()


def test_places_of_a_failed_commit_are_free_and_those_of_another_are_durable() -> None:
    part = part_in_ram()
    ledger = ledger_of(part)
    for failure, durable in ((FAILURE, None), (None, 0)):
        commit = pending_of(ledger)
        assert ledger.next_flush(block=True) is part
        ledger.flushed(part)
        assert part.pending == 0
        ledger.end(commit, failure)
        assert (part.pending, part.durable, ledger.pending) == (None, durable, None)


def test_a_write_or_an_update_that_comes_after_the_commit_has_failed_is_not_of_the_commit() -> None:
    part = part_in_ram()
    ledger = ledger_of(part)
    commit = pending_of(ledger, [(0, 0)])
    assert ledger.wants(part)
    assert ledger.awaited_units() == [0]
    ledger.end(commit, FAILURE)
    ledger.written(part, ARRIVED)
    ledger.updated((0, 0))
    assert part.pending is None
    assert not ledger.wants(part)
    assert ledger.awaited_units() == []


def test_a_flush_says_whether_the_part_had_begun_at_save() -> None:
    begun = [False]
    part = part_in_ram(begun)
    ledger = ledger_of(part)
    commit = pending_of(ledger)
    begun[0] = True  # the next step is decided before the flush
    ledger.next_flush(block=True)
    ledger.flushed(part)
    assert commit.held[part].begun is False


def test_a_part_on_a_device_is_held_as_save_has_copied_it() -> None:
    part = part_on_a_device()
    ledger = ledger_of(part)
    commit = pending_of(ledger)
    assert ledger.next_flush(block=True) is None
    assert part.pending == 0
    assert list(commit.held) == [part]
