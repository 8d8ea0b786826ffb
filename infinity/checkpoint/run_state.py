"""Run state: the state of a run outside of pages, as commits and copies of runs keep it.

It consists of the options of param groups, buffers, extra states of modules, the loss scale, the random
number generators, and the user's state.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.checkpoint import manifest as form
from infinity.checkpoint.codec import Tensors, decode, encode
from infinity.checkpoint.typed_json import Path, corrupt
from infinity.errors import CorruptState, IncompatibleCheckpoint
from infinity.gradients.loss_scale import LossScale
from infinity.layout.names import named_buffers, named_modules
from infinity.layout.tiles import whole_name
from infinity.model.materialize import listed, registered
from infinity.model.tiled_parameter import paged

_SAME = "Load it into the model, the optimizer and the precision with which it was saved."


@dataclass(frozen=True)
class RunState:
    """The state of a run outside of pages, encoded, with the tensors to which the encoded values refer."""

    record: form.RunRecord
    tensors: Tensors = field(repr=False)

    def check(self, path: Path) -> None:
        """Check that all values can be decoded. path: the record's place, for errors. Raises CorruptState."""
        record = self.record
        for index, group in enumerate(record.param_groups):
            place = ((path, ".param_groups"), index)
            if type(decode(group.options, self.tensors, (place, ".options"))) is not dict:
                raise corrupt((place, ".options"), "is not a dict of options")
        named = {"buffers": record.buffers, "extra_state": record.extra_state, "rng": record.rng}
        for field_name, values in named.items():
            for name, value in values.items():
                decode(value, self.tensors, ((path, f".{field_name}"), (name,)))
        decode(record.state, self.tensors, (path, ".state"))
        decode(record.identity, self.tensors, (path, ".identity"))

    @property
    def user_state(self) -> Any:
        """The state that the user gave to `save`, decoded."""
        return decode(self.record.state, self.tensors, "state")

    def check_groups(self, names: Sequence[Sequence[str]]) -> None:
        """Raise IncompatibleCheckpoint if an optimizer's param groups have other parameters.

        names: for each group, the canonical names of its parameters. Tiles count as the weight.
        """
        ours = [_wholes(each) for each in names]
        theirs = [_wholes(group.params) for group in self.record.param_groups]
        if ours == theirs:
            return
        apart = set(itertools.chain(*ours)) ^ set(itertools.chain(*theirs))
        if apart:
            cause = (
                f"Only the optimizer or only the commit has {listed(sorted(apart))} in its param groups, and "
                "not both."
            )
        else:
            cause = (
                f"The parameters lie in the optimizer's {len(ours)} param groups in another way than in the "
                f"commit's {len(theirs)}."
            )
        raise IncompatibleCheckpoint(
            cause,
            "Build the model and the optimizer with the same parameters and groups, in the same order.",
        )

    def check_buffers(self, model: nn.Module) -> None:
        """Raise IncompatibleCheckpoint if buffers are missing on either side or differ in shape or dtype."""
        here = dict(named_buffers(model))
        if here.keys() != self.record.buffers.keys():
            differing = sorted(here.keys() ^ self.record.buffers.keys())
            raise IncompatibleCheckpoint(
                f"The model's buffers differ from the checkpoint's: {differing}.", _SAME
            )
        for name, theirs in self._buffers().items():
            found = (theirs.shape, theirs.dtype) if isinstance(theirs, torch.Tensor) else None
            if found != (here[name].shape, here[name].dtype):
                raise IncompatibleCheckpoint(
                    f"The buffer {name} has another shape or dtype in the checkpoint.", _SAME
                )

    def set_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set the options of param groups, in place. Call `check_groups` before."""
        for group, saved in zip(groups, self.record.param_groups, strict=True):
            options = decode(saved.options, self.tensors, "param_groups")
            parameters = group["params"]
            group.clear()
            group.update({**options, "params": parameters})

    def set_module_state(self, model: nn.Module, scale: LossScale, device: torch.device) -> None:
        """Set buffers, extra states and the loss scale. Call `check_buffers` before.

        device: where buffers that are on the meta device are made.
        """
        buffers, places = self._buffers(), registered(model)
        for name, buffer in list(named_buffers(model)):
            if buffer.is_meta:
                places[id(buffer)].put(buffers[name].to(device))
            else:
                with torch.no_grad():
                    buffer.copy_(buffers[name])
        extra = dict(modules_with_extra_state(model))
        for name, value in self.record.extra_state.items():
            if name in extra:
                extra[name].set_extra_state(decode(value, self.tensors, name))
        if self.record.loss_scale is not None and scale.dynamic:
            scale.of_one_rank, scale.good_steps = (
                self.record.loss_scale.value,
                self.record.loss_scale.good_steps,
            )

    def set_generators(self) -> None:
        """Set all random number generators to the saved states. Raises CorruptState if one is not valid."""
        try:
            set_generators({name: decode(each, self.tensors, name) for name, each in self.record.rng.items()})
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            if isinstance(error, CorruptState):
                raise
            raise CorruptState(
                f"A random number generator's state cannot be used ({error}).", "Load another checkpoint."
            ) from error

    def _buffers(self) -> dict[str, Any]:
        return {name: decode(each, self.tensors, name) for name, each in self.record.buffers.items()}


def capture(
    model: nn.Module,
    param_groups: Sequence[Mapping[str, Any]],
    scale: LossScale,
    *,
    state: object,
    rng: Mapping[str, Any],
    identity: object = None,
) -> RunState:
    """Copy the part of a run's state that is not in pages. Called under the runtime's lock.

    param_groups: the param groups of the user's optimizer, with paged parameters. state: the user's state.
    rng: states of the random number generators, from `generators`. identity: identifies the job. Raises
    ConfigError for a value that cannot be kept.
    """
    tensors: Tensors = {}
    record = form.RunRecord(
        param_groups=tuple(_groups(param_groups, tensors)),
        buffers={
            name: encode(buffer.detach(), tensors, f"buffer {name!r}")
            for name, buffer in named_buffers(model)
        },
        extra_state={
            name: encode(module.get_extra_state(), tensors, f"extra state of {name!r}")
            for name, module in modules_with_extra_state(model)
        },
        loss_scale=form.LossScaleEntry(scale.of_one_rank, scale.good_steps) if scale.dynamic else None,
        rng={name: encode(each, tensors, f"rng[{name!r}]") for name, each in rng.items()},
        state=encode(state, tensors, "state"),
        identity=encode(identity, tensors, "identity"),
    )
    return RunState(record, tensors)


def _groups(param_groups: Sequence[Mapping[str, Any]], tensors: Tensors) -> Iterator[form.ParamGroup]:
    for number, group in enumerate(param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        yield form.ParamGroup(encode(options, tensors, f"param_groups[{number}]"), group_names(group))


def group_names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The canonical names of a param group's parameters, and of the tiles of tiled ones in their place."""
    return tuple(each._place.name for each in paged(group["params"]))


def _wholes(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(whole_name(each)[0] for each in names))


def generators() -> dict[str, Any]:
    """Copy the states of all random number generators: torch's on the CPU and on each CUDA device, numpy's
    and Python's.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Set all random number generators to states that `generators` has returned.

    States of CUDA devices that this machine does not have are ignored.
    """
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])


def modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of the modules that define `get_extra_state`."""
    for name, module in named_modules(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module
