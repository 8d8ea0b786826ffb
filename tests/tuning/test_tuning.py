"""Tests of `infinity tune` on real directories: test files, report, and the settings that it keeps.

It must also refuse unusable directories and options before it measures, and leave no file behind.
"""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from infinity import aio, cli
from infinity.errors import ConfigError, StorageError, StorageFull
from infinity.planning import machine_rates
from infinity.planning.machine_file import Machine
from infinity.system import io_settings, machine
from infinity.system.cache import cache_file
from infinity.system.directory import nameless_file
from infinity.system.io_settings import DEFAULT, IoSettings
from infinity.tiers import NvmeTier, trial_file
from infinity.tiers.trial_file import MODES, Memory, TestFile
from infinity.tuning import tune

MIB = 1 << 20


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make sweeps short, on small files, and give each test a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("INFINITY_AIO", raising=False)
    monkeypatch.setattr(tune, "_SECONDS", 0.3)
    monkeypatch.setattr(tune, "_STRIPES_SECONDS", 0.01)
    monkeypatch.setattr(tune, "BLOCKS", (256 << 10, MIB))
    monkeypatch.setattr(tune, "DEPTHS", (4, 16))
    monkeypatch.setattr(tune, "SLICE_SECONDS", 0.002)
    monkeypatch.setattr(tune, "_FILE_BYTES", trial_file.SMALLEST)
    monkeypatch.setattr(tune, "_IN_FLIGHT", trial_file.SMALLEST)
    monkeypatch.setattr(tune, "stream_speed", lambda: 10e9)


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory(trial_file.SMALLEST)


# ---- the file -----------------------------------------------------------------------------------


def test_the_file_has_no_name_and_its_room_comes_back(tmp_path: Path, memory: Memory) -> None:
    with TestFile(os.fspath(tmp_path), trial_file.SMALLEST, memory, DEFAULT) as file:
        assert list(tmp_path.iterdir()) == []
        assert file.nbytes == os.stat(file.path).st_size == trial_file.SMALLEST
        assert os.stat(file.path).st_blocks * 512 >= trial_file.SMALLEST
        descriptor = int(file.path.rpartition("/")[2])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_every_byte_of_the_file_is_written_and_incompressible(tmp_path: Path, memory: Memory) -> None:
    with (
        TestFile(os.fspath(tmp_path), trial_file.SMALLEST + 12288, memory, DEFAULT) as file,
        open(file.path, "rb") as found,
    ):
        while block := found.read(MIB):
            values = torch.frombuffer(bytearray(block), dtype=torch.uint8)
            assert torch.bincount(values.long(), minlength=256).min() > 0.2 * len(block) / 256


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_a_trial_moves_what_it_says(
    tmp_path: Path, memory: Memory, monkeypatch, mode: str, backend: str
) -> None:
    counted: list[aio.EngineStats] = []
    close = aio.Engine.__exit__

    def closing(engine: aio.Engine, *error) -> None:
        counted.append(engine.stats)
        close(engine, *error)

    with TestFile(os.fspath(tmp_path), trial_file.SMALLEST, memory, DEFAULT) as file:
        monkeypatch.setattr(aio.Engine, "__exit__", closing)
        assert file.rate(IoSettings(backend, MIB, 4), mode, 0.01).steady > 1e6
    (stats,) = counted
    assert stats.in_flight_peak == 4
    reads, writes = stats.read_bytes, stats.write_bytes
    assert (
        stats.read_transfers + stats.write_transfers == (reads + writes) // MIB
    )  # the read is cut into blocks
    assert {"read": not writes, "write": not reads, "mixed": abs(reads - writes) <= trial_file.REQUEST_BYTES}[
        mode
    ]
    if file.direct:
        assert stats.buffered_bytes == 0


def test_trials_go_on_where_the_last_one_ended(tmp_path: Path, memory: Memory) -> None:
    with TestFile(os.fspath(tmp_path), trial_file.SMALLEST, memory, DEFAULT) as file:
        offsets = []

        class Spy:
            def read(self, buffer: object, offset: int) -> None:
                offsets.append(offset)

            write = read

        requests = trial_file.REQUEST_BYTES
        for count in (3, 7):
            found = file.requests(Spy(), "read", requests)  # type: ignore[arg-type]
            for _ in range(count):
                next(found)
            found.close()
        assert max(offsets) + requests == trial_file.SMALLEST
        assert offsets[:4] == [0, requests, 2 * requests, 3 * requests]


def test_a_slow_disk_gets_a_smaller_file(tmp_path: Path, memory: Memory) -> None:
    with TestFile(os.fspath(tmp_path), 4 * trial_file.SMALLEST, memory, DEFAULT, seconds=0.0) as file:
        assert file.nbytes == trial_file.SMALLEST


def test_without_nameless_files_one_with_a_name_is_gone_at_once(
    tmp_path: Path, memory: Memory, monkeypatch
) -> None:
    real = os.open

    def no_tmpfile(path, flags, *mode):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", no_tmpfile)
    with TestFile(os.fspath(tmp_path), trial_file.SMALLEST, memory, DEFAULT) as file:
        assert list(tmp_path.iterdir()) == []
        assert file.rate(IoSettings("threads", MIB, 4), "read", 0.001).whole > 0


# ---- what is refused ----------------------------------------------------------------------------


def test_directories_that_cannot_hold_the_file(tmp_path: Path, ram_disk: Path) -> None:
    (tmp_path / "file").touch()
    for path, number in ((tmp_path / "absent", errno.ENOENT), (tmp_path / "file", errno.ENOTDIR)):
        with pytest.raises(StorageError) as caught:
            tune.tune([os.fspath(path)])
        assert caught.value.errno == number
    with pytest.raises(StorageError, match="tmpfs"):
        tune.tune([os.fspath(ram_disk)])
    assert not cache_file("tune.json").exists()


def test_a_read_only_directory(tmp_path: Path, monkeypatch) -> None:
    def refuse(*arguments):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="read-only"):
        nameless_file(os.fspath(tmp_path))


@pytest.mark.parametrize("size", [None, "64MiB"])
def test_a_full_disk(small_disk: Path, size: str | None) -> None:
    with pytest.raises(StorageFull) as caught:
        tune.tune([os.fspath(small_disk)], size=size)
    assert "free" in caught.value.cause
    assert [each.name for each in small_disk.iterdir()] == ["lost+found"]


def test_sizes_and_paths_that_make_no_sense(tmp_path: Path, monkeypatch) -> None:
    path = os.fspath(tmp_path)
    for paths, options in (
        ([], {}),
        ([path, f"{path}/."], {}),
        ([path], {"size": "1MiB"}),
        ([path], {"size": "2 GB"}),
    ):
        with pytest.raises(ConfigError):
            tune.tune(paths, **options)
    monkeypatch.setenv("INFINITY_AIO", "spdk")
    with pytest.raises(ConfigError, match="spdk"):
        tune.tune([path])


def test_errors_of_the_disk_name_the_directory(tmp_path: Path, memory: Memory, monkeypatch) -> None:
    faults = aio.Faults()
    faults.fail("read", 3, errno.EIO)
    real = aio.Engine
    with TestFile(os.fspath(tmp_path), trial_file.SMALLEST, memory, DEFAULT) as file:
        monkeypatch.setattr(aio, "Engine", lambda **options: real(**options, faults=faults))
        with pytest.raises(StorageError) as caught:
            file.rate(IoSettings("threads", MIB, 4), "read", 0.01)
    assert caught.value.errno == errno.EIO
    assert os.fspath(tmp_path) in caught.value.cause
    assert "/proc" not in str(caught.value)


# ---- the whole ----------------------------------------------------------------------------------


def test_what_was_found_is_used_by_all_io(tmp_path: Path) -> None:
    path, seen = os.fspath(tmp_path), []
    found = tune.tune([path], report=lambda done, what: seen.append((done, what)))
    (one,) = found.disks
    assert found.saved
    assert found.stripes is None
    assert found.note is None
    assert list(tmp_path.iterdir()) == []
    assert seen[-1] == (1.0, "done")
    assert all(0 <= done <= 1 and what for done, what in seen)
    working = {each.name for each in aio.probe(path).backends if each.ok}
    assert {point.settings.backend for point in one.points} <= working
    assert one.chosen in one.points
    assert set(one.best) == set(MODES)
    assert io_settings.settings_for(path) == one.chosen.settings
    with NvmeTier({path: MIB}, MIB) as tier:
        facts = tier.engines[0].facts
        assert IoSettings(facts.backend, facts.block_bytes, facts.depth) == one.chosen.settings
    kept = io_settings.Profile().disk(path)
    assert kept is not None
    assert kept.facts["cpus"] == machine.cpu().allowed
    speeds = machine_rates.measure_rates({path: MIB}, torch.device("cpu"), torch.float32)
    assert speeds.disk["read"] == one.chosen.read  # nothing was probed
    assert speeds.host_stream == 10e9


def test_every_engine_that_works_is_tried(tmp_path: Path) -> None:
    working = [each for each in aio.probe(tmp_path).backends if each.ok]
    direct = [each.name for each in working if each.direct]
    assert tune._backends(os.fspath(tmp_path)) == (direct or [each.name for each in working])


def test_a_forced_engine_is_the_only_one_that_is_tried(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("INFINITY_AIO", "threads")
    (one,) = tune.tune([os.fspath(tmp_path)]).disks
    assert {point.settings.backend for point in one.points} == {"threads"}


def test_a_spoilt_profile_is_replaced_with_a_note(tmp_path: Path) -> None:
    cache_file("tune.json").parent.mkdir(parents=True, exist_ok=True)
    cache_file("tune.json").write_text("{")
    found = tune.tune([os.fspath(tmp_path)])
    assert found.note is not None
    assert io_settings.Profile().note is None


def test_figures_of_memory_are_not_replaced_by_slower_ones(tmp_path: Path) -> None:
    for rate in (5e9, 9e9, 7e9):
        machine_rates.keep({"/a": {"read": 1e9, "write": 1e9, "mixed": 1e9}}, stream=rate)
    figures = json.loads(cache_file("machine_rates.json").read_text())
    assert [each["rate"] for name, each in figures.items() if name.endswith("stream")] == [9e9]


def test_several_paths_are_striped_as_found(tmp_path: Path) -> None:
    paths = [os.fspath(tmp_path / name) for name in ("first", "second")]
    for path in paths:
        os.mkdir(path)
    found = tune.tune(paths)
    assert found.stripes is not None
    mixed = [each.chosen.mixed for each in found.disks]
    assert found.stripes.shares == pytest.approx([each / sum(mixed) for each in mixed])
    assert min(found.stripes.read, found.stripes.write, found.stripes.mixed) > 0
    assert found.shared == (tuple(paths),)
    assert io_settings.tuned_shares(paths) == pytest.approx(found.stripes.shares)
    assert all(list(Path(path).iterdir()) == [] for path in paths)


def test_an_interrupt_leaves_nothing(warm: None, tmp_path: Path) -> None:
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from infinity.cli import main
sys.exit(main(["tune", "--path", {os.fspath(tmp_path)!r}, "--size", "32MiB"]))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    while not any("infinity-aio" in name for name in _thread_names(process.pid)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
    assert not cache_file("tune.json").exists()


def _thread_names(pid: int) -> list[str]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/comm"):
        try:
            found.append(task.read_text())
        except OSError:  # the thread ended meanwhile
            continue
    return found


# ---- what a person sees -------------------------------------------------------------------------


def test_the_command_prints_a_table_and_an_object(tmp_path: Path, capsys) -> None:
    assert cli.main(["tune", "--path", os.fspath(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out.splitlines()[-1])
    (one,) = report["disks"]
    chosen = one["chosen"]["settings"]
    assert chosen["backend"] in aio.BACKENDS
    assert report["stream"] == 10e9
    assert (report["link"] is None) == (not torch.cuda.is_available())
    for words in ("best read", "best write", "best mixed", "chosen", "GB/s", "kept in"):
        assert words in shown.err
    assert chosen["backend"] in shown.err


def test_the_machine_file_has_what_was_measured(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine_rates, "_MATRIX", 128)  # products in fp16 take seconds on most CPUs
    path, file = os.fspath(tmp_path / "disk"), os.fspath(tmp_path / "machine.json")
    os.mkdir(path)
    assert cli.main(["tune", "--path", path, "--machine", file, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = Machine.read(file)
    assert (found.measured, found.host_memory, found.host_stream) == (True, machine.memory().total, 10e9)
    assert found.disk == {mode: report["disks"][0]["chosen"][mode] for mode in MODES}
    if not torch.cuda.is_available():
        assert (found.device_memory, found.compute_capability, found.device_updates) == (None, None, False)
    speeds = machine_rates.measure_rates({path: MIB}, found.device(None), torch.bfloat16)
    assert found.rates(1).disk["mixed"] == speeds.disk["mixed"]
    assert found.flops["bf16"] == speeds.flops[torch.bfloat16]
    assert found.compute_memory == speeds.compute_memory


def test_paths_together_are_shown_with_their_shares(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # long paths take room from the rest of a line
    paths = [os.fspath(tmp_path / name) for name in ("first", "second")]
    for path in paths:
        os.mkdir(path)
    assert cli.main(["tune", "--path", paths[0], "--path", paths[1]]) == 0
    shown = capsys.readouterr().out.replace("\n", "")
    assert "all paths together" in shown
    assert "on one device" in shown
    assert "%" in shown


@pytest.mark.parametrize("bad", [["--size", "1MiB"], ["--machine", "/absent/machine.json"]])
def test_mistakes_are_told_before_anything_is_measured(tmp_path: Path, monkeypatch, capsys, bad) -> None:
    monkeypatch.setattr(tune, "sweep_disk", None)
    assert cli.main(["tune", "--path", os.fspath(tmp_path), *bad]) in (1, 2)
    assert "Error" in capsys.readouterr().err
