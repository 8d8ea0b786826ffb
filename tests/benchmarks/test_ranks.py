"""Tests of benchmarks/ranks.py, which has several ranks train together.

A quick run reports all cases and leaves no file. Seconds are not checked, but losses and bytes are.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import two_nodes
import warm_python
from torch_releases import fsdp2_on_a_cpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATE = "100mbit"
"""Of the link between two nodes."""
sys.path.insert(0, str(BENCHMARKS))

import ranks  # noqa: E402
import turns  # noqa: E402
from peers import tcp  # noqa: E402
from peers.group import Group  # noqa: E402
from peers.process import ContenderFailed  # noqa: E402
from peers.task import Batches, Task  # noqa: E402


@pytest.fixture(autouse=True)
def without_deepspeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the benchmark's processes the import of `deepspeed` fails."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "deepspeed.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), *sys.path]))
    monkeypatch.setattr(subprocess, "Popen", warm_python.Popen)


def task_in(directory: Path, **changes: Any) -> Task:
    directory.mkdir()
    text = directory.parent / "text"
    text.write_bytes(bytes(range(256)) * 8)
    task = Task(
        contender="fsdp2",
        mode="cpu",
        decoder=asdict(turns.QUICK),
        decoder_file=str(turns.decoder_module.__file__),
        batch=1,
        seq=32,
        learning_rate=3e-3,
        clip=1.0,
        device="cpu",
        directory=str(directory),
        text=str(text),
        budgets={},
        states="fp32",
        update="lazy",
    )
    return replace(task, **changes)


def test_two_ranks_of_each_case_and_a_peer_that_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    cases = ["ours:3:ram", "ours:3:nvme", "ours:2:ram", "deepspeed:nvme"]
    code = ranks.main(["--quick", "--json", "--directory", str(disk), "--timeout", "60", "--case", *cases])
    assert list(disk.iterdir()) == []
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 1 and set(report["failures"]) == {"deepspeed:nvme"}
    assert "broken on purpose" in report["failures"]["deepspeed:nvme"]
    found = {name: each[0] for name, each in report["turns"].items()}
    assert list(found) == cases[:3]
    assert len({tuple(each["losses"]) for each in found.values()}) == 1, "homes and stages change no bit"
    settings = report["settings"]
    for each in found.values():
        assert len(each["seconds"]) == settings["steps"]
        assert len(each["losses"]) == settings["lead"] + settings["steps"]
        assert each["sent_bytes"] >= sum(each["facts"]["sent"].values()) > 0
        assert each["rss_steps"] > 0 and each["rss_built"] > 0
        assert each["facts"]["plan"]["activations"] > 0
    plans = {name: each["facts"]["plan"] for name, each in found.items()}
    assert set(plans["ours:3:ram"]["budgets"]) == {"host"}
    assert set(plans["ours:3:nvme"]["budgets"]) == {"host", "nvme"}
    assert plans["ours:3:ram"]["homes"]["host"] < plans["ours:2:ram"]["homes"]["host"]


@pytest.mark.slow
@pytest.mark.skipif(bool(two_nodes.missing(RATE)), reason=two_nodes.missing(RATE))
def test_two_nodes_with_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--json", "--directory", str(tmp_path), "--timeout", "60", "--link", RATE]
    cases = ["ours:3:nvme", "ours:3:nvme:flat"]
    assert ranks.main([*options, "--ranks", "4", "--case", *cases]) == 0
    turns = json.loads(capsys.readouterr().out.splitlines()[-1])["turns"]
    kept, flat = (turns[name][0] for name in cases)
    assert kept["losses"] == flat["losses"]
    for turn in (kept, flat):
        assert 0 < turn["crossed_bytes"] < turn["link_bytes"] < 2 * turn["crossed_bytes"]
    assert kept["crossed_bytes"] < flat["crossed_bytes"]


@fsdp2_on_a_cpu
def test_ranks_of_a_peer_have_their_own_batches_and_the_same_model(tmp_path: Path) -> None:
    tasks = [task_in(tmp_path / str(rank), rank=rank, ranks=2) for rank in range(2)]
    with Group("fsdp2", tasks, sys.executable, 60, 1) as group:
        group.ready()
        replies = group.ask("ranked", lead=1, steps=1)
        group.finish()
    first, second = (reply["losses"] for reply in replies)
    assert first != second and all(0 < loss < 7 for loss in (*first, *second))
    assert all(reply["sent_bytes"] > 0 for reply in replies)


def test_batches_of_all_ranks_are_those_of_one(tmp_path: Path) -> None:
    together = Batches(task_in(tmp_path / "one", batch=2))
    each = [Batches(task_in(tmp_path / str(rank), rank=rank, ranks=2)) for rank in range(2)]
    for _ in range(3):
        tokens, targets = together.next()
        apart = [batches.next() for batches in each]
        assert torch.equal(torch.cat([pair[0] for pair in apart]), tokens)
        assert torch.equal(torch.cat([pair[1] for pair in apart]), targets)


def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, which is no contender, for half an hour if nobody ends it."""
    tasks = [task_in(tmp_path / "0", ranks=2), task_in(tmp_path / "1", rank=1, ranks=2, contender="absent")]
    with (
        Group("fsdp2", tasks, sys.executable, 300, 1) as group,
        pytest.raises(ContenderFailed, match=r"fsdp2 rank 1 ended with 1(.|\n)*peers\.absent"),
    ):
        group.ready()


def test_bytes_sent_are_those_of_the_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with mine, theirs:
            mine.sendall(b"before")
            assert theirs.recv(16) == b"before"
            before = tcp.sent()
            mine.sendall(bytes(1000))
            assert len(theirs.recv(1000, socket.MSG_WAITALL)) == 1000
            assert tcp.since(before) == 1000


def test_figures_of_a_turn_are_those_of_its_ranks() -> None:
    one = {
        "seconds": [1.0, 5.0, 2.0],
        "losses": [4.0, 2.0],
        "sent_bytes": 10,
        "link_bytes": 0,
        "rss_steps": 3,
        "rss_built": 9,
    }
    two = {
        "seconds": [2.0, 4.0, 1.0],
        "losses": [6.0, 1.0],
        "sent_bytes": 20,
        "link_bytes": 6,
        "rss_steps": 4,
        "rss_built": 8,
    }
    facts = {"of": 0, "crossed": 4}
    assert ranks.turn_of([one | {"facts": facts}, two | {"facts": {"of": 1, "crossed": 8}}]) == {
        "seconds": [2.0, 5.0, 2.0],
        "step_s": 2.0,
        "losses": [5.0, 1.5],
        "sent_bytes": 15,
        "link_bytes": 3,
        "crossed_bytes": 6,
        "rss_steps": 4,
        "rss_built": 9,
        "facts": facts,
    }


def test_medians_and_ratios_of_rounds() -> None:
    def turn(number: int, *seconds: float) -> dict[str, Any]:
        figures = {
            "sent_bytes": number,
            "link_bytes": 0,
            "crossed_bytes": number,
            "rss_steps": 7,
            "rss_built": 8,
            "losses": [3.0, 2.0 - number],
        }
        facts = {"facts": {"plan": {"ram_bytes": 7 - number}}}
        return figures | facts | {"round": number, "seconds": list(seconds), "step_s": seconds[0]}

    found = {
        "ours:3:ram": [turn(0, 2.0, 9.0), turn(1, 3.0, 4.0), turn(2, 4.0, 4.0)],
        "ours:3:nvme": [turn(1, 6.0)],
        "fsdp2": [turn(0, 4.0), turn(1, 3.0)],
    }
    assert ranks.medians(found["ours:3:ram"]) == {
        "step_s": 4.0,
        "sent_bytes": 1,
        "link_bytes": 0,
        "crossed_bytes": 1,
        "rss_steps": 7,
        "rss_built": 8,
        "loss": 0.0,
        "plan_ratio": 7 / 6,
    }
    assert ranks.ratios_to_peers(found) == {
        "fsdp2": {
            "ours:3:ram": {"median": 1.5, "rounds": [2.0, 1.0]},
            "ours:3:nvme": {"median": 0.5, "rounds": [0.5]},
        }
    }


@pytest.mark.parametrize(
    "wrong",
    [
        ["--steps", "0"],
        ["--ranks", "1"],
        ["--case", "ours:4:ram"],
        ["--link", "fast"],
        ["--link", "1gbit", "--ranks", "3"],
    ],
)
def test_options_that_make_no_sense(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        ranks.parse(["--directory", str(tmp_path), *wrong])
    assert ended.value.code == 2
