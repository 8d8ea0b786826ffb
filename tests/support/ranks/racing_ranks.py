"""Programs of ranks that train at different speeds; see tests/distributed/test_races.py."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import rank_processes
import torch
from torch import nn

import infinity
from infinity.distributed.message import Message, MessageKind
from infinity.distributed.service_thread import ServiceThread
from infinity.distributed.streams import Streams
from infinity.layout import tiles
from infinity.training_step import TrainingStep

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH = 128
TOGETHER = 2
"""Number of micro-batches in a step, over all ranks."""


TILED = bool(os.environ.get("TILED"))
"""Whether the layers of a `Model` are tiled."""


class Model(nn.Module):
    """A model of four layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.middle = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        if TILED:
            tiles.FEWEST_ELEMENTS = 1 << 12
            for each in (self.first, *self.middle):
                infinity.tiled(each)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for layer in self.middle:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.last(hidden)


class Training:
    """A model, its runtime and its micro-batches, of which each rank takes one in each step."""

    def __init__(self, partition: str | None, *, model: nn.Module | None = None, **options: Any) -> None:
        """partition, options: as for infinity.offload; one rank ignores `partition`. model: a `Model` if it
        is None.
        """
        self.model: Any = Model() if model is None else model
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if SIZE > 1:
            options["partition"] = partition
        options.setdefault("budget", infinity.Budget(host="64MiB"))
        self.runtime = infinity.offload(self.model, optimizer, **options)

    def backward(self, number: int, *, times: float = 1.0) -> None:
        """Run a micro-batch of a step, if it is one of this rank's."""
        if number % SIZE == RANK:
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)) * times
            loss = self.model(inputs).float().square().mean()
            (loss / (1 if SIZE > 1 else TOGETHER)).backward()

    def end(self) -> str:
        self.runtime.optimizer.step()
        self.runtime.optimizer.zero_grad()
        return self.digest()

    def digest(self) -> str:
        values = b"".join(each.view(torch.uint8).numpy().tobytes() for each in self._values())
        return hashlib.sha256(values).hexdigest()

    def _values(self) -> list[torch.Tensor]:
        return [each.contiguous() for each in self.model.state_dict().values()]


@contextlib.contextmanager
def hear_late_of_cleared() -> Iterator[None]:
    """A context in which rank 0 hears late that other ranks have cleared their gradients."""
    handle = ServiceThread._handle

    def late(self: ServiceThread, source: int, message: Message) -> None:
        if RANK == 0 and message.kind is MessageKind.CLEARED:
            time.sleep(0.1)
        handle(self, source, message)

    ServiceThread._handle = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        ServiceThread._handle = handle  # type: ignore[method-assign]


@hear_late_of_cleared()
def idle_rank(partition: str = "optimizer") -> list[str]:
    """Rank 0 has no backward in the second step, and hears late that gradients were cleared."""
    training, found = Training(partition), []
    for step in range(3):
        for number in range(TOGETHER):
            if step != 1 or number:
                training.backward(number)
        found.append(training.end())
    training.runtime.close()
    return found


def idle_rank_with_shards() -> list[str]:
    """The same where gradients are shards, whose numbers rank 0 tells when it enters step()."""
    return idle_rank("gradients")


def late_first_backward() -> list[str]:
    """Rank 0 gets gradients of rank 1 before its own, at a loss scale that it has not used yet. In the second
    step, only rank 1 has gradients that are not finite.
    """
    training, found = Training("gradients", precision=infinity.Precision(compute="fp16")), []
    for step in range(3):
        if SIZE > 1 and RANK == 0:
            time.sleep(0.1)
        for number in range(TOGETHER):
            training.backward(number, times=float("inf") if step == 1 and number == 1 else 1.0)
        found.append(training.end())
    training.runtime.close()
    return found


class Product(nn.Module):
    """A unit of two parameters. Each of two ranks keeps the gradient of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 10) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(inputs @ self.first) @ self.last)


def eager_updates_of_parts() -> list[Any]:
    """Rank 1 begins its eager update of a unit before it has a gradient of the unit's other parameter."""
    found: list[Any] = []
    for partition in ("gradients", "parameters"):
        torch.manual_seed(0)
        model = nn.Sequential(Product(), Product())
        declared = 1 if SIZE > 1 else TOGETHER
        training = Training(partition, model=model, update="eager", accumulation=declared)
        for step in range(3):
            if SIZE > 1 and RANK == 1:
                time.sleep(0.05)
            for number in range(TOGETHER):
                training.backward(TOGETHER * step + number)
            found.append(training.end())
        states = training.runtime.optimizer.state_dict()["state"]
        found.append([float(each["step"]) for each in states.values()])
        training.runtime.close()
    return found


def edits_while_sending() -> list[str]:
    """Both ranks edit parameters at once after a step, while rank 0's bytes of that step are still sent."""
    push = Streams.push

    def late(self: Streams, *given: Any) -> Any:
        if RANK == 0:
            threading.Timer(0.05, push, (self, *given)).start()
            return []
        return push(self, *given)

    Streams.push = late  # type: ignore[method-assign]
    training = Training("gradients")
    views, found = [each.data for each in training.model.first.parameters()], []
    for _ in range(2):
        for number in range(TOGETHER):
            training.backward(number)
        training.runtime.optimizer.step()
        training.runtime.optimizer.zero_grad()
        with training.runtime.full_parameters(training.model), torch.no_grad():
            for view in views:
                view.add_(0.125)
            for parameter in training.model.parameters():
                parameter.mul_(0.5)
        found.append(training.digest())
    training.runtime.close()
    return found


def states_after_loading() -> list[float]:
    """Rank 0 reads states that it has loaded while rank 1 still loads."""
    training = Training("parameters")
    for number in range(TOGETHER):
        training.backward(number)
    training.runtime.optimizer.step()
    state = training.runtime.optimizer.state_dict()
    for each in state["state"].values():
        each["exp_avg"].fill_(0.25)
    write = TrainingStep.write_state

    def late(self: TrainingStep, *arguments: Any) -> None:
        if RANK == 1:
            time.sleep(0.02)
        write(self, *arguments)

    TrainingStep.write_state = late  # type: ignore[method-assign]
    training.runtime.optimizer.load_state_dict(state)
    loaded = training.runtime.optimizer.state_dict()["state"].values()
    found = [float(each["exp_avg"].mean()) for each in loaded]
    training.runtime.close()
    return found


if __name__ == "__main__":
    rank_processes.serve(globals())
