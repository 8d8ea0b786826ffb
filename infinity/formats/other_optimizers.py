"""Other optimizers: those of other packages that have a rule here, recognised by the names of their classes.

No package is imported: an optimizer that exists has imported its own.
"""

from __future__ import annotations

from typing import Any

import torch

from infinity.errors import ConfigError, UnsupportedOptimizer

_BITSANDBYTES = {
    f"bitsandbytes.optim.{name.lower()}.{paged}{name}{bits}": name
    for name in ("AdamW", "Lion")
    for paged in ("", "Paged")
    for bits in ("", "8bit", "32bit")
}
_LION_PYTORCH = {f"lion_pytorch.{module}.Lion": "Lion" for module in ("lion_pytorch", "foreach")}

NAMES = ("lion_pytorch's Lion", "bitsandbytes' AdamW and Lion (8 or 32 bits, paged or not)")
"""The optimizers of other packages that `recognised` knows, in words."""


def recognised(optimizer: torch.optim.Optimizer, states: str) -> tuple[str, str] | None:
    """Return (the name of the optimizer's rule, the format of its moments); None for an unknown class.

    The format is "int8" for an 8-bit optimizer of bitsandbytes, and otherwise `states`, which is as in
    `Precision.states`. Raises UnsupportedOptimizer for an option that has no equivalent here, and ConfigError
    if the optimizer of bitsandbytes has taken a step, or if it has 8 bits and `states` is "bf16".
    """
    path = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if path in _LION_PYTORCH:
        _refuse(path, "decoupled_weight_decay", getattr(optimizer, "decoupled_wd", False), False)
        return _LION_PYTORCH[path], states
    if path not in _BITSANDBYTES:
        return None
    # Options outside the groups. Some versions lack some of them.
    options: Any = getattr(optimizer, "args", None)
    for name, plain in (("percentile_clipping", 100), ("max_unorm", 0.0), ("skip_zeros", False)):
        _refuse(path, name, getattr(options, name, plain), plain)
    _check_overrides(optimizer, path)
    if optimizer.state:
        raise ConfigError(
            f"The {path} has taken a step, and its states are not torch's.",
            "Give infinity.offload the optimizer before its first step.",
        )
    eight = getattr(options, "optim_bits", 32) == 8
    if eight and states == "bf16":
        raise ConfigError(
            f'The {path} has states of 8 bits, but Precision(states="bf16") was given.',
            "Leave states= out, or use an optimizer with 32 bits.",
        )
    return _BITSANDBYTES[path], "int8" if eight else states


def _check_overrides(optimizer: Any, path: str) -> None:
    """Refuse options that bitsandbytes' GlobalOptimManager has for single parameters. The number of bits is
    accepted: all moments have one format here.
    """
    parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
    manager = getattr(optimizer, "mng", None)
    named = dict(getattr(manager, "pid2config", {}))
    for module, name, config in getattr(manager, "module_weight_config_triple", ()):
        named[id(getattr(module, name))] = config
    for key, config in named.items():
        if key in parameters and config.keys() - {"optim_bits", "min_8bit_size"}:
            raise UnsupportedOptimizer(
                f"The {path} has options of single parameters ({', '.join(sorted(config))}) in "
                "bitsandbytes' GlobalOptimManager, which are not implemented here.",
                "Put these parameters into a group with these options.",
            )


def _refuse(path: str, name: str, value: object, plain: object) -> None:
    if value != plain:
        raise UnsupportedOptimizer(
            f"{path} with {name}={value!r} is not implemented here.", f"Use {name}={plain!r}."
        )
