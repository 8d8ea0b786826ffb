"""Tests of benchmarks/gpu.sh, run with a fake Python interpreter that records its calls.

What a part of the script runs must come in its order and with the right arguments, what fails must not stop
the next, and what the machine has no room for must be left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
sys.path.insert(0, str(SCRIPT.parent))

import gpu_idle  # noqa: E402
import gpu_probe  # noqa: E402
import train  # noqa: E402

PARTS = {
    1: ["facts", "driver", "host", "kernels", "cuda-core", "parity", "step-926m"],
    2: ["7b-offload", "7b-offload-eager", "7b"],
    3: ["idle-926m", "train-926m", "cuda-rest", "parity-rest"],
    4: ["train-7b", "train-14b", "train-7b-nvme", "ranks-926m", "doctor", "tune", "cpu_adam"],
}
"""What the parts of benchmarks/gpu.sh run, in order, the most valuable first. "memcheck" and "aio" are
missing here, because the script leaves them out where compute-sanitizer or fio is not installed.
"""
OPTIONAL = {"memcheck", "aio"}


@dataclass(frozen=True)
class Done:
    code: int
    summary: list[str]
    calls: list[str]
    """The arguments of each call of the fake interpreter, one line a call."""
    results: Path
    swap: Path

    def calls_of(self, program: str) -> list[list[str]]:
        """The arguments of each call of a program of benchmarks/."""
        return [shlex.split(line)[1:] for line in self.calls if f"/{program}.py" in line]

    def named(self, word: str) -> list[str]:
        """The names on those lines of the summary that begin with `word`."""
        lines = (line.removeprefix(word).split() for line in self.summary if line.startswith(word))
        return [words[0].rstrip(":") for words in lines]


def run(
    tmp_path: Path,
    part: object,
    *,
    failing: str = "nothing of the kind",
    **environment: str,
) -> Done:
    """Run a part of benchmarks/gpu.sh with a fake interpreter, and return what the script did.

    failing: every call of the interpreter with this text in its arguments exits with 1. environment:
    variables that are set for the script.
    """
    compiled = "compiled CPUAdamBuilder\\ncompiled AsyncIOBuilder\\n"
    results, swap, calls = tmp_path / "results", tmp_path / "swap", tmp_path / "calls"
    swap.mkdir()
    calls.touch()
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
printf '%s\\n' "$(echo "$@" | tr '\\n' ' ')" >>"{calls}"
case "$*" in *"{failing}"*) exit 1 ;; *op_builder*) printf '{compiled}' ;; esac
echo '{{"figures": 1}}'
"""
    )
    python.chmod(0o755)
    room = {"RAM_GIB": "500", "DISK_GIB": "500", "GPU_GIB": "140"}
    done = subprocess.run(
        ["bash", str(SCRIPT), str(part), str(results)],
        env=os.environ | {"PYTHON": str(python), "SWAP": str(swap)} | room | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    summary = results / f"{part}.summary"
    lines = summary.read_text().splitlines() if summary.exists() else []
    return Done(done.returncode, lines, calls.read_text().splitlines(), results, swap)


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    done = run(tmp_path, 1, failing="is_available")
    assert done.code == 3 and not done.results.exists() and len(done.calls) == 2


def test_a_part_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, 5)
    assert done.code == 2 and not done.calls and not done.results.exists()


@pytest.mark.parametrize("part", PARTS)
def test_all_that_a_part_runs_passes_and_leaves_few_results(part: int, tmp_path: Path) -> None:
    done = run(tmp_path, part)
    assert done.code == 0
    assert [name for name in done.named("passed") if name not in OPTIONAL] == PARTS[part]
    lines = [json.loads(line) for line in (done.results / f"{part}.json").read_text().splitlines()]
    assert [each["of"] for each in lines if each["of"] not in OPTIONAL] == PARTS[part]
    assert all(each["found"] == {"figures": 1} for each in lines)
    assert f"== {PARTS[part][0]} (" in (done.results / f"{part}.log").read_text()
    assert len(list(done.results.iterdir())) <= 8
    assert list(done.swap.iterdir()) == []


def test_what_part_1_asks(tmp_path: Path) -> None:
    done = run(tmp_path, 1, RAM_GIB="64")
    asked = [gpu_probe.parse(each) for each in done.calls_of("gpu_probe")]
    assert [each.command for each in asked] == ["facts", "driver", "host", "kernels", "step"]
    assert asked[2].sizes == [1, 8, 32, 56]


def test_7b_has_the_placement_of_zero_offload(tmp_path: Path) -> None:
    done = run(tmp_path, 2)
    asked = [gpu_probe.parse(each) for each in done.calls_of("gpu_probe")]
    assert [(each.device, each.host, each.update, each.clip) for each in asked] == [
        ("48GiB", "94GiB", "lazy", 1.0),
        ("48GiB", "94GiB", "eager", 0.0),
        (None, None, "lazy", 1.0),
    ]
    assert {(each.model, each.batch, each.seq) for each in asked} == {("7b", 4, 1024)}


def test_trainings_have_their_peers_and_their_time(tmp_path: Path) -> None:
    every = ["deepspeed:cpu", "deepspeed:nvme", "fsdp2", "torch:fused"]
    expected = {
        3: [("926m", 105, every)],
        4: [("7b", 155, ["deepspeed:cpu"]), ("14b", 65, []), ("7b", 35, [])],
    }
    for part, trainings in expected.items():
        (tmp_path / str(part)).mkdir()
        done = run(tmp_path / str(part), part)
        jobs = [train.parse(each)[0] for each in done.calls_of("train")]
        peers = [[spec.name for spec in job.specs if not spec.ours] for job in jobs]
        assert [(job.model, job.seconds) for job in jobs] == [each[:2] for each in trainings]
        assert peers == [each[2] for each in trainings]
        if part == 3:
            (idle,) = (gpu_idle.parse(each) for each in done.calls_of("gpu_idle"))
            assert (idle.model, idle.device) == ("926m", "cuda")
            assert idle.timeline.parent == idle.trace.parent == done.results


def test_every_test_of_a_gpu_is_in_a_part(tmp_path: Path) -> None:
    """Tests that need a GPU have the mark "cuda", and the parts' folders and words leave none of them out."""
    asked = []
    for part in (1, 3):
        (tmp_path / str(part)).mkdir()
        asked += [line for line in run(tmp_path / str(part), part).calls if "-n 0" in line]
    chosen = [line for line in asked if "-k edges" not in line]
    assert len(chosen) == 4 and all("-m cuda and not slow" in line for line in chosen)
    rest = [line.partition("cuda and not slow")[2] for line in chosen]
    paths = [found for line in rest for found in re.findall(r"(--ignore )?\S*?/(tests\S*)", line)]
    taken = [path for ignored, path in paths if not ignored]
    parity = "tests/test_parity.py"
    assert taken == ["tests/tiers", "tests/device_update", parity, "tests", parity]
    assert {path for ignored, path in paths if ignored} == set(taken) - {"tests"}
    words = [line.partition("-k ")[2].strip() for line in chosen]
    assert words == ["", "transformer", "", "not transformer"]


def test_what_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    done = run(tmp_path, 4, failing="--model 14b")
    assert done.code == 1
    assert any(line.startswith("failed    train-14b with 1") for line in done.summary)
    assert [name for name in done.named("passed") if name != "aio"] == [
        name for name in PARTS[4] if name != "train-14b"
    ]


def test_without_a_package_that_can_be_built_nothing_is_run(tmp_path: Path) -> None:
    done = run(tmp_path, 1, failing="import infinity")
    assert done.code == 1 and done.named("failed") == ["build"]
    assert sum("pip wheel" in line for line in done.calls) == 1


def test_what_the_machine_has_no_room_for_is_left_out(tmp_path: Path) -> None:
    done = run(tmp_path, 4, RAM_GIB="128", DISK_GIB="64", GPU_GIB="78")
    assert done.code == 0
    left = [name for name in done.named("left out") if name.startswith("train")]
    assert left == ["train-14b", "train-14b-on-less", "train-7b-nvme"]


def test_14b_is_placed_by_what_the_gpu_has(tmp_path: Path) -> None:
    done = run(tmp_path, 4, GPU_GIB="78")
    (job,) = [found for each in done.calls_of("train") if (found := train.parse(each)[0]).model == "14b"]
    assert [(spec.device, spec.host, spec.nvme) for spec in job.specs] == [("70GiB", "84GiB", "62GiB")]
