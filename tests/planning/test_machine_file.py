"""Tests of machine files: plans for a machine that is not here, with the file's sizes and rates, and refusals
of files that are none.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.planning import machine_file
from infinity.planning.machine_file import Machine, check_writable
from infinity.planning.planner import Available
from infinity.tiers import Tier

SHIPPED = ["cloud-l4", "h100-sxm-8", "rtx4090-desktop"]
GB = 10**9
CPU = Machine(
    name="a computer",
    measured=True,
    host_memory=16 * GB,
    flops={"bf16": 1e11, "fp16": 1e10, "fp32": 5e10},
    compute_memory=1e10,
    host_stream=2e10,
    disk={"read": 2e9, "write": 1e9, "mixed": 1.5e9},
)
CUDA = replace(CPU, device_memory=8 * GB, compute_capability=[9, 0], device_updates=True, link=2e10)


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))


def planned(machine: Any, **options: Any) -> infinity.Plan:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    inputs = (torch.ones(64, 256),)
    return infinity.plan(trained, optimizer, example_inputs=inputs, machine=machine, **options)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a measurement of this machine fail."""
    monkeypatch.setattr("infinity.api.measure_rates", None)
    monkeypatch.setattr(Available, "now", None)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_plan_for_a_gpu_that_is_not_here(name: str) -> None:
    machine = Machine.read(name)
    made = planned(name, device="cuda", budget=infinity.Budget(nvme={"/not/here": "1TiB"}))
    assert made.device == torch.device("cuda", 0)
    assert machine.device_memory is not None
    assert 0.8 * machine.device_memory < made.budgets[Tier.DEVICE] < machine.device_memory
    assert 0.8 * machine.host_memory < made.budgets[Tier.HOST] < machine.host_memory
    assert made.headroom > 0 and made.activations is not None
    assert made.prediction is not None and made.prediction.compute > 0 and not made.prediction.measured
    assert f"machine: {machine.name}: published figures, not measured" in str(made)
    assert "predicted" in str(made)


@pytest.mark.parametrize("name", SHIPPED)
def test_figures_that_come_with_the_package_have_sources(name: str) -> None:
    machine = Machine.read(name)
    assert not machine.measured
    said = " ".join(source.split(":")[0] for source in machine.sources)
    for figure in ("device_memory", "host_memory", "flops", "compute_memory", "host_stream", "link", "disk"):
        assert figure in said


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for number, machine in enumerate((CPU, CUDA)):
        machine.write(tmp_path / str(number))
        assert asked(tmp_path / str(number)) == asked_of(machine)
    made = planned(tmp_path / "0")
    assert (made.device.type, made.unified) == ("cpu", True)
    assert "machine: a computer: as measured there" in str(made)
    assert made.work is not None
    assert made.prediction == made.predict() and made.speeds == CPU.rates(0)


def asked(path: Path) -> dict[str, Any]:
    return asked_of(Machine.read(path))


def asked_of(machine: Machine) -> dict[str, Any]:
    return {**vars(machine), "sources": list(machine.sources)}


def test_ranks_of_a_machine_share_its_ram_and_disks_but_no_device() -> None:
    alone, shared = CUDA.rates(2), CUDA.rates(2, ranks=4)
    assert alone.disk["read"] == 4e9 and shared.disk["read"] == 1e9
    assert shared.host_stream == alone.host_stream / 4
    assert (shared.link, shared.flops) == (alone.link, alone.flops)
    assert Available.of(CUDA, 4).host == Available.of(CUDA).host // 4
    assert Available.of(CUDA, 4).device == Available.of(CUDA).device


@pytest.mark.parametrize("updates", [True, False])
def test_the_device_updates_if_the_file_says_so(tmp_path: Path, updates: bool) -> None:
    replace(CUDA, device_updates=updates).write(tmp_path / "file")
    assert bool(planned(tmp_path / "file").updated_on_device) == updates


def test_another_device_or_a_missing_disk_is_refused(tmp_path: Path) -> None:
    replace(CPU, disk=None).write(tmp_path / "file")
    with pytest.raises(ConfigError, match="has the rates of cpu"):
        planned(tmp_path / "file", device="cuda")
    with pytest.raises(ConfigError, match="has no disk"):
        planned(tmp_path / "file", budget=infinity.Budget(nvme={"/not/here": "1TiB"}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("unknown", 1),
        ("host_memory", None),
        ("host_memory", 16e9),
        ("host_stream", 0),
        ("host_stream", float("inf")),
        ("measured", "false"),
        ("compute_capability", "9.0"),
        ("link", "fast"),
        ("link", None),
        ("flops", {"bf16": 1e12}),
        ("disk", {"read": 1e9, "write": -1.0, "mixed": 1e9}),
    ],
)
def test_what_is_no_machine_file(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "file"
    CUDA.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match="is no machine file"):
        Machine.read(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', "[" * 100_000])
def test_what_is_no_json_of_a_machine(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match="is no machine file"):
        Machine.read(tmp_path / "file")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"or one of {', '.join(SHIPPED)}"):
        Machine.read(tmp_path / "absent")
    for path in (tmp_path, tmp_path / "absent" / "file"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_writable(path)
    check_writable(tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_the_files_come_with_the_package() -> None:
    assert sorted(each.stem for each in machine_file._SHIPPED.iterdir()) == SHIPPED


def test_the_choice_of_updates_follows_the_file(tmp_path: Path) -> None:
    """States in slow RAM are updated under the backward, too, where the number of backwards is declared."""
    path = str(tmp_path / "file")
    slow = replace(CUDA, device_updates=False, host_stream=1e8, flops=dict.fromkeys(CUDA.flops, 1e9))
    slow.write(path)
    smallest = planned(path, device="cuda").smallest
    options = {"device": "cuda", "budget": infinity.Budget(device=smallest[Tier.DEVICE], host="1GiB")}
    assert planned(path, accumulation=1, **options).update == "speculative"
    assert planned(path, **options).update == "lazy"
    assert planned(path, accumulation=1, update="lazy", **options).update == "lazy"
