"""Tests that the device's update kernels give the same bits as the CPU's, and that one launch is enough for
all parameters of a unit that is not very large.

By default the CPU is the device: the kernels' source is compiled for the CPU. Where there is a GPU, the
tests run there too. Compilation for GPUs is tested in test_device_kernels.py, whole runtimes in
test_twin_flow.py and test_twin_flow_training.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from cpu_adam_cases import RULES as CASES
from cpu_adam_cases import adversarial, clones, floats, states
from device_arrays import (
    FORMS,
    GRADIENTS,
    MASTERS,
    Allocations,
    Arrays,
    check,
    kernels,
    on_cpu,
    on_device,
    opened,
    squares,
    stored,
    workspace_bytes,
)
from emulated_device import EmulatedDevice
from homes import each_device

from infinity import _cpu_adam
from infinity.cpu_adam import (
    BLOCK,
    CODE_BLOCK,
    SGD,
    AdamW,
    Segment,
    Update,
)
from infinity.device_update.kernels import (
    DTYPES,
    KERNELS,
    MOMENTS,
    PARAMETERS,
    RULES,
    Kernels,
    UpdateKind,
    host_library,
)
from infinity.device_update.table import MOST_HYPERS, MOST_PARAMETERS, MOST_PIECES, TILE, DeviceChunk
from infinity.device_update.update import DeviceUpdates, MovingChunk, ParameterUpdate
from infinity.tiers.driver import Driver, Stream


class Queued(Kernels):
    """Kernels whose launches are queued on a stream of the test driver, and run when the stream runs."""

    def __init__(self, driver: Driver, stream: Stream) -> None:
        super().__init__(torch.device("cpu"), ())
        self._stream = stream
        module = driver.module(b"infinity-host-kernels:" + str(host_library()).encode())
        self._queued = {name: module.function(name) for name in KERNELS}

    def launch(self, name: str, warps: int, arguments: bytes, kinds: Any = frozenset()) -> None:
        self._queued[name].launch(self._stream, -(-warps // 8), 256, arguments)


# ---- Bits ----


def check_bits(plain: Arrays, device: str, rule: Any, *, dtype: torch.dtype, master: str, form: str) -> None:
    n = plain["grad"].numel()
    given = stored({**plain, "grad": plain["grad"].to(dtype)}, form, master)
    work: dict[str, Any] = {"segments": [Segment(0, n, seed=11)], "hypers": [rule], "scale": 0.7}
    check(on_device(given, device, **work), on_cpu(given, **work))


@each_device
@pytest.mark.parametrize("rule", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_every_update_has_the_bits_of_the_cpus(form: str, rule: str, device: str) -> None:
    """The device's results have the CPU's bits for all formats, also for denormals, infinities and NaNs."""
    number = _cpu_adam.fold(CASES[rule].native(), 1.0)[0]
    every = product(range(len(DTYPES)), range(len(PARAMETERS)))
    # All kinds are compiled together, since compiling one kind alone takes half as long as compiling all.
    kernels(device).require(UpdateKind(number, *each, FORMS.index(form)) for each in every)
    n = 5 * TILE + 77
    plain = {"grad": floats(9, n), **states(n)}
    finite = {"grad": floats(8, n, finite=True).clamp(-9, 9), **states(n, 3, finite=True)}
    for dtype, master in product(GRADIENTS, MASTERS):
        check_bits(plain, device, CASES[rule], dtype=dtype, master=master, form=form)
        check_bits(finite, device, CASES[rule], dtype=dtype, master=master, form=form)


@each_device
@pytest.mark.parametrize("rule", CASES)
def test_edges_against_each_other_have_the_bits_of_the_cpus(rule: str, device: str) -> None:
    given, g = adversarial(60_000)
    for form, master in (("fp32", "fp32"), ("bf16", "split"), ("int8", "fp16")):
        check_bits({"grad": g, **given}, device, CASES[rule], dtype=torch.float32, master=master, form=form)


@pytest.mark.slow
@pytest.mark.parametrize("rule", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_ten_million_values_have_the_bits_of_the_cpus(form: str, rule: str) -> None:
    """The device's results have the CPU's bits for ten million values.

    The values are spread over all formats of parameters and gradients.
    """
    kinds = list(product(GRADIENTS, MASTERS))
    given, g = adversarial(10_000_000 // len(kinds) // 2)
    n = g.numel()
    for number, (dtype, master) in enumerate(kinds):
        wild = {"grad": floats(number, n), **states(n, number + 1)}
        check_bits(wild, "cpu", CASES[rule], dtype=dtype, master=master, form=form)
        check_bits({"grad": g, **given}, "cpu", CASES[rule], dtype=dtype, master=master, form=form)


@each_device
@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_in_pieces_has_the_bits_of_one(form: str, device: str) -> None:
    """A parameter that is updated as several segments gets the bits of an update in one segment.

    The segments may come in any order, and each but the last has a multiple of CODE_BLOCK elements.
    """
    n = 3 * BLOCK + 37
    plain = {"grad": floats(3, n, finite=True).clamp(-2, 2), **states(n, finite=True)}
    given = stored(plain, form, "split")
    whole: dict[str, Any] = {"segments": [Segment(0, n, seed=99)], "hypers": [CASES["adamw"]]}
    expected = on_cpu(given, **whole)
    for cuts in ([CODE_BLOCK], [CODE_BLOCK * 17, BLOCK], [BLOCK, 2 * BLOCK, n - n % CODE_BLOCK]):
        edges = [0, *cuts, n]
        parts = [Segment(start, end - start, 0, start, 99) for start, end in pairwise(edges)]
        for segments in (parts, parts[::-1]):
            now = on_device(
                given, device, segments=segments, hypers=whole["hypers"], parameters=["p"] * len(parts)
            )
            check(now, expected)


@each_device
@pytest.mark.parametrize("form", FORMS)
def test_only_segments_are_touched_each_with_its_hypers(form: str, device: str) -> None:
    n = 3 * BLOCK
    plain = {"grad": floats(3, n, finite=True).clamp(-2, 2), **states(n, finite=True)}
    segments = [
        Segment(CODE_BLOCK, 100, 1),
        Segment(4 * CODE_BLOCK, BLOCK + 3, 0, seed=5),
        Segment(n - 64, 1, 2),
    ]
    rules = [CASES["adamw"], CASES["momentum"], replace(CASES["sgd"], lr=0.5)]
    given = stored(plain, form)
    now = on_device(given, device, segments=segments, hypers=rules)
    check(now, on_cpu(given, segments=segments, hypers=rules))
    untouched = torch.ones(n, dtype=torch.bool)
    for each in segments:
        untouched[each.start : each.start + each.count] = False
    for name in ("parameter", "first_moment", "second_moment"):
        assert torch.equal(now[name][untouched], given[name][untouched]), name


def test_parameters_without_a_turn_stay_as_they_are() -> None:
    n = 4 * CODE_BLOCK
    given = stored({"grad": torch.ones(n), **states(n, finite=True)}, "int8", "split")
    there = clones(given)
    segments = [Segment(CODE_BLOCK * each, CODE_BLOCK) for each in range(4)]
    updates, _memory = opened([DeviceChunk(Update(**there, segments=segments, hypers=[]), "abcd")], "cpu")
    updates.update({"a": ParameterUpdate(CASES["adamw"], 1), "c": ParameterUpdate(CASES["adamw"], 2)}, 1.0)
    updated = [replace(segments[0], seed=1), replace(segments[2], seed=2)]
    check(there, on_cpu(given, segments=updated, hypers=[CASES["adamw"]]))
    updates.update({}, 1.0)
    assert kernels("cpu").launched == ["infinity_update"]


def test_hyper_parameters_are_folded_as_for_the_cpu() -> None:
    """Constants derived from hyper-parameters, such as bias corrections, have the same bits as on the CPU.

    Steps and scales are chosen so that these constants have to be rounded.
    """
    n = 1000
    plain = {"grad": floats(3, n, finite=True).clamp(-2, 2), **states(n, finite=True)}
    for rule, scale in product(CASES.values(), (1.0, 1 / 3, -1e-9)):
        for hyper in (rule, replace(rule, maximize=True)):
            work: dict[str, Any] = {"segments": [Segment(0, n)], "hypers": [hyper], "scale": scale}
            check(on_device(plain, "cpu", **work), on_cpu(plain, **work))


def test_a_rule_without_momentum_leaves_the_buffer_alone() -> None:
    n = 1000
    for form in FORMS:
        given = stored({"grad": torch.ones(n), **states(n, finite=True)}, form)
        work: dict[str, Any] = {"segments": [Segment(0, n)], "hypers": [SGD(lr=0.1, first_step=False)]}
        now = on_device(given, "cpu", **work)
        check(now, on_cpu(given, **work))
        assert torch.equal(now["first_moment"], given["first_moment"])


# ---- Launches ----


def many(count: int, hypers: int) -> tuple[Arrays, dict[str, Any]]:
    """Return (arrays, other arguments) for `on_device` and `on_cpu`: an update of `count` small parameters.

    The other arguments are the segments and the hyper-parameters. Each parameter has at most CODE_BLOCK
    elements. hypers: the number of different sets of hyper-parameters, which the parameters use in turn.
    """
    n = count * CODE_BLOCK
    given = stored(
        {"grad": floats(1, n, finite=True).clamp(-2, 2), **states(n, finite=True)}, "bf16", "split"
    )
    rules = [AdamW(lr=1e-3 * (each + 1), step=each + 1) for each in range(hypers)]
    segments = [
        Segment(each * CODE_BLOCK, CODE_BLOCK - each % 3, each % hypers, seed=each) for each in range(count)
    ]
    return given, {"segments": segments, "hypers": rules}


@pytest.mark.parametrize(
    ("count", "hypers", "launches"),
    [
        (1, 1, 1),
        (MOST_PARAMETERS, MOST_HYPERS, 1),
        (MOST_PARAMETERS + 1, 1, 2),
        (3 * MOST_PARAMETERS, 2, 3),
        (3 * MOST_HYPERS, 3 * MOST_HYPERS, 3),
    ],
)
def test_a_unit_is_updated_by_one_launch_unless_it_is_very_large(
    count: int, hypers: int, launches: int
) -> None:
    given, work = many(count, hypers)
    check(on_device(given, "cpu", **work), on_cpu(given, **work))
    assert kernels("cpu").launched == ["infinity_update"] * launches


@pytest.mark.parametrize("count, hypers", [(1, 1), (MOST_PIECES, 3), (2 * MOST_PIECES + 5, 2), (40, 40)])
def test_a_chunk_whose_arrays_move_has_the_cpus_bits(count: int, hypers: int) -> None:
    """Its states lie in one tensor, elsewhere than when it was described, and each gradient by itself."""
    given, work = many(count, hypers)
    expected = on_cpu(given, **work)
    moving = [name for name in given if name.endswith("moment") or name == "remainder"]
    sizes = [given[name].nbytes for name in moving]
    first, then = (torch.empty(sum(sizes), dtype=torch.uint8) for _ in range(2))
    described = given | {
        name: part.view(given[name].dtype) for name, part in zip(moving, first.split(sizes), strict=True)
    }
    chunk = MovingChunk(Update(**described, segments=work["segments"], hypers=[]), first)
    there = dict(zip(moving, then.split(sizes), strict=True))
    for name, part in there.items():
        part.copy_(given[name].view(torch.uint8))
    gradients = [given["grad"][each.start :][: each.count].clone() for each in work["segments"]]
    updates = [ParameterUpdate(work["hypers"][each.hyper], each.seed) for each in work["segments"]]
    addresses = [each.data_ptr() for each in gradients]
    chunk.update(Kernels(torch.device("cpu"), ()), then, addresses, updates, 1.0)
    found = {name: there[name].view(given[name].dtype) if name in there else given[name] for name in given}
    check(found, expected)


@pytest.mark.parametrize("threads", [False, True])
def test_what_is_queued_has_all_that_it_needs(threads: bool) -> None:
    """Launches that run only after `update` and `measure` have returned still give the CPU's results.

    The stream of the test driver is held until both calls have returned. A launch whose arguments were freed
    by then would give other results.
    """
    device = EmulatedDevice(3, threads=threads)
    stream = device.driver.stream()
    given, work = many(3 * MOST_PARAMETERS, 2)
    expected = on_cpu(given, **work)
    chunk = DeviceChunk(Update(**given, segments=work["segments"], hypers=[]), range(3 * MOST_PARAMETERS))
    memory = torch.zeros(workspace_bytes([chunk]), dtype=torch.uint8)
    updates = DeviceUpdates([chunk], memory, Queued(device.driver, stream))
    device.hold(stream)
    before = clones(given)
    updates.update(
        {
            each: ParameterUpdate(work["hypers"][part.hyper], part.seed)
            for each, part in enumerate(work["segments"])
        },
        1.0,
    )
    updates.measure()
    assert device.count("cuLaunchKernel") == 4
    check(given, before)
    device.let_go(stream)
    stream.synchronize()
    check(given, expected)
    gradients = given["grad"].view(-1, CODE_BLOCK)
    counts = [part.count for part in work["segments"]]
    sums = [squares([row[:count]]) for row, count in zip(gradients, counts, strict=True)]
    assert updates.table.squares(memory).tolist() == [each for some in sums for each in some]


def test_the_structs_are_those_of_the_native_code() -> None:
    """Python lists as many formats as the native code has, every rule that the native code uses, and four
    kernels. Folded hyper-parameters take 44 bytes, as the native code asserts when it is compiled.
    """
    for hyper in CASES.values():
        folded = _cpu_adam.fold(hyper.native(), 1.0)
        assert len(folded) == 44 and folded[0] < len(RULES)
    assert len(DTYPES) == len(_cpu_adam.Dtype) and len(MOMENTS) == len(_cpu_adam.MomentFormat)
    assert len(PARAMETERS) == len(_cpu_adam.ParameterFormat)
    assert len(KERNELS) == 4


# ---- Memory ----


@pytest.mark.parametrize("form", FORMS)
def test_an_update_and_a_measurement_allocate_nothing(form: str) -> None:
    n = BLOCK + 100
    given = stored({"grad": floats(9, n), **states(n)}, form, "split")
    updates, _memory = opened(
        [DeviceChunk(Update(**given, segments=[Segment(0, n)], hypers=[]), ["p"])], "cpu"
    )
    with Allocations() as made:
        updates.update({"p": ParameterUpdate(CASES["adamw"], 1)}, 0.5)
        updates.measure()
    assert made.found == []
