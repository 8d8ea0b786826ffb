"""Tests of benchmarks/bits.py, which trains small models and compares the bits of the results.

It compares this checkout of the package with another one, and names the cases whose bits differ.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import infinity
from infinity.gradients.device import DeviceUnits

pytestmark = pytest.mark.usefixtures("warm")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bits.py"
TWO = (
    "tied, nvme, eager, accumulate 1, unclipped, groups 1, bf16 with fp32 states, adamw",
    "custom, host, lazy, accumulate 4, clipped, groups 2, fp32 with fp32 states, adamw",
)


OLDEST = {"infinity.aio.Faults", "infinity.tiers.Tier", "infinity.tiers.tier.usable_device"}
"""Names inside the package that the benchmark's cases may import at module level.

Commit 9a250c9 has all of them, so the cases also run with the package of that commit or a later one.
"""


@pytest.fixture
def bits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(os.fspath(BENCHMARK.parent))
    return importlib.import_module("bits")


def checkout(directory: Path, more: str = "") -> Path:
    """Make an importable copy of the package in `directory`, by symbolic links, and return `directory`.

    more: source text that is appended to the copy's __init__.py.
    """
    package, ours = directory / "infinity", Path(infinity.__file__).parent
    package.mkdir(parents=True)
    for each in ours.iterdir():
        if each.name not in ("__init__.py", "__pycache__"):
            (package / each.name).symlink_to(each)
    (package / "__init__.py").write_text((ours / "__init__.py").read_text() + more)
    return directory


def compared(bits: ModuleType, directory: Path, against: Path, *names: str) -> int:
    """Run benchmarks/bits.py with `--against`, and return its exit code: 1 if any bits differ, else 0.

    directory: where pages are kept while the models train. against: the directory of the other copy of the
    package. names: the cases to train and to compare.
    """
    steps = ["--steps", "2", "--directory", str(directory)]
    return int(bits.main([*steps, "--against", str(against), "--case", *names]))


EDIT = """
_offload = offload


def offload(model, *arguments, **options):
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            parameter.data.view(-1)[0] += 2.0**-6
    return _offload(model, *arguments, **options)
"""


def test_the_same_package_has_the_same_bits(
    bits: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = checkout(tmp_path / "other")
    assert compared(bits, tmp_path, other, *TWO) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 cases have the same bits"
    assert list(tmp_path.iterdir()) == [other]


def test_another_bit_is_told_by_the_case_that_has_it(
    bits: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(bits, tmp_path, checkout(tmp_path / "other", EDIT), *TWO) == 1
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last == [f"differs: {TWO[0]}", "1 of 2 cases have the same bits"]


def test_a_directory_without_the_package(bits: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no package infinity that works") as ended:
        compared(bits, tmp_path, tmp_path, TWO[1])
    assert isinstance(ended.value.code, str)  # Python prints the text and exits with 1


@pytest.mark.parametrize("name", ["homes.py", "parity.py", "zoo.py", "../benchmarks/bits.py"])
def test_packages_of_older_commits_have_what_every_case_imports(name: str) -> None:
    """All names that the file `name` imports from the package at module level are in OLDEST.

    So the benchmark's cases can train with packages of older commits, which have these names. Imports inside
    functions are exempt, because comparisons on the CPU do not call these functions, or because the failure
    to import is reported.
    """
    found = set()
    for statement in ast.parse((Path(__file__).parents[1] / name).read_text()).body:
        if isinstance(statement, ast.ImportFrom):
            found |= {f"{statement.module}.{each.name}" for each in statement.names}
        elif isinstance(statement, ast.Import):
            found |= {each.name for each in statement.names}
    assert {each for each in found if each.startswith("infinity.")} <= OLDEST


def test_cases_are_told_apart_and_have_every_home(bits: ModuleType) -> None:
    names = [each.name for each in bits.cases(20)]
    assert len(set(names)) == len(names)
    assert set(TWO) < set(names)
    every = {(each.home, each.update) for each in bits.cases(20)}
    assert every == {(home, update) for home in bits.HOMES for update in ("lazy", "eager")}


def test_digests_are_of_what_the_case_says(
    bits: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case's digest, the hash of all bits of a training, depends on the format of the states.

    It does not depend on the tier where pages rest. Only cases named "device updates" make the device update
    parameters.
    """
    updated: list[int] = []
    update = DeviceUnits.update

    def counted(self: DeviceUnits, *arguments: Any) -> None:
        updated.append(1)
        update(self, *arguments)

    monkeypatch.setattr(DeviceUnits, "update", counted)

    def found(*names: str) -> list[str]:
        assert bits.main(["--steps", "2", "--directory", str(tmp_path), "--case", *names]) == 0
        digests = json.loads(capsys.readouterr().out.splitlines()[-1])
        return [digests[name] for name in names]

    rest = "lazy, accumulate 1, unclipped, groups 1, bf16 with {} states, adamw"
    cases = [
        f"transformer, {home}, " + rest.format(states)
        for home, states in (("nvme", "fp32"), ("unified", "fp32"), ("nvme", "int8"))
    ]
    one, same, other = found(*cases)
    assert one == same != other
    assert not updated
    found("device updates, transformer, device, " + rest.format("fp32"))
    assert updated


def test_no_such_case(bits: ModuleType) -> None:
    with pytest.raises(SystemExit) as ended:
        bits.parse(["--case", "nobody"])
    assert ended.value.code == 2
