"""Tests of the choice of CPUs for update threads.

Update threads take one CPU of each core and respect the cgroup's CPU quota. If there are enough cores, some
are left to the threads that compute forward and backward.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.cpu_adam.placement import default_cpus, leave_room, one_per_core
from infinity.system import machine


def test_one_cpu_of_each_core(tmp_path: Path) -> None:
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert one_per_core(range(8), tmp_path) == (0, 1, 2, 3)
    assert one_per_core([2, 5, 6], tmp_path) == (2, 5)
    assert one_per_core([2, 6], tmp_path / "absent") == (2, 6)


@pytest.mark.parametrize(
    ("cores", "quota", "taken"),
    [
        (1, None, (0,)),
        (2, None, (0, 1)),
        (4, None, (1, 2, 3)),
        (64, None, tuple(range(8, 64))),
        (4, 2.5, (2, 3)),
        (4, 0.5, (3,)),
    ],
)
def test_the_trainer_keeps_cores_where_there_are_enough(
    cores: int, quota: float | None, taken: tuple[int, ...]
) -> None:
    assert leave_room(range(cores), quota) == taken


def test_the_quota_is_the_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine.CpuFacts(model="", online=64, allowed=64, quota=1.9, numa_nodes=1)
    monkeypatch.setattr(machine, "cpu", lambda: facts)
    assert len(default_cpus()) == 1
