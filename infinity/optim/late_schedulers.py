"""Late schedulers: learning-rate schedulers that are made after `load` has restored the options of groups.

The constructor of a scheduler sets learning rates, and momenta or betas if it cycles them. Nothing shows
whether the user wants this new schedule, or goes on to load the scheduler's own state, which leaves the
options as the constructor has set them. So no option is set back: a warning names all that have changed.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_MARK = "_wrapped_by_lr_sched"
"""The constructor of a scheduler wraps the `step` of its optimizer, unless `step` has this attribute."""


class LateSchedulers:
    """The options of param groups as they were restored, and a watch for schedulers that are made then."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """optimizers: schedulers of any of them set the options of `groups`. They are not kept, and `end`
        must be given the same. Their `step` is replaced by an equivalent one until then.
        """
        self._options = [_texts(group) for group in groups]
        self._steps: list[Any] = []
        """For each optimizer the `step` among its own attributes, or None: it has that of its class."""
        for each in optimizers:
            step: Any = vars(each).get("step")
            if hasattr(step, _MARK):
                step = vars(each)["step"] = _Watched(step)
            self._steps.append(step)

    def end(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """End the watch. Returns whether a scheduler was made since it began.

        A scheduler that was made before it, and takes its first step before the optimizer does, counts too.
        """
        late = False
        for optimizer, before in zip(optimizers, self._steps, strict=True):
            now: Any = vars(optimizer).get("step")
            if isinstance(before, _Watched):
                late |= before.seen
                if now is before:
                    vars(optimizer)["step"] = before.step
            else:
                late |= now is not before and hasattr(now, _MARK)
        return late

    def warn(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Warn if restored options have changed. groups: as given to the constructor."""
        changes = [
            f"{name} of parameter group {index} from {before} to {now.get(name, 'nothing')}"
            for index, (group, restored) in enumerate(zip(groups, self._options, strict=True))
            for now in (_texts(group),)
            for name, before in restored.items()
            if now.get(name) != before
        ]
        if not changes:
            return
        # Schedulers and torch wrap `step` in turn, so that the user's line is any number of frames away.
        frame, level = sys._getframe(), 1
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("infinity", "torch"):
            frame, level = frame.f_back, level + 1
        warnings.warn(
            "A scheduler was made after runtime.load(), and options that load() had restored have changed: "
            f"{', '.join(changes)}. To continue the schedule, call load() after making schedulers, and then "
            "their load_state_dict().",
            stacklevel=level,
        )


class _Watched:
    """The `step` of an optimizer, which notes that the constructor of a scheduler has looked at it."""

    def __init__(self, step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, step)
        self.step = step
        self.seen = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*args, **kwargs)

    @property
    def _wrapped_by_lr_sched(self) -> bool:
        self.seen = True
        return True


def _texts(group: Mapping[str, Any]) -> dict[str, str]:
    """The options of a group as texts, because schedulers change tensors in place."""
    options = {name: value for name, value in group.items() if name != "params"}
    return {
        name: repr(value.tolist() if isinstance(value, torch.Tensor) else value)
        for name, value in options.items()
    }
