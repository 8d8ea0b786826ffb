"""Tests of meshes that are a part of the world: others train at once, or do not train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch.distributed as dist
from mesh_ranks import CASES
from ranked_cases import Place, differences, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from infinity.api import meet, several_ranks
from infinity.errors import ConfigError


@pytest.fixture
def rank_3_of_4() -> Iterator[None]:
    """A default group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_3_of_4")
def test_a_mesh_of_two_dimensions_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ConfigError, match=r'The mesh has 2 dimensions.*such as mesh\["dp"\]'):
        several_ranks(mesh)
    with pytest.raises(ConfigError, match=r"The mesh has 2 dimensions.*mesh_dim_names"):
        several_ranks(init_device_mesh("cpu", (1, 4)))
    assert several_ranks(mesh["dp"]) and several_ranks(mesh["tp"])


@pytest.mark.usefixtures("rank_3_of_4")
@pytest.mark.parametrize("ranks", [[0], [0, 2]])
def test_a_rank_outside_of_the_mesh_is_refused(ranks: list[int]) -> None:
    cause = rf"Rank 3 is not in the mesh, which has the ranks \[{', '.join(map(str, ranks))}\]"
    with pytest.raises(ConfigError, match=cause):
        several_ranks(DeviceMesh("cpu", ranks))


@pytest.mark.usefixtures("rank_3_of_4")
def test_a_mesh_of_one_rank_is_a_single_rank_that_leaves_cpus_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    alone = meet(init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))["dp"], 3, None)
    assert (alone.share.ranks, alone.place) == (1, (0, 3, 4))
    assert alone.node_share([10, 11, 12, 13]) == [13]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one rank trains with the micro-batches of two."""
    directory = tmp_path_factory.mktemp("alone")
    return [train(case, Place(0, 2, alone=True), directory) for case in CASES]


@pytest.mark.parametrize(
    ("function", "size", "meshes"),
    [
        pytest.param("one_is_left_out", 3, [(0, 2)], marks=pytest.mark.slow),
        pytest.param("the_first_is_left_out", 3, [(2, 1)], marks=pytest.mark.slow),
        ("two_at_once", 4, [(0, 2), (1, 3)]),
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
