"""Tests of slots in host RAM: where the newest bytes of a home are."""

from __future__ import annotations

import torch

from infinity.pages.home import Home
from infinity.pages.slot_pair import confirm
from infinity.tiers import Tier


def _home() -> Home:
    """A home of 60 bytes, in which the ranges [10, 30), [30, 40) and [50, 60) have two slots."""
    home = Home(Tier.HOST, 60, torch.arange(60, dtype=torch.uint8), True)
    home.pair_up(torch.zeros(40, dtype=torch.uint8), [(10, 20), (30, 10), (50, 10)])
    return home


def _confirm(home: Home, *numbers: int) -> None:
    """Fill slots with 100, 101 and 102, and make them the newest."""
    for number in numbers:
        home.pairs[number].begin().fill_(100 + number)
        confirm([home.pairs[number]])


def test_views_find_the_newest_bytes_and_join_neighbours() -> None:
    home = _home()
    assert [each.tolist() for each in home.views(5, 50)] == [list(range(5, 55))]
    _confirm(home, 0, 1)
    found = home.views(5, 50)
    assert [each.tolist() for each in found] == [
        list(range(5, 10)),
        [100] * 20 + [101] * 10,
        list(range(40, 55)),
    ]
    _confirm(home, 0, 2)
    assert torch.cat(home.views(0, 60)).tolist() == [
        *range(10),
        *[100] * 20,
        *[101] * 10,
        *range(40, 50),
        *[102] * 10,
    ]
    assert home.view(12, 3).data_ptr() == home.memory[12:].data_ptr()  # turned over twice
    assert home.view(35, 5).tolist() == [101] * 5
    assert home.views(42, 3)[0].data_ptr() == home.memory[42:].data_ptr()


def test_results_that_are_not_confirmed_change_nothing() -> None:
    home = _home()
    for pair in home.pairs:
        pair.begin().fill_(7)
        pair.tentative = None
        confirm([pair])
    assert torch.cat(home.views(0, 60)).tolist() == list(range(60))


def test_where_the_model_computes_with_the_home_the_newest_bytes_are_there() -> None:
    home = _home()
    home.shown = True
    _confirm(home, 1, 2)
    assert [each.data_ptr() for each in home.views(0, 60)] == [home.memory.data_ptr()]
    assert home.memory[28:42].tolist() == [28, 29, *[101] * 10, 40, 41]


def test_pairs_are_found_by_where_they_begin() -> None:
    home = _home()
    assert [home.pair(start) for start in (0, 10, 29, 30, 40, 50)] == [
        None,
        home.pairs[0],
        None,
        home.pairs[1],
        None,
        home.pairs[2],
    ]
