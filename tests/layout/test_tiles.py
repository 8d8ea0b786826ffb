"""Tiles: the grid of rows, and the units of a model with tiled modules."""

import itertools

import pytest
import torch
from torch import nn

import infinity
from infinity.config import Precision
from infinity.cpu_adam import BLOCK
from infinity.errors import ConfigError
from infinity.layout import tiles
from infinity.layout.chunks import build
from infinity.layout.tiles import FEWEST_ELEMENTS, MOST_TILES, row_ranges, tiled_weights
from infinity.layout.units import survey


@pytest.mark.parametrize(
    "shape", [(4096, 4096), (1, 1), (0, 8), (8, 0), (50257, 768), (1000, 4095), (32768, 32768), (7, 1 << 20)]
)
def test_the_rows_of_tiles_cover_a_weight_in_order_and_in_whole_blocks(shape: tuple[int, int]) -> None:
    ranges = row_ranges(shape)
    assert list(itertools.chain(*ranges)) == list(range(shape[0]))
    assert len(ranges) <= MOST_TILES
    for rows in ranges[:-1]:
        assert len(rows) * shape[1] % BLOCK == 0
        assert len(rows) * shape[1] >= FEWEST_ELEMENTS


def test_a_weight_of_4_gib_has_tiles_of_64_mib_and_one_of_64_mib_has_tiles_of_4_mib() -> None:
    assert {len(rows) * 32768 * 4 for rows in row_ranges((32768, 32768))} == {64 << 20}
    assert {len(rows) * 4096 * 4 for rows in row_ranges((4096, 4096))} == {4 << 20}


def _model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", 1 << 18)
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(1024, 512), nn.Linear(512, 512), nn.Linear(512, 1024))
    model[2].weight = model[0].weight
    infinity.tiled(model[0])
    infinity.tiled(model[2])
    return model


@pytest.mark.parametrize("unit_bytes", [1, 1 << 30])
def test_each_tile_is_a_unit_of_its_own_which_no_other_has_to_fit_beside(
    unit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(monkeypatch)
    surveyed = survey(model, Precision(compute="fp32"))
    grouping = surveyed.group(unit_bytes)
    units = [[surveyed.parameters[index].names for index in members] for _, members in grouping]
    assert units == [
        [("0.weight[0:512]", "2.weight[0:512]")],
        [("0.weight[512:1024]", "2.weight[512:1024]")],
        [("1.weight",), ("1.bias",)],
        [("2.bias",)],
    ]
    assert surveyed.together(grouping) == ()
    assert build(surveyed, grouping, BLOCK).module_units == {"1": (2,), "2": (3,)}
    assert surveyed.nbytes == sum(each.nbytes for each in model.parameters())


def test_a_weight_that_tiles_cannot_hold_is_refused() -> None:
    model = infinity.tiled(nn.Linear(64, 64))
    model.weight = nn.Parameter(torch.zeros(64, 64).t())
    with pytest.raises(ConfigError, match="strides"):
        tiled_weights(model)
    model = infinity.tiled(nn.Linear(64, 64))
    model.weight.register_hook(lambda gradient: None)
    with pytest.raises(ConfigError, match="hook"):
        tiled_weights(model)
    model = infinity.tiled(nn.Linear(64, 64))
    nn.utils.parametrize.register_parametrization(model, "weight", nn.Identity())
    with pytest.raises(ConfigError, match="computed"):
        tiled_weights(model)
