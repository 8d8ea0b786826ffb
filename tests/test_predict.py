"""Seconds from bytes and rates, against sums made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import ConfigError
from infinity.placement import Kind
from infinity.predict import Bandwidths, Phase, Prediction, Traffic, predict, traffic
from infinity.tiers import Tier

GB = 10**9
CPU = Bandwidths(disk_read=2e9, disk_write=1e9, disk_mixed=1.5e9, host_stream=4e9, flops=1e11)
GPU = Bandwidths(disk_read=2e9, disk_write=1e9, disk_mixed=1.5e9, host_stream=4e9, link=1e9, flops=1e11)


def check(found: Prediction, seconds: float, limited_by: str, **busy: float) -> None:
    assert found.seconds == pytest.approx(seconds)
    assert found.limited_by == limited_by
    parts = {"compute": found.compute, "disk": found.disk, "update": found.update, "link": found.link}
    assert parts == pytest.approx({**dict.fromkeys(parts, 0.0), **busy})
    assert not found.measured


def test_the_phases_follow_one_another() -> None:
    moved = Traffic(
        compute=Phase(disk_read=6 * GB, disk_write=1 * GB), update=Phase(disk_read=3 * GB, disk_write=3 * GB)
    )
    # Forward and backward: 2 GB mixed (4/3 s) and 5 GB read alone (2.5 s); the update: 6 GB mixed.
    check(predict(moved, CPU, 1.0), 2 / 1.5 + 2.5 + 4.0, "disk", compute=1.0, disk=2 / 1.5 + 2.5 + 4.0)


def test_compute_hides_the_disk_in_its_own_phase_only() -> None:
    moved = Traffic(compute=Phase(disk_read=2 * GB), update=Phase(disk_write=3 * GB, host=4 * GB))
    check(predict(moved, CPU, 5.0), 5.0 + 3.0, "compute", compute=5.0, disk=1.0 + 3.0, update=1.0)


def test_on_the_cpu_all_but_the_disk_adds_up() -> None:
    moved = Traffic(
        compute=Phase(disk_read=2 * GB, to_device=2 * GB, host=4 * GB),
        update=Phase(host=16 * GB, to_host=2 * GB),
    )
    # Compute 1 s, accumulating 1 s and copying 1 s; then updating 4 s and copying 1 s.
    check(predict(moved, CPU, 1.0), 3.0 + 5.0, "update", compute=2.0, link=2.0, update=4.0, disk=1.0)


def test_a_link_runs_beside_compute_and_update() -> None:
    moved = Traffic(
        compute=Phase(to_device=3 * GB, to_host=1 * GB), update=Phase(host=8 * GB, to_host=1 * GB)
    )
    check(predict(moved, GPU, 1.0), 3.0 + 2.0, "link", compute=1.0, link=4.0, update=2.0)


def test_without_a_disk_nothing_waits_for_one() -> None:
    speeds = Bandwidths(host_stream=4e9, flops=1e11)
    check(
        predict(Traffic(compute=Phase(), update=Phase(host=4 * GB)), speeds, 0.5),
        1.5,
        "update",
        compute=0.5,
        update=1,
    )


def test_micro_batches_repeat_forward_and_backward_and_read_gradients_again() -> None:
    moved = Traffic(
        compute=Phase(disk_read=2 * GB, host=4 * GB),
        accumulation=Phase(disk_read=1 * GB, host=2 * GB),
        update=Phase(disk_write=1 * GB),
    )
    # Disk: 3 x 2 + 2 x 1 GB read, then 1 GB written; compute: 3 x (0.5 + 1) + 2 x 0.5.
    check(predict(moved, CPU, 0.5, 3), 5.5 + 1.0, "compute", compute=5.5, disk=4.0 + 1.0)
    with pytest.raises(ConfigError, match="0 micro-batches"):
        predict(moved, CPU, 0.5, 0)


sizes = st.integers(0, 100 * GB)
phases = st.builds(Phase, disk_read=sizes, disk_write=sizes, to_device=sizes, to_host=sizes, host=sizes)
plain_rates = st.floats(1e8, 1e11)


@given(
    moved=st.builds(Traffic, compute=phases, accumulation=phases, update=phases),
    more=st.builds(Traffic, compute=phases, accumulation=phases, update=phases),
    link=st.none() | plain_rates,
    read=plain_rates,
    write=plain_rates,
    share=st.floats(0, 1),
    seconds=st.floats(0, 100),
    micro_batches=st.integers(1, 5),
)
def test_more_bytes_never_take_less(*, moved, more, link, read, write, share, seconds, micro_batches) -> None:
    # A disk that reads and writes at once is no faster than the two would be beside one another.
    mixed = min(read, write) * (1 + share)
    speeds = Bandwidths(
        disk_read=read, disk_write=write, disk_mixed=mixed, host_stream=5e9, link=link, flops=1e11
    )
    both = Traffic(
        compute=moved.compute + more.compute,
        accumulation=moved.accumulation + more.accumulation,
        update=moved.update + more.update,
    )
    less = predict(moved, speeds, seconds, micro_batches).seconds
    assert predict(both, speeds, seconds, micro_batches).seconds >= less * (1 - 1e-9)
    assert predict(moved, speeds, seconds + 1, micro_batches).seconds >= less * (1 - 1e-9)
    assert predict(moved, speeds, seconds, micro_batches + 1).seconds >= less * (1 - 1e-9)


PAGES = {Kind.PARAMETER: [100, 100], Kind.GRADIENT: [40, 40], Kind.OPTIMIZER: [300, 300]}


def moved_with(tier: Tier, *, unified: bool, computes_in_ram: bool) -> Traffic:
    homes = tuple(dict.fromkeys(Kind, tier) for _ in range(2))
    return traffic(homes, PAGES, [80, 80], unified=unified, computes_in_ram=computes_in_ram)


def test_traffic_of_pages_on_disk() -> None:
    moved = moved_with(Tier.NVME, unified=True, computes_in_ram=True)
    assert moved.compute == Phase(disk_read=400, disk_write=80, host=2 * (80 + 80))
    assert moved.accumulation == Phase(disk_read=80, host=80)
    assert moved.update == Phase(disk_read=2 * 420, disk_write=2 * 380, host=2 * (160 + 40 + 600))
    assert (moved.disk_read, moved.disk_write) == (400 + 840, 80 + 760)
    apart = moved_with(Tier.NVME, unified=False, computes_in_ram=False)
    assert (apart.compute.to_device, apart.compute.to_host) == (400, 160)


def test_traffic_of_pages_on_the_device() -> None:
    moved = moved_with(Tier.DEVICE, unified=False, computes_in_ram=True)
    assert moved.compute == Phase(to_device=80, host=2 * (80 + 80))
    assert moved.update == Phase(to_host=840, to_device=760, host=2 * (160 + 40 + 600))
    assert moved.accumulation == Phase(to_host=80, host=80)


def test_traffic_of_pages_in_unified_memory_is_the_update_s_alone() -> None:
    moved = moved_with(Tier.HOST, unified=True, computes_in_ram=True)
    for phase in (moved.compute, moved.accumulation, moved.update):
        assert phase == Phase(host=phase.host)
