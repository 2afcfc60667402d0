"""docs/known_faults.md names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "known_faults.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", PAGE)))


def defined_in(path: Path) -> set[str]:
    """Names of the tests in a file, those of classes behind the name of their class."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {f"{before}{one.name}" for one in inner if isinstance(one, ast.FunctionDef)}
    return found


def test_every_test_on_the_page_is_there():
    assert len(NAMED) > 30
    assert [f"{file}::{name}" for file, name in NAMED if name not in defined_in(ROOT / file)] == []


def test_every_row_names_one():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| reported")]
    assert rows
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+", row)] == []
