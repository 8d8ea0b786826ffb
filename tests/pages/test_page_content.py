"""Tests that errors name the parameter whose bytes lie at an offset of a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from damaged_disk import PAGE, Place, read_at, write_at
from homes import budget_for
from runs_on_disk import Run, everything
from zoo import entry

import infinity
from infinity.errors import CorruptState
from infinity.pages.home import content_at
from infinity.pages.optimizer_page import StatePage
from infinity.planning.placement import Kind


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_each_entry_of_a_page_is_named(states: str, tmp_path: Path) -> None:
    """What is named for an offset are those entries that the pages themselves have there."""
    model = entry("transformer").make()
    optimizer = torch.optim.AdamW(model.parameters())
    precision = infinity.Precision(states=states)
    budget = budget_for("nvme", model, optimizer, tmp_path, precision)
    plan = infinity.plan(model, optimizer, budget=budget, precision=precision, device="cpu")
    for unit, layout in enumerate(plan.layout.units):
        page = StatePage(unit, layout, None, plan)  # type: ignore[arg-type]
        for index, parameter in enumerate(layout.parameters):
            name, size = parameter.names[0], parameter.dtype.itemsize
            said = content_at(plan, unit, Kind.PARAMETER, layout.start(index) // PAGE * PAGE)
            assert f"values of {name} for its elements 0 to " in said or "more" in said
            last = content_at(plan, unit, Kind.PARAMETER, layout.start(index) + parameter.numel * size - 1)
            assert f" to {parameter.numel}" in last
            for chunk_index, piece in page.pieces(index):
                start = plan.gradient_offset(unit, chunk_index) + 4 * piece.offset
                said = content_at(plan, unit, Kind.GRADIENT, start)
                assert said.startswith(f"gradient of {name} for its elements {piece.start} to "), said
                for array in page.formats[chunk_index].arrays:
                    start, _ = page.place(chunk_index, array.name, piece)
                    said = content_at(plan, unit, Kind.OPTIMIZER, start)
                    end = piece.start + min(piece.count, PAGE // array.dtype.itemsize * array.per)
                    assert said.startswith(
                        f"{array.name} of {name} for its elements {piece.start} to {end}"
                    ), said


def test_padding_is_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    plan = infinity.plan(model, None, budget=infinity.Budget(host="1GiB"), device="cpu")
    assert content_at(plan, 0, Kind.PARAMETER, 1 << 20) == "a page of the model without values"


@pytest.mark.parametrize("commits", [False, True])
def test_the_error_of_a_live_run_names_the_parameter(commits: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, of=entry("transformer"), commits=commits, compute="fp32")
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(1))
        name, parameter = max(model.named_parameters(), key=lambda each: each[1].numel())
        with runtime.full_parameters(model.get_submodule(name.rpartition(".")[0])):
            parameter.data.fill_(1.2345)
        everything(model, runtime)
        whole = torch.full((PAGE // 4,), 1.2345).numpy().tobytes()
        (slab,) = runtime._components.store.nvme.slabs
        places = [Place(str(slab.path), at) for at in range(0, slab.nbytes, PAGE)]
        damaged = [place for place in places if read_at(place) == whole]
        assert damaged, "some pages have values of this parameter only"
        for place in damaged:
            write_at(place, bytes(PAGE))
        with pytest.raises(CorruptState, match=rf"values of {name} for its elements \d+ to \d+") as caught:
            everything(model, runtime)
        assert (caught.value.path, caught.value.offset) in damaged
