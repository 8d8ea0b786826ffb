"""Tests of training with bf16 and int8 moments: all homes give equal bits, and state dicts can be loaded."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for, check_homes
from other_optimizers import Lion
from small_runtime import TIED, opened, train_step
from torch import Tensor, nn

import infinity
from infinity.formats.encodings import FIRST_SPAN, SECOND_SPAN, decode, encode

STATES = ("bf16", "int8")
RULES: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.3),
    "lion": lambda parameters: Lion(parameters, lr=1e-2),
}
Run = dict[str, Any]


class Odd(nn.Module):
    """A model whose parameters differ in size: one has a single element, others have less or more elements
    than a block, and some lie in several chunks.

    A block is a run of elements whose int8 codes of a moment share one exponent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(37, 130)
        self.second = nn.Linear(130, 130, bias=False)
        self.shift = nn.Parameter(torch.zeros(65))
        self.third = nn.Linear(130, 65)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        return self.third(torch.tanh(self.second(x))) + self.shift


def loss_of(model: nn.Module, number: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 37, generator=torch.Generator().manual_seed(number))
    return model(x.to(dtype)).float().square().mean()


def train(directory: Path, home: str, precision: infinity.Precision, make: Any, *, seed: int = 5) -> Run:
    """Train four steps with all pages at `home`, and return losses, parameters and optimizer states.

    The budget is that of budget_for in homes.py. make: function from parameters to a torch optimizer.
    """
    torch.manual_seed(seed)
    model = Odd()
    optimizer = make(model.parameters())
    budget = budget_for(home, model, optimizer, directory, precision)
    with infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu") as runtime:
        check_homes(home, runtime.plan)
        losses = []
        for number in range(4):
            loss = loss_of(model, number)
            loss.backward()
            losses.append(loss.item())
            if number == 2:
                runtime.clip_grad_norm_(0.1)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        state = runtime.optimizer.state_dict()["state"]
        values = {name: each.clone() for name, each in model.state_dict().items()}
    gc.collect()
    return {"losses": losses, "values": values, "state": state}


def same(one: Run, two: Run) -> bool:
    return (
        one["losses"] == two["losses"]
        and all(torch.equal(one["values"][name], two["values"][name]) for name in one["values"])
        and all(
            torch.equal(moment, two["state"][key][name])
            for key, state in one["state"].items()
            for name, moment in state.items()
        )
    )


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize(
    ("compute", "states"), [("bf16", "bf16"), ("bf16", "int8"), ("fp16", "bf16"), ("fp32", "int8")]
)
def test_placement_changes_no_bit(tmp_path: Path, compute: str, states: str) -> None:
    precision = infinity.Precision(compute=compute, states=states, keep=("shift",))
    runs = []
    for home in ("unified", "device", "host", "nvme", "mixed"):
        directory = tmp_path / home
        directory.mkdir()
        runs.append(train(directory, home, precision, RULES["adamw"]))
    assert all(same(runs[0], other) for other in runs[1:])
    # Other initial values give another result, so the runs above are not equal for any reason.
    assert not same(runs[0], train(tmp_path, "unified", precision, RULES["adamw"], seed=6))


@pytest.mark.sweep
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("rule", RULES)
def test_training_is_near_that_with_fp32_states(tmp_path: Path, states: str, rule: str) -> None:
    runs = {
        each: train(tmp_path, "unified", infinity.Precision(compute="fp32", states=each), RULES[rule])
        for each in ("fp32", states)
    }
    full, small = runs["fp32"], runs[states]
    assert full["losses"] != small["losses"]
    # Rules without roots step in proportion to their moments, and the others by about lr.
    rtol = 0.02 if states == "bf16" else 0.1
    torch.testing.assert_close(small["losses"], full["losses"], rtol=rtol, atol=0)


def is_held(values: Tensor, name: str, states: str) -> bool:
    """Whether the format `states` represents these values of the moment `name` exactly."""
    flat = values.flatten()
    if states == "bf16":
        return torch.equal(flat.bfloat16().float(), flat)
    span = FIRST_SPAN if name in {"exp_avg", "momentum_buffer"} else SECOND_SPAN
    return torch.equal(decode(*encode(flat, span), span), flat)


@pytest.mark.sweep
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(("rule", "home"), [*((rule, "nvme") for rule in RULES), ("adamw", "unified")])
def test_a_state_dict_is_in_torchs_shape_and_comes_back_bit_for_bit(
    tmp_path: Path, states: str, rule: str, home: str
) -> None:
    precision = infinity.Precision(compute="bf16", states=states)
    found = []
    for load in (False, True):
        torch.manual_seed(5)
        model = Odd()
        optimizer = RULES[rule](model.parameters())
        budget = budget_for(home, model, optimizer, tmp_path, precision)
        with infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu") as runtime:
            if load:
                runtime.optimizer.load_state_dict(found[0])
                found.append(runtime.optimizer.state_dict())
                break
            for number in range(3):
                loss_of(model, number).backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            found.append(runtime.optimizer.state_dict())
        gc.collect()
    before, after = (each["state"] for each in found)
    shapes = [each.shape for each in Odd().parameters()]
    moments = 0
    for key, state in before.items():
        for name, value in state.items():
            if name not in {"step", "master"}:
                moments += 1
                assert (value.dtype, value.shape) == (torch.float32, shapes[key])
                assert is_held(value, name, states) and bool(value.any())
                assert torch.equal(after[key][name], value)
    assert moments == len(shapes) * (2 if rule.startswith("adam") else 1)


@pytest.mark.parametrize("states", STATES)
def test_loaded_fp32_moments_are_rounded_to_nearest(tmp_path: Path, states: str) -> None:
    torch.manual_seed(5)
    model = Odd()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    plain.step()
    given = plain.state_dict()
    plain.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute="fp32", states=states)
    budget = budget_for("nvme", model, optimizer, tmp_path, precision)
    with infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu") as runtime:
        runtime.optimizer.load_state_dict(given)
        got = runtime.optimizer.state_dict()["state"]
    for key, state in given["state"].items():
        for name, span in (("exp_avg", FIRST_SPAN), ("exp_avg_sq", SECOND_SPAN)):
            flat = state[name].flatten()
            expected = flat.bfloat16().float() if states == "bf16" else decode(*encode(flat, span), span)
            assert torch.equal(got[key][name].flatten(), expected)


def test_pages_shrink_by_what_the_formats_save() -> None:
    """AdamW's states of a bf16 parameter take 10 bytes an element with fp32 moments, 6 with bf16 moments and
    a little over 4 with int8 moments. Two of these bytes are the low bits of the fp32 master.
    """
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    found = {}
    for states in ("fp32", "bf16", "int8"):
        plan = infinity.plan(
            model,
            optimizer,
            budget=infinity.Budget(host="2GiB"),
            precision=infinity.Precision(states=states),
        )
        layout = plan.layout.units[0]
        nbytes = sum(plan.state_format(0, number).nbytes for number in range(len(layout.chunks)))
        found[states] = nbytes / 4096**2
    assert found["fp32"] == pytest.approx(10, rel=1e-3)
    assert found["bf16"] == pytest.approx(6, rel=1e-3)
    assert found["int8"] == pytest.approx(4 + 2 / 64, rel=2e-2)


def test_a_model_with_attention_and_tied_weights_learns(tmp_path: Path) -> None:
    for states in STATES:
        model = TIED.make("cpu")
        with opened(model, tmp_path, compute="bf16", states=states) as runtime:
            losses = [train_step(model, runtime) for _ in range(4)]
        assert losses[-1] < losses[0]
