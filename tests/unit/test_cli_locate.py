"""What `MODULE:RUNNER` finds, and what a typo is told; tables and durations. No Redis."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from taskrunner import TaskRunner
from taskrunner.cli import main
from taskrunner.cli.locate import WrongArgument, find_runner
from taskrunner.cli.table import duration, pairs, printable, table

APP = """
from taskrunner import Registry, TaskRunner

class Place:
    runner = TaskRunner(consumer_group="nested", registry=Registry())

runner = TaskRunner(consumer_group="found", registry=Registry())
place = Place()
number = 7
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with an application, which is the current one."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "shop_app.py").write_text(APP)
    (tmp_path / "shop_pack").mkdir()
    (tmp_path / "shop_pack" / "__init__.py").write_text("")
    (tmp_path / "shop_pack" / "inner.py").write_text(APP)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("shop_"):
            del sys.modules[name]


def test_a_runner_is_found_in_the_current_directory(app: Path) -> None:
    """Without PYTHONPATH and without an installed package."""
    found = find_runner("shop_app:runner")

    assert isinstance(found, TaskRunner)
    assert found.config.consumer_group == "found"
    assert find_runner("shop_pack.inner:place.runner").config.consumer_group == "nested"


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("shop_ap:runner", ["no module 'shop_ap'", "did you mean shop_app?"]),
        ("shop_pack.iner:runner", ["package 'shop_pack'", "did you mean inner?"]),
        ("shop_app:runer", ["has no 'runer'", "TaskRunners in 'shop_app': runner", "did you mean"]),
        ("shop_app:number", ["is a int, not a TaskRunner", "runner"]),
        ("shop_app", ["names no runner", "TaskRunners in 'shop_app': runner"]),
        ("shop_app.py:runner", ["is a file", "shop_app:RUNNER"]),
        ("./shop_pack/inner:runner", ["is a file", "shop_pack.inner:RUNNER"]),
        ("shop-app:runner", ["'shop-app' is no module's name"]),
        ("shop_app.runner", ["a module and no package", "did you mean shop_app:runner?"]),
        ("shop_app:runner()", ["has no 'runner()'", "did you mean runner?"]),
        ("shop_pack:runner", ["there is no TaskRunner at the top level of 'shop_pack'"]),
        (":runner", ["is not MODULE:RUNNER"]),
        ("shop_app:", ["is not MODULE:RUNNER"]),
    ],
)
def test_a_typo_is_told_what_was_found_instead(app: Path, spec: str, told: list[str]) -> None:
    """At 3 a.m. nobody remembers the name."""
    with pytest.raises(WrongArgument) as caught:
        find_runner(spec)

    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import no_such_thing_anywhere", "No module named 'no_such_thing_anywhere'"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_module_that_fails_shows_its_own_lines(app: Path, source: str, told: str) -> None:
    """An error inside the module is not a missing module, and shows where it is."""
    (app / "shop_bad.py").write_text(f"\n{source}\n")

    with pytest.raises(WrongArgument) as caught:
        find_runner("shop_bad:runner")

    assert "importing 'shop_bad' failed" in str(caught.value)
    assert told in str(caught.value)
    assert "shop_bad.py" in str(caught.value)
    assert "importlib" not in str(caught.value)


def test_wrong_arguments_end_with_2(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script can tell a typo from a failure."""
    assert main(["info", "shop_ap:runner"]) == 2
    assert main(["info"]) == 2
    assert main(["info", "shop_app:runner", "--group", "g"]) == 2
    assert main(["info", "--group", "g", "--url", "http://nowhere"]) == 2
    assert main(["enqueue", "--group", "g", "name", "{not json"]) == 2
    assert main(["enqueue", "--group", "g", "name", "1", "--in", "nan"]) == 2
    assert main(["dead", "list", "--group", "g", "--after", "x"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words", ["dead show a:b", "dead requeue a:b", "delayed cancel a:b", "enqueue a:b name"]
)
def test_a_missing_argument_is_not_taken_for_a_missing_runner(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """The runner may be left out, so what was typed for it is read as what follows it."""
    assert main(words.split()) == 2
    assert "if 'a:b' is that, an argument behind it is missing" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No traceback for what is no fault of the program, and where to look."""
    assert main(["info", "--group", "g", "--url", "redis://127.0.0.1:1/0"]) == 1

    told = capsys.readouterr().err
    assert told.startswith("taskrunner: Redis: ")
    assert "127.0.0.1:1" in told
    assert "See that it runs there" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("worker a:b --processes two", "--processes: 'two' is not a whole number"),
        ("worker a:b --processes 0", "--processes: 0 is below 1"),
        ("worker a:b --health-port 70000", "--health-port: 70000 is not a port"),
        ("worker a:b --health-port http", "--health-port: 'http' is not a whole number"),
        ("worker a:b --log-level loud", "--log-level: invalid choice: 'loud'"),
        ("worker", "required: MODULE:RUNNER"),
        ("dead list a:b --limit 0", "--limit: 0 is below 1"),
        ("demo --limit some", "--limit: 'some' is not a whole number"),
        ("enqueue a:b name 1 --in 5m", "--in: '5m' is not a number of seconds"),
        ("worker a:b --proceses 2", "[--processes N]"),
        ("worker a:b --proceses 2", "worker: error: unrecognized arguments: --proceses 2"),
        ("dead show a:b 1-0 more", "dead show: error: unrecognized arguments: more"),
        ("wrker a:b", "invalid choice: 'wrker'"),
    ],
)
def test_a_wrong_value_is_told_with_its_option(
    capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    """Exit code 2, the option, what it was given, and the rule."""
    with pytest.raises(SystemExit) as ended:
        main(words.split())

    assert ended.value.code == 2
    assert told in capsys.readouterr().err


COMMAND_LINES = [
    *("", "worker", "demo", "info", "doctor", "enqueue", "purge", "redis"),
    *("dead", "dead list", "dead show", "dead requeue", "dead delete", "dead purge"),
    *("delayed", "delayed list", "delayed cancel"),
]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", COMMAND_LINES)
def test_help_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, width: int
) -> None:
    """Every option has its line; nothing of how the source is laid out shows."""
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--help"])

    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= width
    assert "Floor" not in said
    for line in said.splitlines():  # a name without a word of what it means
        bare = re.fullmatch(r"  (--?\w[\w-]*|[A-Z|]+)( [A-Z|]+)?", line)
        assert not bare or bare[1] in ("COMMAND", "ACTION"), line


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """What a report of a fault begins with."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert re.fullmatch(r"taskrunner \S.*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.34, "340 ms"),
        (12.5, "12.5 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
        (-5, "-5.0 s"),
    ],
)
def test_durations_are_said_as_people_do(seconds: float, text: str) -> None:
    """No one divides by 3600 in their head."""
    assert duration(seconds) == text


def test_a_table_is_aligned_and_harmless() -> None:
    """Task names and errors come from anyone: none may move the cursor."""
    shown = table(("NAME", "COUNT"), [("a", "1"), ("long\x1b[2J", "20")])

    assert shown.splitlines() == ["NAME      COUNT", "a             1", "long?[2J     20"]
    assert printable("a\nb") == "a?b"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the output be a terminal of that many columns."""

    def set_width(columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return set_width


ROWS = [
    ("1795978606637-0", "send-email", "2026-11-29T18:56:46Z", "ValueError: connection refused"),
    ("1795978606637-1", "app.billing.create_invoice", "2026-11-29T18:56:46Z", "KeyError: 'width'"),
]


@pytest.mark.parametrize("width", [50, 66, 80, 120])
def test_a_table_fits_the_terminal(terminal: Callable[[int], None], width: int) -> None:
    """Ids stay whole, for they are copied; what may be left out is left out first."""
    terminal(width)
    lines = table(("ID", "TASK", "AT", "ERROR"), ROWS, cut=("TASK", "ERROR"), spare=("AT",))

    assert max(map(len, lines.splitlines())) <= width
    assert ROWS[0][0] in lines
    assert ("2026-11-29T18:56:46Z" in lines) == (width >= 66)
    assert (ROWS[0][3] in lines) == (width == 120)


def test_a_pipe_gets_all_of_a_table() -> None:
    """Whatever COLUMNS says: it is read by programs."""
    shown = table(("ID", "TASK", "AT", "ERROR"), ROWS, cut=("TASK", "ERROR"), spare=("AT",))

    for row in ROWS:
        assert all(cell in shown for cell in row)


def test_a_long_value_goes_on_below_itself(terminal: Callable[[int], None]) -> None:
    """Words stay whole."""
    terminal(30)

    assert pairs([("tasks", "send-email, create-invoice"), ("group", "shop")]) == (
        "tasks  send-email,\n       create-invoice\ngroup  shop"
    )
