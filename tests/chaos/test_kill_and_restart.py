"""Workers and servers that die, and come back: every accepted task is run."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support import Desk, Ledger, OwnServer, WorkerProcess, eventually, faults

pytestmark = pytest.mark.chaos


@pytest.mark.slow
def test_every_task_runs_while_workers_are_killed_every_second(
    desk: Desk,
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """5,000 tasks, three workers, 20 kills, each restarted at once under the same host name."""
    tasks = tasks_file(
        """
        @task(name="moment", max_lost=50)
        def moment(payload):
            with record(payload):
                time.sleep(0.035)
        """
    )
    total, kills = 5000, 20
    chance = random.Random(20)
    workers = [make_worker(tasks_file=tasks, start=False) for _ in range(3)]
    for worker in workers:
        worker.start(wait=False)
    desk.send("moment", range(1000))
    sent = 1000
    share = (total - sent) // kills
    for _ in range(kills):
        desk.send("moment", range(sent, sent + share))
        sent += share
        faults.down_for(1.0)
        worker = chance.choice(workers)
        worker.kill()
        worker.close()
        worker.start(wait=False)
    assert sent == total
    ledger.wait_finished(range(total), 60)
    desk.wait_done(30)
    assert desk.letters() == []
    counts = ledger.counts()
    assert counts.keys() == set(range(total))
    print(
        f"{sum(counts.values()) - total} of {total} tasks ran again, one {max(counts.values())} "
        f"times; everything ended {time.monotonic() - ledger.runs()[0].start:.1f} s after the start"
    )
    hosts = [worker.status()["host"] for worker in workers]
    assert len(set(hosts)) == 3
    # Nobody is left out of what comes now.
    desk.send("moment", [f"after-{number}" for number in range(200)])
    ledger.wait_finished([f"after-{number}" for number in range(200)], 20)
    desk.wait_done()


def test_work_resumes_in_the_same_processes_when_the_server_was_killed_under_load(
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """With an append-only file nothing accepted is lost; running tasks don't notice."""
    server = own_server(appendonly=True)
    desk = make_desk(server.url)
    queue = {"reclaim_delay": 5}
    workers = [make_worker(url=server.url, queue=queue) for _ in range(2)]
    pids = [worker.pid for worker in workers]
    accepted: list[int] = []
    number = 0
    deadline = time.monotonic() + 30
    for outage in range(3):
        goal = len(accepted) + 300
        while len(accepted) < goal:
            assert time.monotonic() < deadline
            number = _try_to_send(desk, number, accepted)
        with faults.killed(server):
            number = _try_to_send(desk, number, accepted)
            faults.down_for(0.3 * outage)
    desk.send("sleep", [{"id": "last", "seconds": 0}])
    ledger.wait_finished([*accepted, "last"], 30)
    desk.wait_done()
    assert [worker.pid for worker in workers] == pids
    assert all(worker.running for worker in workers)
    assert desk.letters() == []
    counts = ledger.counts()
    again = {id_: count for id_, count in counts.items() if count > 1}
    print(f"{len(accepted)} accepted over 3 outages, {len(again)} ran more than once")
    assert not again


def _try_to_send(desk: Desk, number: int, accepted: list[int]) -> int:
    """Send the next few; those without an answer may or may not be there."""
    batch = range(number, number + 20)
    try:
        desk.send("sleep", [{"id": id_, "seconds": 0.01} for id_ in batch])
    except redis.RedisError:
        return batch.stop
    accepted.extend(batch)
    return batch.stop


def test_work_resumes_in_the_same_processes_when_everything_was_flushed(
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """Stream, group, presence and lease are made again; what runs ends and isn't run twice."""
    server = own_server()
    desk = make_desk(server.url)
    workers = [make_worker(url=server.url) for _ in range(2)]
    pids = [worker.pid for worker in workers]
    for turn in range(3):
        running = [f"running-{turn}-{number}" for number in range(8)]
        desk.send("sleep", [{"id": id_, "seconds": 1} for id_ in running])
        for id_ in running:
            ledger.wait_started(id_)
        faults.flush(desk.client, "all")
        fresh = [f"fresh-{turn}-{number}" for number in range(50)]
        desk.send("note", fresh)
        ledger.wait_finished([*running, *fresh], 15)
    desk.wait_done()
    assert [worker.pid for worker in workers] == pids
    assert all(worker.status()["state"] == "started" for worker in workers)
    assert set(ledger.counts().values()) == {1}
    assert sum(bool(worker.status()["is_leader"]) for worker in workers) == 1


def test_work_resumes_when_the_server_comes_back_empty(
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """A server without persistence forgets everything when it is killed; new work is done."""
    server = own_server()
    desk = make_desk(server.url)
    workers = [make_worker(url=server.url) for _ in range(2)]
    desk.send("sleep", [{"id": f"running-{number}", "seconds": 1} for number in range(8)])
    for number in range(8):
        ledger.wait_started(f"running-{number}")
    with faults.killed(server):
        faults.down_for(0.5)
    fresh = [f"fresh-{number}" for number in range(50)]
    desk.send("note", fresh)
    ledger.wait_finished([*fresh, *(f"running-{number}" for number in range(8))], 15)
    desk.wait_done()
    assert all(worker.status()["state"] == "started" for worker in workers)
    assert set(ledger.counts().values()) == {1}


def test_idle_instances_are_counted_and_killed_ones_no_longer(
    make_desk: Callable[..., Desk], make_worker: Callable[..., WorkerProcess]
) -> None:
    """A reader exists from its start, not from its first message (semantics §3, Consumers)."""

    def counted() -> int:
        return make_desk().runner.replications()  # a new one each time: a runner caches the count

    workers = [make_worker() for _ in range(2)]
    eventually(lambda: counted() == 2, 5, interval=0.1)
    workers[0].kill()
    eventually(lambda: counted() == 1, 10, interval=0.1)
    assert workers[1].running


def test_first_start_on_an_empty_server_reports_nothing(
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """A stream and a group that don't exist yet are how every installation begins, no fault."""
    server = own_server()
    worker = make_worker(url=server.url)
    desk = make_desk(server.url)
    desk.send("note", ["first"])
    ledger.wait_finished(["first"])
    desk.wait_done()
    status: dict[str, Any] = worker.status()
    assert status["errors"] == []
    assert worker.log_lines("ERROR") + worker.log_lines("WARNING") == []
