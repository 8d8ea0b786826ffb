"""Tests of running averages in the CPU update: their bits are those of torch.lerp over fp32 masters."""

from __future__ import annotations

import pytest
import torch
from cpu_adam_cases import bits, clones, floats, join, same_bits, split, states

from infinity.cpu_adam import AVERAGED, AdamW, AverageStep, Segment, ThreadPool, Update, runnable_isas
from infinity.errors import ConfigError

HYPERS = [AdamW(lr=1e-2, step=3, weight_decay=0.1)]
COUNT = 3 * 4096 + 77
WEIGHTS = (1 - 0.999, 1 - 0.9, 0.5, 1 - 0.3, 0.0, 1.0)


def work(
    format: str,
    arrays: dict[str, torch.Tensor],
    step: AverageStep,
    segments: list[Segment],
    **options: object,
) -> Update:
    """An update of `arrays`, whose masters are in a format: "plain", "split" or "copy" (in fp16)."""
    own = clones(arrays)
    if format == "split":
        own["parameter"], own["remainder"] = split(own["parameter"])
    elif format == "copy":
        own["copy"] = torch.empty(own["parameter"].numel(), dtype=torch.float16)
    return Update(segments=segments, hypers=HYPERS, average_step=step, **{**own, **options})


def master(done: Update) -> torch.Tensor:
    assert isinstance(done.parameter, torch.Tensor)
    return done.parameter if done.remainder is None else join(done.parameter, done.remainder)


@pytest.mark.parametrize("format", ["plain", "split", "copy"])
@pytest.mark.parametrize("isa", runnable_isas())
def test_averages_have_the_bits_of_lerp(isa: str, format: str) -> None:
    arrays = states(COUNT, finite=True) | {"average": floats(9, COUNT, finite=True)}
    gradient = floats(5, COUNT, finite=True)
    # One segment is updated and one only averaged; the rest of the arrays is left as it is.
    segments = [Segment(0, 4096 + 5), Segment(4096 + 5, 4096 + 11, AVERAGED)]
    updated, averaged = slice(0, 4101), slice(4101, 8208)
    with ThreadPool(isa=isa) as pool:
        plain = work(format, clones(arrays), None, segments[:1], grad=gradient, average=None)
        pool.run(plain)
        for weight in WEIGHTS:
            done = work(format, arrays, AverageStep(False, weight), segments, grad=gradient)
            pool.run(done)
            assert same_bits(master(done), master(plain))
            expected = arrays["average"].clone()
            for part in (updated, averaged):
                torch._foreach_lerp_([expected[part]], [master(plain)[part]], weight)
            assert same_bits(done.average, expected)
        done = work(format, arrays, AverageStep(True, 0.1), segments, grad=gradient)
        pool.run(done)
        assert same_bits(done.average[: averaged.stop], master(plain)[: averaged.stop])
        assert same_bits(done.average[averaged.stop :], arrays["average"][averaged.stop :])


def test_averages_are_equal_on_all_isas_and_at_all_offsets() -> None:
    arrays = states(COUNT) | {"average": floats(9, COUNT)}
    gradient, found = floats(5, COUNT), []
    for isa in runnable_isas():
        for segments in ([Segment(0, COUNT)], [Segment(0, 4096), Segment(4096, COUNT - 4096, 0, 4096)]):
            with ThreadPool(isa=isa, chunk=4096) as pool:
                done = work("split", arrays, AverageStep(False, 0.1), segments, grad=gradient)
                pool.run(done)
                found.append(bits(done.average))
    assert all(torch.equal(each, found[0]) for each in found)
    assert set(found[0][torch.isnan(done.average)].tolist()) == {0x7FC00000}


def test_averages_alone_need_no_gradient() -> None:
    arrays = states(COUNT, finite=True) | {"average": floats(9, COUNT, finite=True)}
    with ThreadPool() as pool:
        done = work("split", arrays, AverageStep(False, 0.25), [Segment(0, COUNT, AVERAGED)], grad=None)
        pool.run(done)
        assert same_bits(master(done), arrays["parameter"])
        assert same_bits(done.average, torch.lerp(arrays["average"], arrays["parameter"], 0.25))
        with pytest.raises(ConfigError, match="grad"):
            pool.run(work("split", arrays, AverageStep(False, 0.25), [Segment(0, COUNT)], grad=None))
        with pytest.raises(ConfigError, match="hyper-parameters"):
            pool.run(
                work(
                    "plain", arrays, None, [Segment(0, COUNT, AVERAGED)], grad=floats(5, COUNT), average=None
                )
            )
        with pytest.raises(ConfigError, match="overlap"):
            pool.run(
                work(
                    "plain",
                    arrays,
                    None,
                    [Segment(0, COUNT)],
                    grad=arrays["average"],
                    average=arrays["average"],
                )
            )
