"""Programs of ranks whose user code reads, drops and watches gradients, and makes edits that differ; see
tests/distributed/test_user_code.py.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import rank_processes
import torch
from racing_ranks import RANK, SIZE, TILED, TOGETHER, WIDTH, Product, Training, hear_late_of_cleared
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from infinity.errors import InfinityError

PARTITIONS = [(None, "optimizer", "gradients", "parameters")[int(each)] for each in os.environ["STAGES"]]
LAST = SIZE > 1 and RANK == SIZE - 1


def drop(training: Training) -> None:
    """Set p.grad = None for three parameters. The last rank is late, when others may be in their next
    backward.
    """
    if LAST:
        time.sleep(0.05)
    for module in (training.model.first, training.model.middle[1], training.model.last):
        module.weight.grad = None
        assert module.weight.grad is None


def micro_batches(training: Training, first: int) -> None:
    for number in range(first, first + TOGETHER):
        training.backward(number)


def dropped() -> list[list[Any]]:
    """For each partition, what training comes to if all ranks drop gradients."""
    found = []
    for partition in PARTITIONS:
        training = Training(partition)
        runtime, weight = training.runtime, training.model.first.weight
        told: list[Any] = []

        def read(training: Training = training) -> Any:
            gradient = training.runtime.grad(training.model.first.weight)
            return None if gradient is None else float(gradient.norm())

        micro_batches(training, 0)
        drop(training)
        told += [read(), float(runtime.clip_grad_norm_(0.05)), read(), training.end()]
        micro_batches(training, 2)
        told += [float(runtime.clip_grad_norm_(0.05)), read()]
        drop(training)
        told.append(read())
        runtime.optimizer.step()
        told += [read(), weight.grad is None]
        runtime.optimizer.zero_grad()
        micro_batches(training, 4)
        for parameter in training.model.parameters():
            parameter.grad = None
        try:
            runtime.optimizer.step()
        except InfinityError as error:
            told.append(error.cause)
        runtime.close()
        found.append(told)
    return found


def refused() -> list[list[str]]:
    """For each partition, how it ends if one rank alone drops a gradient, if a backward adds to one that was
    dropped, and if one is dropped inside of a backward or with eager updates.
    """
    found = []
    for partition in PARTITIONS:
        told = []
        for program in (one_rank, another_backward, inside, eager):
            options: dict[str, Any] = {"update": "eager", "accumulation": 1} if program is eager else {}
            training = Training(partition, **options)
            try:
                program(training)
                told.append(training.end() and "trained")
            except InfinityError as error:
                told.append(f"{type(error).__name__}: {error.cause}")
            if program is not one_rank:  # a rank that is late would hear that another one has closed
                training.runtime.training_step._ranks.agree("all ranks were refused")
            training.runtime.close()
        found.append(told)
    return found


def one_rank(training: Training) -> None:
    micro_batches(training, 0)
    if LAST:
        training.model.last.bias.grad = None
    training.runtime.clip_grad_norm_(1.0)


def another_backward(training: Training) -> None:
    micro_batches(training, 0)
    training.model.last.bias.grad = None
    micro_batches(training, 2)


def inside(training: Training) -> None:
    def hook(parameter: torch.Tensor) -> None:
        parameter.grad = None

    training.model.last.bias.register_post_accumulate_grad_hook(hook)
    micro_batches(training, 0)


def eager(training: Training) -> None:
    micro_batches(training, 0)
    training.model.last.bias.grad = None


@hear_late_of_cleared()
def read_when_cleared() -> list[Any]:
    """Ranks read a gradient right after zero_grad(), of which rank 0 hears late."""
    found: list[Any] = []
    for partition in PARTITIONS:
        training = Training(partition)
        for step in range(2):
            micro_batches(training, 2 * step)
            found.append(training.end())
            found.append(training.runtime.grad(training.model.first.weight) is None)
        training.runtime.close()
    return found


def hooks() -> list[float]:
    """The norms of the gradients that a hook of a parameter sees, of one micro-batch after another."""
    training, found = Training("parameters"), []
    scale = 1 if SIZE > 1 else TOGETHER  # one rank has divided the losses
    training.model.last.weight.register_hook(lambda each: found.append(float((each * scale).norm())))
    micro_batches(training, 0)
    micro_batches(training, 2)
    training.end()
    training.runtime.close()
    return found


def differing_edits() -> list[list[Any]]:
    """For each partition: the error by which edits that differ are refused, whether they are undone, and how
    training goes on.
    """
    found = []
    for partition in PARTITIONS:
        training = Training(partition)
        told: list[Any] = []
        before = training.digest()
        for program in (
            functools.partial(edit, training),
            training.digest,
            functools.partial(go_on, training),
        ):
            try:
                told.append(program() == before)
            except InfinityError as error:
                told.append(f"{type(error).__name__}: {error}")
        training.runtime.close()
        found.append(told)
    return found


def edits_outside() -> list[list[Any]]:
    """For each partition: how edits outside of full_parameters end, whether they have changed anything, and
    how training goes on, at last after one through a view.
    """
    found = []
    for partition in PARTITIONS:
        training = Training(partition)
        weight, before = training.model.first.weight, training.digest()
        given = training.model.state_dict()
        ways: tuple[Callable[[], Any], ...] = (
            functools.partial(torch.nn.init.zeros_, weight),
            functools.partial(setattr, weight, "data", torch.zeros(WIDTH, WIDTH, dtype=weight.dtype)),
            functools.partial(training.model.load_state_dict, given),
        )
        told: list[Any] = [error_of(each) for each in ways]
        told += [training.digest() == before, error_of(functools.partial(go_on, training))]
        training.model.last.weight.data.clamp_(-0.01, 0.01)
        told += [error_of(functools.partial(go_on, training)), error_of(training.digest)]
        training.runtime.close()
        found.append(told)
    return found


def edit(training: Training) -> None:
    with training.runtime.full_parameters(training.model.first), torch.no_grad():
        training.model.first.weight.mul_(2 + RANK)


def go_on(training: Training) -> str:
    micro_batches(training, 0)
    return training.end()


def discarded() -> list[list[Any]]:
    """For each partition, how zero_grad() without step() ends with eager updates, and what step() comes to
    afterwards. Then how a step goes on whose gradients are lost on the last rank before an update has begun.
    """
    found = []
    for partition in PARTITIONS:
        told: list[Any] = []
        training = eager_training(partition, 1)
        zero_grad = training.runtime.optimizer.zero_grad
        zero_grad()
        for first in range(0, 8, TOGETHER):
            micro_batches(training, first)
            told += [error_of(zero_grad), training.end()]
        told.append(updates(training))
        training.runtime.close()
        training = eager_training(partition, 2)
        before = training.digest()
        micro_batches(training, 0)
        if LAST or SIZE == 1:
            training.runtime._components.gradients.break_off()  # the gradients so far are lost
        if SIZE > 1:
            assert error_of(training.model.last.bias.grad.norm)
        assert error_of(training.runtime.optimizer.step) != ""
        training.runtime.optimizer.zero_grad()
        told.append(training.digest() == before)
        training.runtime.close()
        found.append(told)
    return found


def eager_training(partition: str | None, backwards: int, model: torch.nn.Module | None = None) -> Training:
    """A training with eager updates, with so many backwards on each of several ranks in a step."""
    declared = backwards * (1 if SIZE > 1 else TOGETHER)
    return Training(partition, model=model, update="eager", accumulation=declared)


def updates(training: Training) -> list[float]:
    """Number of updates of each parameter that has been updated."""
    state = training.runtime.optimizer.state_dict()["state"]
    return [float(each["step"]) for each in state.values()]


def not_finite() -> list[list[Any]]:
    """For each partition, how training with eager updates goes on after gradients that are not finite."""
    found = []
    for partition in PARTITIONS:
        training = eager_training(partition, 1)
        for number in range(TOGETHER):
            training.backward(number, times=float("inf") if number else 1.0)
        told: list[Any] = [error_of(training.runtime.optimizer.step)]
        training.runtime.optimizer.zero_grad()
        micro_batches(training, 2)
        told += [training.end(), updates(training)]
        training.runtime.close()
        found.append(told)
    return found


def half_updated() -> list[list[str]]:
    """For each partition with shards: the last rank has updated its part of a unit, when it is found
    that the gradient of rank 0's part is not finite.
    """
    found = []
    for partition in PARTITIONS[2:]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Product(), Product())
        training = eager_training(partition, 1, model)
        if RANK == 0:
            model[0].first.register_hook(lambda gradient: gradient * float("nan"))
        else:
            shards = training.runtime.training_step._ranks.shards
            while not shards._turns._done[0] or shards._asked or shards._ready:
                time.sleep(0.01)  # until all gradients of rank 0 are added
        micro_batches(training, 0)
        calls = (training.end, training.runtime.optimizer.zero_grad, training.digest)
        found.append([error_of(each) for each in calls])
        training.runtime.close()
    return found


def failed_step() -> list[list[str]]:
    """For each partition, what training comes to if a step fails on several ranks, and they go on with the
    same call once more, with another backward, or with zero_grad().
    """
    found = []
    for partition in PARTITIONS:
        training, told = Training(partition), []
        for number, way in enumerate(("again", "another backward", "zero_grad")):
            first = 4 * number
            # Stages 0 and 1 add gradients of several backwards in another order than one rank does.
            backwards = range(first, first + 4 if way == "another backward" else first + 2, TOGETHER)
            micro_batches(training, first)
            if SIZE > 1:
                if LAST:
                    time.sleep(0.02)
                    training.runtime.optimizer.param_groups[0]["lr"] = 0.5
                assert "options of the param groups" in error_of(training.runtime.optimizer.step)
                training.runtime.optimizer.param_groups[0]["lr"] = 1e-2
            if way == "zero_grad":
                training.runtime.optimizer.zero_grad()
                micro_batches(training, first + 2)
            for each in backwards[1:] if partition in PARTITIONS[2:] else ():
                micro_batches(training, each)
            told.append(training.end())
        training.runtime.close()
        found.append(told)
    return found


def other_calls() -> list[list[str]]:
    """For each partition, how it ends if ranks make different calls and go on: all calls raise one error."""
    found = []
    for partition in PARTITIONS:
        training = Training(partition)
        micro_batches(training, 0)
        clip = functools.partial(training.runtime.clip_grad_norm_, 1.0)
        calls = [clip if LAST else training.runtime.optimizer.step]
        calls += [clip, training.runtime.optimizer.step, functools.partial(micro_batches, training, 2)]
        found.append([error_of(each) for each in calls])
        training.runtime.close()
    return found


def replaced_states() -> list[list[Any]]:
    """For each partition, what training comes to if ranks replace optimizer states by equal ones, and try to
    replace them by others: the errors come last.
    """
    found = []
    for partition in PARTITIONS:
        training, errors = Training(partition), []
        optimizer, model = training.runtime.optimizer, training.model
        micro_batches(training, 0)
        training.end()
        given = optimizer.state_dict()
        for state in given["state"].values():
            state["exp_avg"] = state["exp_avg"].bfloat16()
            if LAST:  # equal values, though they are kept otherwise
                state["exp_avg"] = state["exp_avg"].double().t().contiguous().t()
        if SIZE > 1:
            wrong = optimizer.state_dict()
            wrong["param_groups"][0]["lr"] = 0.5
            if LAST:
                wrong["state"][3]["exp_avg_sq"][0] = 1.0
            other = {"step": 7.0, "exp_avg": torch.ones(WIDTH), "exp_avg_sq": torch.ones(WIDTH)}
            parameter = model.first.bias if LAST else model.middle[0].bias
            errors = [
                error_of(functools.partial(optimizer.load_state_dict, wrong)),
                error_of(functools.partial(optimizer.state.__setitem__, parameter, other)),
                error_of(functools.partial(optimizer.state.__delitem__, parameter)),
            ]
        optimizer.load_state_dict(given)
        del optimizer.state[model.middle[1].weight]
        optimizer.state[model.last.bias] = {**optimizer.state[model.last.bias], "step": 5.0}
        micro_batches(training, 2)
        found.append([training.end(), updates(training), optimizer.param_groups[0]["lr"], errors])
        training.runtime.close()
    return found


class Routed(torch.nn.Module):
    """Two products, of which a micro-batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.products = torch.nn.ModuleList([Product(), Product()])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.products[int(inputs[0, 0] > 0)](inputs)


def zeros() -> list[Any]:
    """For each partition, what training comes to if gradients become zeros, by the optimizer or the model."""
    found = []
    for partition in PARTITIONS:
        for by_model in (False, True):
            training = Training(partition, model=Routed())
            runtime, model, told = training.runtime, training.model, []
            owner = model if by_model else runtime.optimizer
            for step in range(4):
                micro_batches(training, 2 * step)
                told.append(float(runtime.clip_grad_norm_(0.05)))
                runtime.optimizer.step()
                if LAST:
                    time.sleep(0.02)
                owner.zero_grad(set_to_none=False)
                told.append([each.grad is None for each in model.parameters()])
                gradients = [runtime.grad(each) for each in model.parameters()]
                told.append([None if each is None else bool(each.any()) for each in gradients])
                told.append(training.digest())
            micro_batches(training, 8)
            runtime.optimizer.zero_grad(set_to_none=False)  # each rank knows of its own gradients alone
            runtime.optimizer.step()
            told += [training.digest(), [len(runtime.optimizer.state), updates(training)]]
            owner.zero_grad()
            told.append(error_of(runtime.optimizer.step))
            runtime.optimizer.zero_grad()
            for step in range(5, 7):
                micro_batches(training, 2 * step)
                told.append(float(runtime.clip_grad_norm_(0.05)))
                runtime.optimizer.step()
                owner.zero_grad()
                told.append(training.digest())
            runtime.close()
            found.append(told)
        declared = 1 if SIZE > 1 else TOGETHER
        training = Training(partition, update="eager", accumulation=declared)
        for step in range(3):
            micro_batches(training, 2 * step)
            training.runtime.optimizer.step()
            training.model.zero_grad(set_to_none=step == 1)
            found.append([training.digest()])
        training.runtime.close()
    return found


def torch_clips() -> list[Any]:
    """For each partition, what training comes to if torch measures and scales gradients by `p.grad`."""
    found = []
    for partition in PARTITIONS:
        training = Training(partition)
        weight, told = training.model.first.weight, []
        for step in range(2):
            micro_batches(training, 2 * step)
            given = list(training.model.parameters())
            told.append(float(torch.nn.utils.clip_grad_norm_(given, 0.05, foreach=step == 1)))
            # Each rank asks for the norm of another parameter.
            norms = [float(each.grad.norm()) for each in (given if LAST else given[::-1])]
            told.append(sorted(norms))
            told += [float(weight.grad.sum()), training.end()]
        training.runtime.close()
        training = Training(partition, model=Routed())
        for step in range(2):
            micro_batches(training, 2 * step)
            for each in training.model.parameters():
                if each.grad is not None:  # a rank knows of its own gradients alone
                    each.grad.mul_(0.25)
            told.append(training.end())
        training.runtime.close()
        training = Training(partition)
        bias = training.model.last.bias
        micro_batches(training, 0)
        bias.grad = torch.zeros_like(bias)
        told += [training.end(), updates(training)]
        if partition in PARTITIONS[2:]:
            micro_batches(training, 2)
            told.append(float(bias.grad.norm()))
            micro_batches(training, 4)
            told += [float(bias.grad.norm()), training.end()]
        training.runtime.close()
        training = eager_training(partition, 1)
        for step in range(2):
            micro_batches(training, 2 * step)
            told += [float(training.model.last.bias.grad.norm()), training.end()]
        training.runtime.close()
        found.append(told)
    return found


def other_factors() -> list[list[str]]:
    """For each partition, how it ends if ranks scale gradients by other factors, or not all, or set one."""
    found = []
    for partition in PARTITIONS:
        training, told = Training(partition), []
        micro_batches(training, 0)
        weight = training.model.last.weight
        told.append(error_of(functools.partial(setattr, weight, "grad", torch.ones(8, WIDTH))))
        weight.grad.mul_(0.5)
        told.append(error_of(training.runtime.optimizer.step))
        for each in training.model.parameters():
            each.grad.mul_(1.0 if each is weight else 0.5)
        if LAST:
            for each in training.model.parameters():
                each.grad.div_(4)
        told.append(error_of(training.runtime.optimizer.step))
        training.runtime.optimizer.zero_grad()
        micro_batches(training, 2)
        told.append(training.end() and "trained")
        handle = weight.register_post_accumulate_grad_hook(lambda each: each.grad.norm())
        told.append(error_of(functools.partial(micro_batches, training, 4)))
        handle.remove()
        training.runtime.close()
        found.append(told)
    return found


def edited_masters() -> list[Any]:
    """For each partition, what training comes to with edits that leave most masters as they are, and whether
    a training goes on with the same bits if its optimizer is loaded before its model.
    """
    found = []
    for partition in PARTITIONS:
        training = Training(partition)
        for step in range(2):
            micro_batches(training, 2 * step)
            training.end()
        weight = training.model.middle[0].weight
        with training.runtime.full_parameters(training.model), torch.no_grad():
            (weight if TILED else weight.data).clamp_(-0.09, 0.09)  # edits of p.data are refused for tiles
            weight[3] = 0.5
            training.model.last.weight.copy_(training.model.last.weight.clone())
        values = {name: each.clone() for name, each in training.model.state_dict().items()}
        states = training.runtime.optimizer.state_dict()
        masters = [float((each["master"] % 2**-14 != 0).float().mean()) for each in states["state"].values()]
        micro_batches(training, 4)
        end = training.end()
        training.runtime.close()
        again = Training(partition)
        micro_batches(again, 6)
        again.end()
        again.runtime.optimizer.load_state_dict(states)
        with again.runtime.full_parameters(again.model):
            again.model.load_state_dict(values)
        micro_batches(again, 4)
        found.append([masters, end, again.end() == end])
        again.runtime.close()
    return found


def averages() -> list[list[str]]:
    """For each partition, an average of masters that all ranks keep, and one that the last rank keeps alone,
    with training between their updates.
    """
    found = []
    for partition in PARTITIONS:
        training = Training(partition)
        together = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        alone = AveragedModel(training.model) if LAST or SIZE == 1 else None
        for first in range(0, 6, TOGETHER):
            micro_batches(training, first)
            training.runtime.optimizer.step()
            together.update_parameters(training.model)
            if alone is not None:
                alone.update_parameters(training.model)
            training.runtime.optimizer.zero_grad()
        training.runtime.close()
        found.append(["" if each is None else digest_of(each) for each in (together, alone)])
    return found


def kept() -> list[list[Any]]:
    """For each partition, the masters of a model, and the model that each rank keeps at the end."""
    found = []
    for partition in PARTITIONS:
        training = Training(partition)
        for first in range(0, 4, TOGETHER):
            micro_batches(training, first)
            training.end()
        with training.runtime.masters():
            masters = digest_of(training.model)
        if LAST:
            time.sleep(0.05)
        training.runtime.close(keep=True)
        plain = {(type(each), each.dtype) for each in training.model.parameters()}
        assert plain == {(torch.nn.Parameter, torch.float32)}
        found.append([masters, digest_of(training.model)])
    return found


def digest_of(model: torch.nn.Module) -> str:
    state = model.state_dict().values()
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in state)).hexdigest()


def error_of(call: Callable[[], Any]) -> str:
    """The error that a call raises; "" if it raises none."""
    try:
        call()
    except InfinityError as error:
        return f"{type(error).__name__}: {error.cause}"
    return ""


def every_program() -> dict[str, Any]:
    """What each program of this file returns, by its name."""
    programs = (
        dropped,
        read_when_cleared,
        zeros,
        edited_masters,
        hooks,
        discarded,
        not_finite,
        failed_step,
        replaced_states,
        averages,
        kept,
        torch_clips,
    )
    several = (refused, differing_edits, edits_outside, half_updated, other_calls, other_factors)
    found = {each.__name__: each() for each in several} if SIZE > 1 else {}
    return found | {each.__name__: each() for each in programs}


if __name__ == "__main__":
    rank_processes.serve(globals())
