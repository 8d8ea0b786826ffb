"""Initial adapters: gives LoRA adapters on the meta device the values that PEFT would have given them.

For a model on the meta device, PEFT makes adapters there too, without values. This module initialises the
adapters in PEFT's order, each in a copy of its layer in RAM, one layer at a time.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, InfinityError
from infinity.layout.adapters import adapter_configs, base_model, base_names, tuned_layers
from infinity.layout.names import is_a
from infinity.model.materialize import Fill, listed, registered

Read = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns the values of a tensor of the base model, in RAM, in any dtype."""

_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""Children of a LoRA layer that map an adapter's name to its tensors, in the order in which PEFT makes
them.
"""
_CURE = (
    "Load the base into RAM (from_pretrained), and add the adapters there; or add plain adapters of LoRA "
    '(init_lora_weights=True or "gaussian") by get_peft_model. Those of a file are read after '
    "infinity.offload: peft.set_peft_model_state_dict(model, peft.load_peft_weights(path))."
)


@dataclass
class _Lora:
    layer: Any
    adapter: str
    config: Any

    @property
    def parts(self) -> dict[str, Any]:
        """The adapter's modules and parameters in the layer. The key of each is the name of the child of the
        layer that holds it, such as "lora_A".
        """
        children = ((name, getattr(self.layer, name, None) or {}) for name in _PARTS)
        return {name: child[self.adapter] for name, child in children if self.adapter in child}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [
            each
            for part in self.parts.values()
            for each in ([part] if isinstance(part, nn.Parameter) else part.parameters())
        ]

    def refusal(self, name: str) -> str:
        """Return the reason, for an error message, why only PEFT can compute the values; "" if there is none.

        name: name_or_path of the base model. If the adapter's configuration names another base model, the
        adapter was read from a file.
        """
        start = self.config.init_lora_weights
        variant = getattr(self.layer, "lora_variant", {}).get(self.adapter)
        if not isinstance(start, bool) and start != "gaussian":
            return f"init_lora_weights={start!r} makes them from the values of the whole base"
        maker = self.layer if is_a(self.layer, "MultiheadAttention") else variant
        if maker is not None and not type(maker).__name__.startswith("Dora"):
            return f"{type(maker).__name__} makes them"
        if self.config.inference_mode or (self.config.base_model_name_or_path or name) != name:
            return "they were in a file, and PEFT has not kept them"
        return ""

    def made(self, read: Read) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return (parameter, values) for each of the adapter's parameters, as `values` yields them.

        read: returns the values of the base. Raises ConfigError if PEFT fails.
        """
        try:
            return list(self.values(read))
        except InfinityError:
            raise
        except Exception as error:
            raise ConfigError(
                f"PEFT could not initialise the adapter {self.adapter!r} of a {type(self.layer).__name__}: "
                f"{type(error).__name__}: {error}",
                _CURE,
            ) from error

    def values(self, read: Read) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield (parameter, values) for the adapter's parameters, drawing the random numbers that PEFT draws.

        PEFT makes adapters in torch's default dtype, and rounds them to the dtype of the base. read: returns
        the values of the base.
        """
        own, base = self.parameters, self.layer.get_base_layer()
        dtype = getattr(base, getattr(self.layer, "parameter_name", "weight")).dtype
        real = {id(each): nn.Parameter(torch.empty(each.shape, device="cpu")) for each in own}
        if "lora_magnitude_vector" in self.parts:
            real |= {id(each): nn.Parameter(read(each).to(each.dtype), False) for each in base.parameters()}
        # deepcopy takes a tensor's copy from the memo.
        layer = copy.deepcopy(self.layer, dict(real))
        made = _Lora(layer, self.adapter, self.config)
        parts = made.parts
        magnitude = parts.pop("lora_magnitude_vector", None)
        for part in parts.values():
            if isinstance(part, nn.Parameter):
                part.data = torch.randn(part.shape)
            else:
                part.reset_parameters()
        layer.reset_lora_parameters(self.adapter, self.config.init_lora_weights)
        for part in parts.values():
            for each in [part] if isinstance(part, nn.Parameter) else part.parameters():
                each.data = each.data.to(dtype if dtype.is_floating_point else each.dtype)
        if magnitude is not None:
            matrices = [each if isinstance(each, nn.Parameter) else each.weight for each in parts.values()]
            magnitude.update_layer(
                base_layer=layer.get_base_layer(),
                lora_A=matrices[0],
                lora_B=matrices[1],
                scaling=layer.scaling[self.adapter],
            )
        for parameter, found in zip(own, made.parameters, strict=True):
            yield parameter, found.detach().to(parameter.dtype)


def initialise_adapters(
    model: nn.Module, wanted: set[int], read: Read, fill: Fill, device: torch.device
) -> None:
    """Initialise the adapters of `model` on the meta device, and the copies of modules that PEFT trains
    whole.

    With the same seed, the values have the bits that PEFT gives adapters in RAM. At any time RAM holds the
    adapters of one layer, and with DoRA also a copy of the layer. wanted: the ids of the parameters and
    persistent buffers that need values. read: see `Read`. fill: function (parameter, values), called once for
    each wanted parameter. device: where wanted buffers are made.

    Raises ConfigError, before `fill` is called, if only PEFT can compute the values of a tensor.
    """
    tensors, base, adapters = registered(model), base_names(model), list(_loras(model))
    called = getattr(base_model(model), "name_or_path", None) or ""
    for each in adapters:
        why = each.refusal(called)
        if why and wanted & {id(own) for own in each.parameters}:
            name = tensors[id(each.parameters[0])].names[0]
            raise ConfigError(
                f"The adapter {name} is on the meta device, and PEFT alone knows its values: {why}.", _CURE
            )
    copies = {
        id(tensor): (tensor, original)
        for tensor, original in _trained_copies(model)
        if id(tensor) in wanted and id(original) in base
    }
    made = Counter(id(own) for each in adapters for own in each.parameters)
    left = [key for key in tensors if key in wanted and made[key] + (key in copies) != 1]
    if left:
        names = listed([tensors[key].names[0] for key in left])
        raise ConfigError(
            f"The adapters {names} are on the meta device, and PEFT alone knows their values.", _CURE
        )
    with torch.device("cpu"), torch.no_grad():
        for each in adapters:
            # The values of an adapter in RAM are dropped: computing them draws the random numbers before the
            # next ones.
            for parameter, values in () if each.refusal(called) else each.made(read):
                if id(parameter) in wanted:
                    fill(parameter, values)
    for tensor, original in copies.values():
        if isinstance(tensor, nn.Parameter):
            fill(tensor, read(original))
        else:
            tensors[id(tensor)].put(read(original).to(device, tensor.dtype, copy=True))


def _loras(model: nn.Module) -> Iterator[_Lora]:
    """Yield the LoRA adapters in the order in which PEFT makes them, one adapter after another. The layers of
    an adapter come first, then its wrappers of single parameters. If several of these wrap one module, the
    innermost comes first.
    """
    layers = [each for each in tuned_layers(model) if is_a(each, "LoraLayer")]
    first: dict[int, int] = {}
    order = []
    for index, layer in enumerate(layers):
        place = first.setdefault(id(layer.get_base_layer()), index)
        depth = sum(is_a(inner, "ParamWrapper") for inner in layer.modules())
        order.append((depth > 0, place, depth))
    for adapter, config in adapter_configs(model).items():
        for index in sorted(range(len(layers)), key=order.__getitem__):
            found = _Lora(layers[index], adapter, config)
            if found.parts:
                yield found


def _trained_copies(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tensor of the copy, tensor of the original) for each parameter and buffer of the modules that
    PEFT copies to train them as a whole.
    """
    wrappers: list[Any] = [each for each in model.modules() if is_a(each, "ModulesToSaveWrapper")]
    for wrapper in wrappers:
        original = wrapper.original_module
        known = {**dict(original.named_parameters()), **dict(original.named_buffers())}
        for trained in wrapper.modules_to_save.children():
            for name, tensor in (*trained.named_parameters(), *trained.named_buffers()):
                if name in known:
                    yield tensor, known[name]
