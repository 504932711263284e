"""BL-24: the second signal ends at once; a runner outside the main thread; dispatch at the end."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Desk, Ledger, Names, WorkerProcess, busy, eventually, stays
from tests.support.worker import ROOT

pytestmark = pytest.mark.chaos

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize(
    ("first", "second"), list(itertools.product(SIGNALS, SIGNALS)), ids=lambda number: number.name
)
def test_bl24_second_signal_ends_at_once_and_the_message_stays_claimable(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tmp_path: Path,
    ledger: Ledger,
    first: signal.Signals,
    second: signal.Signals,
) -> None:
    """The first waits for what runs, the second does not: exit within a second with 128 + its
    number; both are announced; the task is reclaimed by another."""
    worker = make_worker(queue={"reclaim_delay": 1}, config={"shutdown_timeout": 30})
    desk = make_desk(server.url, reclaim_delay=1)
    gate = tmp_path / "gate"
    desk.send("wait-for-file", [{"id": "long", "path": str(gate)}])
    ledger.wait_started("long")
    worker.signal(first)
    eventually(lambda: worker.log_lines(first.name, "in order"), 2, message=worker.log)
    stays(lambda: worker.running, 0.3)
    asked = time.monotonic()
    worker.signal(second)
    assert worker.wait(5) == 128 + second
    assert time.monotonic() - asked < busy()
    assert worker.log_lines("second signal", second.name)
    assert [held.count for held in desk.held()] == [1]
    other = make_worker(queue={"reclaim_delay": 1})
    assert ledger.wait_started("long", times=2).pid == other.pid
    gate.touch()
    eventually(desk.is_empty)


def run(source: str, server: EmbeddedServer, names: Names, ledger: Ledger) -> str:
    """Run a program; RUNNER makes its runner. Returns what it printed."""
    head = f"""
import atexit, os, signal, sys, threading, time
from taskrunner import RedisStreamQueue, TaskRunner, current_task, task
from tests.support.ledger import record

def make():
    return TaskRunner(
        consumer_group={names.group!r}, host={names.host!r}, shutdown_timeout=2,
        queue=RedisStreamQueue({server.url!r}, prefix={names.prefix!r}, reclaim_delay=2),
    )

@task(name="note")
def note(payload):
    with record(payload):
        pass

ran = 0

@task(name="count")
def count(payload):
    global ran
    note(payload)
    ran += 1

def threads():
    until = time.monotonic() + 2
    while True:
        left = [thread.name for thread in threading.enumerate() if "taskrunner" in thread.name]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + textwrap.dedent(source)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TASKRUNNER_TEST_LEDGER": str(ledger.path),
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_bl24_runner_in_another_thread_is_stopped_and_run_again(
    server: EmbeddedServer, names: Names, make_desk: Callable[..., Desk], ledger: Ledger
) -> None:
    """No handlers there; `stop()` ends it; twice in one process; no thread is left."""
    out = run(
        """
        before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        runner = make()
        for round_ in (1, 2):
            thread = threading.Thread(target=runner.run_forever)
            thread.start()
            while runner.state != "started":
                time.sleep(0.01)
            assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
            count.delay(round_)
            while ran < round_:
                time.sleep(0.01)
            assert runner.stop() is True
            thread.join(5)
            assert not thread.is_alive() and runner.state == "stopped"
            assert threads() == [], threads()
        print("done")
        """,
        server,
        names,
        ledger,
    )
    assert out.strip() == "done"
    ledger.assert_once([1, 2])
    assert make_desk().is_empty()


def test_bl24_former_handlers_are_put_back(
    server: EmbeddedServer, names: Names, ledger: Ledger
) -> None:
    """In the main thread: the signal stops the runner, then the application's handlers hold."""
    out = run(
        """
        def mine(*_):
            print("mine")
        signal.signal(signal.SIGTERM, mine)
        runner = make()
        for round_ in (1, 2):
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            runner.run_forever()
            assert signal.getsignal(signal.SIGTERM) is mine
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert threads() == [], threads()
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        server,
        names,
        ledger,
    )
    assert out.split() == ["mine"]


def test_bl24_signal_is_heard_in_any_thread_and_in_the_middle_of_dispatching(
    server: EmbeddedServer, names: Names, ledger: Ledger
) -> None:
    """The main thread sleeps in `run_forever` while the kernel gives the signal to another one; or
    it is stopped from a task."""
    out = run(
        """
        runner = make()

        @task(name="stop")
        def stop(payload):
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        stop.delay()
        started = time.monotonic()
        runner.run_forever()
        print("in time" if time.monotonic() - started < 4 else "late")
        """,
        server,
        names,
        ledger,
    )
    assert out.strip() == "in time"


def test_bl24_dispatch_works_until_the_very_end(
    server: EmbeddedServer, names: Names, make_desk: Callable[..., Desk], ledger: Ledger
) -> None:
    """`.delay()` in an atexit hook, and in a daemon thread at interpreter end: sent, or an error,
    and never a hang."""
    desk = make_desk()
    run(
        """
        runner = make()
        runner.start()
        note.delay("first")
        atexit.register(lambda: note.delay("atexit"))

        def forever():
            while True:
                try:
                    note.delay("daemon")
                except Exception:
                    return
                time.sleep(0.001)

        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.3)
        runner.stop()
        """,
        server,
        names,
        ledger,
    )
    sent = desk.added()
    assert sent > 2
    bodies = [fields[b"payload"] for _, fields in desk.client.xrange(names.stream)]
    assert sum(b'"atexit"' in body for body in bodies) == 1
    assert ledger.counts()["first"] == 1
    assert desk.length() == sent - len(ledger.runs())


def test_bl24_process_ends_though_nobody_stopped_the_runner(
    server: EmbeddedServer, names: Names, make_desk: Callable[..., Desk], ledger: Ledger
) -> None:
    """`start()` in a program whose main thread simply ends: no hang; what was accepted is there or
    was run."""
    started = time.monotonic()
    run(
        """
        runner = make()
        runner.start()
        for number in range(50):
            note.delay(number)
        """,
        server,
        names,
        ledger,
    )
    assert time.monotonic() - started < 10
    desk = make_desk()
    assert desk.length() + len(ledger.finished()) >= 50


def test_bl24_stop_within_a_task_does_not_wait_for_itself(
    server: EmbeddedServer, names: Names, make_desk: Callable[..., Desk], ledger: Ledger
) -> None:
    """A task that stops its own runner."""
    out = run(
        """
        runner = make()

        @task(name="stop-it")
        def stop_it(payload):
            with record("stop-it"):
                runner.stop()

        stop_it.delay()
        runner.run_forever()
        print("ended")
        """,
        server,
        names,
        ledger,
    )
    assert out.strip() == "ended"
    eventually(make_desk().is_empty)
    ledger.assert_once(["stop-it"])
