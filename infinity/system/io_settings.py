"""I/O settings of each disk: found by `infinity tune`, kept in the user's cache, used by all I/O."""

from __future__ import annotations

import datetime
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from infinity.aio import BACKENDS, Engine, Faults
from infinity.errors import ConfigError
from infinity.system import machine
from infinity.system.cache import JsonFile

FORMAT = 1
"""The format of the profile's file. A file of another format is ignored."""

_LARGEST_BLOCK = 1 << 30
_DEEPEST = 4096
_AND = " + "


@dataclass(frozen=True, order=True)
class IoSettings:
    """Settings that an I/O engine is made with."""

    backend: str
    """One of `infinity.aio.BACKENDS`, or "auto"."""
    block_bytes: int
    """Bytes of the blocks that requests are cut into."""
    depth: int
    """Blocks in flight; for the threads backend also the number of threads, up to 16."""

    @property
    def bytes_in_flight(self) -> int:
        return self.block_bytes * self.depth


DEFAULT = IoSettings("auto", 4 << 20, 32)
"""The settings for a disk that was never tuned."""


@dataclass(frozen=True, kw_only=True)
class DiskProfile:
    """The findings of `infinity tune` for one disk. Rates are bytes per second with these settings, then."""

    settings: IoSettings
    path: str
    """The directory where it was measured."""
    read: float
    write: float
    mixed: float
    at: str
    """The time of measuring, in ISO 8601, UTC."""
    facts: Mapping[str, Any]
    """The machine's processor, CPUs and memory."""


@dataclass(frozen=True, kw_only=True)
class StripeProfile:
    """The findings of `infinity tune` for several disks together."""

    shares: tuple[float, ...]
    """Each disk's share of the bytes; `infinity.tiers.striping.choose_striping` takes them as speeds."""
    mixed: float
    """Bytes per second of all disks together, half reads and half writes."""
    at: str
    """The time of measuring, in ISO 8601, UTC."""


def disk_key(directory: str | os.PathLike[str]) -> str:
    """The key of the disk under an existing directory: host, device, file system and kernel."""
    device = os.stat(directory).st_dev
    where = f"{os.major(device)}:{os.minor(device)}"
    return f"{platform.node()} {where} {machine.file_system(directory)} Linux {machine.kernel()}"


def now() -> str:
    """The present time as profiles write it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


_Findings = tuple[dict[str, Any], dict[str, Any]]
"""The entries of disks and those of stripes, by key, as the file has them."""


class Profile:
    """The file of findings. A file that is absent or cannot be used counts as empty."""

    def __init__(self) -> None:
        self._file = JsonFile[_Findings]("tune.json", _findings, ({}, {}))
        self._disks, self._stripes = self._file.content
        self.path = self._file.path
        self.note: str | None = None
        """The reason why an existing file is ignored, for people; None if it is not."""
        if self._file.ignored is not None:
            self.note = f"The profile {self.path} is ignored ({self._file.ignored}). Run infinity tune again."

    def disk(self, directory: str | os.PathLike[str]) -> DiskProfile | None:
        """The findings for the disk under an existing directory, if any."""
        entry = self._disks.get(disk_key(directory))
        return None if entry is None else _disk_profile(entry)

    def stripes(self, directories: Sequence[str | os.PathLike[str]]) -> StripeProfile | None:
        """The findings for the disks under these directories together, shares in this order, if any."""
        key, order = _key_of_all(directories)
        if key not in self._stripes:
            return None
        found = _stripe_profile(self._stripes[key])
        shares = [0.0] * len(order)
        for place, share in zip(order, found.shares, strict=True):
            shares[place] = share
        return replace(found, shares=tuple(shares))

    def keep_disk(self, directory: str | os.PathLike[str], found: DiskProfile) -> None:
        """Replace the findings for a disk; `save` writes them to the file."""
        self._disks[disk_key(directory)] = asdict(found)

    def keep_stripes(self, directories: Sequence[str | os.PathLike[str]], found: StripeProfile) -> None:
        """Replace the findings for several disks together; `save` writes them to the file."""
        key, order = _key_of_all(directories)
        self._stripes[key] = asdict(replace(found, shares=tuple(found.shares[place] for place in order)))

    def save(self) -> bool:
        """Write the file in one step; False where the system refuses."""
        return self._file.save({"format": FORMAT, "disks": self._disks, "stripes": self._stripes})


def settings_for(directory: str | os.PathLike[str]) -> IoSettings:
    """The settings for an existing directory: as tuned, or the default.

    Where INFINITY_AIO names a backend, findings for another one do not apply. A profile that cannot be used
    is ignored with a warning.
    """
    profile = Profile()
    if profile.note is not None:
        warnings.warn(profile.note, RuntimeWarning, stacklevel=2)
    try:
        found = profile.disk(directory)
    except OSError:  # the first I/O there raises a better error
        return DEFAULT
    forced = os.environ.get("INFINITY_AIO") or "auto"
    if found is None or forced not in ("auto", found.settings.backend):
        return DEFAULT
    return found.settings


def tuned_shares(directories: Sequence[str | os.PathLike[str]]) -> tuple[float, ...] | None:
    """The share of the bytes that each of these directories should hold; None where that was not tuned."""
    found = Profile().stripes(directories)
    return None if found is None else found.shares


def open_engine(
    directory: str | os.PathLike[str],
    *,
    backend: str = "auto",
    depth: int | None = None,
    block_bytes: int | None = None,
    faults: Faults | None = None,
) -> Engine:
    """An engine for an existing directory. Arguments that are not given come from `settings_for` it.

    Where the tuned backend does not work any more, the defaults are used. Raises what `Engine` raises.
    """
    settings = settings_for(directory)
    if backend not in ("auto", settings.backend):
        settings = DEFAULT

    def engine(name: str, settings: IoSettings) -> Engine:
        return Engine(
            directory,
            backend=name,
            depth=settings.depth if depth is None else depth,
            block_bytes=settings.block_bytes if block_bytes is None else block_bytes,
            faults=faults,
        )

    if backend != "auto" or settings.backend == "auto":
        return engine(backend, settings)
    try:
        return engine(settings.backend, settings)
    except ConfigError:
        return engine("auto", DEFAULT)


def _key_of_all(directories: Sequence[str | os.PathLike[str]]) -> tuple[str, list[int]]:
    """The key of a set of disks, the same in any order, and the indices of the disks in the key's order."""
    keys = [disk_key(directory) for directory in directories]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return _AND.join(keys[place] for place in order), order


def _findings(found: Any) -> _Findings:
    """The content of parsed JSON. Raises ValueError, TypeError, KeyError or AttributeError for a content that
    `Profile.save` did not write."""
    if found["format"] != FORMAT:
        raise ValueError(f"its format is {found['format']!r}, not {FORMAT}")
    disks, stripes = dict(found["disks"]), dict(found["stripes"])
    for entry in disks.values():
        _disk_profile(entry)
    for key, entry in stripes.items():
        if len(_stripe_profile(entry).shares) != len(key.split(_AND)):
            raise ValueError("it has shares of other disks")
    return disks, stripes


def _disk_profile(entry: Any) -> DiskProfile:
    """The profile of a disk's entry. Raises ValueError, TypeError or KeyError for one that `asdict` did not
    make."""
    settings = IoSettings(**entry["settings"])
    if settings.backend not in BACKENDS:
        raise ValueError(f"it names an engine {settings.backend!r}")
    if not 4096 <= settings.block_bytes <= _LARGEST_BLOCK or settings.block_bytes % 4096:
        raise ValueError(f"it has blocks of {settings.block_bytes} bytes")
    if not 1 <= settings.depth <= _DEEPEST:
        raise ValueError(f"it has {settings.depth} blocks in flight")
    return DiskProfile(**{**entry, "settings": settings})


def _stripe_profile(entry: Any) -> StripeProfile:
    shares = tuple(float(share) for share in entry["shares"])
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ValueError(f"it has shares of {list(shares)}")
    return StripeProfile(**{**entry, "shares": shares})
