"""What the pages say of keys, attempts, messages and public names is true of the code."""

import ast
import inspect
import itertools
import re
from functools import cache
from pathlib import Path

import pytest

import taskrunner
from taskrunner import keys, retry, testing

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def table(text: str, header: str) -> list[list[str]]:
    """The cells of the table that begins with this header."""
    _, found, rest = text.partition(f"\n{header}\n")
    assert found, f"no table {header!r}"
    lines = itertools.takewhile(lambda line: line.startswith("|"), rest.splitlines())
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


# --- keys.md ---


def test_every_key_is_on_its_page_and_no_other() -> None:
    """By the functions of keys.py, called with the page's placeholders."""
    group, prefix, queue = "<group>", "<prefix>", "<queue>"
    made = {
        keys.stream(prefix, queue),
        keys.delayed(group),
        keys.dead_letters(group),
        keys.metrics(group),
        keys.capacity(group),
        keys.leader(group).rpartition(":")[0] + ":<base32(sha1(group))>",
        keys.presence("<host>"),
        keys.unique("<task>:<key>"),
        keys.ring(prefix, queue),
    }
    rows = table(page("keys.md"), "| key | type | holds | size | goes |")
    assert {row[0].strip("`") for row in rows} == made
    assert all(all(row) for row in rows)

    functions = {
        node.name
        for node in ast.parse((ROOT / "taskrunner" / "keys.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len(functions - {"channel", "consumer", "parse_consumer"}) == len(made), "a new key?"


# --- guarantees.md ---


@pytest.mark.parametrize(
    "row",
    table(page("guarantees.md"), "| max_retry | max_lost | deliveries | code runs | end |"),
    ids="-".join,
)
def test_an_example_of_attempts_is_right(row: list[str]) -> None:
    """Judged by the rules that the executor asks."""
    max_retry, max_lost = int(row[0]), int(row[1])
    deliveries = row[2].split(", ")
    end, runs = "", 0
    for attempt, what in enumerate([*deliveries, "one more"], start=1):
        if not retry.may_run(attempt, max_retry, max_lost):
            end = "`MaxRetryExceededError`"
            break
        assert what != "one more", "the last delivery does not end it"
        runs += 1
        if what == "works":
            end = "success"
            break
        if what == "fails" and retry.is_final(ValueError(), attempt, max_retry):
            end = "`TaskExecutionError`"
            break
    assert (str(runs), end) == (row[3], row[4])
    assert runs == len(deliveries)


# --- troubleshooting.md ---

NO_QUOTES = (
    "taskrunner",
    "dead ",
    "pip ",
    "redis-cli",
    "def ",
    "f.delay",
    "TaskRunner(",
    "datetime.",
)


@cache
def texts() -> str:
    """Every text of the package, one a line, with … for what is filled in."""
    found: list[str] = []
    for path in sorted((ROOT / "taskrunner").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d)?[a-z]", "…", node.value))
    return "\n".join(text.replace("\n", " ") for text in found)


def quotes() -> list[str]:
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```$", "", page("troubleshooting.md")))
    return sorted({one for one in spans if " " in one and not one.startswith(NO_QUOTES)})


@pytest.mark.parametrize("quote", quotes())
def test_a_message_that_is_quoted_exists(quote: str) -> None:
    """Word for word, but for what is filled in."""
    pieces = [re.escape(piece) for piece in re.split("…", quote) if piece.strip(" :")]
    assert re.search("[^\n]*".join(pieces), texts()), quote


def test_a_finding_that_is_named_exists() -> None:
    """Those of doctor, by their names."""
    code = "".join(path.read_text() for path in (ROOT / "taskrunner" / "cli").glob("*.py"))
    known = set(re.findall(r'check="([a-z-]+)"', code))
    for name in ("troubleshooting.md", "keys.md", "starting-points.md"):
        named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", page(name))) - {"redis-cli"}
        assert named <= known, name
    listed = {
        cell
        for row in table(page("cli.md"), "| finding | |")
        for cell in re.findall("`([^`]+)`", row[0])
    }
    assert listed == known


# --- api.md ---


def test_the_signature_of_task_is_right() -> None:
    """It is written out there, because the overloads say more than people ask."""
    (shown,) = re.findall(r"^\.\. autofunction:: task\((.*)\)$", page("api.md"), re.MULTILINE)
    real = inspect.signature(taskrunner.task).parameters.values()
    assert re.findall(r"(\w+)=([\w.]+)", shown) == [
        (one.name, "default_registry" if one.name == "registry" else repr(one.default))
        for one in real
    ]


def test_every_public_name_is_in_the_reference() -> None:
    """And the reference shows nothing that can't be imported."""
    shown = re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)", page("api.md"), re.MULTILINE)
    inner = {
        "taskrunner.observer.Observer",
        "taskrunner.store.dead_letters.DeadLetters",
        "taskrunner.store.delayed_set.DelayedSet",
    }
    tests = [f"taskrunner.testing.{name}" for name in testing.__all__]
    assert sorted(set(shown) - inner) == sorted([*taskrunner.__all__, *tests])
    assert len(shown) == len(set(shown))


# --- README.md ---


def test_every_link_of_the_readme_leads_somewhere() -> None:
    """Those between the pages are checked by Sphinx."""
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", readme)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
