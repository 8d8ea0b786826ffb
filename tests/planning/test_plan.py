import re
from html import unescape
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_models import MiB, check, gradients_on_nvme, partly_frozen, planned, stack

from infinity.api import plan
from infinity.config import Budget, Precision
from infinity.errors import BudgetError, ConfigError
from infinity.formats.optimizer_rules import Rule
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.planning.planner import Available, make_plan
from infinity.planning.predict import PhaseBytes
from infinity.tiers import Tier

models = st.builds(
    stack,
    st.lists(st.sampled_from([3, 17, 64, 90, 130]), min_size=1, max_size=6),
    st.sets(st.integers(0, 5), max_size=2),
)
sizes = st.integers(1, 3 * MiB) | st.integers(1, 100_000)


def on(nvme: int | None) -> dict[str, int] | None:
    return nvme and {"/nowhere": nvme}


@settings(max_examples=300, deadline=None)
@given(
    model=models,
    frozen=st.booleans(),
    optimizer=st.sampled_from([None, torch.optim.AdamW, torch.optim.SGD]),
    precision=st.builds(
        Precision,
        compute=st.sampled_from(["bf16", "fp16", "fp32"]),
        accumulate=st.sampled_from(["fp32", "compute"]),
    ),
    activations=st.none() | st.integers(0, MiB),
    accumulation=st.sampled_from([None, 1, 2]),
    commits=st.booleans(),
    device=st.none() | sizes,
    host=sizes,
    nvme=st.none() | sizes,
)
def test_needed_is_exact(
    *, model, frozen, optimizer, precision, activations, accumulation, commits, device, host, nvme
) -> None:
    """With the `needed` of each error a model fits in the end; with a page less of that tier it does not."""
    model = partly_frozen(model) if frozen else model
    budget = {"device": device, "host": host, "nvme": on(nvme)}
    others = {"activations": activations, "accumulation": accumulation, "commits": commits}
    short: list[str] = []
    for _ in range(4):
        arguments = {"optimizer": optimizer, "precision": precision, **others, **budget}
        try:
            made = planned(model, **arguments)
        except BudgetError as error:
            tier = next(each for each in ("device", "host", "nvme") if f"the {each} tier" in error.cause)
            assert error.needed is not None
            assert str(error.needed) in error.cure
            needed = error.needed
        else:
            break
        short.append(tier)
        less = max(1, needed - 4096)
        with pytest.raises(BudgetError):
            planned(model, **{**arguments, tier: on(less) if tier == "nvme" else less})
        budget = {**budget, tier: on(needed) if tier == "nvme" else needed}
    if commits:
        assert len(short) == len(set(short))
        assert made.nvme_bytes == made.durable_bytes + gradients_on_nvme(made)
    else:
        # The figure for one tier suffices, unless the device alone cannot replace the missing host memory.
        assert len(short) <= (2 if short[:1] == ["device"] else 1)
    check(made, Budget(**budget))


@settings(max_examples=60, deadline=None)
@given(
    model=models,
    device=st.none() | sizes,
    nvme=st.booleans(),
    accumulation=st.sampled_from([None, 1]),
    commits=st.booleans(),
)
def test_the_smallest_budgets_are_true_minima(model, device, nvme, accumulation, commits) -> None:
    others = {"activations": 5000, "accumulation": accumulation, "commits": commits}
    plenty = {"device": device and 64 * MiB, "host": 64 * MiB, "nvme": on(64 * MiB if nvme else None)}
    smallest = planned(model, **others, **plenty).smallest
    assert not commits or (Tier.NVME in smallest) == nvme

    def fits(budgets: dict[Tier, int]) -> Plan:
        near = {tier.value: nbytes for tier, nbytes in budgets.items() if tier is not Tier.NVME}
        # Where the least host memory holds all pages, none is left for the disk.
        disk = on(budgets.get(Tier.NVME, 4096)) if nvme else None
        made = planned(model, **others, **near, nvme=disk)
        check(made, Budget(**near, nvme=disk))
        return made

    assert fits(smallest).smallest == smallest
    for tier, nbytes in smallest.items():
        with pytest.raises(BudgetError):
            fits({**smallest, tier: max(1, nbytes - 4096)})


@settings(max_examples=100, deadline=None)
@given(
    model=models,
    device=st.none() | sizes,
    host=sizes,
    nvme=st.none() | sizes,
    more=st.integers(0, MiB),
    commits=st.booleans(),
)
def test_what_fits_still_fits_in_more(*, model, device, host, nvme, more, commits) -> None:
    def fits(extra: int) -> bool:
        budget = {
            "device": device and device + extra,
            "host": host + extra,
            "nvme": on(nvme and nvme + extra),
        }
        try:
            planned(model, commits=commits, **budget)
        except BudgetError:
            return False
        return True

    assert fits(more) or not fits(0)


def test_a_small_model_trains_in_very_little() -> None:
    model = stack([220])  # 97k parameters
    made = planned(model, device="1MiB", host="8MiB")
    assert made.home_bytes[Tier.DEVICE] > 0
    model = stack([64] * 12)
    made = planned(model, device=20 * 1024, host=160 * 1024, nvme={"/nowhere": "8MiB"})
    assert len(made.layout.units) == 12


def test_with_room_all_rests_near_and_parameters_come_first() -> None:
    model = stack([64] * 4)
    made = planned(model, host="64MiB", nvme={"/nowhere": "64MiB"})
    assert made.unified
    assert made.resident_bytes == made.nvme_bytes == 0
    parameters = sum(unit.nbytes for unit in made.layout.units)
    made = planned(model, device=parameters, host="64MiB")
    assert made.device_bytes == made.mirror_bytes == parameters
    assert {homes[Kind.OPTIMIZER] for homes in made.homes} == {Tier.HOST}
    made = planned(model, device=parameters, host=made.host_bytes - parameters)
    assert {homes[Kind.PARAMETER] for homes in made.homes} == {Tier.DEVICE}
    assert {homes[Kind.OPTIMIZER] for homes in made.homes} == {Tier.HOST}
    assert made.device_bytes == parameters and not made.mirrored


def test_where_no_page_moves_there_is_no_staging() -> None:
    """A plan whose pages all stay where they are used sets aside no staging, buffers that would go unused."""
    nvme = {"/somewhere": "1GiB"}
    assert planned(stack([64] * 6), host="256MiB", nvme=nvme).staging_bytes == 0
    tight = planned(stack([64] * 6), host="400KiB", nvme=nvme)
    assert tight.home_bytes[Tier.NVME] and tight.staging_bytes
    assert planned(stack([64] * 6), host="256MiB", device="256MiB").staging_bytes


@pytest.mark.parametrize("update", ["lazy", "eager"])
@pytest.mark.parametrize(
    ("width", "host"), [(1024, "2GiB"), (2048, "4GiB"), (2048, "1800MiB"), (2048, "400MiB")]
)
def test_ample_staging_has_the_updates_of_a_unit_or_a_quarter(width: int, host: str, update: str) -> None:
    made = planned(
        stack([width] * 96), update=update, accumulation=1, host=host, nvme={"/somewhere": "64GiB"}
    )
    assert made.nvme_bytes
    units = range(len(made.layout.units))
    largest = max(sum(made.page_bytes(unit, kind) for kind in Kind) for unit in units)
    quarter = made.budgets[Tier.HOST] // 4 // 4096 * 4096
    assert made.staging_bytes == max(2 * made.chunk_update_bytes, min(quarter, largest))


def test_one_backward_a_step_keeps_states_nearer_than_gradients() -> None:
    model, budget = stack([64] * 9), {"host": 600 << 10, "nvme": {"/swap": 64 * MiB}}
    in_their_dtype = Precision(accumulate="compute")
    unknown, several, one = (
        planned(model, accumulation=each, precision=in_their_dtype, **budget) for each in (None, 4, 1)
    )
    assert unknown.homes == several.homes
    check(one, Budget(**budget))

    def here(made: Plan, kind: Kind) -> int:
        return sum(home[kind] is Tier.HOST for home in made.homes)

    assert here(one, Kind.OPTIMIZER) > here(unknown, Kind.OPTIMIZER)
    assert here(one, Kind.GRADIENT) < here(unknown, Kind.GRADIENT)
    assert one.traffic.update.disk_write < unknown.traffic.update.disk_write
    assert one.smallest == unknown.smallest


def test_activations_and_buffers_take_room_where_the_model_computes() -> None:
    model = stack([64] * 4)
    model.register_buffer("mask", torch.empty(1000, device="meta"))
    assert planned(model, device="1MiB", host="64MiB", activations=1000).device_bytes <= MiB
    with pytest.raises(BudgetError, match="the device tier"):
        planned(model, device="1MiB", host="64MiB", activations=MiB)
    with pytest.raises(BudgetError, match="the host tier") as caught:
        planned(model, host="64MiB", activations=64 * MiB)
    assert planned(model, host=caught.value.needed, activations=64 * MiB).reserved >= 64 * MiB + 4000
    unknown = planned(model, device="64MiB", host="64MiB")
    assert unknown.activations is None and unknown.reserved == 4096


def test_a_cuda_budget_keeps_room_for_activations_that_nobody_knows() -> None:
    model = stack([64] * 4)
    arguments = {
        "precision": Precision(),
        "device": torch.device("cuda", 0),
        "available": Available(device=64 * MiB, host=64 * MiB),
    }
    rule = Rule.of(torch.optim.AdamW(model.parameters()))
    made = make_plan(model, rule, budget=Budget(host="64MiB"), **arguments)
    assert made.reserved == 16 * MiB and made.rows()[0]["activations"] is None
    with pytest.raises(BudgetError) as caught:
        make_plan(model, rule, budget=Budget(device=8192, host="64MiB"), **arguments)
    needed = caught.value.needed
    assert make_plan(model, rule, budget=Budget(device=needed, host="64MiB"), **arguments)
    with pytest.raises(BudgetError):
        make_plan(model, rule, budget=Budget(device=needed - 4096, host="64MiB"), **arguments)


def test_the_device_is_named_before_the_host() -> None:
    with pytest.raises(BudgetError, match="the device tier"):
        planned(stack([64] * 4), device=4096, host=4096, nvme={"/nowhere": "64MiB"})


def test_several_paths_keep_room_for_striping() -> None:
    model = stack([300] * 4)
    with pytest.raises(BudgetError) as error:
        planned(model, host="1MiB", nvme={"/a": "1MiB", "/b": "1MiB"})
    half = -(-error.value.needed // 2)
    made = planned(model, host="1MiB", nvme={"/a": half + 4096, "/b": half + 4096})
    assert made.nvme_bytes * 33 / 32 <= error.value.needed


def test_inference_has_no_gradients_and_no_states() -> None:
    made = planned(stack([64] * 4), optimizer=None, host="1MiB")
    assert {homes[Kind.GRADIENT] for homes in made.homes} == {None}
    assert made.traffic.update == made.traffic.accumulation == PhaseBytes()
    assert made.predict() is None


def test_steps_move_what_rests_elsewhere() -> None:
    made = planned(
        stack([64] * 4), host=200_000, nvme={"/nowhere": "64MiB"}, precision=Precision(compute="fp32")
    )
    (nvme,) = [row for row in made.rows() if row["tier"] == "nvme"]
    expected_write = nvme["params"] + nvme["gradients"] + nvme["optimizer"]
    assert nvme["optimizer"] > 0
    assert made.traffic.disk_write == expected_write
    # The parameters that forward reads are updated too. Each of both passes finds pages that the other left
    # in the pool.
    read = nvme["gradients"] + nvme["optimizer"] + 2 * (nvme["params"] - made.resident_bytes)
    assert 0 <= made.traffic.disk_read - read < 2 * len(made.layout.units)


def test_a_meta_model_prints_a_table() -> None:
    made = plan(
        stack([64] * 4),
        torch.optim.AdamW(stack([64]).parameters()),
        budget=Budget(device="64KiB", host="200KiB", nvme={"/nowhere": "2MiB"}),
        device="cpu",
    )
    lines = str(made).splitlines()
    head = lines[0].split()
    assert head == ["tier", "budget", "params", "gradients", "optimizer", "working", "activations", "free"]
    assert [line.split()[0] for line in lines[2:5]] == ["device", "host", "nvme"]
    assert "unknown" in lines[2]
    assert "predicted unknown s/step" in lines[5]
    assert "smallest budgets" in lines[-1]


def test_a_plan_tells_of_products_without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(supported: bool, compute: str) -> str:
        op = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: supported)
        monkeypatch.setattr(torch.ops, "mkldnn", op)
        precision = Precision(compute=compute)
        return str(plan(stack([64]), None, budget=Budget(host="1MiB"), precision=precision, device="cpu"))

    assert "no instructions for products in bf16" in text(False, "bf16")
    assert "instructions" not in text(True, "bf16") + text(False, "fp32")


def test_a_notebook_shows_a_plan_as_a_table() -> None:
    made = plan(stack([64] * 4), None, budget=Budget(device="64KiB", host="200KiB"), device="cpu")
    html = made._repr_html_()
    words = unescape(re.sub("<[^>]*>", " ", html)).split()
    assert words == re.sub("─+", "", str(made)).split()
    assert html.count("<tr>") == 1 + len(made.budgets) and len(html) < 2000


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="dict"):
        plan({}, None)


def test_a_transformers_configuration_is_built_on_meta() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    made = plan(config, None, budget=Budget(host="64MiB"), device="cpu")
    names = {name for unit in made.layout.units for each in unit.parameters for name in each.names}
    assert "model.layers.1.mlp.down_proj.weight" in names
