"""Tests of what ranks are given: buffers, options of optimizers, meshes, the environment, an error file."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from warm_python import Popen

import infinity
from infinity.distributed.agreed_plan import Claim, check_claims, claims_of, disk_claims, option_digests
from infinity.errors import BudgetError, ConfigError
from infinity.planning.residual_states import ResidualBytes, Residuals
from infinity.tiers import Tier
from infinity.tiers.arena import available_ram


def results(function: str, **environment: str) -> list[Any]:
    """What each of two ranks returned; none may have failed."""
    outcomes = rank_processes.run("input_ranks.py", function, size=2, environment=environment)
    assert [(each.code, each.error) for each in outcomes] == [(0, "")] * 2, outcomes
    return [each.result for each in outcomes]


def test_buffers_whose_elements_share_memory_get_the_values_of_rank_0() -> None:
    assert (
        results("overlapping_buffers")
        == [
            {
                "one": [1.0] * 4,
                "rows": [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]],
                "windows": [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]],
            }
        ]
        * 2
    )


def test_options_that_are_no_values_may_be_other_objects_on_each_rank() -> None:
    assert results("options_without_values") == [[2.0]] * 2


def test_optimizers_with_other_options_are_refused_by_offload() -> None:
    for each in rank_processes.run("input_ranks.py", "other_options", size=2):
        assert (each.code, each.error) == (0, "RankDivergence"), each
        assert "At offload() the option betas of rank 1 and of rank 0 differ: " in each.text


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_only_their_parts_of_a_file(size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "0.weight": torch.randn(1024, 1024),
        "0.bias": torch.randn(1024),
        "1.weight": torch.randn(256, 256, 3, 3),
        "1.bias": torch.randn(256),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    outcomes = rank_processes.run(
        "input_ranks.py",
        "from_a_file",
        size=size,
        environment={"WEIGHTS": str(tmp_path / "a.safetensors")},
    )
    for each in outcomes:
        assert each.code == 0 and each.result, each
        assert each.result.pop("hidden") == pytest.approx(1 - 1 / size, abs=0.03)
        assert each.result == pytest.approx({name: float(t.double().sum()) for name, t in tensors.items()})


# --- what ranks of one node take together ---------------------------------------------------------------


def test_slabs_on_one_disk_that_do_not_fit_together_are_refused_on_all(tmp_path: Path) -> None:
    (zero, one) = results("on_one_disk", DISK=str(tmp_path))
    assert zero == one
    assert zero.startswith("nvme: Ranks 0, 1 together want ")
    assert "of the file system of DISK/0, where " in zero


def of_memory(place: str, wanted: int, free: int = 100, returned: int = 0) -> Claim:
    return Claim(Tier.DEVICE.value, place, f"the memory of cuda:{place}", wanted, free, returned)


def checked(*ranks: tuple[int, list[Claim]]) -> None:
    """Check the claims of ranks, of each (its node, its claims), as the ranks would hear them."""
    check_claims(dict(enumerate(json.loads(json.dumps(ranks)))))


def test_device_budgets_of_ranks_with_one_device_are_added_up() -> None:
    checked((0, [of_memory("a", 50)]), (0, [of_memory("a", 50, free=99)]))
    with pytest.raises(BudgetError) as caught:
        checked((0, [of_memory("a", 50)]), (0, [of_memory("b", 70)]), (0, [of_memory("a", 51)]))
    assert caught.value.tier == "device"
    assert caught.value.cause == (
        "Ranks 0, 2 together want 101 B of the memory of cuda:a, where 100 B are free."
    )
    assert caught.value.cure == "Give each of them at most 50 B there, or a device of its own."


def test_places_on_other_nodes_and_of_other_tiers_are_other_places() -> None:
    disk = Claim(Tier.NVME.value, "a", "a disk", 80, 100)
    checked((0, [of_memory("a", 80)]), (1, [of_memory("a", 80)]), (0, [disk]), (1, [disk]))
    with pytest.raises(BudgetError, match="Ranks 1, 3 together want 160 B of a disk"):
        checked((0, [of_memory("a", 80)]), (1, [disk]), (0, [disk]), (1, [disk]))


def test_what_ranks_give_back_first_counts_as_free() -> None:
    checked((0, [of_memory("a", 60, returned=15)]), (0, [of_memory("a", 60, returned=5)]))
    with pytest.raises(BudgetError, match="where 119 B are free"):
        checked((0, [of_memory("a", 60, returned=15)]), (0, [of_memory("a", 60, returned=4)]))


def test_what_one_rank_takes_alone_is_checked_elsewhere() -> None:
    checked((0, [of_memory("a", 200)]), (0, [of_memory("b", 200)]))


def test_a_disk_gets_at_least_what_the_others_have_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("one", "two", "three")
    for name in names:
        (tmp_path / name).mkdir()
    budgets = {str(tmp_path / name): 100 for name in names}
    (alone,) = disk_claims(250, budgets, 0)
    assert (alone.wanted, alone.name) == (250, f"the file system of {tmp_path / 'one'}")
    status = os.stat

    def apart(path: Any, **options: Any) -> Any:
        """Directory "two" lies on another disk."""
        found = list(status(path, **options))
        found[2] += Path(path).name == "two"
        return os.stat_result(found)

    monkeypatch.setattr("infinity.distributed.agreed_plan.os.stat", apart)
    assert [each.wanted for each in disk_claims(250, budgets, 0)] == [150, 50]
    assert [each.wanted for each in disk_claims(150, budgets, 0)] == [50]
    assert disk_claims(0, budgets, 0) == []


def test_scratch_needs_room_on_disk_also_beside_slabs_that_are_adopted(tmp_path: Path) -> None:
    budget = infinity.Budget(host="64MiB", nvme={str(tmp_path): "64MiB"})
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    plan = infinity.plan(model, optimizer, budget=budget, device="cpu", checkpoint=tmp_path)
    assert plan.nvme_bytes > 0
    away = replace(plan, residuals=Residuals(policy="offload", room=ResidualBytes(disk=1 << 20)))

    def on_disk(plan: Any, *, adopts: bool) -> int:
        claims = claims_of(plan, budget, adopts=adopts)
        return sum(each.wanted for each in claims if each.tier == Tier.NVME.value)

    assert on_disk(away, adopts=False) == (1 << 20) + plan.nvme_bytes
    assert on_disk(away, adopts=True) == 1 << 20
    assert on_disk(plan, adopts=True) == 0


# --- digests of options ---------------------------------------------------------------------------------


class Schedule:
    """An option that is no plain value."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda step: step,
        object,
        Schedule,
        lambda: [Schedule(), {"schedule": Schedule()}],
        lambda: torch.tensor([0.5, 1.0]),
        lambda: torch.empty(2, device="meta"),
        lambda: {"a": 1, "b": (2.0, None)},
        lambda: torch.float32,
    ],
)
def test_equal_options_have_equal_digests(make: Any) -> None:
    first, second = make(), make()  # both live, so that their addresses differ
    assert option_digests([{"lr": 0.1, "option": first}]) == option_digests([{"option": second, "lr": 0.1}])


def test_the_order_within_sets_and_mappings_does_not_matter() -> None:
    assert option_digests([{"option": {"a": 1, "b": 2}}]) == option_digests([{"option": {"b": 2, "a": 1}}])
    assert option_digests([{"option": {8, 0}}]) == option_digests([{"option": {0, 8}}])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.2),
        (1, "1"),
        (True, None),
        ((0.9, 0.99), (0.9, 0.999)),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (torch.tensor(0.1), torch.tensor(0.2)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (Schedule(), object()),
        (json.dumps, json.loads),
        (torch.float32, torch.bfloat16),
    ],
)
def test_other_options_have_other_digests(one: Any, other: Any) -> None:
    first, second = ([{"lr": 0.1, "option": each, "params": []}] for each in (one, other))
    found = option_digests(first), option_digests(second)
    assert [name for name in found[0] if found[0][name] != found[1][name]] == ["option"]


def test_groups_and_options_that_are_absent_count() -> None:
    assert option_digests([{"lr": 0.1}]) != option_digests([{"lr": 0.1}, {"lr": 0.1}])
    assert option_digests([{"lr": 0.1}, {}]) != option_digests([{}, {"lr": 0.1}])


# --- the environment and the mesh -----------------------------------------------------------------------


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


def test_ranks_find_out_who_shares_their_machine_if_the_launcher_does_not_say() -> None:
    (zero, cpus, least), (one, others, _) = results("place", LOCAL_RANK="", LOCAL_WORLD_SIZE="")
    assert (zero, cpus) == ([0, 0, 2], [10, 11])
    assert (one, others) == ([0, 1, 2], [12, 13])
    assert 0 < least < 0.6 * available_ram()


def test_the_launcher_is_believed() -> None:
    for found, cpus, _ in results("place", LOCAL_RANK="3", LOCAL_WORLD_SIZE="4", GROUP_RANK="7"):
        assert (found, cpus) == ([7, 3, 4], [13])


@pytest.mark.parametrize(
    ("mesh", "kind"), [("data", "str"), (0, "int"), (dist.ProcessGroup(0, 2), "ProcessGroup")]
)
def test_what_is_no_mesh_is_refused(mesh: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"The mesh is a {kind}") as caught:
        offload(mesh=mesh)
    assert "init_device_mesh" in caught.value.cure


# --- torchrun's error file ------------------------------------------------------------------------------


def ended(program: str, file: Path) -> Any:
    """Run a program with this error file, as torchrun does. Returns the content of the file."""
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    process = Popen([sys.executable, "-c", program], env=environment, stdout=-1, stderr=-2, text=True)
    written = process.communicate()[0]
    assert process.returncode == 1, written
    return json.loads(file.read_text())


def test_an_error_that_nothing_catches_reaches_the_error_file(tmp_path: Path) -> None:
    message = ended("import infinity; infinity.offload('model', None)", tmp_path / "error")["message"]
    assert message["message"] == "ConfigError: The model is a str. Give an nn.Module."
    assert "in check_model" in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["timestamp"].isdecimal()


def test_an_error_file_that_has_an_error_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "error").write_text('"first"')
    assert ended("import infinity; infinity.offload('model', None)", tmp_path / "error") == "first"


def test_the_first_cause_on_several_ranks_reaches_the_error_file(tmp_path: Path) -> None:
    zero, one = rank_processes.run(
        "input_ranks.py", "uncaught", size=2, environment={"ERRORS": str(tmp_path)}
    )
    assert (zero.code, zero.error, one.code) == (0, "RankFailure", 1), (zero, one)
    assert json.loads((tmp_path / "1").read_text())["message"]["message"] == "ZeroDivisionError: planted"
    assert not (tmp_path / "0").exists(), "rank 0 has caught its error"
