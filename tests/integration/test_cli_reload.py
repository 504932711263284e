"""`taskrunner worker --reload` as typed: real changes of a real file."""

import importlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskrunner.cli import main, reload
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import eventually, stays
from tests.support.desk import Desk
from tests.support.names import Names
from tests.support.server import pause_process, process_is_alive
from tests.support.shop import Shop, Typed

pytest.importorskip("watchfiles")


@pytest.fixture
def shop(tmp_path: Path, server: EmbeddedServer, names: Names) -> Iterator[Shop]:
    """The application of this test."""
    made = Shop(tmp_path, server.url, names)
    yield made
    made.close()


def rewrite(shop: Shop, old: str, new: str) -> None:
    """As an editor does: a new file in the place of the old one."""
    source = shop.directory / "shop.py"
    text = source.read_text()
    assert old in text
    written = shop.directory / "shop.py.new"
    written.write_text(text.replace(old, new))
    written.replace(source)


def ran(shop: Shop) -> list[str]:
    return [what for _, what in shop.ran()]


def wait_ran(shop: Shop, worker: Typed, *what: str) -> None:
    eventually(lambda: ran(shop) == list(what), 30, message=lambda: f"{ran(shop)} {worker.log}")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_change_is_what_runs_from_then_on(shop: Shop, desk: Desk, processes: str) -> None:
    """A running task ends first, one process follows another in order, and Ctrl-C ends all."""
    worker = shop.worker("--reload", "--processes", processes)
    worker.wait_started(int(processes))
    assert re.search(
        r"^reload +when a Python file changes; for development only$", worker.log, re.M
    )
    desk.send("nap", [1.0])
    wait_ran(shop, worker, "begin")
    first = {pid for pid, _ in shop.ran()}

    rewrite(shop, 'ran("begin")', 'ran("begin anew")')
    wait_ran(shop, worker, "begin", "end")
    worker.wait_started(2 * int(processes))
    assert "shop.py changed: starting anew" in worker.log
    assert "watchfiles" not in worker.log  # says the same in fewer words
    desk.send("nap", [0])
    wait_ran(shop, worker, "begin", "end", "begin anew", "end")
    pids = {pid for pid, _ in shop.ran()}
    assert len(pids) == 2

    worker.process.send_signal(signal.SIGINT)
    assert worker.wait() == 0, worker.log
    eventually(lambda: not any(process_is_alive(pid) for pid in pids | first))
    assert not worker.living
    assert desk.length() == 0


def test_a_syntax_error_is_shown_and_the_next_change_tries_again(shop: Shop, desk: Desk) -> None:
    """Whoever edits makes mistakes; the worker is there again when they are mended."""
    worker = shop.worker("--reload")
    worker.wait_started()

    rewrite(shop, "def note(payload):", "def note(payload:")
    eventually(lambda: "waiting for a change" in worker.log, 30, message=lambda: worker.log)
    assert "SyntaxError" in worker.log
    assert "importing 'shop' failed" in worker.log
    assert worker.process.poll() is None

    rewrite(shop, "def note(payload:", "def note(payload):")
    worker.wait_started(2)
    desk.send("note", ["mended"])
    wait_ran(shop, worker, "mended")


def test_an_application_that_is_broken_from_the_start_is_waited_for(shop: Shop) -> None:
    """The same, and Ctrl-C ends it though no worker runs."""
    rewrite(shop, "registry = Registry()", "registry = Registry(")
    worker = shop.worker("--reload")
    eventually(lambda: "the worker ended with 2: waiting" in worker.log, 30)

    worker.process.send_signal(signal.SIGINT)
    assert worker.wait() == 0


def test_files_that_are_no_source_change_nothing(shop: Shop, desk: Desk) -> None:
    """Virtual environments, caches, repositories, and other kinds of files."""
    worker = shop.worker("--reload")
    worker.wait_started()
    for name in (".venv/lib/a.py", "__pycache__/shop.py", ".git/hooks/b.py", "notes.txt"):
        (shop.directory / name).parent.mkdir(parents=True, exist_ok=True)
        (shop.directory / name).write_text("changed")

    stays(lambda: "starting anew" not in worker.log, 1.5)
    (shop.directory / "new.py").write_text("")
    eventually(lambda: "new.py changed" in worker.log, 10, message=lambda: worker.log)


def test_a_source_below_a_root_is_watched_wherever_the_root_lies() -> None:
    """A project may itself lie in a directory called env."""
    roots = [Path("/srv/env/project")]

    assert reload.is_watched(Path("/srv/env/project/a/b.py"), roots)
    assert not reload.is_watched(Path("/srv/env/project/venv/lib/b.py"), roots)
    assert not reload.is_watched(Path("/srv/env/other.py"), roots)


def test_a_killed_reloader_leaves_nothing_behind(shop: Shop, desk: Desk) -> None:
    """Its worker, or the supervisor and its workers, stop in order."""
    worker = shop.worker("--reload", "--processes", "2")
    worker.wait_started(2)
    desk.send("nap", [1.0])
    wait_ran(shop, worker, "begin")

    worker.process.kill()
    worker.process.wait()
    eventually(lambda: not worker.living, 15, message=lambda: worker.log)
    assert ran(shop) == ["begin", "end"]
    assert desk.length() == 0


def test_a_second_signal_ends_at_once(shop: Shop, desk: Desk) -> None:
    """Workers of workers too."""
    worker = shop.worker("--reload", "--processes", "2")
    worker.wait_started(2)
    desk.send("nap", [30])
    wait_ran(shop, worker, "begin")

    worker.process.send_signal(signal.SIGINT)
    eventually(lambda: "stopping in order" in worker.log, 10)
    worker.process.send_signal(signal.SIGINT)
    assert worker.wait(10) == 128 + signal.SIGINT
    eventually(lambda: not worker.living, 10)


def test_without_watchfiles_it_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What to type, in one line."""

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert main(["worker", "shop:runner", "--reload"]) == 2
    told = capsys.readouterr().err
    assert "--reload needs watchfiles: pip install 'redis-taskrunner[reload]'" in told


def test_reload_and_burst_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """What stops by itself is not started anew."""
    assert main(["worker", "shop:runner", "--reload", "--burst"]) == 2
    assert "--reload and --burst" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc, and Linux")
def test_a_frozen_worker_ends_with_its_reloader(shop: Shop) -> None:
    """The kernel wakes it: it has heard of nothing."""
    worker = shop.worker("--reload")
    worker.wait_started()
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children")
    (child,) = (int(pid) for pid in children.read_text().split())
    pause_process(child)

    worker.process.kill()
    worker.process.wait()
    eventually(lambda: not process_is_alive(child), 15, message=lambda: worker.log)
