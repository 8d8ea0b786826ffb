"""Tests of what ranks are given: buffers, options of optimizers, meshes, the environment, an error file."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import infinity
from infinity.errors import ConfigError


def offload(**options: Any) -> infinity.Runtime:
    return infinity.offload(
        nn.Linear(2, 2), None, budget=infinity.Budget(host="32MiB"), device="cpu", **options
    )


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", "0"),
        ("RANK", "x"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "x"),
        ("LOCAL_WORLD_SIZE", "0"),
    ],
)
def test_variables_that_are_no_numbers_are_refused(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"variable {variable} is '{text}'"):
        offload()


def test_a_rank_beyond_the_last_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK is 2, and WORLD_SIZE is 2"):
        offload()


def test_a_rank_that_is_absent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "")
    with pytest.raises(ConfigError, match="RANK expected, but not set"):
        offload()


def test_empty_variables_count_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "")
    with offload() as runtime:
        assert runtime.plan.share.ranks == 1


@pytest.mark.parametrize(
    ("mesh", "kind"), [("data", "str"), (0, "int"), (dist.ProcessGroup(0, 2), "ProcessGroup")]
)
def test_what_is_no_mesh_is_refused(mesh: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"The mesh is a {kind}") as caught:
        offload(mesh=mesh)
    assert "init_device_mesh" in caught.value.cure
