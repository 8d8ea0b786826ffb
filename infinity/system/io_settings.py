"""I/O settings of each disk: `infinity tune` finds them, the user's cache keeps them, all I/O uses them."""

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
"""The version of the format of `Profile`'s file. A file of another version is ignored."""

_LARGEST_BLOCK = 1 << 30
_DEEPEST = 4096
_AND = " + "


@dataclass(frozen=True, order=True)
class IoSettings:
    backend: str
    """One of `infinity.aio.BACKENDS`, or "auto" for the first backend that works."""
    block_bytes: int
    depth: int
    """The most blocks in flight. The threads backend has this number of threads, but at most 16."""

    @property
    def bytes_in_flight(self) -> int:
        return self.block_bytes * self.depth


DEFAULT = IoSettings("auto", 4 << 20, 32)
"""The settings for a disk that was never tuned."""


@dataclass(frozen=True, kw_only=True)
class DiskProfile:
    """What `infinity tune` found for one disk, with rates in bytes per second."""

    settings: IoSettings
    path: str
    read: float
    write: float
    mixed: float
    at: str
    """The time of the measurement, in UTC, as ISO 8601 text."""
    facts: Mapping[str, Any]
    """The machine's processor ("cpu"), number of CPUs ("cpus") and bytes of memory ("memory")."""


@dataclass(frozen=True, kw_only=True)
class StripeProfile:
    """What `infinity tune` found for several disks that are used together."""

    shares: tuple[float, ...]
    """The fraction of all bytes on each disk: `speeds` of `infinity.tiers.striping.choose_striping`."""
    mixed: float
    at: str


def disk_key(directory: str | os.PathLike[str]) -> str:
    """A text for the disk of an existing directory: host, block device, file system and kernel."""
    device = os.stat(directory).st_dev
    where = f"{os.major(device)}:{os.minor(device)}"
    return f"{platform.node()} {where} {machine.file_system(directory)} Linux {machine.kernel()}"


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


_Findings = tuple[dict[str, Any], dict[str, Any]]
"""Entries of single disks by `disk_key`, and of sets of disks by `_key_of_all`."""


class Profile:
    """The findings of `infinity tune` in the user's cache. A file that cannot be used counts as empty."""

    def __init__(self) -> None:
        self._file = JsonFile[_Findings]("tune.json", _findings, ({}, {}))
        self._disks, self._stripes = self._file.content
        self.path = self._file.path
        self.note: str | None = None
        """Why an existing file is ignored, for users; None if the file is absent or was read."""
        if self._file.ignored is not None:
            self.note = f"The profile {self.path} is ignored ({self._file.ignored}). Run infinity tune again."

    def disk(self, directory: str | os.PathLike[str]) -> DiskProfile | None:
        """The profile of the disk under an existing directory; None if the disk was not tuned."""
        entry = self._disks.get(disk_key(directory))
        return None if entry is None else _disk_profile(entry)

    def stripes(self, directories: Sequence[str | os.PathLike[str]]) -> StripeProfile | None:
        """The profile of these disks together, with shares in their order; None if they were not tuned
        together.
        """
        key, order = _key_of_all(directories)
        if key not in self._stripes:
            return None
        found = _stripe_profile(self._stripes[key])
        shares = [0.0] * len(order)
        for place, share in zip(order, found.shares, strict=True):
            shares[place] = share
        return replace(found, shares=tuple(shares))

    def keep_disk(self, directory: str | os.PathLike[str], found: DiskProfile) -> None:
        """Set the profile of the disk under a directory, in memory only; see `save`."""
        self._disks[disk_key(directory)] = asdict(found)

    def keep_stripes(self, directories: Sequence[str | os.PathLike[str]], found: StripeProfile) -> None:
        """Set the profile of several disks together, in memory only. The shares in `found` are in the order
        of `directories`.
        """
        key, order = _key_of_all(directories)
        self._stripes[key] = asdict(replace(found, shares=tuple(found.shares[place] for place in order)))

    def save(self) -> bool:
        """Replace the file in one step. Returns whether the operating system allowed it."""
        return self._file.save({"format": FORMAT, "disks": self._disks, "stripes": self._stripes})


def settings_for(directory: str | os.PathLike[str]) -> IoSettings:
    """The I/O settings for an existing directory: the settings that `infinity tune` found, unless
    INFINITY_AIO names another backend; else `DEFAULT`. A file that cannot be used is ignored with a warning.
    """
    profile = Profile()
    if profile.note is not None:
        warnings.warn(profile.note, RuntimeWarning, stacklevel=2)
    try:
        found = profile.disk(directory)
    except OSError:  # the first I/O in the directory raises a better error
        return DEFAULT
    forced = os.environ.get("INFINITY_AIO") or "auto"
    if found is None or forced not in ("auto", found.settings.backend):
        return DEFAULT
    return found.settings


def tuned_shares(directories: Sequence[str | os.PathLike[str]]) -> tuple[float, ...] | None:
    """The fraction of all bytes that each directory should hold; None if they were not tuned together."""
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
    """Make an I/O engine for an existing directory. Arguments that are not given come from `settings_for`, or
    `DEFAULT` if the tuned backend does not work any more. Raises the errors of `infinity.aio.Engine`.
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
    """Return (key, order) for a set of disks.

    key: a text that names the disks, and that does not depend on the order of `directories`. order: for each
    disk in the key, the disk's index in `directories`. Shares are stored in the order of the key.
    """
    keys = [disk_key(directory) for directory in directories]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return _AND.join(keys[place] for place in order), order


def _findings(found: Any) -> _Findings:
    """Convert the parsed JSON of the file to its entries. This and the functions below raise ValueError,
    TypeError, KeyError or AttributeError for JSON that `Profile.save` did not write.
    """
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
    settings = IoSettings(**entry["settings"])
    if settings.backend not in BACKENDS:
        raise ValueError(f"it names an unknown backend {settings.backend!r}")
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
