"""Tests of the layout of durable images in slab files: ranges, their sum, and the places of chunks."""

import itertools
from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_models import partly_frozen, planned, stack

from infinity.config import Precision
from infinity.layout.shards import ALONE
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.planning.slab_layout import (
    PageImages,
    SlabLayout,
    frozen_bytes,
    slab_layout,
    trained_bytes,
)

models = st.builds(
    stack,
    st.lists(st.sampled_from([3, 17, 64, 90, 130]), min_size=1, max_size=6),
    st.sets(st.integers(0, 5), max_size=2),
)
precisions = st.builds(
    Precision,
    compute=st.sampled_from(["bf16", "fp16", "fp32"]),
    keep=st.sampled_from([(), ("*bias",), ("*weight",)]),
    states=st.sampled_from(["fp32", "int8"]),
)
optimizers = st.sampled_from([None, torch.optim.AdamW, torch.optim.SGD])


def images(made: Plan, layout: SlabLayout) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of all images of all pages."""
    for index, unit in enumerate(made.layout.units):
        trainable = sum(
            -(-region.elements * region.dtype.itemsize // 4096) * 4096
            for region in unit.regions
            if region.trainable
        )
        states = made.page_bytes(index, Kind.OPTIMIZER)
        parameters = layout.parameters[index]
        yield parameters.first, parameters.first + unit.nbytes
        for start in parameters.others:
            yield start, start + trainable
        for start in (layout.states[index].first, *layout.states[index].others):
            yield start, start + states


@settings(max_examples=100, deadline=None)
@given(model=models, frozen=st.booleans(), precision=precisions, optimizer=optimizers)
def test_images_fill_the_start_of_the_volume(*, model, frozen, precision, optimizer) -> None:
    """Images lie one behind the other: they do not overlap, and add up to the bytes that the plan counts."""
    model = partly_frozen(model) if frozen else model
    made = planned(
        model, optimizer=optimizer, precision=precision, host="64MiB", nvme={"/a": "64MiB"}, commits=True
    )
    layout = made.slab_layout
    assert layout is not None
    ranges = list(images(made, layout))
    assert all(edge % 4096 == 0 for each in ranges for edge in each)
    assert ranges[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert ranges[-1][1] == layout.nbytes == made.durable_bytes


@settings(max_examples=100, deadline=None)
@given(model=models, frozen=st.booleans(), precision=precisions)
def test_what_is_trained_takes_two_places_and_the_rest_one(*, model, frozen, precision) -> None:
    model = partly_frozen(model) if frozen else model
    made = planned(model, precision=precision, host="64MiB", nvme={"/a": "64MiB"}, commits=True)
    units = made.layout.units
    trainable = sum(trained_bytes(each, ALONE) for each in units)
    states = sum(made.page_sizes[Kind.OPTIMIZER])
    frozen_too = sum(unit.nbytes for unit in units) - trainable
    assert frozen_too == sum(frozen_bytes(each, ALONE) for each in units)
    assert made.durable_bytes == 2 * (trainable + states) + frozen_too


def test_two_units_by_hand() -> None:
    """The golden offsets: they are in checkpoints, so that another order would lose what was committed."""
    made = planned(stack([64, 64], frozen=[1]), host="64MiB", commits=True, slab_directory="/a")
    first, second = made.layout.units
    assert (first.nbytes, second.nbytes) == (20480, 20480)  # 128 x 64 weights and 128 biases, in bf16
    state = made.page_bytes(0, Kind.OPTIMIZER)
    assert made.page_sizes[Kind.OPTIMIZER] == [state, 0]
    end = 2 * 20480 + 2 * state
    assert made.slab_layout == SlabLayout(
        parameters=(PageImages(0, (20480,)), PageImages(end, (end + 20480,))),
        states=(PageImages(40960, (40960 + state,)), PageImages(end + 20480, (end + 20480,))),
        nbytes=end + 20480,
    )
    assert slab_layout(made.layout.units, ALONE, [state, 0]) == made.slab_layout


def test_no_units_take_no_bytes() -> None:
    assert slab_layout([], ALONE, []) == SlabLayout((), (), 0)
