"""BL-15: during a rolling deploy a worker meets a task that it does not know yet."""

from collections.abc import Callable
from pathlib import Path

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Desk, Ledger, WorkerProcess, eventually

NEW = """
    @task(name="new")
    def new(payload):
        with record(["new", current_task().attempt]):
            pass

    @task(name="note")
    def note(payload):
        with record(payload):
            pass
"""


def test_bl15_unknown_task_waits_for_a_worker_that_knows_it(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """The old worker puts it back, paced; known tasks flow meanwhile; a newer one runs it, once, on
    its first attempt."""
    old = make_worker()
    desk = make_desk(server.url)
    desk.send("new", [None])
    desk.send("note", range(50))
    ledger.wait_finished(range(50), 5)
    eventually(lambda: len(old.log_lines("not registered")) >= 2, 10)
    assert not ledger.runs(["new", 1])
    make_worker(tasks_file=tasks_file(NEW))
    assert old.stop() == 0
    eventually(lambda: any(run.id == ["new", 1] for run in ledger.runs()), 15)
    eventually(desk.is_empty)
    assert sum(run.id == ["new", 1] for run in ledger.runs()) == 1
    assert desk.letters() == []


def test_bl15_task_that_stays_unknown_ends_loudly(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """Bounded by a count in the message: fewer than two tries a second, then the dead letters and
    an ERROR that names it; its lock is free then."""
    worker = make_worker(config={"unknown_task_deliveries": 3})
    desk = make_desk(server.url)
    desk.define("nowhere", unique_for=60, unique_key="payload")
    (sent,) = desk.send("nowhere", [{"a": 1}])
    assert sent is not None
    for number in range(20):
        desk.send("note", [number])
    eventually(desk.letters, 15)
    (letter,) = desk.letters()
    assert (letter.task_name, letter.error_type) == ("nowhere", "TaskNotFoundError")
    assert letter.payload == {"a": 1}
    assert len(worker.log_lines("not registered")) in (2, 3)
    assert worker.log_lines(" ERROR ", "nowhere")
    eventually(desk.is_empty)
    ledger.assert_once(range(20))
    assert desk.send("nowhere", [{"a": 1}]) != [None]
