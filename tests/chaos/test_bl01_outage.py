"""BL-01: Redis goes away and comes back; workers must take up work by themselves, tasks must not
notice."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tests.support import (
    Desk,
    Ledger,
    OwnServer,
    WorkerProcess,
    assert_recovered,
    eventually,
    faults,
    service_threads,
)

pytestmark = pytest.mark.chaos


def test_bl01_running_task_ends_and_work_goes_on_when_redis_is_restarted(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """The server dies under a task that outlives reclaim_delay, and comes back with its data."""
    server = own_server(appendonly=True)
    worker = make_worker(url=server.tcp_url, queue={"reclaim_delay": 1})
    desk = make_desk(server.url, reclaim_delay=1)
    threads = service_threads(worker)
    desk.send("sleep", [{"id": "long", "seconds": 4}])
    ledger.wait_started("long")
    with faults.killed(server):
        faults.down_for(1.5)
    desk.send("note", list(range(20)))
    ledger.wait_finished(["long", *range(20)], 15)
    eventually(desk.is_empty, 10, message=worker.log)
    ledger.assert_once(["long", *range(20)])
    assert_recovered(worker, desk, ledger, threads)


def test_bl01_task_that_ends_during_the_outage_is_settled_after_it(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """The settlement waits in the worker; the task is not run again though its claim is overdue."""
    server = own_server(appendonly=True)
    worker = make_worker(url=server.tcp_url, queue={"reclaim_delay": 1})
    other = make_worker(url=server.tcp_url, queue={"reclaim_delay": 1})
    desk = make_desk(server.url, reclaim_delay=1)
    threads = service_threads(worker)
    ids = [f"short-{n}" for n in range(6)]
    desk.send("sleep", [{"id": id_, "seconds": 1} for id_ in ids])
    for id_ in ids:
        ledger.wait_started(id_)
    with faults.killed(server):
        ledger.wait_finished(ids)
        faults.down_for(1)
    eventually(desk.is_empty, 15, message=worker.log)
    ledger.assert_once(ids)
    assert other.running
    assert_recovered(worker, desk, ledger, threads)


def test_bl01_nothing_is_taken_over_before_its_holder_could_renew_it(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    """After an outage everything looks overdue. An idle worker that is back first leaves the holder
    a third of reclaim_delay, 3 s here, to come back too."""
    server = own_server(appendonly=True)
    options = {"url": server.tcp_url, "queue": {"reclaim_delay": 9}}
    desk = make_desk(server.url, reclaim_delay=9)
    holder = make_worker(**options)
    ids, gate = [f"held-{number}" for number in range(4)], tmp_path / "gate"
    desk.send("wait-for-file", [{"id": id_, "path": str(gate)} for id_ in ids])
    for id_ in ids:
        ledger.wait_started(id_)
    idle = make_worker(**options)
    with faults.killed(server):
        holder.pause()
        faults.down_for(2)  # the idle one looks about once a second, and so meets it
    desk.client.xclaim(
        desk.names.stream, desk.names.group, desk.held()[0].consumer, 0,
        [held.entry_id for held in desk.held()], idle=20_000, justid=True,
    )  # fmt: skip
    desk.send("note", ["back"])
    ledger.wait_finished(["back"])
    faults.down_for(1.5)  # looks about more than once
    holder.resume()
    eventually(lambda: max(held.idle for held in desk.held()) < 5, 10)
    gate.touch()
    ledger.wait_finished(ids)
    desk.wait_done()
    ledger.assert_once([*ids, "back"])
    assert not idle.log_lines("taken over")


def test_bl01_work_goes_on_when_connections_are_dropped_again_and_again(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """Ten times within three seconds, under load; whatever was accepted is run."""
    server = own_server()
    worker = make_worker(url=server.tcp_url)
    desk = make_desk(server.url)
    control = server.client()
    threads = service_threads(worker)
    desk.send("sleep", [{"id": "long", "seconds": 3}])
    ledger.wait_started("long")
    accepted: list[int] = []
    for round_ in range(10):
        until = time.monotonic() + 0.25
        while time.monotonic() < until:
            try:
                desk.send("note", [number := len(accepted)])
                accepted.append(number)
            except redis.RedisError:
                pass  # the outcome is unknown: not counted as accepted
        faults.drop_connections(control)
        assert worker.running, f"round {round_}\n{worker.log()}"
    assert len(accepted) > 10
    ledger.wait_finished(["long", *accepted], 15)
    eventually(desk.is_empty, 10, message=worker.log)
    assert ledger.counts()["long"] == 1
    assert_recovered(worker, desk, ledger, threads)


def test_bl01_worker_waits_for_redis_when_it_starts_first(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """No server when the worker starts: it says so once, and works as soon as there is one."""
    server = own_server()
    url = server.tcp_url
    server.kill()
    worker = make_worker(url=url)
    threads = service_threads(worker)
    faults.down_for(2)
    assert worker.status()["state"] == "started"
    away = worker.log_lines("Redis is away")
    assert len(away) == 1, worker.log()
    server.start()
    desk = make_desk(server.url)
    assert_recovered(worker, desk, ledger, threads)


def test_bl01_each_outage_and_its_end_are_said_once(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """One line when Redis goes, one when it is back, however many threads met it; and again."""
    server = own_server(appendonly=True)
    worker = make_worker(url=server.tcp_url, config={"block_duration": 1})
    desk = make_desk(server.url)
    for outage in (1, 2):
        with faults.killed(server):
            eventually(
                lambda outage=outage: len(worker.log_lines("Redis is away")) == outage,
                5,
                message=worker.log,
            )
            faults.down_for(1)
        eventually(lambda outage=outage: desk.send("note", [outage]), 5)
        ledger.wait_finished([outage])
        eventually(
            lambda outage=outage: len(worker.log_lines("redis recovered")) == outage,
            5,
            message=worker.log,
        )
        assert len(worker.log_lines("Redis is away")) == outage, worker.log()


def test_bl01_memory_stays_flat_when_redis_is_away_for_thousands_of_attempts(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """Attempts form no recursion and keep nothing; the wait between them is cut short for this."""
    tasks = tasks_file(
        """
        import itertools
        from taskrunner.service import Backoff

        attempts = itertools.count(1)

        def short(self):
            self._delay = 0.001
            number = next(attempts)
            if number in (1000, 6000):
                with record(f"attempt-{number}"):
                    pass
            return 0.001

        Backoff.next = short

        @task(name="note")
        def note(payload):
            with record(payload):
                pass
        """
    )
    server = own_server()
    worker = make_worker(url=server.tcp_url, tasks_file=tasks)
    desk = make_desk(server.url)
    threads = service_threads(worker)
    with faults.killed(server):
        ledger.wait_finished(["attempt-1000"], 20)
        before = worker.rss_bytes()
        ledger.wait_finished(["attempt-6000"], 40)
        grown = worker.rss_bytes() - before
    assert grown < 10e6, f"{grown / 1e6:.1f} MB more"
    assert_recovered(worker, desk, ledger, threads)
