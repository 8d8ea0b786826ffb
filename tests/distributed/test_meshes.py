"""Tests of meshes that are a part of the world: others train at once, or do not train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_processes
from mesh_ranks import CASES
from ranked_cases import Place, differences, train


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one rank trains with the micro-batches of two."""
    directory = tmp_path_factory.mktemp("alone")
    return [train(case, Place(0, 2, alone=True), directory) for case in CASES]


@pytest.mark.parametrize(
    ("function", "size", "meshes"),
    [
        pytest.param("one_is_left_out", 3, [(0, 2)], marks=pytest.mark.slow),
        ("the_first_is_left_out", 3, [(2, 1)]),
        pytest.param("two_at_once", 4, [(0, 2), (1, 3)], marks=pytest.mark.slow),
    ],
)
def test_a_mesh_trains_as_a_world_of_its_own(
    function: str, size: int, meshes: list[tuple[int, int]], alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    found = rank_processes.run(
        "mesh_ranks.py", function, size=size, timeout=100.0, environment={"DIRECTORY": str(tmp_path)}
    )
    assert [(each.code, each.error) for each in found] == [(0, "")] * size, found
    told: list[str] = []
    for mesh in meshes:
        for number, case in enumerate(CASES):
            told += differences(case, 2, [found[rank].result[number] for rank in mesh], alone[number])
    assert not told, "\n".join(told)
    trained = {rank for mesh in meshes for rank in mesh}
    assert all(found[rank].result is None for rank in range(size) if rank not in trained)
