"""Picture of a terminal: runs a command, and draws the text that it prints as an SVG.

    python benchmarks/terminal_picture.py --out docs/first-run.svg -- \
        infinity train --budget-host 256MiB --budget-nvme .:1GiB

The command runs in a new directory, which is removed afterwards. Since its output is a pipe, `infinity
train` prints a line of progress every five seconds. Of these lines only the first, the middle and the last
are drawn. All other lines are drawn as they were printed.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

_TEMPLATE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>TITLE</title>
<desc>DESCRIPTION</desc>
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Template of the SVG: Rich's own, with a title and a description, and without the fonts that Rich's template
loads from the network."""

_WIDTH = 106
_STEP = re.compile(r"step (\d+)/\d+ ")


def fewer_lines(printed: str) -> str:
    """Return `printed` without its lines of progress, except the first, the middle and the last of them."""
    lines = printed.splitlines()
    steps = [index for index, line in enumerate(lines) if _STEP.match(line)]
    if not steps:
        return printed.strip("\n")
    left_out = set(steps) - {steps[0], steps[len(steps) // 2], steps[-1]}
    return "\n".join(line for index, line in enumerate(lines) if index not in left_out).strip("\n")


def picture(command: str, printed: str, *, title: str) -> str:
    """Return an SVG, as text, of a terminal in which `command` has printed `printed`.

    It has no links, fonts, images or scripts. title: the title of the terminal's window.
    """
    console = Console(
        record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text(printed.expandtabs(4)))
    console.print()  # Rich clips the last line by a path that Rich does not define
    description = f"A terminal in which {command} prints: {' '.join(printed.split())}"
    template = _TEMPLATE.replace("TITLE", _literal(title)).replace("DESCRIPTION", _literal(description))
    return console.export_svg(title=title, code_format=template, unique_id="terminal")


def _literal(text: str) -> str:
    """Escape `text` for XML and for a template of str.format, and return it."""
    return escape(text).replace("{", "{{").replace("}", "}}")


def run(command: Sequence[str], directory: str | None) -> str:
    """Run `command` in a temporary directory below `directory`, and return what it prints on stdout.

    command: a program and its arguments. directory: None for the system's directory of temporary files.
    Raises CalledProcessError if the command fails.
    """
    environment = {**os.environ, "COLUMNS": str(_WIDTH), "PYTHONIOENCODING": "utf-8"}
    argv = [sys.executable, "-m", *command] if command[0] == "infinity" else list(command)
    with tempfile.TemporaryDirectory(dir=directory) as inside:
        done = subprocess.run(
            argv, cwd=inside, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` gives, draw its output as an SVG, and print the output. Returns 0.

    arguments: those of the command line, by default sys.argv[1:].
    """
    parser = argparse.ArgumentParser(description="Draw what a command prints as an SVG.")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the SVG file to write")
    parser.add_argument(
        "--in", dest="directory", metavar="DIR", help="directory in which the temporary directory is made"
    )
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    options = parser.parse_args(arguments)
    command, printed = " ".join(options.command), run(options.command, options.directory)
    shown = fewer_lines(printed)
    options.out.write_text(picture(command, shown, title=command))
    print(printed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
