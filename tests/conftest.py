"""Settings of all tests: where they run and in how many processes, and fixtures that many files share."""

import os

# This has to be set before torch is imported, and holds for processes that tests start, too. The models of
# the tests are tiny: a second thread makes nothing faster, and spins where another process wants to run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and tests would go through its objects: see below
import warm_python
from alone import Machine
from cover import chosen_of
from homes import NEEDS_CUDA
from tiny_job import TinyJob, make_tiny

from infinity.planning import machine_rates, twin_flow
from infinity.system import machine

# This has to be set before anything uses cuBLAS, which may order sums differently each time without a
# workspace of its own. The workspace is small because the budgets of the tests are small, and because each
# thread that multiplies takes a workspace (infinity/planning/headroom.py).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")

# A shell's background job ignores Ctrl-C, and so do the processes that it starts. Tests send Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # even if OMP_NUM_THREADS says otherwise

for absent in (each for each in (torch.cuda, torch.xpu) if not each.is_available()):
    # Otherwise torch keeps each seed for a device that may come, with the caller's stack, which takes 3 ms.
    absent.manual_seed_all = lambda seed: None

if machine.file_system(tempfile.gettempdir()) == "tmpfs":
    # Slabs refuse RAM, so `tmp_path` has to be on a disk; /var/tmp is one by convention.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")


WORKERS = 3
"""Number of worker processes that run the tests, unless only single files or tests are asked for. It is one
more than the least number of CPUs, because tests of several processes wait for each other.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Divide the tests among workers, unless options say otherwise (`-n 0`) or pytest-xdist is absent.

    Each worker goes through its part in order, so that tests of a file share what its first tests made. A
    worker that is done takes half of what another worker has left. On a machine with a GPU one process runs
    all tests, because tests need the GPU's memory for themselves.
    """
    options = config.option
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    by_default = options.numprocesses is None and options.dist == "no" and not options.usepdb
    few = any("::" in each or Path(each).is_file() for each in config.args)
    room = len(os.sched_getaffinity(0)) >= WORKERS - 1 and not torch.cuda.is_available()
    if by_default and room and not few:
        options.numprocesses, options.dist = WORKERS, "worksteal"


MACHINE = pytest.StashKey[Machine]()


hypothesis.settings.register_profile("quick", max_examples=30, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        hypothesis.settings.load_profile("quick")
    if hasattr(config, "workerinput"):
        config.stash[MACHINE] = Machine(Path(config.option.basetemp).parent)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the combinations of parameters that a test with the mark `sweep` leaves out by default,
    and as cuda the tests that are skipped without a GPU.
    """
    for item in items:
        if any(each.kwargs.get("reason") == NEEDS_CUDA for each in item.iter_markers("skipif")):
            item.add_marker("cuda")
    sweeps: dict[tuple[pytest.Item | None, str], list[pytest.Function]] = {}
    for item in items:
        of = item.get_closest_marker("sweep") and isinstance(item, pytest.Function)
        if not of or item.get_closest_marker("slow"):
            continue
        if torch.cuda.is_available() or item.callspec.params.get("device") != "cuda":
            sweeps.setdefault((item.parent, item.originalname), []).append(item)
    for cases in sweeps.values():
        mark = cases[0].get_closest_marker("sweep")
        assert mark is not None
        strength, most = mark.kwargs.get("strength", 1), mark.kwargs.get("most")
        values = [{name: id(value) for name, value in each.callspec.params.items()} for each in cases]
        quick = chosen_of(values, strength, most)
        for at in set(range(len(cases))) - set(quick):
            cases[at].add_marker(pytest.mark.slow)


def pytest_unconfigure() -> None:
    warm_python.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    shared = item.config.stash.get(MACHINE, None)
    if shared is None:
        return (yield)
    with shared.used(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def away_from_the_user_s_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests a cache directory of their own, so that they neither use nor change the user's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = os.fspath(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def short_probes_of_disks() -> Iterator[None]:
    """Measure the rates of a disk with few bytes and for a moment: a plan with example inputs measures each
    directory that it does not know, and most tests have one of their own. A probe would take a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        probe = machine_rates.disk_speed

        def short(path: str, *, nbytes: int, **options: float) -> object:
            return probe(path, nbytes=min(nbytes, 4 << 20), **{**options, "seconds": 0.01})

        patch.setattr(machine_rates, "disk_speed", short)
        yield


@pytest.fixture(autouse=True)
def environment_of_each_test_alone() -> Iterator[None]:
    """Undo changes of the environment after each test. With the variables of a rank, libraries that later
    tests use would join a process group.
    """
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def no_gpu_for_tests_of_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide GPUs from all tests without the mark `cuda`, and from the processes that they start: a GPU is the
    default device where there is one, and most tests were written for the CPU.
    """
    if request.node.get_closest_marker("cuda") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyJob:
    """Return a TinyJob: a folder with a text, a folder for pages, and options with which `infinity train`
    trains on the text. During the test, the command has a preset "tiny" and an empty cache.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tiny(monkeypatch)
    return TinyJob(tmp_path)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `subprocess` start Python programs in processes that have torch imported already."""
    monkeypatch.setattr(subprocess, "Popen", warm_python.Popen)


@pytest.fixture(scope="session", autouse=True)
def away_from_the_source_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run the tests in an empty folder, so that Python processes they start import the installed package."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_not_collected() -> None:
    """Keep objects that exist before a module's tests out of later garbage collections.

    Many tests collect garbage, and so does a runtime that is short of room. Torch and thousands of tests have
    a million objects, and a collection that goes through all of them takes longer than most tests. The
    fixture runs before each module's tests, because importing the module makes more objects. It first
    collects the garbage that exists by then.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def the_same_bits_every_time(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Have tests whose parameter `device` is "cuda" run deterministic kernels and multiply without TF32."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("device") != "cuda":
        yield
        return
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def cpu_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU do all updates, even of units whose pages all rest on a device.

    Updates on a device are compared with the CPU's in tests/planning/test_twin_flow_training.py.
    """
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on an ext4 file system of 32 MiB, of which some 23 MiB are free.

    The test is skipped where the file system cannot be made or mounted.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    image = tmp_path / "disk.img"
    mounted = tmp_path / "disk"
    mounted.mkdir()
    image.touch()
    os.truncate(image, 32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    mount = ["mount", "-o", "loop", str(image), str(mounted)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no loop mount here: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=False)


@pytest.fixture
def ram_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a tmpfs, a file system in RAM."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or not os.access(shared, os.W_OK):
        pytest.skip("needs a writable /dev/shm")
    directory = shared / f"infinity-test-{os.getpid()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
