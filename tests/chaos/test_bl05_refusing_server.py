"""BL-05: the server answers and refuses work (LOADING, MISCONF): an outage, never a task's fault."""

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
    assert_said_once,
    eventually,
    faults,
    service_threads,
)

pytestmark = pytest.mark.chaos


def test_bl05_queued_tasks_run_once_when_the_server_was_loading(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """A restart that loads for seconds: running and queued tasks run once, on their first
    attempt; `.delay()` says what is the matter."""
    server = own_server()
    worker = make_worker(url=server.tcp_url, config={"num_workers": 2, "batch_size": 2})
    desk = make_desk(server.url)
    threads = service_threads(worker)
    running = [{"id": f"running-{n}", "seconds": 3} for n in range(2)]
    desk.send("sleep", running)
    for payload in running:
        ledger.wait_started(payload["id"])
    desk.send("fail", ["failing"])  # has three attempts and a short retry_delay
    desk.send("note", list(range(20)))
    faults.restart_loading(server, keys=1500)
    eventually(lambda: faults.is_loading(server), 5, interval=0.001)
    with pytest.raises(redis.BusyLoadingError):
        desk.send("note", ["refused"])
    eventually(lambda: not faults.is_loading(server), 15)
    ledger.wait_finished([*(payload["id"] for payload in running), *range(20)], 20)
    ledger.wait_started("failing", times=3)
    eventually(desk.is_empty, 15, message=worker.log)
    counts = ledger.counts()
    assert counts.pop("failing") == 3
    assert set(counts.values()) == {1}, counts
    assert "refused" not in counts
    assert_recovered(worker, desk, ledger, threads)


def test_bl05_settlement_waits_and_work_goes_on_when_writes_were_refused(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tmp_path: Path,
    ledger: Ledger,
) -> None:
    """Snapshots fail, so every write is refused for longer than reclaim_delay: what ends then is
    settled afterwards, and nothing runs twice."""
    misconf = faults.MisconfServer(own_server, tmp_path)
    server = misconf.server
    workers = [make_worker(url=server.tcp_url, queue={"reclaim_delay": 1}) for _ in range(2)]
    desk = make_desk(server.url)
    threads = service_threads(workers[0])
    ids = [f"ends-in-the-fault-{n}" for n in range(4)]
    desk.send("sleep", [{"id": id_, "seconds": 1} for id_ in ids])
    for id_ in ids:
        ledger.wait_started(id_)
    desk.send("retry-once", [{"id": "retried", "delay": 1}])
    ledger.wait_started("retried")
    with misconf.refusing():
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            desk.send("note", ["refused"])
        ledger.wait_finished(ids)
        lines, cpu = len(workers[0].log().splitlines()), workers[0].cpu_seconds()
        faults.down_for(3)
        assert workers[0].cpu_seconds() - cpu < 0.6
        during = workers[0].log().splitlines()[lines:]
        assert workers[0].running
    eventually(desk.is_empty, 15, message=workers[0].log)
    counts = ledger.counts()
    assert {id_: counts[id_] for id_ in ids} == dict.fromkeys(ids, 1)
    assert counts["retried"] == 2
    assert_recovered(workers[0], desk, ledger, threads)
    assert_said_once(during)
    # Redis says what is the matter; where in our code it was heard helps nobody.
    assert any("MISCONF" in line for line in during), during
    assert not any("Traceback" in line for line in during), during
