"""Tests that random programs see with residual pages what they see in plain PyTorch, and leave nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import differences, injected
from policy_runs import late, small_pages, smallest_budget
from residual_rooms import ROOMS, Saver, left
from saved_programs import SMALLEST, Program, Saving, programs, seen_by
from torch import nn

import infinity

PLACES = ("unified", "apart", "streams")
RAM = 40 << 10
"""Bytes that programs have of the RAM for activations; a test holds the rest."""


@contextlib.contextmanager
def opened(place: str, directory: Path) -> Iterator[infinity.Runtime]:
    """A runtime whose activations leave for a RAM of a few pages, and for a disk."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters())
    facts = {
        "precision": infinity.Precision(compute="fp32"),
        "device": "cpu",
        "activations": "offload",
        "example_inputs": (torch.ones(512, 16),),
    }
    streams = EmulatedDevice(7).in_use() if place == "streams" else contextlib.nullcontext()
    with small_pages(SMALLEST), streams, injected(late(1)):
        planned = functools.partial(infinity.plan, model, optimizer, **facts)
        budget = smallest_budget(planned, place, "NVMe", directory, part=8)
        with infinity.offload(model, optimizer, budget=budget, **facts) as runtime:
            yield runtime


def check(program: Program, saving: Saving, nothing_left: Callable[[], None]) -> None:
    assert differences(seen_by(program, saving), seen_by(program, contextlib.nullcontext)) == []
    nothing_left()


def examples(number: int) -> settings:
    return settings(deadline=None, max_examples=number)


def check_nothing_left(runtime: Any, held: int) -> None:
    store, pages = runtime._components.store, runtime._components.pager.residual
    pages.rest()
    assert left(pages) == {}
    assert store.scratch.free_bytes == store.scratch.budget
    if store.link.direct:  # otherwise the link keeps what it copied until its next copy
        assert store.activations.leased == held


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_programs_in_runtimes(place: str, tmp_path: Path) -> None:
    with opened(place, tmp_path) as runtime:
        pool, pages = runtime._components.store.activations, runtime._components.pager.residual

        @examples(300)
        @given(programs)
        def checked(program: Program) -> None:
            nothing_left = functools.partial(check_nothing_left, runtime, pool.leased)
            check(program, runtime._components.pager.saving, nothing_left)

        with pool.lease(pool.nbytes - RAM):
            checked()
        assert pages.counts.written > 0


def check_in_rooms(kind: str, number: int) -> None:
    """The disk's requests and the copies end when somebody waits for them, which is as late as can be."""

    @examples(number)
    @given(programs, st.sampled_from([0, 10_000, 1 << 20]), st.sampled_from([0, 10_000]))
    def checked(program: Program, kept: int, window: int) -> None:
        saver = Saver(kind, kept=kept, ram=RAM, disk=1 << 24, window=window)
        check(program, saver.saving, saver.check_nothing_left)

    with small_pages(SMALLEST):
        checked()


@pytest.mark.parametrize("kind", ROOMS)
def test_programs_in_rooms(kind: str) -> None:
    check_in_rooms(kind, 20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROOMS)
def test_more_programs_in_rooms(kind: str) -> None:
    check_in_rooms(kind, 1000)


def check_in_threads(kind: str, number: int) -> None:
    @examples(number)
    @given(st.lists(programs, min_size=2, max_size=3))
    def checked(several: list[Program]) -> None:
        saver = Saver(kind, ram=3 * RAM, disk=1 << 24, window=10_000)
        with ThreadPoolExecutor(len(several)) as threads:
            found = list(threads.map(lambda program: seen_by(program, saver.saving), several))
        plain = [seen_by(program, contextlib.nullcontext) for program in several]
        assert differences(found, plain) == []
        del found
        saver.check_nothing_left()

    with small_pages(SMALLEST):
        checked()


@pytest.mark.parametrize("kind", ["copies that wait"])
def test_programs_in_several_threads(kind: str) -> None:
    check_in_threads(kind, 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROOMS)
def test_more_programs_in_several_threads(kind: str) -> None:
    check_in_threads(kind, 300)
