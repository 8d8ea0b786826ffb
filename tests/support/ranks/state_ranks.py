"""Programs of ranks whose optimizers have states before offload; see test_initial_states.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rank_processes
import torch
from ranked_cases import PARTITIONS, digest
from torch import nn

import infinity
from infinity.distributed import exchange
from infinity.distributed.communicator import Communicator
from infinity.distributed.exchange import Exchange

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TOGETHER = 2
"""Number of micro-batches in a step, over all ranks."""
WIDTH = 40


@dataclass(frozen=True)
class Case:
    """What is trained, and what the optimizers of ranks have before offload."""

    stage: int
    optimizer: str = "adamw"
    compute: str = "fp32"
    states: str = "fp32"
    others: str = "nothing"
    """What the optimizers of the ranks behind rank 0 have: "nothing", "other states", or "alone"; with
    "alone" they have states, and rank 0 has none.
    """
    masters: str = "none"
    """Which masters are given: "none", "fit", or "one does not fit": one whose last element alone does not
    round to the parameter's value.
    """


CASES = (
    *(Case(stage) for stage in range(4)),
    Case(0, "sgd", others="other states"),
    Case(3, "sgd", states="int8", others="other states"),
    Case(2, "adagrad", others="other states"),
    Case(3, states="int8", others="other states"),
    Case(1, states="bf16", others="other states"),
    *(Case(stage, others="alone") for stage in (0, 3)),
    *(Case(stage, compute="bf16", masters="fit") for stage in range(4)),
    Case(1, compute="fp16", masters="fit", others="other states"),
    *(Case(stage, compute="bf16", masters="one does not fit") for stage in (0, 3)),
    Case(3, compute="fp16", states="bf16", masters="one does not fit", others="other states"),
    Case(3, compute="bf16", masters="fit", others="alone"),
)


class Model(nn.Module):
    """A convolution whose weight lies channels_last, a frozen layer, and parameters of several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Conv2d(10, 40, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(WIDTH, 8).requires_grad_(False)
        self.up, self.down = nn.Linear(WIDTH, 400), nn.Linear(400, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.spread(x.view(-1, 10, 2, 2)).flatten(1)
        total: torch.Tensor = self.down(torch.tanh(self.up(y))) + self.frozen(x)
        return total


def given(case: Case, model: nn.Module, rank: int) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """The states that a rank's optimizer has: parameter -> state. The bias of the last layer has none."""
    random, found = torch.Generator().manual_seed(100 + rank), {}
    trained = [each for each in model.parameters() if each.requires_grad]
    for at, parameter in enumerate(trained[:-1]):
        # Contiguous, though one parameter is not.
        moments = [torch.rand(parameter.shape, generator=random) * 1e-3 for _ in range(2)]
        steps = torch.tensor(3.0 + at + 10 * rank)
        state = {
            "adamw": {"step": steps, "exp_avg": moments[0], "exp_avg_sq": moments[1]},
            "adagrad": {"step": steps, "sum": moments[0]},
            "sgd": {"momentum_buffer": moments[0]},
        }[case.optimizer]
        if case.masters != "none":
            # Less than half the distance to the next number in bf16 and fp16.
            master = parameter.detach().float() * (1 + 2.0 ** (-11 if case.compute == "bf16" else -14))
            if case.masters == "one does not fit" and at % 2 == 0:
                master[(-1,) * master.dim()] += 1.0
            state["master"] = master
        found[parameter] = state
    return found


def opened(case: Case, *, frozen_too: bool = False) -> tuple[nn.Module, Any]:
    """The model and its runtime. frozen_too: whether rank 0's optimizer has the state of a frozen layer."""
    torch.manual_seed(7 + RANK)
    model = Model().to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.compute])
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    more = {"momentum": 0.9} if case.optimizer == "sgd" else {}
    optimizer = kinds[case.optimizer](model.parameters(), lr=1e-2, **more)
    has_states = RANK > 0 if case.others == "alone" else RANK == 0 or case.others == "other states"
    if has_states:
        optimizer.state.update(given(case, model, RANK))
    if frozen_too and RANK == 0:
        optimizer.state[model.frozen.weight] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.ones(8, WIDTH),
            "exp_avg_sq": torch.ones(8, WIDTH),
        }
    runtime = infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host="64MiB"),
        precision=infinity.Precision(compute=case.compute, states=case.states),
        device="cpu",
        **({"partition": PARTITIONS[case.stage]} if SIZE > 1 else {}),
    )
    return model, runtime


def states_and_bits() -> list[Any]:
    """For each case: the case, digests of the optimizer states after offload, and digests of states and of
    parameters after two steps.
    """
    torch.set_num_threads(1)
    exchange._STATES = 4096  # several ranges for each piece
    return [_trained(case) for case in CASES]


def _trained(case: Case) -> list[Any]:
    model, runtime = opened(case)
    with runtime:
        found: list[Any] = [repr(case), _states(runtime)]
        for step in range(2):
            for number in range(TOGETHER):
                if number % SIZE == RANK:
                    inputs = torch.randn(
                        4, WIDTH, generator=torch.Generator().manual_seed(10 * step + number)
                    )
                    loss = model(inputs.to(next(model.parameters()).dtype)).float().square().mean()
                    (loss / (1 if SIZE > 1 else TOGETHER)).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        found += [_states(runtime), [digest(each) for each in model.state_dict().values()]]
    return found


def _states(runtime: Any) -> dict[str, dict[str, Any]]:
    """Number of a parameter -> its state: the step as a number, and other entries as digests."""
    state = runtime.optimizer.state_dict()["state"]
    return {
        str(number): {name: float(each) if name == "step" else digest(each) for name, each in entries.items()}
        for number, entries in state.items()
    }


def bytes_taken() -> list[int]:
    """Bytes of states that a rank received, and bytes of its own share of all moments, at stage 3."""
    _, runtime = opened(Case(3))
    with runtime:
        parts = runtime._components
        received = parts.ranks.wire.traffic().received["initial states"]
        pages = parts.states.pages.values()
        elements = sum(
            piece.count
            for page in pages
            for parameter in page.has_moments
            for _, piece in page.pieces(parameter)
        )
    return [received, elements * 2 * 4]


def rank_1_fails() -> None:
    """Rank 1 raises an error before its third range of states."""
    take, calls = Exchange.take, []

    def planted(self: Exchange, *arguments: Any) -> None:
        calls.append(1)
        if self._label == "initial states" and len(calls) > 2:
            raise infinity.ConfigError("Planted.", "None.")
        take(self, *arguments)

    Exchange.take = planted  # type: ignore[method-assign]
    opened(Case(3))


def frozen_state() -> None:
    """Rank 0's optimizer has a state for a frozen parameter."""
    opened(Case(3), frozen_too=True)


def early_rank_1() -> bool:
    """Rank 1 begins a forward before rank 0's runtime is made. So rank 0 gets requests for pages that it must
    answer later.
    """
    serve = Communicator.serve

    def late(self: Communicator, parts: Any) -> Any:
        if RANK == 0:
            time.sleep(0.2)
        return serve(self, parts)

    Communicator.serve = late  # type: ignore[method-assign]
    model, runtime = opened(Case(3))
    with runtime, torch.no_grad():
        return bool(model(torch.ones(2, WIDTH)).isfinite().all())


if __name__ == "__main__":
    rank_processes.serve(globals())
