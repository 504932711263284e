"""Python on the pages is Python: it compiles, names what there is, and runs where a page says so.

A block below the comment `<!-- run -->` is run in an empty directory beside a server of its own, and
prints what the block of text below it shows. The configurations of `docs/starting-points.md` are run as
they would be copied: as `tasks.py`, by the commands below them.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import taskrunner
from taskrunner import RedisStreamQueue, TaskRunnerConfig, Timings, task
from taskrunner.cli.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?ms)^(<!-- run -->\n)?^```python\n(.*?)^```$")

PARAMETERS = {
    "task": set(inspect.signature(task).parameters),
    "TaskRunner": {one.name for one in attrs.fields(TaskRunnerConfig)}
    | {"config", "client", "queue", "registry"},
    "TaskRunnerConfig": {one.name for one in attrs.fields(TaskRunnerConfig)},
    "Timings": {one.name for one in attrs.fields(Timings)},
    "RedisStreamQueue": set(inspect.signature(RedisStreamQueue).parameters),
    "delay": {"payload", "run_at", "run_in"},
    "delay_many": {"payloads", "run_at", "run_in"},
}


MODULES = ("otel", "prometheus", "testing")
"""What is imported from the package beside its names."""


def all_blocks() -> Iterator[tuple[Path, int, str]]:
    for page in PAGES:
        text = page.read_text()
        for found in BLOCK.finditer(text):
            yield page, text.count("\n", 0, found.start()) + 1, found[2]


BLOCKS = [pytest.param(code, id=f"{page.name}-{line}") for page, line, code in all_blocks()]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_on_a_page_compiles_and_names_what_there_is(code: str) -> None:
    """Names imported from taskrunner exist, and so do the keywords that its callables are given."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "taskrunner":
            assert {one.name for one in node.names} <= {*taskrunner.__all__, *MODULES}
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            given = {one.arg for one in node.keywords if one.arg is not None}
            if "Celery" not in code:
                assert given <= PARAMETERS.get(name, given), name


def runnable() -> Iterator[tuple[Path, str, str]]:
    for page in PAGES:
        pattern = r"(?ms)^<!-- run -->\n```python\n(.*?)^```$\n+^```text\n(.*?)^```$"
        for code, output in re.findall(pattern, page.read_text()):
            yield page, code, output


RUNNABLE = [pytest.param(code, output, id=page.name) for page, code, output in runnable()]


@pytest.fixture(scope="module")
def private() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tcp=True) as embedded:
        yield embedded


def environment(server: EmbeddedServer) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TASKRUNNER_REDIS_URL": server.tcp_url}


def done(words: list[str], directory: Path, server: EmbeddedServer, code: int = 0) -> str:
    """The output of a command that ends with this exit code."""
    made = subprocess.run(
        words,
        cwd=directory,
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert made.returncode == code, made.stdout + made.stderr
    return made.stdout


@pytest.mark.parametrize(("code", "output"), RUNNABLE)
def test_a_block_that_is_to_be_run_prints_what_the_page_shows(
    code: str, output: str, private: EmbeddedServer, tmp_path: Path
) -> None:
    (tmp_path / "example.py").write_text(code)
    assert done([sys.executable, "example.py"], tmp_path, private) == output


def test_nothing_that_is_to_be_run_is_overlooked() -> None:
    """Each mark stands above Python, and that above what it prints."""
    marks = sum(page.read_text().count("<!-- run -->") for page in PAGES)
    assert marks == len(RUNNABLE) > 0


def starting_points() -> list[tuple[str, list[str]]]:
    page = (ROOT / "docs" / "starting-points.md").read_text()
    pattern = r"(?ms)^```python\n(.*?)^```$\n+^```console\n(.*?)^```$"
    return [
        (code, re.findall(r"(?m)^\$ taskrunner (.*)$", commands))
        for code, commands in re.findall(pattern, page)
    ]


@pytest.mark.parametrize(("code", "commands"), starting_points())
def test_a_starting_point_works_as_it_is_copied(
    code: str, commands: list[str], private: EmbeddedServer, tmp_path: Path
) -> None:
    """But for the port, and two processes in place of four; --burst ends it."""
    (tmp_path / "tasks.py").write_text(code.replace("localhost:6379", f"127.0.0.1:{private.port}"))
    assert len(commands) == code.count("TaskRunner(\n") + code.count("= TaskRunner(consumer")

    for command in commands:
        words = command.replace("--processes 4", "--processes 2").split()
        done([sys.executable, "-m", "taskrunner", *words, "--burst"], tmp_path, private)


def test_the_readme_works_as_it_is_copied(private: EmbeddedServer, tmp_path: Path) -> None:
    """Its three files and the commands of its last lines."""
    readme = (ROOT / "README.md").read_text()
    tasks, application, worker = (found[2] for found in list(BLOCK.finditer(readme))[:3])
    (tmp_path / "tasks.py").write_text(tasks)
    (tmp_path / "application.py").write_text(application)
    (tmp_path / "worker.py").write_text(worker)
    done([sys.executable, "application.py"], tmp_path, private)

    with subprocess.Popen(
        [sys.executable, "-u", "worker.py"],
        cwd=tmp_path,
        env=environment(private),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "mail to a@example.com\n"
        running.terminate()
        assert running.wait(60) == 0

    for command in re.findall(r"`taskrunner ((?:worker|info) [^`]+)`", readme):
        words = [*command.split(), *(["--burst"] if command.startswith("worker") else [])]
        done([sys.executable, "-m", "taskrunner", *words], tmp_path, private)
    assert "`taskrunner doctor tasks:runner`" in readme
    doctor = [sys.executable, "-m", "taskrunner", "doctor", "tasks:runner"]
    assert "no-persistence" in done(doctor, tmp_path, private, code=3)
