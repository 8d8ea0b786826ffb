"""Tests of the documents: the files that they name exist, and every import in the package goes down the table
in docs/architecture.md.
"""

import ast
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

PATH = re.compile(r"(?<![\w./-])(?:infinity|csrc|tests|docs|benchmarks|examples|\.ci)/[\w./*-]*")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
PICTURE = re.compile(r"!\[[^\]]+\]\(([^)]+\.svg)\)")
"""Matches a picture that is shown with an alternative text."""
SHOWING = [ROOT / "README.md", ARCHITECTURE]
FILE = re.compile(r"`([\w.*-]+\.(?:py|pyi|cpp|hpp|inl|md|toml|yaml|svg)|CMakeLists\.txt|LICENSE|NOTICE)`")


def module_of(file: Path) -> str:
    """The dotted name of the module in a Python file."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted((ROOT / "infinity").rglob("*.py"))
MODULES = {module_of(file): file.relative_to(ROOT).as_posix() for file in FILES}
NATIVE = {module_of(file) for file in (ROOT / "infinity").rglob("*.pyi")}


def packages() -> list[str]:
    """The package's folders and top files in the order of the architecture's table, the topmost first."""
    return re.findall(r"^\| `(infinity/(?:\w+/|\w+\.py))` \|", ARCHITECTURE.read_text(), re.MULTILINE)


def package_of(file: str) -> str:
    """The folder or top file of the package to which a file belongs, as the architecture's table names it."""
    folder, slash, _ = file.removeprefix("infinity/").partition("/")
    return f"infinity/{folder}{slash}"


def noun_of(file: Path) -> str:
    """The first paragraph of a Python file's docstring, which names what the file implements (its noun)."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import below `node` that runs, those inside functions included. Imports for types do not run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield from imports(ast.Module([other], []))
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from imports(child)


def imported(statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The dotted names of the package's own Python modules that a statement imports."""
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    else:
        assert statement.level == 0, "the package writes its imports in full"
        whole = [f"{statement.module}.{alias.name}" for alias in statement.names]
        names = [name if name in MODULES or name in NATIVE else str(statement.module) for name in whole]
    for name in names:
        if name.split(".")[0] == "infinity" and name not in NATIVE:
            assert name in MODULES, name
            yield name


def graph() -> dict[str, set[str]]:
    """For each file of the package, the files of the package that the file imports."""
    return {
        MODULES[module_of(file)]: {
            MODULES[name]
            for statement in imports(ast.parse(file.read_text(), str(file)))
            for name in imported(statement)
        }
        for file in FILES
    }


def paths(text: str) -> set[str]:
    """All paths in `text` that start with a folder at the root of the repository, such as "docs/"."""
    return {found.rstrip(".") for found in PATH.findall(text)}


def test_the_architecture_has_a_row_for_every_package() -> None:
    assert sorted(packages()) == sorted({package_of(file) for file in MODULES.values()})


def test_every_file_of_the_package_says_its_noun() -> None:
    nouns = [noun_of(file) for file in FILES]
    assert all(nouns) and len(set(nouns)) == len(nouns), "two files with one noun, or a file without"


def test_few_modules_stand_outside_of_folders() -> None:
    assert len([file for file in MODULES.values() if file.count("/") == 1]) <= 10


def test_every_native_module_is_named() -> None:
    text = ARCHITECTURE.read_text()
    stubs = {file.relative_to(ROOT).as_posix() for file in (ROOT / "infinity").rglob("*.pyi")}
    cores = {f"csrc/{folder.name}/" for folder in (ROOT / "csrc").iterdir() if folder.is_dir()}
    assert stubs | cores <= paths(text)


def test_imports_have_no_circle() -> None:
    TopologicalSorter(graph()).prepare()  # raises CycleError, which names the circle


def test_every_package_imports_only_packages_below_it() -> None:
    place = {name: number for number, name in enumerate(packages())}
    upwards = [
        f"{file} imports {other}"
        for file, others in graph().items()
        for other in others
        if place[package_of(other)] < place[package_of(file)]
    ]
    assert upwards == []


def test_the_graph_of_imports_sees_what_it_must() -> None:
    edges = graph()
    assert "infinity/tiers/pool.py" in edges["infinity/tiers/tier.py"], "from a.b.c import name"
    assert "infinity/__init__.py" in edges["infinity/cli/doctor.py"], "from a import name"
    assert "infinity/cli/train.py" in edges["infinity/cli/__init__.py"], "from a.b import module as module"
    assert "infinity/cpu_adam/__init__.py" in edges["infinity/optim/scheduler.py"], "from a import package"


def test_the_graph_leaves_out_imports_for_types_only() -> None:
    code = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    from c import d\n"
    assert [ast.unparse(each) for each in imports(ast.parse(code))] == ["import b", "from c import d"]


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="an sdist comes without .ci and results")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each.name)
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    assert [name for name in sorted(paths(text)) if not list(ROOT.glob(name.rstrip("/")))] == []
    links = LINK.findall(text)
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_file_that_a_source_names_exists() -> None:
    sources = [*FILES, *(ROOT / "csrc").rglob("*.[hc]pp"), *(ROOT / "csrc").rglob("*.inl")]
    named = {name for each in sources for name in paths(each.read_text()) if Path(name).suffix}
    assert len(named) > 50
    assert [name for name in sorted(named) if not list(ROOT.glob(name))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each.name)
def test_every_file_that_a_document_names_by_itself_exists(document: Path) -> None:
    def there(name: str) -> bool:
        folders = ("infinity", "csrc", "tests", "docs", "benchmarks", "examples")
        return any(ROOT.glob(name)) or any(any((ROOT / folder).rglob(name)) for folder in folders)

    assert [name for name in FILE.findall(document.read_text()) if not there(name)] == []


def test_notes_that_are_cited_exist() -> None:
    """Every note that a document or source file cites, as `[Note: x] in path`, is written in that path."""
    cite = re.compile(r"\[Note: ([^\]]+)\] in `?([\w./]+)`?")
    sources = [*FILES, *(ROOT / "csrc").rglob("*.*"), *DOCUMENTS]
    cited = {found for file in sources for found in cite.findall(file.read_text())}
    assert cited, "the architecture cites notes"

    def written(note: str, path: str) -> bool:
        target = ROOT / path
        files = [target] if target.is_file() else list(target.rglob("*.*"))
        return any(f"[Note: {note}]" in file.read_text() for file in files)

    assert [each for each in sorted(cited) if not written(each[0], each[1].rstrip("."))] == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda each: each.name)
def test_a_picture_is_shown_described_and_complete_in_itself(picture: Path) -> None:
    links = [
        (document.parent, link) for document in SHOWING for link in PICTURE.findall(document.read_text())
    ]
    assert picture in [(folder / link).resolve() for folder, link in links]
    root = ET.parse(picture).getroot()
    names = [element.tag.split("}")[1] for element in root.iter()]
    assert {"title", "desc"} <= set(names)
    assert not {"image", "script", "foreignObject"} & set(names), "viewers do not load or run these"
    text = picture.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http" not in text and "@import" not in text and "@font-face" not in text
    assert picture.stat().st_size < 60_000


NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


TABLES = {"differences.md": 25, "from-deepspeed.md": 15, "from-fsdp2.md": 15, "from-accelerate.md": 10}
"""The documents whose table rows each name a test, and a number of rows that they exceed."""


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_test(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what ")]
    assert len(rows) > TABLES[name]
    assert [row for row in rows if not NAMED_TEST.search(row)] == []
    named = NAMED_TEST.findall(text)
    assert [each for each in named if f"\ndef {each[1]}(" not in (ROOT / each[0]).read_text()] == []
