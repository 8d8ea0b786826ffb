"""Tests of how the package's objects come to know each other: an object gets every object and function that
it will call as an argument of its constructor. No later statement may set one.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "infinity"
FILES = sorted(PACKAGE.rglob("*.py"))


def set_later(tree: ast.AST) -> list[str]:
    """Return the statements in `tree` (as source text) that allow an object to get a callable after its
    construction.

    These statements declare an attribute without a value (`self.keeper: Keeper`), or assign a callable to an
    attribute of an object other than `self`. By them an object could call an object of a higher package,
    which is made later.
    """
    functions = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value is None and isinstance(node.target, ast.Attribute):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Assign) and is_callable(node.value, functions):
            found += [
                ast.unparse(node)
                for target in node.targets
                if isinstance(target, ast.Attribute) and not of_self(target)
            ]
    return found


def of_self(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def is_callable(value: ast.expr, functions: set[str]) -> bool:
    """Whether `value` is a lambda, `self`, or a function or method whose name is in `functions`."""
    if isinstance(value, ast.Lambda):
        return True
    if isinstance(value, ast.Name):
        return value.id in functions or value.id == "self"
    return isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.attr in functions


@pytest.mark.parametrize("file", FILES, ids=lambda each: each.relative_to(PACKAGE).as_posix())
def test_nothing_is_set_after_construction_to_call_upwards(file: Path) -> None:
    assert set(set_later(ast.parse(file.read_text()))) == set()


@pytest.mark.parametrize(
    "line",
    ["self.keeper: Keeper", "engine.updates = self", "gradients.added = after.look", "paging.f = lambda: 1"],
)
def test_what_would_be_found(line: str) -> None:
    code = f"class A:\n    def look(self):\n        {line}\n"
    assert len(set_later(ast.parse(code))) == 1
