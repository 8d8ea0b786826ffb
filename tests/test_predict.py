"""Seconds from bytes and rates, against sums made by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import ConfigError
from infinity.placement import Kind
from infinity.predict import Bandwidths, Phase, Prediction, Traffic, UpdateTime, predict, traffic
from infinity.tiers import Tier

GB = 10**9
CPU = Bandwidths(
    disk_read=2e9, disk_write=1e9, disk_mixed=1.5e9, host_stream=4e9, gradient_pass=2e9, flops=1e11
)
GPU = Bandwidths(
    disk_read=2e9, disk_write=1e9, disk_mixed=1.5e9, host_stream=4e9, gradient_pass=2e9, link=1e9, flops=1e11
)


def check(found: Prediction, seconds: float, limited_by: str, **busy: float) -> None:
    assert found.seconds == pytest.approx(seconds)
    assert found.limited_by == limited_by
    parts = {"compute": found.compute, "disk": found.disk, "update": found.update, "link": found.link}
    assert parts == pytest.approx({**dict.fromkeys(parts, 0.0), **busy})
    assert not found.measured


SLOWED = 0.25
"""Seconds more for each second that the CPU and the disk work beside one another."""


def test_a_lazy_update_runs_under_the_first_forward() -> None:
    moved = Traffic(
        forward=Phase(disk_read=1 * GB),
        backward=Phase(disk_read=2 * GB, disk_write=1 * GB),
        update=Phase(disk_read=3 * GB, disk_write=3 * GB),
    )
    # Forward: 6 GB mixed and 1 GB read alone. Backward: 2 GB mixed and 1 GB read alone, under 3 s of compute.
    first, second = 6 / 1.5 + 0.5, 2 / 1.5 + 0.5
    seconds = first + SLOWED * 1.5 + 3.0 + SLOWED * second
    check(predict(moved, CPU, 4.5), seconds, "disk", compute=4.5, disk=first + second)


def test_an_update_in_step_follows_forward_and_backward() -> None:
    moved = Traffic(
        forward=Phase(disk_read=2 * GB),
        backward=Phase(disk_read=4 * GB, disk_write=1 * GB),
        update=Phase(disk_read=3 * GB, disk_write=3 * GB),
        when="sync",
    )
    # Forward and backward: 2 GB mixed (4/3 s) and 5 GB read alone (2.5 s); the update: 6 GB mixed.
    found = predict(moved, CPU, 1.0)
    check(found, 2 / 1.5 + 2.5 + SLOWED * 1.0 + 4.0, "disk", compute=1.0, disk=2 / 1.5 + 2.5 + 4.0)


def test_an_eager_update_has_the_whole_step_to_hide_in() -> None:
    moved = Traffic(
        forward=Phase(disk_read=2 * GB),
        backward=Phase(disk_read=2 * GB),
        update=Phase(disk_read=3 * GB, disk_write=4 * GB),
        when="eager",
    )
    # 8 GB mixed at 1.5 GB/s, 3 GB read alone at 2 GB/s.
    disk = 8 / 1.5 + 1.5
    check(predict(moved, CPU, 1.0), disk + SLOWED * 1.0, "disk", compute=1.0, disk=disk)
    check(predict(moved, CPU, 9.0), 9.0 + SLOWED * disk, "compute", compute=9.0, disk=disk)


def test_compute_hides_the_disk_in_its_own_phase_only() -> None:
    moved = Traffic(backward=Phase(disk_read=2 * GB), update=Phase(disk_write=3 * GB, host=4 * GB))
    # Forward takes 2 s and the update 1 s, which are as long as the disk takes; backward hides its second.
    seconds = 3.0 * (1 + SLOWED) + 4.0 + SLOWED * 1.0
    check(predict(moved, CPU, 6.0), seconds, "compute", compute=6.0, disk=1.0 + 3.0, update=1.0)


def test_on_the_cpu_all_but_the_disk_adds_up() -> None:
    moved = Traffic(
        forward=Phase(to_device=1 * GB),
        backward=Phase(disk_read=2 * GB, to_device=1 * GB, host=2 * GB, gradients=1 * GB),
        update=Phase(host=16 * GB, to_host=2 * GB),
    )
    # Forward 0.5 s, updating 4 s and copying 1.5 s; then backward 1 s, taking gradients over and adding to
    # them 1 s, copying 0.5 s, all of it slowed by the disk's second.
    seconds = 6.0 + 2.5 + SLOWED * 1.0
    check(predict(moved, CPU, 1.5), seconds, "update", compute=2.5, link=2.0, update=4.0, disk=1.0)


def test_a_link_runs_beside_compute_and_update() -> None:
    moved = Traffic(
        forward=Phase(to_device=3 * GB),
        backward=Phase(to_device=3 * GB, to_host=1 * GB),
        update=Phase(host=8 * GB, to_host=1 * GB),
    )
    check(predict(moved, GPU, 1.0), 3.0 + 3.0, "link", compute=1.0, link=6.0, update=2.0)


def test_without_a_disk_nothing_waits_for_one() -> None:
    speeds = Bandwidths(host_stream=4e9, gradient_pass=2e9, flops=1e11)
    moved = Traffic(backward=Phase(to_device=0), update=Phase(host=4 * GB))
    check(predict(moved, speeds, 0.5), 1.5, "update", compute=0.5, update=1)


def test_micro_batches_repeat_forward_and_backward_and_read_gradients_again() -> None:
    moved = Traffic(
        forward=Phase(disk_read=1 * GB),
        backward=Phase(disk_read=1 * GB, host=4 * GB),
        accumulation=Phase(disk_read=1 * GB, host=2 * GB),
        update=Phase(disk_write=1 * GB),
        when="sync",
    )
    # Disk: 3 x 2 + 2 x 1 GB read, then 1 GB written; compute: 3 x (0.5 + 1) + 2 x 0.5.
    found = predict(moved, CPU, 0.5, 3)
    check(found, 5.5 + SLOWED * 4.0 + 1.0, "compute", compute=5.5, disk=4.0 + 1.0)
    with pytest.raises(ConfigError, match="0 micro-batches"):
        predict(moved, CPU, 0.5, 0)


def test_inference_is_all_forward() -> None:
    found = predict(Traffic(forward=Phase(disk_read=2 * GB)), CPU, 3.0)
    check(found, 3.0 + SLOWED * 1.0, "compute", compute=3.0, disk=1.0)


sizes = st.integers(0, 100 * GB)
phases = st.builds(
    Phase, disk_read=sizes, disk_write=sizes, to_device=sizes, to_host=sizes, host=sizes, gradients=sizes
)
plain_rates = st.floats(1e8, 1e11)
some = phases.map(lambda each: each + Phase(host=1))  # a backward moves something
traffics = st.builds(Traffic, forward=phases, backward=some, accumulation=phases, update=phases)


@given(
    moved=traffics,
    more=traffics,
    update=st.sampled_from(["lazy", "eager", "sync"]),
    link=st.none() | plain_rates,
    read=plain_rates,
    write=plain_rates,
    share=st.floats(0, 1),
    seconds=st.floats(0, 100),
    micro_batches=st.integers(1, 5),
)
def test_more_bytes_never_take_less(
    *, moved, more, update, link, read, write, share, seconds, micro_batches
) -> None:
    # A disk that reads and writes at once is no faster than the two would be beside one another.
    mixed = min(read, write) * (1 + share)
    speeds = Bandwidths(
        disk_read=read,
        disk_write=write,
        disk_mixed=mixed,
        host_stream=5e9,
        gradient_pass=2e9,
        link=link,
        flops=1e11,
    )
    both = Traffic(
        forward=moved.forward + more.forward,
        backward=moved.backward + more.backward,
        accumulation=moved.accumulation + more.accumulation,
        update=moved.update + more.update,
        when=update,
    )
    moved = replace(moved, when=update)
    less = predict(moved, speeds, seconds, micro_batches).seconds
    assert predict(both, speeds, seconds, micro_batches).seconds >= less * (1 - 1e-9)
    assert predict(moved, speeds, seconds + 1, micro_batches).seconds >= less * (1 - 1e-9)
    assert predict(moved, speeds, seconds, micro_batches + 1).seconds >= less * (1 - 1e-9)


PAGES = {Kind.PARAMETER: [100, 100], Kind.GRADIENT: [40, 40], Kind.OPTIMIZER: [300, 300]}


def moved_with(
    tier: Tier, *, unified: bool, computes_in_ram: bool, resident: int = 0, update: UpdateTime = "lazy"
) -> Traffic:
    return traffic(
        tuple(dict.fromkeys(Kind, tier) for _ in range(2)),
        PAGES,
        [80, 80],
        [3, 4],
        resident=resident,
        update=update,
        unified=unified,
        computes_in_ram=computes_in_ram,
    )


def test_traffic_of_pages_on_disk() -> None:
    moved = moved_with(Tier.NVME, unified=True, computes_in_ram=True)
    assert moved.forward == Phase(disk_read=200)
    assert moved.backward == Phase(disk_read=200, disk_write=80, gradients=2 * 80)
    assert moved.accumulation == Phase(disk_read=80, host=80)
    # The parameters that forward reads are those that are updated.
    assert moved.update == Phase(disk_read=2 * 340, disk_write=2 * 380, host=2 * (160 + 40 + 600), chunks=7)
    assert (moved.disk_read, moved.disk_write) == (400 + 680, 80 + 760)
    apart = moved_with(Tier.NVME, unified=False, computes_in_ram=False)
    assert (apart.forward.to_device, apart.backward.to_device, apart.backward.to_host) == (200, 200, 160)
    by_itself = moved_with(Tier.NVME, unified=True, computes_in_ram=True, update="sync")
    assert by_itself.update == Phase(
        disk_read=2 * 420, disk_write=2 * 380, host=2 * (160 + 40 + 600), chunks=7
    )
    assert apart.update.disk_read == by_itself.update.disk_read


def test_only_chunks_of_units_on_disk_stream() -> None:
    rest = dict.fromkeys(Kind, Tier.HOST)
    homes = (rest, {**rest, Kind.OPTIMIZER: Tier.NVME})
    options = {"resident": 0, "update": "lazy", "unified": True, "computes_in_ram": True}
    assert traffic(homes, PAGES, [80, 80], [3, 4], **options).update.chunks == 4
    inference = {**PAGES, Kind.GRADIENT: [0, 0], Kind.OPTIMIZER: [0, 0]}
    on_disk = tuple({**rest, Kind.PARAMETER: Tier.NVME} for _ in range(2))
    assert traffic(on_disk, inference, [0, 0], [3, 4], **options).update.chunks == 0


def test_a_chunk_that_streams_takes_the_trainer_s_time() -> None:
    moved = Traffic(backward=Phase(disk_read=2 * GB), update=Phase(host=4 * GB, chunks=100))
    first, second = 1.0 + 0.5 + 100 * 0.01, 1.0 + SLOWED * 1.0
    found = predict(moved, CPU, 1.5, per_chunk=0.01)
    check(found, first + second, "update", compute=1.5, disk=1.0, update=2.0)


def test_resident_pages_need_not_come_up_again() -> None:
    moved = moved_with(Tier.NVME, unified=True, computes_in_ram=True, resident=100)
    assert (moved.forward.disk_read, moved.backward.disk_read) == (100, 100)
    all_of_them = moved_with(Tier.HOST, unified=False, computes_in_ram=True, resident=300)
    assert (all_of_them.forward.to_device, all_of_them.backward.to_device) == (0, 0)


def test_traffic_of_pages_on_the_device() -> None:
    moved = moved_with(Tier.DEVICE, unified=False, computes_in_ram=True)
    assert moved.forward == Phase()
    assert moved.backward == Phase(to_device=80, gradients=2 * 80)
    assert moved.update == Phase(to_host=840, to_device=760, host=2 * (160 + 40 + 600))
    assert moved.accumulation == Phase(to_host=80, host=80)


def test_traffic_of_pages_in_unified_memory_is_the_update_s_alone() -> None:
    moved = moved_with(Tier.HOST, unified=True, computes_in_ram=True)
    for phase in (moved.forward, moved.backward, moved.accumulation, moved.update):
        assert phase == Phase(host=phase.host, gradients=phase.gradients)
