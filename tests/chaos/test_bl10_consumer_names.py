"""BL-10: names of consumers never collide, and never pile up."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Desk, Ledger, Names, WorkerProcess, eventually
from tests.support.fleet import Fleet

pytestmark = pytest.mark.chaos


def consumers(desk: Desk) -> set[str]:
    rows: Any = desk.client.xinfo_consumers(desk.names.stream, desk.names.group)
    return {row["name"].decode() for row in rows}


def test_bl10_namesakes_started_at_once_get_names_of_their_own(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
) -> None:
    """Five processes with one long host name start together: five names, each message once."""
    host = names.host + "x" * 200
    workers = [make_worker(start=False, config={"host": host}) for _ in range(5)]
    starts = [threading.Thread(target=worker.start) for worker in workers]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    desk = make_desk(server.url)
    hosts = {host, *(f"{host}-{number}" for number in range(2, 6))}
    eventually(lambda: {worker.status()["host"] for worker in workers} == hosts)
    assert len({worker.status()["instance_id"] for worker in workers}) == 5
    wanted = {f"{names.group}_{host_}_{number}" for host_ in hosts for number in (1, 2)}
    eventually(lambda: consumers(desk) == wanted)
    desk.send("sleep", [{"id": number, "seconds": 0.01} for number in range(200)])
    ledger.wait_finished(range(200))
    eventually(desk.is_empty)
    ledger.assert_once(range(200))
    assert len({run.pid for run in ledger.runs()}) > 1


def test_bl10_names_of_stopped_and_killed_workers_go(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
) -> None:
    """A clean stop takes its names along at once; those of the killed go when idle for long, once
    nothing is pending for them."""
    timings = {"janitor": 0.5, "consumer_idle": 1, "presence": 1}
    steady = make_worker(timings=timings, queue={"reclaim_delay": 1})
    desk = make_desk(server.url, reclaim_delay=1)
    mine = {f"{names.group}_{names.host}-w1_{number}" for number in (1, 2)}
    eventually(lambda: consumers(desk) == mine)
    with Fleet(server.url, names, reclaim_delay=1) as fleet:
        for _ in range(10):
            runner = fleet.start(timings=timings, host=f"{names.host}-f")
            eventually(lambda: len(consumers(desk)) == 4)
            assert runner.stop()
            assert consumers(desk) == mine
    killed = [make_worker(timings=timings, queue={"reclaim_delay": 1}) for _ in range(4)]
    ids = list(range(12))
    desk.send("sleep", [{"id": id_, "seconds": 0.5} for id_ in ids])
    eventually(lambda: len(desk.held()) == 12)
    for worker in killed:
        worker.kill()
    assert len(consumers(desk)) > 2
    ledger.wait_finished(ids, 20)
    eventually(desk.is_empty)
    eventually(lambda: {n for n in consumers(desk) if not n.endswith("_0")} == mine, 10)
    assert steady.running
