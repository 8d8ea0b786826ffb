"""Plot: draws the findings of a tuning as bytes per second over block size, a line for each backend and
queue depth.
"""

from __future__ import annotations

import errno
import importlib
import os
from pathlib import Path
from typing import Any

from infinity.config import format_size
from infinity.errors import ConfigError, storage_error, storage_errors
from infinity.tiers.trial_file import MODES
from infinity.tuning.sweep import DiskSweep, Measured
from infinity.tuning.tune import Tuning

_FORMATS = (".png", ".svg")
_COLOURS = {"io_uring": "tab:blue", "libaio": "tab:orange", "threads": "tab:green"}


def check_plot(path: str | os.PathLike[str]) -> Path:
    """Check the path of a plot that is to be written, and return it. Nothing is written yet.

    Raises ConfigError for a name that ends in neither .png nor .svg, and if matplotlib is missing. Raises
    StorageError for a directory that does not exist.
    """
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise ConfigError(
            f"A plot cannot be written as {target.name}.", "Name a file that ends in .png or .svg."
        )
    _pyplot()
    if not target.parent.is_dir():
        raise storage_error("write a plot in", os.fspath(target.parent), None, errno.ENOENT)
    return target


def draw(tuning: Tuning, path: str | os.PathLike[str]) -> None:
    """Write the plot of a tuning to the file `path`.

    The plot has one row for each tuned directory, and one column each for reads, for writes and for both
    mixed. The chosen settings are circled. Raises the errors of `check_plot`, and StorageError if the file
    cannot be written.
    """
    target = check_plot(path)
    pyplot = _pyplot()
    rows = len(tuning.disks)
    figure, axes = pyplot.subplots(
        rows, len(MODES), figsize=(13, 4 * rows + 0.8), sharey="row", squeeze=False, layout="constrained"
    )
    for disk, row in zip(tuning.disks, axes, strict=True):
        for mode, axis in zip(MODES, row, strict=True):
            _panel(axis, disk, mode)
        row[0].set_ylabel(f"{disk.path}\nGB/s")
        row[0].set_ylim(bottom=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize="small")
    try:
        with storage_errors("write", target):
            figure.savefig(target, dpi=120)
    finally:
        pyplot.close(figure)


def _panel(axis: Any, disk: DiskSweep, mode: str) -> None:
    lines: dict[tuple[str, int], list[Measured]] = {}
    for point in sorted(disk.points, key=lambda point: point.settings):
        lines.setdefault((point.settings.backend, point.settings.depth), []).append(point)
    depths = sorted({depth for _, depth in lines})
    for (backend, depth), points in sorted(lines.items()):
        axis.plot(
            [point.settings.block_bytes for point in points],
            [getattr(point, mode) / 1e9 for point in points],
            marker="o",
            markersize=3,
            color=_COLOURS[backend],
            alpha=0.3 + 0.7 * (depths.index(depth) + 1) / len(depths),
            label=f"{backend} x {depth}",
        )
    chosen = disk.chosen
    axis.plot(
        [chosen.settings.block_bytes],
        [getattr(chosen, mode) / 1e9],
        marker="o",
        markersize=12,
        markerfacecolor="none",
        markeredgecolor="black",
        linestyle="none",
        label="chosen",
    )
    blocks = sorted({point.settings.block_bytes for point in disk.points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(blocks, [format_size(block) for block in blocks], rotation=30)
    axis.set_title(mode)
    axis.set_xlabel("block size")
    axis.grid(alpha=0.3)


def _pyplot() -> Any:
    """Import matplotlib.pyplot, set to draw into files. Raises ConfigError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigError(
            "A plot was asked for and matplotlib is not installed.",
            "Install the extra: pip install 'infinity-runtime[plot]', or leave --plot out.",
        ) from error
