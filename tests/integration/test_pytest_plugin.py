"""The pytest plugin, as an application's test run sees it."""

import configparser
import inspect
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import taskrunner_pytest
from tests.support.plugin import ROOT, run_pytest


def write(directory: Path, **files: str) -> None:
    for name, text in files.items():
        (directory / f"{name}.py").write_text(dedent(text))


def test_the_plugin_loads_nothing_of_the_library() -> None:
    """Every run of pytest in an environment with the library pays for it, also where no test asks
    for a fixture; and what is loaded early is missing from coverage."""
    code = (
        "import sys, taskrunner_pytest\n"
        "print([name for name in ('taskrunner', 'redis', 'hiredis', 'attrs', 'attr') "
        "if name in sys.modules])"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert made.stdout.strip() == "[]"


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    """Under the module's own name, so that `-p taskrunner_pytest` beside it is no second one."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")

    assert setup["options"]["py_modules"] == "taskrunner_pytest"
    assert setup["options.entry_points"]["pytest11"].split() == [
        "taskrunner_pytest",
        "=",
        "taskrunner_pytest",
    ]


def test_fixtures_have_names_of_their_own() -> None:
    """Nobody's `redis` or `clock` is replaced; and nothing is used without being asked for."""
    source = inspect.getsource(taskrunner_pytest)

    assert source.count("@pytest.fixture") == source.count("\ndef taskrunner_") == 7
    assert "autouse" not in source


SUITE = """
    import sys

    import pytest

    def test_nothing_was_loaded_before_a_fixture_was_asked_for():
        assert "taskrunner" not in sys.modules

    @pytest.fixture
    def unique():
        from taskrunner import default_registry, task

        @task(name="unique", unique_for=3600)
        def unique(payload):
            return payload

        return unique

    @pytest.mark.parametrize("time", range(3))
    def test_each_test_begins_with_nothing(taskrunner_runner, unique, time):
        unique.delay(1)
        unique.delay  # its lock is left behind
        assert len(taskrunner_runner.queue) == 1

    def test_a_delayed_one_is_left_behind(taskrunner_runner, unique):
        unique.delay(1, run_in=3600)

    def test_a_started_runner_is_stopped(taskrunner_runner, unique):
        unique.delay(1)
        taskrunner_runner.start()

    def test_queue_and_runner_belong_together(taskrunner_runner, taskrunner_queue):
        assert taskrunner_runner.queue is taskrunner_queue

    def test_nothing_serves_tasks_afterwards(unique):
        from taskrunner import UnboundTaskError

        with pytest.raises(UnboundTaskError):
            unique.delay(1)

    def test_eager(taskrunner_eager, taskrunner_clock, unique):
        unique.delay(1)
        unique.delay(2, run_in=60)
        taskrunner_clock.move(60)
        assert [run.payload for run in taskrunner_eager.runs] == [1, 2]
"""


def test_tests_do_not_meet(tmp_path: Path) -> None:
    """Random names, nothing left, one server for each process of xdist."""
    write(tmp_path, test_suite=SUITE)

    outcome = run_pytest(tmp_path, "-n", "2")

    assert "9 passed" in outcome, outcome


def test_a_failure_in_the_eager_fixture_fails_the_test(tmp_path: Path) -> None:
    """Unless the test says that it is expected."""
    write(
        tmp_path,
        test_suite="""
        import pytest
        from taskrunner import task

        @task(name="fails")
        def fails(payload):
            raise ValueError(payload)

        def test_forgotten(taskrunner_eager):
            fails.delay("this one")

        def test_expected(taskrunner_eager):
            fails.delay("that one")
            taskrunner_eager.raises = False
        """,
    )

    outcome = run_pytest(tmp_path)

    assert "2 passed, 1 error" in outcome, outcome
    assert "task 'fails' failed: ValueError: this one" in outcome
    assert "TasksFailedError: task 'fails' failed: ValueError: that one" not in outcome


def test_without_a_server_the_message_names_the_extra(tmp_path: Path) -> None:
    """And eager mode needs none."""
    write(
        tmp_path,
        conftest="""
        import pytest
        from taskrunner.cli import embedded

        embedded.find_in_wheel = lambda: None
        """,
        test_suite="""
        def test_on_a_server(taskrunner_runner):
            pass

        def test_in_memory(taskrunner_eager):
            assert taskrunner_eager.waiting == 0
        """,
    )

    outcome = run_pytest(tmp_path, PATH="/nonexistent", TASKRUNNER_REDIS_SERVER="")

    assert "1 passed, 1 error" in outcome, outcome
    assert "pip install 'redis-taskrunner[embedded]'" in outcome
