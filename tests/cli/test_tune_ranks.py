"""Tests of `infinity tune` on several ranks: it measures the network between nodes, for `infinity plan`."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from rank_processes import free_port
from tiny_job import PATIENCE, TinyJob, ended

from infinity.distributed.node_link import _source
from infinity.planning.machine_rates import keep_network, network_rate
from infinity.system.cache import cache_file

pytestmark = pytest.mark.usefixtures("warm")


def tune(job: TinyJob, nodes: list[int], cache: Path, *options: str) -> list[tuple[int, str, str]]:
    """Run `infinity tune` on ranks that believe to be on these nodes: (exit code, stdout, stderr) of each."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, node in enumerate(nodes):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(len(nodes)),
                "RANK": str(rank),
                "GROUP_RANK": str(node),
                "LOCAL_RANK": str(nodes[:rank].count(node)),
                "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                "INFINITY_RANK_TIMEOUT": str(PATIENCE),
                "XDG_CACHE_HOME": str(cache / str(node)),
            }
            processes.append(job.start("tune", "--json", *options, env=environment))
            stack.enter_context(ended(processes[-1]))
        said = [each.communicate(timeout=PATIENCE) for each in processes]
        return [(each.returncode, *texts) for each, texts in zip(processes, said, strict=True)]


def test_the_network_is_measured_and_planned_with(
    job: TinyJob, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ["--ranks", 2, "--nodes", 2]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "1"))
    before = job.plan(capsys, *cluster)["ranks"]["network"]
    assert (before["link"], before["seconds"], before["measured"]) == (None, None, False)
    cache_file("machine_rates.json").unlink(missing_ok=True)

    (code, stdout, stderr), second = tune(job, [0, 1], tmp_path)
    assert (code, *second) == (0, 0, "", ""), stderr
    found = json.loads(stdout)
    assert (found["nodes"], found["ranks"], found["saved"]) == (2, 2, True)
    assert "into the slowest of 2 nodes" in stderr
    for node in (0, 1):  # each node keeps it
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(node)))
        assert network_rate() == found["rate"] > 0
    after = job.plan(capsys, *cluster)["ranks"]["network"]
    assert (after["link"], after["measured"]) == (found["rate"], True)
    assert after["seconds"] == after["between_nodes"] / found["rate"]
    planned = job.plan(capsys, *cluster, "--link", "8Gbit")
    given = planned["ranks"]["network"]
    assert (given["link"], given["measured"]) == (1e9, False)
    assert planned["prediction"]["network"] == given["seconds"]


@pytest.mark.parametrize(
    ("nodes", "options", "cause"),
    [([0, 0], [], "All ranks run on one node"), ([0, 1], ["--size", "1GiB"], "an option is about disks")],
)
def test_what_cannot_be_measured_is_refused(
    nodes: list[int], options: list[str], cause: str, job: TinyJob, tmp_path: Path
) -> None:
    found = tune(job, nodes, tmp_path, *options)
    assert [code for code, _, _ in found] == [2, 2]
    assert sum(cause in stderr for _, _, stderr in found) == 1
    assert not list(tmp_path.glob("*/infinity/machine_rates.json"))


def test_each_rank_pulls_from_the_next_node() -> None:
    assert [_source([0, 0, 1, 1], rank) for rank in range(4)] == [2, 3, 0, 1]
    assert [_source([0, 1, 1, 2], rank) for rank in range(4)] == [1, 3, 3, 0]


def test_the_last_measurement_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    assert network_rate() is None
    assert keep_network(2e9)
    assert keep_network(1e9)
    assert network_rate() == 1e9
