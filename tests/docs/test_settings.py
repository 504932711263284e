"""`docs/settings.md` names every setting with its default, and none that does not exist."""

import ast
import configparser
import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from taskrunner import (
    RedisStreamQueue,
    TaskRunner,
    TaskRunnerConfig,
    Timings,
    default_registry,
    task,
)
from taskrunner.cli import _parser  # pyright: ignore[reportPrivateUsage]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text()
COMMANDS = (ROOT / "docs" / "cli.md").read_text()

MADE = {"host": "host name", "timings": Timings(), "registry": default_registry}
"""Defaults that are made, or no literal."""


def rows(heading: str) -> dict[str, str]:
    """Name and default of each row of the first table below a heading."""
    _, found, rest = PAGE.partition(f"\n## {heading}\n")
    assert found, f"no heading {heading!r}"
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), rest.splitlines())
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines)
    ][2:]
    assert all(all(row[-1:]) for row in cells), "an effect is missing"
    return {row[0].strip("`"): row[1] for row in cells}


def shown(text: str) -> Any:
    """The default that a cell shows."""
    code = text.strip("`")
    if not text.startswith("`"):
        return text or "keywords"
    if code == "default_registry":
        return default_registry
    return Timings() if code == "Timings()" else ast.literal_eval(code)


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    names = inspect.signature(function).parameters.values()
    return {
        one.name: "keywords"
        if one.kind is one.VAR_KEYWORD
        else "required"
        if one.default is one.empty
        else one.default
        for one in names
        if one.name != "self"
    }


def fields(cls: type) -> dict[str, Any]:
    return {
        one.name: MADE.get(one.name, "required" if one.default is attrs.NOTHING else one.default)
        for one in attrs.fields(cls)
    }


@pytest.mark.parametrize(
    ("heading", "real"),
    [
        ("A task: `@task(...)`", parameters(task)),
        ("A runner: `TaskRunner(...)`", parameters(TaskRunner.__init__)),
        ("`TaskRunnerConfig`", fields(TaskRunnerConfig)),
        ("`Timings`", fields(Timings)),
        ("`RedisStreamQueue(client, ...)`", parameters(RedisStreamQueue.__init__)),
    ],
    ids=["task", "runner", "config", "timings", "queue"],
)
def test_every_setting_is_there_with_its_default(heading: str, real: dict[str, Any]) -> None:
    """In the order of the code is not asked for; names and values are."""
    assert {name: shown(default) for name, default in rows(heading).items()} == real


def test_every_environment_variable_is_there() -> None:
    """Those that the code reads, but for PATH."""
    read: set[str] = set()
    for path in (ROOT / "taskrunner").rglob("*.py"):
        text = path.read_text()
        read |= set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', text))
        read |= set(re.findall(r'^ENV_VARIABLE.* = "([A-Z_]+)"$', text, re.MULTILINE))
    listed = {
        name for cell in rows("Environment variables") for name in re.findall("[A-Z_]{3,}", cell)
    }
    assert listed == read - {"PATH"}


def test_every_extra_for_users_is_there() -> None:
    """Those that are not for work on the library itself."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    ours = {"test", "lint", "dev", "docs", "bench", "fuzz", "matrix", "mutants", "examples"}
    named = {name.removeprefix("redis-taskrunner[").rstrip("]") for name in rows("Extras")}
    assert named == set(parser["options.extras_require"]) - ours


def options() -> set[str]:
    """Every option of every command."""
    found: set[str] = set()
    todo = [_parser()]
    for parser in todo:  # grows meanwhile
        for action in parser._actions:
            if isinstance(action.choices, dict):
                todo.extend(action.choices.values())
            elif action.help != "==SUPPRESS==":
                found.update(name for name in action.option_strings if name.startswith("--"))
    return found - {"--help"}


def test_every_option_of_the_command_line_is_on_its_page() -> None:
    """And the page invents none."""
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", COMMANDS)) - {"--help"}
    assert named == options()
