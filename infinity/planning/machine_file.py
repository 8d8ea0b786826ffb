"""Machine file: sizes and rates of a machine as JSON, so that plans for it can be made on another machine.

`infinity tune --machine` writes what it has measured. The files in infinity/planning/machines/ have figures
that makers of hardware have published. docs/planning.md says what each key means.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.planning.machine_rates import DTYPES, MachineRates, measure_rates, network_rate
from infinity.planning.twin_flow import has_kernels
from infinity.system import machine
from infinity.system.directory import path_text
from infinity.tiers.trial_file import MODES

_SHIPPED = Path(__file__).with_name("machines")
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine as its file describes it. Sizes are in bytes; rates are in bytes per second, and mean the
    same as those of `MachineRates`.
    """

    name: str
    measured: bool
    """Whether the rates were measured on the machine; else they are published figures."""
    sources: Sequence[str] = ()
    """Where the figures were published."""
    device_memory: int | None = None
    """Memory of one CUDA device. None if the CPU computes."""
    compute_capability: Sequence[int] | None = None
    """The CUDA device's compute capability, (major, minor). None if the CPU computes."""
    device_updates: bool = False
    """Whether the CUDA device can run optimizer updates, for which NVRTC compiles kernels."""
    host_memory: int
    """RAM of the whole machine."""
    flops: Mapping[str, float]
    """Floating-point operations per second of matrix products, by "bf16", "fp16" and "fp32"."""
    compute_memory: float
    host_stream: float
    link: float | None = None
    """None if the CPU computes."""
    disk: Mapping[str, float] | None = None
    """The rates "read", "write" and "mixed" of one directory of the NVMe tier; None if there is no disk."""
    network: float | None = None
    """Rate of the link between two such machines, in each direction; None if it is not known."""

    @staticmethod
    def read(source: str | os.PathLike[str]) -> Machine:
        """Read a machine file. source: its path, or the name of a file that comes with the package.

        Raises ConfigError for a file that cannot be read, or is no machine file.
        """
        shipped = {each.stem: each for each in sorted(_SHIPPED.glob("*.json"))}
        path = shipped.get(path_text(source), Path(source))
        cure = f"Give a file that `infinity tune --machine` has written, or one of {', '.join(shipped)}."
        try:
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
                raise ValueError(f'"format" is not {_FORMAT}')
            made = Machine(**found)
            made._check()
        except OSError as error:
            raise ConfigError(f"The machine file {path} cannot be read: {error.strerror}.", cure) from error
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is no machine file: {error}.", cure) from error
        return made

    @staticmethod
    def measure(disks: Sequence[Mapping[str, float]], stream: float, link: float | None) -> Machine:
        """Describe this machine. Its rates of arithmetic are measured now, and stored in the cache of
        `measure_rates`.

        disks: the rates "read", "write" and "mixed" of each measured directory; the file gets their mean.
        stream: the rate of host RAM. link: the rate of copies to and from the current CUDA device; None
        without one.
        """
        cuda = torch.cuda.is_available()
        device = torch.device("cuda" if cuda else "cpu")
        rates = measure_rates({}, device, torch.bfloat16, DTYPES.values(), anew=True)
        return Machine(
            name=torch.cuda.get_device_name(device) if cuda else machine.cpu().model,
            measured=True,
            device_memory=torch.cuda.mem_get_info(device)[1] if cuda else None,
            compute_capability=torch.cuda.get_device_capability(device) if cuda else None,
            device_updates=has_kernels(device),
            host_memory=machine.memory().total,
            flops={name: rates.flops[dtype] for name, dtype in DTYPES.items()},
            compute_memory=rates.compute_memory,
            host_stream=stream,
            link=link,
            disk={mode: sum(disk[mode] for disk in disks) / len(disks) for mode in MODES},
            network=network_rate(),
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the machine file. Raises OSError."""
        Path(path).write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n")

    @property
    def text(self) -> str:
        """The machine's name and the origin of its figures, as text for the user."""
        return f"{self.name}: {'as measured there' if self.measured else 'published figures, not measured'}"

    def device(self, given: torch.device | str | None) -> torch.device:
        """The device that computes. given: the one that the user has named; None if there is none.

        Raises ConfigError if the machine has another device.
        """
        found = torch.device("cpu") if self.device_memory is None else torch.device("cuda", 0)
        if given is not None and str(given).split(":")[0] != found.type:
            raise ConfigError(
                f"The device is {given}, and the machine file of {self.name} has the rates of {found.type}.",
                f'Give device="{found.type}", or another machine file.',
            )
        return found

    def rates(self, paths: int, ranks: int = 1) -> MachineRates:
        """The rates that one rank has. paths: number of directories of the NVMe tier, each on a disk of its
        own. ranks: number of ranks that share the machine's RAM and disks; each has a device of its own.

        Raises ConfigError if there are directories, and the machine has no disk.
        """
        if paths and self.disk is None:
            raise ConfigError(
                f"The machine file of {self.name} has no disk.", 'Add "disk" there, or leave nvme= out.'
            )
        disk = {mode: paths * rate / ranks for mode, rate in (self.disk or {}).items()}
        return MachineRates(
            disk=disk if paths else None,
            host_stream=self.host_stream / ranks,
            link=self.link,
            network=self.network,
            flops={DTYPES[name]: rate for name, rate in self.flops.items()},
            compute_memory=self.compute_memory,
        )

    def _check(self) -> None:
        """Raises ValueError with the reason why this cannot be a machine."""
        numbers: dict[str, Any] = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name.endswith(("memory", "stream", "link", "network"))
        }
        for group, names in (("flops", DTYPES), ("disk", MODES)):
            found = getattr(self, group)
            if found is None and group == "disk":
                continue
            if not isinstance(found, dict) or set(found) != set(names):
                raise ValueError(f'"{group}" does not have {", ".join(names)}')
            numbers |= {f"{group}.{name}": value for name, value in found.items()}
        optional = ("device_memory", "link", "network")
        for name, value in numbers.items():
            kind = int if name in ("device_memory", "host_memory") else int | float
            given = isinstance(value, kind) and 0 < value < math.inf
            if not given and (value is not None or name not in optional):
                raise ValueError(f'"{name}" is {value!r}')
        for name, right in (
            ("name", isinstance(self.name, str)),
            ("measured", isinstance(self.measured, bool)),
            ("device_updates", isinstance(self.device_updates, bool)),
            ("compute_capability", _is_capability(self.compute_capability)),
        ):
            if not right:
                raise ValueError(f'"{name}" is {getattr(self, name)!r}')
        cuda = (self.device_memory, self.compute_capability, self.link)
        if any(each is None for each in cuda) and cuda != (None, None, None):
            raise ValueError('one of "device_memory", "compute_capability" and "link" is missing')


def _is_capability(found: object) -> bool:
    return found is None or (isinstance(found, list) and [type(each) for each in found] == [int, int])


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError if no machine file can be written to `path`."""
    folder = os.path.dirname(path_text(path)) or "."
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(
            f"The machine file {path} cannot be written.", "Give a file in a directory that you can write."
        )
