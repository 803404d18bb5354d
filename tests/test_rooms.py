"""Imports go down the list of rooms in CONTRIBUTING.md, and every room is on it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import specgen

PACKAGE = Path(specgen.__file__).parent
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"

pytestmark = pytest.mark.skipif(not CONTRIBUTING.exists(), reason="an installed wheel has no CONTRIBUTING.md")


def listed() -> dict[str, int]:
    """{room: its row}, counted from the top."""
    rows = re.findall(r"^\| (`[^|]*`) \|", CONTRIBUTING.read_text(encoding="utf-8").split("\n## ")[2 - 1], re.M)
    return {
        name.removesuffix(".py").rstrip("/"): row
        for row, cell in enumerate(rows)
        for name in re.findall(r"`([^`]+)`", cell)
    }


def files_of(room: str) -> list[Path]:
    folder = PACKAGE / room
    return sorted(folder.glob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]


def imported(path: Path) -> set[str]:
    """The rooms that a file imports, anywhere in it; not what only type checkers read."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped and node.module:
            if node.module == "specgen":
                found |= {alias.name for alias in node.names}
            elif node.module.startswith("specgen."):
                found.add(node.module.split(".")[1])
    return found


def test_every_room_is_listed_and_there() -> None:
    there = {p.stem for p in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert there - {"__init__"} == set(listed())


def test_imports_go_down() -> None:
    rows = listed()
    upward = [
        f"{room} imports {other}"
        for room in rows
        for path in files_of(room)
        for other in imported(path)
        if other in rows and other != room and rows[other] <= rows[room]
    ]
    assert not upward


def test_what_lies_below_the_models_knows_no_torch() -> None:
    rooms = ("rounds", "statistics", "theory", "results", "measured", "prediction", "verdict", "analysis", "bench",
             "comparing", "simulating")  # fmt: skip
    for room in rooms:
        source = (PACKAGE / f"{room}.py").read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) torch", source, re.M), room
