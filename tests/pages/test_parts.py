"""Tests of parts and their slots: they cover pages, do not overlap on disk, and keep what commits hold."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from durable_pages import DurablePages, durable_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_models import stack
from torch import nn

from infinity.config import Precision
from infinity.layout.shards import ALONE
from infinity.pages.home import Home
from infinity.pages.parts import Label, PageParts, Part, Row, block_count
from infinity.planning.slab_layout import trained_bytes
from infinity.tiers import Tier

PAGE = 4096
BLOCK = 4096


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """A model whose layers and biases are trained or frozen in any mixture, on the meta device.

    Some models have a parameter without elements, whose unit may have a page without parameters.
    """
    widths = draw(st.lists(st.sampled_from([1, 3, 17, 64, 90, 130]), min_size=1, max_size=5))
    model = stack(widths)
    if draw(st.booleans()):
        model.append(nn.ParameterList([torch.empty(0, device="meta")]))
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.booleans()))
    return model


layouts = st.builds(
    durable_pages,
    models(),
    chunk=st.sampled_from([4096, 8192, 1 << 20]),
    unit_bytes=st.sampled_from([1, 40000, 1 << 20]),
    precision=st.builds(
        Precision,
        compute=st.sampled_from(["bf16", "fp16", "fp32"]),
        keep=st.sampled_from([(), ("*bias",), ("*weight",)]),
        states=st.sampled_from(["fp32", "int8"]),
    ),
    optimizer=st.sampled_from([None, torch.optim.AdamW, torch.optim.SGD]),
)


@settings(max_examples=100, deadline=None)
@given(pages=layouts)
def test_parts_cover_their_page(pages: DurablePages) -> None:
    for page in pages.all:
        end = 0
        for part in page.parts:
            assert part.start == end
            assert part.nbytes > 0
            assert part.nbytes % PAGE == 0
            end = part.end
        assert end == page.home.nbytes


@settings(max_examples=100, deadline=None)
@given(pages=layouts)
def test_slots_fill_the_volume_and_never_overlap(pages: DurablePages) -> None:
    ranges = sorted((slot, slot + part.nbytes) for part in pages.parts for slot in part.slots)
    edges = [0, *(end for _, end in ranges)]
    assert [start for start, _ in ranges] == edges[:-1]
    assert edges[-1] == pages.images.nbytes


@settings(max_examples=100, deadline=None)
@given(pages=layouts)
def test_slots_are_those_of_the_images(pages: DurablePages) -> None:
    """Chunks and states lie in both images of their page, frozen regions in the first alone."""
    for index, page in enumerate(pages.parameters):
        images = pages.images.parameters[index]
        assert [part.slots[0] for part in page.parts] == [images.first + part.start for part in page.parts]
        trained = [part for part in page.parts if part.trained]
        assert [part.chunk_index for part in trained] == list(range(len(page.layout.chunks)))
        assert [part.start for part in trained] == [
            page.layout.chunk_start(chunk) for chunk in range(len(page.layout.chunks))
        ]
        (second,) = images.others
        for part in trained:
            assert part.slots[1:] == (second,)
            second += part.nbytes
        assert second == images.others[0] + trained_bytes(page.layout, ALONE)
        frozen = [part for part in page.parts if not part.trained]
        assert all(part.chunk_index is None for part in frozen)
        nbytes = sum(each.nbytes for each in page.layout.regions if not each.trainable)
        padding = 0 if any(each.elements for each in page.layout.regions) else PAGE
        assert sum(part.nbytes for part in frozen) == nbytes + padding
    for index, page in enumerate(pages.states):
        images = pages.images.states[index]
        with_states = [chunk for chunk, form in enumerate(page.formats) if form.nbytes]
        assert [part.chunk_index for part in page.parts] == with_states
        for part in page.parts:
            assert part.slots == (images.first + part.start, images.others[0] + part.start)


@settings(max_examples=100, deadline=None)
@given(pages=layouts)
def test_blocks_are_those_of_parameters(pages: DurablePages) -> None:
    """The parts of a unit have each 4096 elements of each parameter as one block, whatever the chunks are."""
    for page in pages.parameters:
        found: Counter[tuple[str, int]] = Counter()
        for part in page.parts:
            number = 0
            for (start, nbytes, size), label in zip(part.segments.tolist(), part.labels, strict=True):
                assert 0 <= start < start + nbytes <= part.nbytes
                itemsize = size // BLOCK
                for block in range(-(-nbytes // size)):
                    first = label.first + block * BLOCK
                    found[label.parameter, first] += 1
                    end = min(first + BLOCK, label.first + nbytes // itemsize)
                    said = f"values of {label.parameter} for its elements {first} to {end}"
                    assert part.named(number) == (said, start + block * size)
                    number += 1
            assert number == len(part.checksums) == block_count(part.segments)
            with pytest.raises(IndexError):
                part.named(number)
        assert found == {
            (each.names[0], first): 1
            for each in page.layout.parameters
            for first in range(0, each.numel, BLOCK)
        }


@settings(max_examples=100, deadline=None)
@given(pages=layouts)
def test_only_masters_have_values_before_the_first_update(pages: DurablePages) -> None:
    for page in pages.states:
        for part in page.parts:
            assert part.chunk_index is not None
            form = page.formats[part.chunk_index]
            pieces = page.layout.chunks[part.chunk_index].pieces
            rows = [
                (*form.place(each.name, piece.offset, piece.count), form.place(each.name, 0, BLOCK)[1])
                for each in form.arrays
                for piece in pieces
            ]
            assert [tuple(row) for row in part.segments.tolist()] == rows
            masters = sum(label.array in ("remainder", "master") for label in part.labels)
            assert len(part.filled) == masters
            page.begun[part.chunk_index] = True
            assert len(part.filled) == len(rows)


def parts_at(places: list[list[int]], sizes: list[int]) -> PageParts:
    home = Home(Tier.NVME, sum(sizes) * PAGE, None, False)
    ends = list(itertools.accumulate(sizes))
    rows: list[Row] = [((0, PAGE, PAGE), Label("weight", "values", 0))]
    return PageParts(
        [
            Part((end - size) * PAGE, end * PAGE, tuple(each * PAGE for each in at), rows, home)
            for at, size, end in zip(places, sizes, ends, strict=True)
        ]
    )


@st.composite
def placed(draw: st.DrawFn) -> PageParts:
    """The parts of a page whose slots lie in any order, often one behind the other."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    slots = [(part, slot) for slot in (0, 1) for part in range(len(sizes))]
    slots = draw(st.one_of(st.just(slots), st.permutations(slots)))
    places = [[0, 0] for _ in sizes]
    end = 0
    for part, slot in slots:
        end += draw(st.sampled_from([0, 0, 0, 1]))
        places[part][slot] = end
        end += sizes[part]
    parts = parts_at(places, sizes)
    for part in parts:
        part.newest = draw(st.integers(0, 1))
    return parts


@settings(max_examples=300, deadline=None)
@given(parts=placed(), data=st.data())
def test_extents_are_those_of_every_page_of_bytes(parts: PageParts, data: st.DataObject) -> None:
    """They equal a list made page by page, in which all neighbours are joined."""
    last = parts[-1].end // PAGE
    start = data.draw(st.integers(0, last))
    end = data.draw(st.integers(start, last))
    wanted: list[tuple[int, int, int]] = []
    for number in range(start, end):
        (part,) = (each for each in parts if each.start <= number * PAGE < each.end)
        place = part.slots[part.newest] + number * PAGE - part.start
        before = wanted[-1] if wanted else None
        if before is not None and before[0] + before[2] - before[1] == place:
            wanted[-1] = (before[0], before[1], (number + 1) * PAGE)
        else:
            wanted.append((place, number * PAGE, (number + 1) * PAGE))
    assert list(parts.extents(start * PAGE, end * PAGE)) == wanted
    over = [part for part in parts if part.start < end * PAGE and start * PAGE < part.end]
    if start < end:
        assert list(parts.over(start * PAGE, end * PAGE)) == over


def test_neighbours_on_disk_are_one_extent() -> None:
    parts = parts_at([[0, 9], [2, 5], [6, 3]], [2, 1, 1])
    assert list(parts.extents(0, 4 * PAGE)) == [(0, 0, 3 * PAGE), (6 * PAGE, 3 * PAGE, 4 * PAGE)]
    parts[2].newest = 1
    assert list(parts.extents(PAGE, 4 * PAGE)) == [(PAGE, PAGE, 4 * PAGE)]


@pytest.mark.parametrize("places", [(0,), (0, 8 * PAGE)], ids=["frozen", "trained"])
def test_no_new_bytes_go_to_a_slot_that_a_commit_holds(places: tuple[int, ...]) -> None:
    """For every combination of slots, `free_slot` is the newest slot if it is free, else another free one."""
    home = Home(Tier.NVME, PAGE, None, False)
    slots = range(len(places))
    seen = 0
    for slot, durable, pending in itertools.product(slots, (None, *slots), (None, *slots)):
        part = Part(0, PAGE, places, [], home)
        part.newest, part.durable, part.pending = slot, durable, pending
        free = set(slots) - {durable, pending}
        target = part.free_slot()
        assert target == (slot if slot in free else next(iter(free), None))
        assert (part.newest, part.durable, part.pending) == (slot, durable, pending)
        seen += 1
    assert seen == {1: 4, 2: 18}[len(places)]
