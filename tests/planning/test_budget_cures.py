"""Tests that the budget that an error names is enough for the same program, and of what errors say."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from budget_cures import PROGRAMS, Case, cases, cure, quick_collections
from hypothesis import HealthCheck, given, settings
from random_models import Part
from torch import nn

import infinity
from infinity.errors import BudgetError


def check(program: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases(program))
    def cured(case: Case) -> None:
        with tempfile.TemporaryDirectory() as name:
            cure(case, Path(name))

    with quick_collections():
        cured()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_first_budget_that_an_error_names_is_enough(program: str) -> None:
    check(program, 2)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_first_budget_that_an_error_names_is_enough_in_many_cases(program: str) -> None:
    check(program, 182)


BLOCKS = tuple(Part("wide", 700) for _ in range(4))
HOLDERS: list[Any] = [
    ("held", 1, "views that your code holds (parts.0.up)"),
    ("concatenated", 0, "views that your code holds (parts.0.up)"),
    ("penalised", 0, "autograd's graph"),
    ("whole", 0, "and 4 others together, 288 KiB"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("program", "which", "said"), HOLDERS)
@pytest.mark.parametrize("place", ["unified-nvme", "emulated"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_error_in_a_program_names_what_keeps_the_pages(
    program: str, which: int, said: str, place: str, tmp_path: Path
) -> None:
    with quick_collections():
        (_, error), *others = cure(Case(BLOCKS, place, (0.0, 0.0, 0.0), program, which), tmp_path)
    assert not others
    assert said in error.cause
    assert ("let go of such views" in error.cure) == (program != "whole")


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(8 << 20, dtype=torch.int32))
        self.scale = nn.Linear(16, 16)


def refused(model: nn.Module, host: str, nvme: Path | None = None, **options: Any) -> BudgetError:
    budget = infinity.Budget(host=host, nvme=None if nvme is None else {str(nvme): "64MiB"})
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(BudgetError) as caught:
        infinity.plan(model, optimizer, budget=budget, device="cpu", **options)
    return caught.value


def test_buffers_are_named_and_are_not_sent_to_a_disk(tmp_path: Path) -> None:
    for nvme in (None, tmp_path):
        error = refused(Quantised(), "1MiB", nvme)
        assert "32 MiB are buffers" in error.cause
        assert "nvme" not in error.cure
        assert error.with_nvme is None
        assert error.needed is not None
        budget = infinity.Budget(host=error.needed)
        model = Quantised()
        with infinity.offload(model, None, budget=budget, device="cpu"):
            assert not model.codes.any()


def test_activations_are_named_and_are_cured_by_smaller_batches() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    error = refused(model, "8MiB", example_inputs=(torch.zeros(100_000, 256, device="meta"),))
    assert "are activations" in error.cause
    assert "lower the batch size" in error.cure
    assert "nvme" not in error.cure, "it would hold pages, and never activations"
    assert error.smaller_batch


def test_a_disk_is_advised_with_the_ram_that_it_leaves_to_be_given(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])

    found = [refused(model(), host) for host in ("64KiB", "7MiB")]
    assert found[0].with_nvme is not None
    assert f"({found[0].with_nvme} bytes) and an nvme budget" in found[0].cure
    assert found[1].with_nvme == 0
    for host in (found[0].with_nvme, 7 << 20):
        budget, planned = infinity.Budget(host=host, nvme={str(tmp_path): "64MiB"}), model()
        infinity.plan(planned, torch.optim.AdamW(planned.parameters()), budget=budget, device="cpu")


def test_a_directory_that_is_missing_is_told_although_no_page_needs_it(tmp_path: Path) -> None:
    model = nn.Linear(16, 16)
    budget = infinity.Budget(host="64MiB", nvme={str(tmp_path / "missing"): "1GiB"})
    with pytest.raises(infinity.StorageError, match="missing"):
        infinity.offload(model, None, budget=budget, device="cpu")
    assert type(model.weight) is nn.Parameter
