"""Tests of I/O settings that `infinity tune` kept: used for the disk that was tuned, ignored if unusable."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from infinity import aio
from infinity.errors import ConfigError, StorageError
from infinity.system import io_settings, machine
from infinity.system.cache import cache_file
from infinity.system.io_settings import DEFAULT, DiskProfile, IoSettings, Profile, StripeProfile
from infinity.tiers import NvmeTier

MIB = 1 << 20
FOUND = DiskProfile(
    settings=IoSettings("threads", MIB, 8),
    path="/somewhere",
    read=3e9,
    write=2e9,
    mixed=2.5e9,
    at="2026-11-21T12:00:00+00:00",
    facts={"cpus": 2},
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.delenv("INFINITY_AIO", raising=False)


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Keep the settings FOUND for a disk, as `infinity tune` does, and return a directory on it."""
    profile = Profile()
    profile.keep_disk(tmp_path, FOUND)
    assert profile.save()
    return tmp_path


def test_a_disk_that_was_never_tuned_has_the_defaults(tmp_path: Path) -> None:
    assert Profile().note is None
    assert io_settings.settings_for(tmp_path) == DEFAULT
    with io_settings.open_engine(tmp_path) as engine:
        assert (engine.facts.block_bytes, engine.facts.depth) == (DEFAULT.block_bytes, DEFAULT.depth)


def test_findings_come_back_as_they_were_kept(tuned: Path) -> None:
    assert Profile().disk(tuned) == FOUND
    (tuned / "other directory").mkdir()
    assert (
        Profile().disk(tuned / "other directory") == FOUND
    )  # settings belong to the disk, not to the directory


@pytest.mark.parametrize(
    "other",
    [
        lambda patch: patch.setattr(machine, "kernel", lambda: "7.0.0"),
        lambda patch: patch.setattr(machine, "file_system", lambda path: "xfs"),
        lambda patch: patch.setattr(io_settings.platform, "node", lambda: "elsewhere"),
    ],
)
def test_another_kernel_file_system_or_host_was_not_tuned(tuned: Path, monkeypatch, other) -> None:
    other(monkeypatch)
    assert Profile().disk(tuned) is None


def test_engines_and_the_tier_are_as_tuned_unless_told_otherwise(tuned: Path) -> None:
    with io_settings.open_engine(tuned) as engine:
        assert (engine.facts.backend, engine.facts.block_bytes, engine.facts.depth) == ("threads", MIB, 8)
    with io_settings.open_engine(tuned, depth=3) as engine:
        assert (engine.facts.backend, engine.facts.block_bytes, engine.facts.depth) == ("threads", MIB, 3)
    with NvmeTier({os.fspath(tuned): MIB}, MIB) as tier:
        assert tier.engines[0].facts.backend == "threads"
        assert tier.engines[0].facts.depth == 8


def test_findings_about_one_engine_are_not_used_for_another(tuned: Path, monkeypatch) -> None:
    other = next((each.name for each in aio.probe(tuned).backends[:2] if each.ok), None)
    if other is None:
        pytest.skip("no engine but threads works here")
    with io_settings.open_engine(tuned, backend=other) as engine:
        assert (engine.facts.backend, engine.facts.depth) == (other, DEFAULT.depth)
    monkeypatch.setenv("INFINITY_AIO", other)
    with io_settings.open_engine(tuned) as engine:
        assert (engine.facts.backend, engine.facts.depth) == (other, DEFAULT.depth)
    monkeypatch.setenv("INFINITY_AIO", "threads")
    assert io_settings.settings_for(tuned) == FOUND.settings
    monkeypatch.setenv("INFINITY_AIO", "spdk")
    with pytest.raises(ConfigError, match="spdk"):
        io_settings.open_engine(tuned)


def test_a_tuned_engine_that_works_no_more_is_replaced(tuned: Path, monkeypatch) -> None:
    real = io_settings.Engine

    def without_threads(*args, backend: str, **options) -> aio.Engine:
        if backend == "threads":
            raise ConfigError("It does not work.", "Use another.")
        return real(*args, backend=backend, **options)

    monkeypatch.setattr(io_settings, "Engine", without_threads)
    with io_settings.open_engine(tuned) as engine:
        assert engine.facts.depth == DEFAULT.depth


def test_a_directory_that_is_not_there_is_the_engines_to_refuse(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent"):
        io_settings.open_engine(tmp_path / "absent")


def spoilt() -> list[str]:
    key = "host 8:1 ext4 Linux 6"
    disk = {**FOUND.__dict__, "settings": FOUND.settings.__dict__}
    whole = {"format": io_settings.FORMAT, "disks": {key: disk}, "stripes": {}}
    shares = {"shares": [0.5, 0.5], "mixed": 1e9, "at": ""}
    return [
        "",
        "[]",
        "\x00",
        json.dumps({**whole, "format": io_settings.FORMAT + 1}),
        json.dumps({**whole, "disks": {key: 3}}),
        json.dumps({**whole, "disks": {key: {**disk, "colour": "red"}}}),
        json.dumps({**whole, "disks": {key: {**disk, "settings": {"backend": "spdk"}}}}),
        json.dumps({**whole, "disks": {key: {**disk, "settings": {**disk["settings"], "depth": 0}}}}),
        json.dumps({**whole, "disks": {key: {**disk, "settings": {**disk["settings"], "block_bytes": 5}}}}),
        json.dumps({**whole, "stripes": {key: shares}}),
        json.dumps({**whole, "stripes": {f"{key} + {key}": {**shares, "shares": [1.5, -0.5]}}}),
    ]


@pytest.mark.parametrize("text", spoilt())
def test_a_profile_that_cannot_be_used_is_ignored_with_a_note(tmp_path: Path, text: str) -> None:
    path = cache_file("tune.json")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    note = Profile().note
    assert note is not None
    assert os.fspath(path) in note
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert io_settings.settings_for(tmp_path) == DEFAULT
    profile = Profile()
    profile.keep_disk(tmp_path, FOUND)
    assert profile.save()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert io_settings.settings_for(tmp_path) == FOUND.settings


def test_shares_of_disks_do_not_depend_on_their_order(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(io_settings, "disk_key", os.fspath)
    found = StripeProfile(shares=(0.5, 0.2, 0.3), mixed=1e9, at="")
    profile = Profile()
    profile.keep_stripes(["c", "a", "b"], found)
    assert profile.save()
    assert Profile().stripes(["c", "a", "b"]) == found
    assert Profile().stripes(["a", "b", "c"]) == replace(found, shares=(0.2, 0.3, 0.5))
    assert io_settings.tuned_shares(["b", "c", "a"]) == (0.3, 0.5, 0.2)
    assert io_settings.tuned_shares(["a", "b"]) is None


def test_tuned_shares_are_how_the_tier_is_striped(tmp_path: Path, monkeypatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.mkdir()
    monkeypatch.setattr(io_settings, "disk_key", os.path.basename)
    profile = Profile()
    profile.keep_stripes([first, second], StripeProfile(shares=(0.25, 0.75), mixed=1e9, at=""))
    profile.save()
    budgets = {os.fspath(path): 64 * MIB for path in (first, second)}
    with NvmeTier(budgets, 32 * MIB) as tier:
        assert tier.striping.weights == (1, 3)


def test_a_cache_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    assert not Profile().save()
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "there"))
    (tmp_path / "there" / "infinity" / "tune.json").mkdir(parents=True)
    assert not Profile().save()
    assert [each.name for each in (tmp_path / "there" / "infinity").iterdir()] == ["tune.json"]
