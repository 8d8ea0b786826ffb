"""Index of results: made, like the table in README, from the files under benchmarks/results/current.

    python benchmarks/results_index.py [--check]

The program writes benchmarks/results/README.md, and the table between two comments in README.md. With
`--check` it writes nothing, and exits with 1 if either file differs from what would be written.

A result is a file current/CLAIM/MACHINE.json, with a note for people, MACHINE.md, beside it. The JSON file
holds:

    claim      the folder's name
    machine    {"name": for people, "cpu", "cpus", "memory_gib", ...: the result of machine_facts}
    date, commit, command   what was run, so that it can be run again
    peer       the program with which infinity is compared, or null
    figures    a list of {"what", "peer", "ours", "ratio", "spread"}: strings for people. "peer" and "ours"
               are what the peer and infinity achieved. "peer" and "ratio" may be null. "spread" is the
               smallest and the largest ratio, or another measure of the spread.
               Two keys are optional: "contender", the contender of train.py that gave the figure, and
               "readme", the number of the figure's row in README's table
    data       the JSON object that the benchmark printed
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
HEAD = """# Results

The newest trustworthy figures behind each claim of [README](../../README.md). This page is made from the
files under [current](current) by `benchmarks/results_index.py`, which says what such a file holds. A speed is
a ratio to a peer that took turns with ours in one run; figures of different machines and days cannot be
compared otherwise. What was tried and not kept is in [docs/lab-notes.md](../../docs/lab-notes.md). Superseded
results are in git's history.
"""


@dataclass(frozen=True)
class Result:
    """One result: a JSON file under benchmarks/results/current/."""

    path: Path
    """Path of the result's JSON file, relative to the root of the repository."""
    record: dict[str, Any]
    """The object in the result's JSON file, with the keys that the docstring of this module lists."""

    @property
    def machine(self) -> str:
        return str(self.record["machine"]["name"])

    @property
    def figures(self) -> list[dict[str, Any]]:
        return list(self.record["figures"])


def results() -> list[Result]:
    """Read all files current/CLAIM/MACHINE.json; returns the results, sorted by claim and machine."""
    files = sorted((RESULTS / "current").glob("*/*.json"))
    return [Result(file.relative_to(ROOT), json.loads(file.read_text())) for file in files]


def table(rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown. The first of `rows` is the table's head."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def index(found: list[Result]) -> str:
    """Return the text of benchmarks/results/README.md: a table of all figures, and one of the commands."""
    figures = [("claim", "of what", "figure", "spread", "machine", "commit", "files")]
    commands = [("file", "peer", "date", "command")]
    for result in found:
        record = result.record
        files = result.path.relative_to("benchmarks/results")
        links = f"[note]({files.with_suffix('.md').as_posix()}), [data]({files.as_posix()})"
        for each in result.figures:
            figure = f"{each['ratio']} x the peer" if each["ratio"] else each["ours"]
            if each["peer"] and not each["ratio"]:
                figure += f", the peer {each['peer']}"
            cells = (record["claim"], each["what"], figure, each["spread"])
            figures.append((*cells, result.machine, record["commit"], links))
        name = files.with_suffix("").as_posix()
        commands.append((name, record["peer"] or "", record["date"], f"`{record['command']}`"))
    return f"{HEAD}\n{table(figures)}\n\n## Commands\n\n{table(commands)}\n"


def measured(found: list[Result]) -> str:
    """Return the table for README: a row for each figure with the key "readme", sorted by that number."""
    rows = {}
    for result in found:
        for each in result.figures:
            if "readme" in each:
                assert each["readme"] not in rows, f"two figures are row {each['readme']}"
                peer = f"{result.record['peer']}: {each['peer']}"
                ratio = f"{each['ratio']} ({each['spread']})"
                link = f"[{result.record['claim']}]({result.path.with_suffix('.md').as_posix()})"
                rows[each["readme"]] = (each["what"], result.machine, peer, each["ours"], ratio, link)
    head = ("what", "machine", "peer", "infinity", "ratio of speeds (least to most)", "file")
    return table([head, *(row for _, row in sorted(rows.items()))])


def with_table(readme: str, text: str) -> str:
    """Return the text of README with its table replaced. readme: the present text. text: the new table."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    found = results()
    readme = ROOT / "README.md"
    wanted = {
        RESULTS / "README.md": index(found),
        readme: with_table(readme.read_text(), measured(found)),
    }
    stale = [file for file, text in wanted.items() if not file.exists() or file.read_text() != text]
    for file in stale:
        if arguments:
            print(f"{file.relative_to(ROOT)} is not what benchmarks/results_index.py makes", file=sys.stderr)
        else:
            file.write_text(wanted[file])
    return int(bool(arguments and stale))


if __name__ == "__main__":
    raise SystemExit(main())
