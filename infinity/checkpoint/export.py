"""Export: writes a model to safetensors files in Hugging Face's layout.

At any time RAM holds at most two ranges of one tensor, or one whole parameter if its memory is not
contiguous, or up to twice the bytes of a parameter that transformers saves in another format (conversion.py),
or about three times the bytes of a layer whose adapters are merged. PEFT merges a copy of one layer at a
time, and says which tensors an adapter's file has. PEFT is not imported here, but found as imported by the
program.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint import tensor_files
from infinity.checkpoint.atomic_directory import (
    Writer,
    check_destination,
    check_room,
    published,
    storing,
    sync,
)
from infinity.checkpoint.safetensors_files import persistent
from infinity.checkpoint.tensor_files import (
    Entry,
    content,
    distribute,
    in_logical_order,
    shard_bytes,
    shard_index,
    whole,
)
from infinity.config import Size
from infinity.errors import ConfigError, InfinityError
from infinity.formats.encodings import join
from infinity.formats.optimizer_rules import AVERAGE
from infinity.layout.adapters import adapter_configs, base_model, base_tensors, has_adapters, tuned_layers
from infinity.layout.chunks import OwnedRange
from infinity.layout.names import is_a, plain_name, transformers_model, unwrapped
from infinity.model.paged_parameter import Place
from infinity.model.pager import Pager
from infinity.model.tiled_parameter import paged
from infinity.pages.optimizer_page import StatePage, States
from infinity.pages.store import Store

_IN_RAM = (
    "Do it in RAM: runtime.close(keep=True), then model.merge_and_unload() or model.save_pretrained(path) of "
    "PEFT."
)
_EXPORTED = ("compute", "fp32", "average")


@dataclass(frozen=True)
class Source:
    """The model to export, with components of its runtime.

    The caller holds the runtime's lock, and has written the user's edits of parameters to their pages' homes.
    """

    model: nn.Module
    pager: Pager
    store: Store
    states: States | None
    compute_dtype: torch.dtype

    def parts(self, place: Place, dtype: torch.dtype, *, average: bool = False) -> Iterator[torch.Tensor]:
        """Yield a parameter's elements in memory order, as flat CPU tensors of up to WINDOW elements.

        The tensors have memory of their own. place: the parameter's page, and its index in the page. dtype:
        the parameter's own dtype, or float32. In float32 the elements are those of the parameter's fp32
        master. The elements of a parameter without a master are converted to float32. average: whether
        trainable parameters yield the running averages of their masters instead, in float32.
        """
        page, index = place.page, place.index
        layout = page.layout.parameters[index]
        if average and layout.trainable and self.states is not None and self.states.keeps_averages:
            state = self.states.pages[page.index]
            for each in page.layout.owned(index, tensor_files.WINDOW):
                yield self._state(state, index, AVERAGE, each).view(torch.float32)
            return
        master = self._master(place, dtype)
        for each in page.layout.owned(index, tensor_files.WINDOW):
            if master is not None and layout.dtype != torch.bfloat16:
                yield self._state(master, index, "master", each).view(torch.float32)
                continue
            values = self._values(place, each)
            if master is not None:
                yield join(values, self._state(master, index, "remainder", each).view(torch.int16))
            else:
                yield values.to(dtype)

    def _master(self, place: Place, dtype: torch.dtype) -> StatePage | None:
        """Return the optimizer page with a parameter's fp32 master; None if the export needs no master.

        For a bf16 parameter the page holds only the bits of the master that the bf16 values lack. No master
        is needed if the export is in the parameter's own dtype, if the parameter is not trained, or if the
        user edited it. place, dtype: as in `parts`.
        """
        layout = place.page.layout.parameters[place.index]
        if self.states is None or not layout.trainable or dtype == layout.dtype:
            return None
        state = self.states.pages[place.page.index]
        return None if place.index in state.edited else state

    def _values(self, place: Place, wanted: OwnedRange) -> torch.Tensor:
        """Return a copy of a range of a parameter's values, flat in the order of memory."""
        self.pager.lock.safe_point()
        return self.pager.copied_values(place, wanted.start, wanted.numel)

    def _state(self, page: StatePage, parameter: int, name: str, wanted: OwnedRange) -> torch.Tensor:
        assert self.states is not None
        self.pager.lock.safe_point()
        return self.states.entries(page, parameter, name, wanted)


def export(
    source: Source, path: str | os.PathLike[str], *, dtype: str, shard: Size, merge: bool = False
) -> None:
    """Write a model into the directory `path`, which must be empty or not exist yet. Parents are made.

    source: the model, with the components of its runtime that hold its parameters.

    The directory gets one file, model.safetensors. If the tensors have more than `shard` bytes, it gets
    model-00001-of-0000N.safetensors and so on, with model.safetensors.index.json. A tensor is never divided:
    a tensor of more than `shard` bytes has a file of its own. Every parameter and persistent buffer is
    written once, contiguous, under its first name in state_dict. Moments of the optimizer are not exported.

    dtype: "compute" writes parameters in the dtype in which the model computes. "fp32" writes the fp32
    masters of trainable floating-point parameters, and converts the other floating-point parameters to fp32.
    "average" is like "fp32", with the running averages of the masters in their place; only a model that was
    offloaded with average= has them. Buffers keep their dtype.

    A transformers model gets the names and shapes that its save_pretrained would write, with config.json and
    generation_config.json. A config names only one dtype, to which from_pretrained casts all parameters.
    Call it with dtype=torch.float32 to read parameters unchanged that `Precision(keep=...)` kept in fp32.

    If the model has adapters of PEFT, only these are written, in the files that PEFT's save_pretrained writes
    and its from_pretrained reads: adapter_config.json and adapter_model.safetensors, which `shard` does not
    divide. An adapter that is not called "default" has its two files in a directory of its name. merge: True
    writes the base model instead, with the active adapters merged into it; the values are those of PEFT's
    merge_and_unload.

    RAM holds at most 2 x 2**20 elements of a tensor at a time, with these exceptions: a parameter that is not
    contiguous, such as channels_last, is held as a whole; parameters that transformers converts together take
    up to twice their bytes; a merge takes about three times the bytes of one layer.

    Raises ConfigError, before anything is written, if an argument cannot be used or safetensors cannot hold a
    tensor, and later if PEFT cannot merge a layer. Raises StorageFull, StorageError or BudgetError if the
    export fails. After an error `path` is as it was before.
    """
    limit = shard_bytes(shard)
    target, found = check_export(source, path, dtype=dtype, merge=merge)
    with storing("export to", target), published(target) as directory, Writer() as writer:
        if isinstance(found, dict):
            contents: dict[str, Iterable[bytes | memoryview]] = {}
            for adapter, (config, entries) in found.items():
                place = "" if adapter == "default" else f"{adapter}/"
                save_configuration(config, directory / place)
                contents[f"{place}adapter_model.safetensors"] = content(entries)
        else:
            of = base_model(source.model) if merge else source.model
            save_config(of, directory, source.compute_dtype if dtype == "compute" else torch.float32)
            contents = model_files(found, limit)
        for name, pieces in contents.items():
            with storing("write", target / name):
                writer.write(directory / name, pieces)


def check_export(
    source: Source, path: str | os.PathLike[str], *, dtype: str = "compute", merge: bool = False
) -> tuple[Path, list[Entry] | dict[str, tuple[Any, list[Entry]]]]:
    """Check that `export` can write the model to `path`, as far as this can be known before. Returns the path
    of the directory, and the tensors to write; for adapters alone the result of `adapter_files`.

    Raises ConfigError, StorageError and StorageFull as `export` does.
    """
    if dtype not in _EXPORTED:
        raise ConfigError(f"The export dtype is {dtype!r}.", f"Give one of {', '.join(_EXPORTED)}.")
    target = check_destination(path)
    if dtype == "average" and (source.states is None or source.states.rule.average is None):
        raise ConfigError(
            "The averages were asked for, and the run keeps none.",
            "Give infinity.offload average=, the decay of the averages.",
        )
    entries = model_entries(source, as_masters=dtype != "compute", average=dtype == "average")
    if has_adapters(source.model) and not merge:
        files = adapter_files(source.model, entries)
        check_room(target, sum(each.nbytes for _, inside in files.values() for each in inside))
        return target, files
    model = unwrapped(source.model)
    if merge:
        model, entries = base_model(model), merged(model, entries)
    if model is transformers_model(model):
        from infinity.checkpoint.conversion import as_saved

        entries = as_saved(model, entries)
    check_room(target, sum(each.nbytes for each in entries))
    return target, entries


def model_files(entries: Sequence[Entry], limit: int) -> dict[str, Iterable[bytes | memoryview]]:
    """Return file name -> content, for the files of the model's tensors, and for the index of several files.

    entries: from `model_entries`. limit: the most bytes of tensors in a file that has several tensors.
    """
    files = distribute(entries, limit, "model")
    contents: dict[str, Iterable[bytes | memoryview]] = {
        name: content(inside) for name, inside in files.items()
    }
    if len(files) > 1:
        contents["model.safetensors.index.json"] = [shard_index(entries, files)]
    return contents


def model_entries(source: Source, *, as_masters: bool, average: bool = False) -> list[Entry]:
    """List tensors to export, in the order of state_dict. as_masters: whether to write parameters in fp32.
    average: whether to write running averages of masters, in fp32.

    Raises ConfigError if safetensors cannot hold a tensor, or if a parameter was added or replaced after the
    model was offloaded.
    """
    entries = []
    for each in persistent(source.model).values():
        name, tensor = each.names[0], each.tensor
        places = [part._place for part in paged([tensor])]
        if places and places[0].pager is source.pager:
            entry = _of_parameter(source, name, places, as_masters=as_masters, average=average)
        elif isinstance(tensor, nn.Parameter):
            raise ConfigError(
                f"The parameter {name} was added or replaced after the model was offloaded.",
                "Change the model first, then offload it (close the runtime and offload again).",
            )
        else:
            entry = _of_buffer(name, tensor)
        entries.append(entry)
    return entries


def _of_parameter(
    source: Source, name: str, places: Sequence[Place], *, as_masters: bool, average: bool
) -> Entry:
    """The entry of a parameter. places: its own, or those of its tiles in row order."""
    place = places[0]
    layout = place.page.layout.parameters[place.index]
    dtype = torch.float32 if as_masters and layout.dtype.is_floating_point else layout.dtype

    def parts() -> Iterable[torch.Tensor]:
        found = itertools.chain.from_iterable(source.parts(each, dtype, average=average) for each in places)
        if torch.empty_strided(layout.shape, layout.stride, device="meta").is_contiguous():
            return found
        whole = torch.empty(layout.numel, dtype=dtype, device="cpu")
        done = 0
        for part in found:
            whole[done : done + part.numel()] = part
            done += part.numel()
        return in_logical_order(whole.as_strided(layout.shape, layout.stride))

    rows = sum(each.page.layout.parameters[each.index].shape[0] for each in places) if len(places) > 1 else 0
    shape = (rows, *layout.shape[1:]) if rows else tuple(layout.shape)
    return Entry(name, dtype, shape, math.prod(shape) * dtype.itemsize, parts)


def _of_buffer(name: str, buffer: torch.Tensor) -> Entry:
    if buffer.layout is not torch.strided:
        raise ConfigError(
            f"The buffer {name} is {buffer.layout}, and safetensors holds dense tensors alone.",
            "Make it dense (to_dense()), or register it with persistent=False.",
        )
    nbytes = buffer.numel() * buffer.dtype.itemsize
    return Entry(name, buffer.dtype, tuple(buffer.shape), nbytes, lambda: in_logical_order(buffer.detach()))


def _has_config(model: nn.Module) -> bool:
    """Whether a model has a configuration of transformers."""
    return callable(getattr(getattr(model, "config", None), "save_pretrained", None))


def save_config(model: nn.Module, directory: Path, dtype: torch.dtype) -> None:
    """Write config.json and generation_config.json of a transformers model, as save_pretrained would.

    dtype: the dtype that the configuration names. For any other model nothing is written.
    """
    if not _has_config(model):
        return
    config: Any = copy.deepcopy(model.config)
    said = {"dtype": str(dtype).removeprefix("torch."), "architectures": [type(unwrapped(model)).__name__]}
    for name, value in said.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for each in (config, getattr(model, "generation_config", None)):
        if not callable(getattr(each, "save_pretrained", None)):
            continue
        try:
            each.save_pretrained(directory)  # type: ignore[union-attr]
        except OSError:
            raise
        except Exception as error:
            raise ConfigError(
                f"The model's {type(each).__name__} cannot be saved: {error}", "Mend it, or set it to None."
            ) from error
    for file in directory.rglob("*"):
        sync(file)


# --- adapters of PEFT -------------------------------------------------------------------------------------


def merged(model: nn.Module, entries: Sequence[Entry]) -> list[Entry]:
    """Return the tensors that the model has after PEFT's merge_and_unload, under their names there.

    entries: those of `model_entries`. The active adapters are merged, with the bits that PEFT gives for these
    values and dtypes. RAM holds about three times the bytes of one layer.

    Raises ConfigError if the model has no layers with adapters, if PEFT does not allow a merge, or if a
    tensor that adapters change is tied to one that they do not. Reading the tensors raises ConfigError if
    PEFT cannot merge a layer.
    """
    if not tuned_layers(model):
        raise ConfigError(
            f"The model, a {type(unwrapped(model)).__name__}, has no layers with adapters of PEFT to merge.",
            "Leave merge=True out.",
        )
    for module in model.modules():
        if is_a(module, "BaseTuner"):
            _peft(module._check_merge_allowed, "merge the adapters")
    known = dict(zip(persistent(model), entries, strict=True))
    found: list[Entry] = []
    first: dict[int, tuple[str, tuple[str, nn.Module] | None]] = {}
    for name, tensor, wrapper in base_tensors(model):
        if id(tensor) not in known:
            continue
        before, owner = first.setdefault(id(tensor), (name, wrapper))
        if owner != wrapper:
            raise ConfigError(
                f"{before} and {name} are one tensor, and become two if adapters are merged.",
                _IN_RAM,
            )
        if name != before:
            continue
        entry = replace(known[id(tensor)], name=name)
        if wrapper is not None:
            path, layer = wrapper
            key = name[len(path) + 1 :] if path else name
            if is_a(layer, "ModulesToSaveWrapper"):
                entry = replace(known[id(_tensors(_trained(layer))[key])], name=name)
            else:
                entry = replace(entry, parts=functools.partial(_merge, layer, key, name, known))
        found.append(entry)
    return found


def _merge(layer: Any, key: str, name: str, known: Mapping[int, Entry]) -> Iterator[torch.Tensor]:
    """Merge the adapters in a copy of `layer`, and yield the tensor `key` of its base layer. known: the
    entries of tensors by id().
    """
    memo: dict[int, Any] = {}
    for tensor in _tensors(layer).values():
        if id(tensor) in known:
            real = whole(known[id(tensor)])
            memo[id(tensor)] = nn.Parameter(real, False) if isinstance(tensor, nn.Parameter) else real

    def merge() -> nn.Module:
        plain: Any = copy.deepcopy(layer, memo)  # a copy of a tensor in the memo is the tensor there
        if hasattr(plain, "unload_and_optionally_merge_module"):
            made: nn.Module = plain.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
            return made
        plain.merge()
        return plain.get_base_layer()  # type: ignore[no-any-return]

    with torch.no_grad():
        yield from in_logical_order(_tensors(_peft(merge, f"merge {name}"))[key])


def _trained(wrapper: Any) -> nn.Module:
    """Return the module that replaces `wrapper` in merge_and_unload."""
    active = wrapper.active_adapters
    copies = wrapper.modules_to_save
    return copies[active[0]] if active and active[0] in copies else wrapper.original_module  # type: ignore


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        plain_name(name): each
        for name, each in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }


def adapter_files(model: nn.Module, entries: Sequence[Entry]) -> dict[str, tuple[Any, list[Entry]]]:
    """Return name -> (configuration, tensors) for each adapter of a model, as PEFT's save_pretrained would
    write them.

    entries: the result of `model_entries`. Raises ConfigError if the model's adapters have no tuned layers,
    or if PEFT would write tensors that the model does not have.
    """
    model = unwrapped(model)
    known: dict[int, Entry] = {}
    state: dict[str, torch.Tensor] = {}
    for registered, entry in zip(persistent(model).values(), entries, strict=True):
        blank = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        known[id(blank)] = entry
        state |= dict.fromkeys(registered.names, blank)
    prefix = "" if is_a(model, "PeftModel") else "base_model.model."
    found = {}
    configs = adapter_configs(model)
    if not configs:
        raise ConfigError(f"The model, a {type(model).__name__}, has adapters without tuned layers.", _IN_RAM)
    for adapter, config in configs.items():

        def select(adapter: str = adapter) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = sys.modules["peft"].get_peft_model_state_dict(
                model, state, adapter_name=adapter
            )
            return found

        tensors = _peft(select, f"list the tensors of the adapter {adapter!r}")
        if not tensors or any(id(each) not in known for each in tensors.values()):
            raise ConfigError(
                f"The file of the adapter {adapter!r} has other tensors than the model has.",
                _IN_RAM,
            )
        found[adapter] = (
            _configuration(model, config),
            [replace(known[id(each)], name=f"{prefix}{name}") for name, each in tensors.items()],
        )
    return found


def _configuration(model: nn.Module, config: Any) -> Any:
    """The configuration of an adapter as PEFT saves it."""
    said, base = copy.copy(config), base_model(model)
    said.inference_mode = True
    said.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None)
    if config.task_type is None:
        said.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return said


def save_configuration(config: Any, directory: Path) -> None:
    """Write adapter_config.json. Raises ConfigError if PEFT cannot."""
    _peft(functools.partial(config.save_pretrained, directory), "save the configuration of an adapter")
    for file in directory.glob("*.json"):
        sync(file)


def _peft(call: Any, what: str) -> Any:
    """Return call(). An error of PEFT becomes ConfigError."""
    try:
        return call()
    except (InfinityError, OSError):
        raise
    except Exception as error:
        raise ConfigError(
            f"PEFT could not {what}: {type(error).__name__}: {error}",
            _IN_RAM,
        ) from error
