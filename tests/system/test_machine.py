import os
import subprocess
from pathlib import Path

import pytest

from infinity.system import machine


def test_memory_is_what_the_kernel_says() -> None:
    facts = machine.memory()
    assert 0 < facts.available <= facts.total
    assert 0 < facts.usable <= facts.available
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts.total == pytest.approx(pages, rel=0.02)


@pytest.mark.parametrize(
    ("limit_name", "usage_name", "cache_name"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_the_tightest_cgroup_counts_and_its_page_cache_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_name: str, usage_name: str, cache_name: str
) -> None:
    for directory, limit, usage in ((tmp_path / "outer", 1000, 900), (tmp_path / "inner", 5000, 200)):
        directory.mkdir()
        (directory / limit_name).write_text(f"{limit}\n")
        (directory / usage_name).write_text(f"{usage}\n")
        (directory / "memory.stat").write_text(f"anon 7\n{cache_name} 150\n")
    monkeypatch.setattr(machine, "_cgroup_chain", lambda controller: [tmp_path / "inner", tmp_path / "outer"])
    facts = machine.memory()
    assert (facts.cgroup_limit, facts.cgroup_left) == (1000, 250)
    assert facts.usable == 250


def test_an_unlimited_cgroup_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    monkeypatch.setattr(machine, "_cgroup_chain", lambda controller: [tmp_path])
    assert machine.memory().cgroup_left is None
    assert machine.cpu().quota is None


def test_cpu_quota_of_both_cgroup_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two, one = tmp_path / "v2", tmp_path / "v1"
    two.mkdir()
    one.mkdir()
    (two / "cpu.max").write_text("150000 100000\n")
    (one / "cpu.cfs_quota_us").write_text("300000\n")
    (one / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(machine, "_cgroup_chain", lambda controller: [two, one])
    assert machine.cpu().quota == 1.5
    monkeypatch.setattr(machine, "_cgroup_chain", lambda controller: [one])
    assert machine.cpu().quota == 3.0


def test_file_systems_are_named(tmp_path: Path) -> None:
    assert machine.file_system("/proc") == "proc"
    assert machine.file_system(tmp_path) not in ("", "proc")


def test_mount_points_with_blanks_and_other_letters(ram_disk: Path) -> None:
    directory = ram_disk / "données à moi"
    directory.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    subprocess.run(["mount", "-t", "tmpfs", "none", str(directory)], check=True)
    try:
        assert machine.file_system(directory) == "tmpfs"
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_limits_are_numbers() -> None:
    limit = machine.memlock_limit()
    assert limit is None or limit >= 0
    assert machine.transparent_huge_pages() in ("always", "madvise", "never", "absent")
    assert machine.cpu().allowed == len(os.sched_getaffinity(0))
