"""HTML table: rows of texts as HTML, which a notebook shows in the place of plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_of(rows: Sequence[Sequence[str]], notes: Iterable[str]) -> str:
    """Return a table and lines below it. All texts are escaped.

    rows: the titles of columns, then the cells of each row. notes: one text a line.
    """
    lines = ["<table>"]
    for index, row in enumerate(rows):
        tag = "td" if index else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{escape(each)}</{tag}>" for each in row) + "</tr>")
    return "\n".join([*lines, "</table>", *(f"<div>{escape(each)}</div>" for each in notes)])
