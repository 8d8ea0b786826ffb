"""Tests that all files name the same version of a tool, and that the package has its metadata's version."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import infinity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CI = ROOT / ".ci" / "run"
MAKEFILE = ROOT / "Makefile"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    """The exact version of each tool that the `dev` extra pins, by the tool's name."""
    exact = [each.split("==") for each in project()["optional-dependencies"]["dev"] if "==" in each]
    return {name.strip(): version.strip() for name, version in exact}


def hooks() -> list[dict[str, Any]]:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    return [hook for repo in config["repos"] for hook in repo["hooks"]]


def tool(hook: dict[str, Any]) -> str:
    return str(hook["entry"]).split()[0]


def checks() -> dict[str, list[str]]:
    """Command lines of `make lint`, which CI runs, by the tool that they run."""
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE.read_text(), re.MULTILINE)
    assert recipe is not None
    found: dict[str, list[str]] = {}
    for line in recipe[1].splitlines():
        found.setdefault(line.split("| xargs ")[-1].split()[0], []).append(line.strip())
    return found


def test_tools_that_judge_style_and_types_have_exact_versions() -> None:
    assert set(pins()) == {"ruff", "mypy", "clang-format"}


@pytest.mark.parametrize("hook", hooks(), ids=lambda hook: hook["id"])
def test_a_hook_has_the_version_of_the_dev_extra(hook: dict[str, Any]) -> None:
    if hook["language"] == "system":
        # The hook runs the tool that `pip install ".[dev]"` installed.
        assert "additional_dependencies" not in hook
        assert tool(hook) in pins()
    else:
        assert hook["additional_dependencies"] == [f"{tool(hook)}=={pins()[tool(hook)]}"]


def test_hooks_and_make_lint_run_the_same_tools() -> None:
    assert {tool(hook) for hook in hooks()} == set(checks())


def test_hooks_and_make_lint_run_both_halves_of_ruff() -> None:
    in_hooks = {hook["entry"].split()[1] for hook in hooks() if tool(hook) == "ruff"}
    assert in_hooks == {line.split()[1] for line in checks()["ruff"]} == {"check", "format"}


def test_hooks_and_make_lint_format_the_same_native_files() -> None:
    (line,) = checks()["clang-format"]
    endings = set(re.findall(r"'\*(\.\w+)'", line))
    (pattern,) = (hook["files"] for hook in hooks() if tool(hook) == "clang-format")
    native = {path for folder in ("csrc", "tests") for path in (ROOT / folder).rglob("*.*") if path.is_file()}
    by_hook = {path for path in native if re.search(pattern, path.relative_to(ROOT).as_posix())}
    assert by_hook == {path for path in native if path.suffix in endings}
    assert {path.suffix for path in by_hook} == endings


def test_make_lint_installs_the_extra_that_has_the_pins() -> None:
    assert re.search(r"^lint:.*/with-test,dev", MAKEFILE.read_text(), re.MULTILINE)


@pytest.mark.skipif(not CI.exists(), reason="an sdist comes without .ci")
def test_ci_runs_readmes_second_command_and_make_lint() -> None:
    targets = re.findall(r"^commands (\w+)$", CI.read_text(), re.MULTILINE)
    assert targets == ["lint", "test"] and "make test" in (ROOT / "README.md").read_text()


def test_the_package_says_the_version_of_its_metadata() -> None:
    assert infinity.__version__ == project()["version"]


def test_every_license_file_is_there() -> None:
    missing = [name for name in project()["license-files"] if not (ROOT / name).is_file()]
    assert missing == []
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License\n")
