"""Table: renders rows of values as plain text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.config import format_size

_WIDTH = 110


def render(rows: Sequence[Mapping[str, Any]], *, words: bool = False) -> str:
    """Render rows as a plain text table, and return the text. The header shows the keys of the first row.

    rows: at least one mapping, each from the title of a column to the value shown there; all have the same
    keys in the same order. An integer counts as a number of bytes and is shown with a unit such as MiB. The
    integer 0 is shown as "-", None as "unknown", and any other value as str() gives it. words: whether all
    values are words, which begin at the left, and go on in the next line in the last column.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(rows[0]):
        right, wraps = bool(index) and not words, words and index == len(rows[0]) - 1
        table.add_column(name, justify="right" if right else "left", no_wrap=not wraps)
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row.values()))
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines() if line.strip())


def cell(value: object) -> str:
    """The text of a value in a table, as `render` says."""
    if value is None:
        return "unknown"
    if isinstance(value, int):
        return format_size(value) if value else "-"
    return str(value)
