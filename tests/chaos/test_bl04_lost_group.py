"""BL-04: the stream or its group is gone: it is made again at once, without a hot loop."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import redis

from tests.support import (
    Desk,
    Ledger,
    Names,
    OwnServer,
    WorkerProcess,
    assert_recovered,
    assert_said_once,
    eventually,
    faults,
    service_threads,
)

pytestmark = pytest.mark.chaos

What = Literal["all", "stream", "group"]


@pytest.mark.parametrize("what", ["all", "stream", "group"])
def test_bl04_lost_group_is_made_again_when_flushed(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
    what: What,
) -> None:
    """An idle worker loses the group under its blocked read; it is quiet and takes new work."""
    server = own_server()
    worker = make_worker(url=server.tcp_url)
    desk = make_desk(server.url)
    threads = service_threads(worker)
    desk.send("note", ["before"])
    ledger.wait_finished(["before"])
    eventually(desk.is_empty)
    faults.flush(server.client(), what, stream=names.stream, group=names.group)
    assert_recovered(worker, desk, ledger, threads)
    ledger.assert_once([run.id for run in ledger.runs()])


@pytest.mark.parametrize("what", ["all", "stream", "group"])
def test_bl04_later_messages_all_run_when_flushed_under_load(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
    what: What,
) -> None:
    """What was in Redis may be lost with it, what is added afterwards is not; a lost group loses
    nothing, and what runs at that moment is not started again beside itself."""
    server = own_server()
    workers = [make_worker(url=server.tcp_url) for _ in range(2)]
    desk = make_desk(server.url)
    control = server.client()
    threads = service_threads(workers[0])
    stop = threading.Event()
    sent: list[tuple[float, int]] = []

    def load() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            before = time.monotonic()
            desk.send("sleep", [{"id": number, "seconds": 0.03}])
            sent.append((before, number))
            time.sleep(0.01)

    producer = threading.Thread(target=load)
    producer.start()

    def load_goes_on() -> None:
        seen = len(sent)
        eventually(lambda: len(sent) > seen + 15)

    flushed = 0.0
    try:
        for _ in range(3):
            load_goes_on()
            faults.flush(control, what, stream=names.stream, group=names.group)
            flushed = time.monotonic()
        load_goes_on()
    finally:
        stop.set()
        producer.join()
    must = [number for at, number in sent if what == "group" or at > flushed]
    assert len(must) > 10
    ledger.wait_finished(must, 20)
    for worker in workers:
        assert_recovered(worker, desk, ledger, threads)
    if what != "group":
        ledger.assert_once([run.id for run in ledger.runs()])


def test_bl04_group_is_made_again_when_flushed_and_out_of_memory(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """The repair is refused too for a while: it is tried again, paced."""
    server = own_server()
    worker = make_worker(url=server.tcp_url)
    desk = make_desk(server.url)
    control = server.client()
    threads = service_threads(worker)
    with faults.out_of_memory(control):
        faults.flush(control, "all")
        eventually(lambda: worker.log_lines("OutOfMemory"), 5, message=worker.log)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            desk.send("note", ["refused"])
        lines, cpu = len(worker.log().splitlines()), worker.cpu_seconds()
        faults.down_for(3)
        assert worker.cpu_seconds() - cpu < 0.6
        during = worker.log().splitlines()[lines:]
    assert_recovered(worker, desk, ledger, threads)
    assert not ledger.runs("refused")
    assert_said_once(during)


@pytest.mark.parametrize("what", ["all", "group"])
def test_bl04_retries_and_strays_go_on_when_flushed_under_a_running_task(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tmp_path: Path,
    names: Names,
    ledger: Ledger,
    what: What,
) -> None:
    """A task whose delivery is lost runs on; meanwhile the worker renews, retries and reclaims the
    others, and does not spin."""
    server = own_server()
    worker = make_worker(url=server.tcp_url, queue={"reclaim_delay": 1})
    desk = make_desk(server.url, reclaim_delay=1)
    client = server.client()
    threads = service_threads(worker)
    gate = tmp_path / "gate"
    desk.send("wait-for-file", [{"id": "running", "path": str(gate)}])
    ledger.wait_started("running")
    faults.flush(client, what, stream=names.stream, group=names.group)
    eventually(lambda: client.xinfo_groups(names.stream), 5)
    faults.down_for(1.2)  # until what runs would look overdue
    desk.send("fail-once-delay-half", ["retried"])
    ledger.wait_started("retried", times=2, timeout=5)
    desk.strand("note", ["stray"], idle=5)
    ledger.wait_finished(["stray"], 5)
    cpu = worker.cpu_seconds()
    faults.down_for(2)
    assert worker.cpu_seconds() - cpu < 0.2, "the heartbeat spins"
    gate.touch()
    ledger.wait_finished(["running"])
    assert_recovered(worker, desk, ledger, threads)
    assert ledger.counts()["running"] == 1
