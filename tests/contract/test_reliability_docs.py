"""What `docs/reliability.md` promises is shown by tests that exist, and no field case is without."""

import ast
import itertools
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
CASES = range(1, 29)
"""Field cases BL-01 to BL-28: faults that other libraries had."""

MOVES = (
    *("dispatch", "delayed dispatch", "promote", "fetch", "run", "success", "retry"),
    *("dead letter", "renewal", "reclaim", "hand-back"),
)
FAULTS = (
    *("request lost", "reply lost", "process killed", "process frozen"),
    *("Redis killed, back with its data", "Redis silent", "Redis refuses", "Redis forgot"),
)


@cache
def functions() -> dict[str, set[str]]:
    """The test functions' names by file."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        found[str(path.relative_to(ROOT))] = {
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
    return found


def table(header: str) -> list[list[str]]:
    """The cells of the table that begins with this header."""
    _, found, rest = PAGE.read_text().partition(header + "\n")
    assert found, f"no table {header!r}"
    lines = itertools.takewhile(lambda line: line.startswith("|"), rest.splitlines())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows[1:]  # below the rule


@pytest.mark.parametrize("number", CASES, ids=lambda number: f"BL-{number:02}")
def test_field_case_has_a_test_under_its_number(number: int) -> None:
    """A test function bears the number, and the page names its file."""
    files = {
        name
        for name, found in functions().items()
        if any(re.match(rf"test_bl{number:02}_", function) for function in found)
    }
    assert files, f"no test is named test_bl{number:02}_..."
    (row,) = [
        row
        for row in table("| case | what went wrong elsewhere | tests |")
        if row[0] == f"BL-{number:02}"
    ]
    assert row[1]
    assert set(re.findall(r"`([^`]+)`", row[2])) & files, f"{row[2]} is not among {files}"


def test_no_field_case_of_the_page_is_unknown() -> None:
    """The page and this test know the same cases."""
    rows = table("| case | what went wrong elsewhere | tests |")
    assert [row[0] for row in rows] == [f"BL-{number:02}" for number in CASES]


def test_every_fault_at_every_move_has_an_answer() -> None:
    """The table is the full product, and no cell is empty."""
    rows = table("| move | fault | what happens | shown by |")
    assert [(row[0], row[1]) for row in rows] == list(itertools.product(MOVES, FAULTS))
    assert [row for row in rows if len(row) != 4 or not all(row)] == []


def test_every_answer_is_shown_by_a_test_that_exists() -> None:
    """By its function's name."""
    known = set().union(*functions().values())
    for move, fault, _, shown in table("| move | fault | what happens | shown by |"):
        named = re.findall(r"`([^`]+)`", shown)
        assert named, f"{move}, {fault}: no test"
        assert set(named) <= known, f"{move}, {fault}: {set(named) - known}"


def test_every_file_that_the_page_names_exists() -> None:
    """So that nobody looks for what was moved."""
    named = set(re.findall(r"`(tests/[^`]+)`", PAGE.read_text()))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()
