"""Updates by the device's kernels: the bits of the CPU's, for every rule and format, and how many launches.

With the CPU as the device, whose kernels are the same source compiled for it (tests/test_device_kernels.py
has the compiler); on a GPU where there is one. test_twin_flow.py and test_twin_flow_training.py have whole
runtimes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from cpu_adam_cases import RULES as CASES
from cpu_adam_cases import adversarial, clones, floats, split, states
from device_updates import Allocations, kernels, opened
from emulated_device import EmulatedDevice
from homes import each_device

from infinity import _cpu_adam
from infinity.cpu_adam import (
    BLOCK,
    CODE_BLOCK,
    SGD,
    AdamW,
    Gradient,
    Segment,
    ThreadPool,
    Update,
    sum_in_order,
)
from infinity.device_kernels import (
    DTYPES,
    KERNELS,
    MOMENTS,
    PARAMETERS,
    RULES,
    Kernels,
    UpdateKind,
    host_library,
)
from infinity.device_table import MOST_HYPERS, MOST_PARAMETERS, TILE, Chunk, size_of
from infinity.device_update import DeviceUpdates, Turn
from infinity.moments import FIRST_SPAN, SECOND_SPAN, encode
from infinity.tiers.driver import Driver, Stream

FORMS = ("fp32", "bf16", "int8")
MASTERS = ("fp32", "split", "fp16", "bf16 copy", "fp32 copy")
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
Arrays = dict[str, torch.Tensor]


class Queued(Kernels):
    """Kernels that run when a stream of the test driver comes to them."""

    def __init__(self, driver: Driver, stream: Stream) -> None:
        super().__init__(torch.device("cpu"), ())
        self._stream = stream
        module = driver.module(b"infinity-host-kernels:" + str(host_library()).encode())
        self._queued = {name: module.function(name) for name in KERNELS}

    def launch(self, name: str, warps: int, arguments: bytes, kinds: Any = frozenset()) -> None:
        self._queued[name].launch(self._stream, -(-warps // 8), 256, arguments)


def on_device(
    arrays: Arrays,
    device: str,
    *,
    segments: Sequence[Segment],
    hypers: Sequence[Any],
    scale: float = 1.0,
    parameters: Sequence[Hashable] = (),
) -> Arrays:
    """The arrays as an update on the device leaves them, on the CPU. parameters: of each segment."""
    there = {name: each.to(device, copy=True) for name, each in arrays.items()}
    whose = parameters or range(len(segments))
    updates, _memory = opened([Chunk(Update(**there, segments=segments, hypers=[]), whose)], device)
    turns = {
        each: Turn(hypers[segment.hyper], segment.seed) for each, segment in zip(whose, segments, strict=True)
    }
    updates.update(turns, scale)
    return {name: each.cpu() for name, each in there.items()}


def on_cpu(arrays: Arrays, **work: Any) -> Arrays:
    """The arrays as the CPU's kernels leave them."""
    there = clones(arrays)
    with ThreadPool(threads=1) as pool:
        pool.run(Update(**there, **work))
    return there


def check(now: Arrays, expected: Arrays) -> None:
    """Every array bit for bit."""
    for name, each in expected.items():
        one, other = now[name].view(torch.uint8), each.view(torch.uint8)
        assert torch.equal(one, other), f"{name}: {int((one != other).sum())} bytes differ"


def stored(plain: Arrays, form: str, master: str = "fp32") -> Arrays:
    """The arguments of an Update that hold these float32 states and gradient."""
    found = {"grad": plain["grad"].clone(), "parameter": plain["parameter"].clone()}
    for name, span in (("first_moment", FIRST_SPAN), ("second_moment", SECOND_SPAN)):
        if form == "int8":
            found[name], found[name.replace("moment", "scale")] = encode(plain[name], span)
        else:
            found[name] = plain[name].to(torch.bfloat16 if form == "bf16" else torch.float32)
    if master == "split":
        found["parameter"], found["remainder"] = split(plain["parameter"])
    elif master != "fp32":
        dtypes = {"fp16": torch.float16, "bf16 copy": torch.bfloat16, "fp32 copy": torch.float32}
        found["copy"] = torch.zeros(plain["parameter"].numel(), dtype=dtypes[master])
    return found


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
    """Ordinary numbers, denormals, zeros of both signs, infinities and NaNs with payloads."""
    number = _cpu_adam.fold(CASES[rule].native(), 1.0)[0]
    every = product(range(len(DTYPES)), range(len(PARAMETERS)))
    # Compiled together: a kind alone would take half of the time of all.
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
    """Of every rule and format of moments, over all formats of parameters and gradients together."""
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
    """Whatever chunks they lie in, in whatever order, and however few elements a piece has."""
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
    updates, _memory = opened([Chunk(Update(**there, segments=segments, hypers=[]), "abcd")], "cpu")
    updates.update({"a": Turn(CASES["adamw"], 1), "c": Turn(CASES["adamw"], 2)}, 1.0)
    updated = [replace(segments[0], seed=1), replace(segments[2], seed=2)]
    check(there, on_cpu(given, segments=updated, hypers=[CASES["adamw"]]))
    updates.update({}, 1.0)
    assert kernels("cpu").launched == ["infinity_update"]


def test_hyper_parameters_are_folded_as_for_the_cpu() -> None:
    """At steps and scales at which their constants are rounded."""
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
    """So many parameters of a block each, in turns with so many hyper-parameters."""
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


@pytest.mark.parametrize("threads", [False, True])
def test_what_is_queued_has_all_that_it_needs(threads: bool) -> None:
    """On a stream that runs later, through the driver's table: nothing of a launch has to be kept."""
    device = EmulatedDevice(3, threads=threads)
    stream = device.driver.stream()
    given, work = many(3 * MOST_PARAMETERS, 2)
    expected = on_cpu(given, **work)
    chunk = Chunk(Update(**given, segments=work["segments"], hypers=[]), range(3 * MOST_PARAMETERS))
    memory = torch.zeros(size_of([chunk]).nbytes, dtype=torch.uint8)
    updates = DeviceUpdates([chunk], memory, Queued(device.driver, stream))
    device.hold(stream)
    before = clones(given)
    updates.update(
        {each: Turn(work["hypers"][part.hyper], part.seed) for each, part in enumerate(work["segments"])}, 1.0
    )
    updates.measure()
    assert device.count("cuLaunchKernel") == 5
    check(given, before)
    device.let_go(stream)
    stream.synchronize()
    check(given, expected)
    gradients = given["grad"].view(-1, CODE_BLOCK)
    counts = [part.count for part in work["segments"]]
    expected_totals = [total([row[:count]]) for row, count in zip(gradients, counts, strict=True)]
    assert updates.table.totals(memory).tolist() == expected_totals


def test_the_structs_are_those_of_the_native_code() -> None:
    """What is asserted of layouts where the module is compiled, and the enumerations."""
    for hyper in CASES.values():
        folded = _cpu_adam.fold(hyper.native(), 1.0)
        assert len(folded) == 44 and folded[0] < len(RULES)
    assert len(DTYPES) == len(_cpu_adam.Dtype) and len(MOMENTS) == len(_cpu_adam.MomentFormat)
    assert len(PARAMETERS) == len(_cpu_adam.ParameterFormat)
    assert len(KERNELS) == 3


# ---- Memory ----


@pytest.mark.parametrize("form", FORMS)
def test_an_update_and_a_measurement_allocate_nothing(form: str) -> None:
    n = BLOCK + 100
    given = stored({"grad": floats(9, n), **states(n)}, form, "split")
    updates, _memory = opened([Chunk(Update(**given, segments=[Segment(0, n)], hypers=[]), ["p"])], "cpu")
    with Allocations() as made:
        updates.update({"p": Turn(CASES["adamw"], 1)}, 0.5)
        updates.measure()
    assert made.found == []


# ---- Sums of squares ----


def measured(values: Mapping[str, Sequence[torch.Tensor]], device: str) -> dict[str, float]:
    """The totals of parameters in pieces of whole blocks, each in a chunk of its own."""
    chunks = []
    for name, pieces in values.items():
        index = 0
        for each in pieces:
            work = Update(
                grad=each.to(device),
                parameter=torch.zeros(each.numel(), device=device),
                segments=[Segment(0, each.numel(), index=index)],
                hypers=[],
            )
            chunks.append(Chunk(work, [name]))
            index += each.numel()
    updates, memory = opened(chunks, device)
    updates.measure()
    totals = updates.table.totals(memory).tolist()
    assert kernels(device).launched == ["infinity_squares", "infinity_totals"]
    return {name: totals[updates.row(name)] for name in values}


def total(pieces: Sequence[torch.Tensor]) -> float:
    """As the runtime takes it on the CPU."""
    found = 0.0
    with ThreadPool(threads=1) as pool:
        for each in pieces:
            work = Gradient(grad=each, squares=True, segments=[Segment(0, each.numel())])
            found = sum_in_order(pool.run(work).blocks[0], found)
    return found


@each_device
@pytest.mark.parametrize("dtype", GRADIENTS)
def test_sums_of_squares_have_the_bits_of_the_cpus(dtype: torch.dtype, device: str) -> None:
    def piece(seed: int, n: int) -> torch.Tensor:
        return floats(seed, n, finite=True).clamp(-1e4, 1e4).to(dtype)

    values = {
        "one": [piece(1, 1)],
        "short": [piece(2, BLOCK - 1)],
        "cut": [piece(3, BLOCK), piece(4, 2 * BLOCK), piece(5, 37)],
        "long": [piece(6, 100 * BLOCK + 33)],
        "wild": [floats(7, 5 * BLOCK).nan_to_num(posinf=3e38, neginf=-3e38).to(dtype).nan_to_num(0, 1, -1)],
    }
    found = measured(values, device)
    for name, pieces in values.items():
        assert np.float64(found[name]).tobytes() == np.float64(total(pieces)).tobytes(), name


@each_device
def test_squares_are_finite_if_and_only_if_the_elements_are(device: str) -> None:
    fine = torch.full((2 * BLOCK,), 3e38)
    values = {"fine": [fine]}
    for bad in (torch.inf, -torch.inf, torch.nan):
        broken = fine.clone()
        broken[BLOCK + 17] = bad
        values[str(bad)] = [broken]
    found = measured(values, device)
    assert {name for name, each in found.items() if np.isfinite(each)} == {"fine"}
