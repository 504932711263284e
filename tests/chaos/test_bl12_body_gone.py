"""BL-12: an entry is pending, but its body was deleted or trimmed."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import (
    Desk,
    Ledger,
    Names,
    WorkerProcess,
    assert_recovered,
    eventually,
    faults,
    service_threads,
)


@pytest.mark.parametrize("version", [None, "6.0.16"])
@pytest.mark.parametrize("how", ["deleted", "trimmed"])
def test_bl12_pending_entry_without_a_body_is_acknowledged_once(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
    how: Literal["deleted", "trimmed"],
    version: str | None,
) -> None:
    """Its neighbours run, the pending list is empty, one line of log tells of each, and nothing is
    claimed again and again; with and without XPENDING's filter."""
    worker = make_worker(queue={"reclaim_delay": 1, "redis_version": version})
    desk = make_desk(server.url, reclaim_delay=1)
    threads = service_threads(worker)
    eventually(lambda: desk.client.xinfo_groups(names.stream))
    ids = desk.strand("note", ["first", "second", "third"], idle=0)
    if how == "deleted":
        gone = [ids[1]]
        desk.client.xdel(names.stream, ids[1])
    else:
        gone = ids
        desk.client.xtrim(names.stream, maxlen=0, approximate=False)
    eventually(desk.is_empty, 10, message=worker.log)
    assert ledger.counts() == ({"first": 1, "third": 1} if how == "deleted" else {})
    for entry_id in gone:
        eventually(lambda entry_id=entry_id: worker.log_lines(entry_id, "without a body"))
    assert_recovered(worker, desk, ledger, threads)
    assert len(worker.log_lines("without a body")) == len(gone), worker.log()


def test_bl12_worker_goes_on_when_the_body_of_what_runs_is_deleted(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tmp_path: Path,
    names: Names,
    ledger: Ledger,
) -> None:
    """The task runs on; meanwhile retries and strays are looked after, and nothing spins."""
    worker = make_worker(queue={"reclaim_delay": 1})
    desk = make_desk(server.url, reclaim_delay=1)
    threads = service_threads(worker)
    gate = tmp_path / "gate"
    (entry_id,) = desk.send("wait-for-file", [{"id": "running", "path": str(gate)}])
    ledger.wait_started("running")
    desk.client.xdel(names.stream, str(entry_id))
    faults.down_for(1.2)  # until what runs would look overdue
    cpu = worker.cpu_seconds()
    faults.down_for(2)
    spent = worker.cpu_seconds() - cpu
    assert spent < 0.2, f"the heartbeat spins: {spent:.2f} s in 2 s"
    desk.strand("note", ["stray"], idle=5)
    desk.send("fail-once-delay-half", ["retried"])
    ledger.wait_started("retried", times=2, timeout=5)
    ledger.wait_finished(["stray"], 5)
    gate.touch()
    ledger.wait_finished(["running"])
    eventually(desk.is_empty, 10, message=worker.log)
    assert_recovered(worker, desk, ledger, threads)
    assert ledger.counts()["running"] == 1


def test_bl12_buffered_message_without_a_body_is_let_go_when_the_worker_was_paused(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tmp_path: Path,
    names: Names,
    ledger: Ledger,
) -> None:
    """Read ahead, then the process stands still for longer than reclaim_delay and the entries are
    deleted: what is not ours any more is not started, nothing stays pending, nothing spins."""
    worker = make_worker(queue={"reclaim_delay": 1}, config={"num_workers": 1, "batch_size": 20})
    desk = make_desk(server.url, reclaim_delay=1)
    threads = service_threads(worker)
    gate = tmp_path / "gate"
    desk.send("noop", range(2000))  # a fast pace, so that it reads ahead
    desk.send("wait-for-file", [{"id": "running", "path": str(gate)}])
    later = desk.send("note", range(3))
    ledger.wait_started("running")
    buffered = {held.entry_id for held in desk.held()} & set(later)
    assert buffered
    with faults.frozen(worker):
        faults.down_for(1.5)
        desk.client.xdel(names.stream, *(str(entry_id) for entry_id in later))
        gate.touch()
    ledger.wait_finished(["running"])
    eventually(desk.is_empty, 10, message=lambda: f"{desk.held()}\n{worker.log()[-3000:]}")
    assert_recovered(worker, desk, ledger, threads)


@pytest.mark.parametrize("end", ["fail", "retry"])
def test_bl12_failed_task_without_a_body_is_ended_not_kept(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tmp_path: Path,
    tasks_file: Callable[[str], Path],
    names: Names,
    ledger: Ledger,
    end: Literal["fail", "retry"],
) -> None:
    """Deleted while it ran, and then it fails: for good, or to be retried; nothing stays pending."""
    tasks = tasks_file(
        """
        @task(name="fail", max_retry=1)
        def fail(payload):
            with record(payload["id"]):
                while not os.path.exists(payload["path"]):
                    time.sleep(0.01)
                raise ValueError

        @task(name="retry", max_retry=2, retry_delay=0.2)
        def retry(payload):
            fail.function(payload)

        @task(name="note")
        def note(payload):
            with record(payload):
                pass
        """
    )
    worker = make_worker(queue={"reclaim_delay": 1}, tasks_file=tasks)
    desk = make_desk(server.url, reclaim_delay=1)
    threads = service_threads(worker)
    gate = tmp_path / "gate"
    (entry_id,) = desk.send(end, [{"id": "running", "path": str(gate)}])
    ledger.wait_started("running")
    desk.client.xdel(names.stream, str(entry_id))
    gate.touch()
    eventually(desk.is_empty, 10, message=worker.log)
    assert ledger.counts() == {"running": 1}
    assert_recovered(worker, desk, ledger, threads)
