"""A million tasks wait, a hundred thousand were held by a dead process, the server is full."""

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from taskrunner import keys, settler
from taskrunner.message import encode
from tests.support import (
    Desk,
    Ledger,
    Names,
    OwnServer,
    WorkerProcess,
    eventually,
    faults,
    stays,
)
from tests.support.fleet import Fleet
from tests.support.worker import DEFAULTS

pytestmark = pytest.mark.chaos

MIB = 1024 * 1024
_AT_ONCE = 2000
_PREEMPTED = 3
"""So many of ten thousand commands may look slow because the server didn't get the processor."""


def sizes(small: int, large: int) -> Any:
    """Parametrise with a size for each day, and a large one that is marked slow."""
    return pytest.mark.parametrize(
        "size", [small, pytest.param(large, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
    )


def fill(client: redis.Redis, names: Names, size: int, task_name: str = "noop") -> None:
    """Add messages as fast as the server takes them."""
    body = encode(
        task_name,
        "null",
        id=str(uuid.uuid4()),
        enqueued_at=time.time(),
        reservation_timeout_ns=100 * 10**9,
    )
    for first in range(0, size, _AT_ONCE):
        with client.pipeline(transaction=False) as pipe:
            for _ in range(min(_AT_ONCE, size - first)):
                pipe.xadd(names.stream, {"payload": body})
            pipe.execute()


def watch_for_slow_commands(client: redis.Redis, milliseconds: int) -> Callable[[], list[Any]]:
    """Have the server note what takes longer; returns what shows it."""
    client.config_set("slowlog-log-slower-than", milliseconds * 1000)
    client.config_set("slowlog-max-len", 1000)
    client.slowlog_reset()

    def shown() -> list[Any]:
        found: Any = client.slowlog_get(1000)
        return [(row["duration"] / 1000, bytes(row["command"])[:100]) for row in found]

    return shown


def peak_bytes(worker: WorkerProcess) -> int:
    """Its largest resident size so far (getrusage would count the process it was forked from)."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def seconds_of(call: Callable[[], Any], times: int) -> float:
    """The best of several calls: what it costs where nothing else takes the processor."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


@sizes(50_000, 1_000_000)
def test_a_worker_and_its_figures_cost_the_same_when_many_tasks_wait(
    size: int,
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    make_worker: Callable[..., WorkerProcess],
    names: Names,
) -> None:
    """Neither the worker's memory, nor `stats()`, nor any command grows with what waits."""
    server = own_server()
    desk = make_desk(server.url)
    worker = make_worker(url=server.url, **DEFAULTS)
    desk.send("noop", range(20_000))
    eventually(desk.is_done, 60, interval=0.05)
    desk.runner.stats()
    few, before = seconds_of(desk.runner.stats, 51), worker.rss_bytes()
    # Held up by tasks that last, it neither fetches nor drains while the figures are taken.
    desk.send("sleep", [{"id": number, "seconds": 600} for number in range(20)])
    eventually(lambda: len(desk.held()) >= 4, 10)
    slow = watch_for_slow_commands(desk.client, 50)
    fill(desk.client, names, size)
    assert desk.length() > size
    many = seconds_of(desk.runner.stats, 51)
    waiting = desk.runner.stats().waiting
    with_many = worker.rss_bytes()
    worker.kill()
    other = make_worker(url=server.url, queue={"reclaim_delay": 300})
    started_with = other.rss_bytes()
    at_start = desk.length()
    eventually(lambda: desk.length() <= at_start - 10_000, 60, interval=0.05)
    peak = peak_bytes(other)
    print(
        f"{size} waiting: stats() {few * 1e3:.2f} ms before, {many * 1e3:.2f} ms with them; worker "
        f"{before / MIB:.1f} MiB before, {with_many / MIB:.1f} with them; a fresh one "
        f"{started_with / MIB:.1f}, at most {peak / MIB:.1f} after 10,000 of them; slow: {slow()}"
    )
    assert size - 500 <= waiting <= size  # the worker's buffer is full of them
    assert many < 3 * few + 0.005
    assert with_many - before < 5 * MIB
    assert peak - started_with < 40 * MIB
    assert len(slow()) <= _PREEMPTED


@sizes(20_000, 100_000)
def test_what_a_dead_process_held_is_reclaimed_without_a_slow_command(
    size: int,
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    make_worker: Callable[..., WorkerProcess],
    names: Names,
) -> None:
    """All of it is run, by pages: no command takes over 50 ms, and fresh tasks don't wait for it."""
    server = own_server()
    desk = make_desk(server.url)
    client = desk.client
    client.xgroup_create(names.stream, names.group, "0", mkstream=True)
    fill(client, names, size)
    dead = keys.consumer(names.group, "dead-host", 1)
    for _ in range(0, size, _AT_ONCE):
        read: Any = client.xreadgroup(names.group, dead, {names.stream: ">"}, count=_AT_ONCE)
        ids = [entry_id for entry_id, _ in read[0][1]]
        client.xclaim(names.stream, names.group, dead, 0, ids, idle=600_000, justid=True)
    slow = watch_for_slow_commands(client, 50)
    began = time.monotonic()
    worker = make_worker(url=server.url, queue={"reclaim_delay": 5}, config={"batch_size": 100})
    waits = []
    while (left := _pending_of(client, names, dead)) > 0:
        assert time.monotonic() < began + 200, f"{left} left"
        sent = time.monotonic()
        before = desk.added()
        desk.send("noop", [None])
        assert desk.added() > before
        eventually(lambda: _waiting(client, names) == 0, 10, interval=0.01)
        waits.append(time.monotonic() - sent)
    eventually(desk.is_done, 30, interval=0.05)
    seconds = time.monotonic() - began
    peak = peak_bytes(worker) / MIB
    print(
        f"{size} reclaimed in {seconds:.1f} s, worker at most {peak:.0f} MiB; a fresh task was "
        f"fetched after at most {max(waits):.2f} s; slow: {slow()}"
    )
    assert len(slow()) <= _PREEMPTED
    assert desk.letters() == []
    assert max(waits) < 10
    assert peak < 80


def _pending_of(client: redis.Redis, names: Names, consumer: str) -> int:
    found: Any = client.xinfo_consumers(names.stream, names.group)
    return sum(row["pending"] for row in found if row["name"].decode() == consumer)


def _waiting(client: redis.Redis, names: Names) -> int:
    """Entries that nobody has read yet."""
    stream: Any = client.xinfo_stream(names.stream)
    groups: Any = client.xinfo_groups(names.stream)
    last = groups[0]["last-delivered-id"]
    return 0 if last == stream["last-generated-id"] else 1


def test_nothing_is_lost_when_the_server_is_full(
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    make_worker: Callable[..., WorkerProcess],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """maxmemory with noeviction: `dispatch` raises, the workers drain, what was accepted is run
    once, and what fails for good reaches the dead letters as soon as they have room."""
    server = own_server()
    tasks = tasks_file(
        """
        @task(name="works")
        def works(payload):
            with record(payload["id"]):
                time.sleep(0.005)

        @task(name="fails", max_retry=2, retry_delay=0.1)
        def fails(payload):
            with record(payload["id"]):
                raise ValueError("always")
        """
    )
    workers = [make_worker(url=server.url, tasks_file=tasks) for _ in range(2)]
    desk = make_desk(server.url)
    desk.send("works", [{"id": "first"}])
    ledger.wait_finished(["first"])
    client = desk.client
    used = int(client.info("memory")["used_memory"])  # type: ignore[index]
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", used + 3 * MIB)
    accepted: dict[str, list[str]] = {"works": [], "fails": []}
    refused, number = 0, 0
    filler = "x" * 4000
    deadline = time.monotonic() + 60
    while refused < 20:
        assert time.monotonic() < deadline, "the server was never full"
        number += 1
        name = "fails" if number % 10 == 0 else "works"
        id_ = f"{name}-{number}"
        try:
            desk.send(name, [{"id": id_, "filler": filler}])
        except redis.OutOfMemoryError:
            refused += 1
        else:
            accepted[name].append(id_)
    status = [worker.status()["state"] for worker in workers]
    ledger.wait_finished(accepted["works"], 60)
    client.config_set("maxmemory", 0)
    eventually(desk.is_empty, 60, interval=0.05, message=lambda: workers[0].log()[-2000:])
    counts = ledger.counts()
    print(f"{len(accepted['works'])} + {len(accepted['fails'])} accepted, {refused} refused")
    assert status == ["started", "started"]
    assert {id_: counts[id_] for id_ in accepted["works"]} == dict.fromkeys(accepted["works"], 1)
    assert {id_: counts[id_] for id_ in accepted["fails"]} == dict.fromkeys(accepted["fails"], 2)
    letters = [letter.payload["id"] for letter in desk.letters()]
    assert sorted(letters) == sorted(accepted["fails"])
    assert counts.keys() == {"first", *accepted["works"], *accepted["fails"]}
    assert all(worker.running for worker in workers)


@pytest.mark.parametrize("bound", ["number", "bytes"])
def test_nothing_more_is_fetched_while_enough_settlements_wait_for_redis(
    bound: str,
    own_server: Callable[..., OwnServer],
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading goes on working when memory is full, and dead letters don't: without a bound all the
    queue would end up in this process."""
    batch, workers = (5, 2) if bound == "number" else (50, 2)
    if bound == "bytes":
        monkeypatch.setattr(settler, "_WAITING_BYTES", 10_000)
    server = own_server()
    with Fleet(server.url, names, reclaim_delay=60) as fleet:
        full = threading.Event()

        def fails(payload: Any) -> None:
            full.wait(30)
            fleet.record(payload[:8])
            raise ValueError("always")

        fleet.task(fails, name="fails")
        bodies = [
            f"{number:08}" + "x" * (0 if bound == "number" else 1000) for number in range(300)
        ]
        runner = fleet.start(num_workers=workers, batch_size=batch)
        fleet.producer.dispatch_many("fails", bodies)
        eventually(lambda: _pending(fleet) >= workers, 10)
        with faults.out_of_memory(fleet.client):
            full.set()
            enough = 2 * batch if bound == "number" else 9
            eventually(lambda: len(fleet.runs) >= enough, 20)
            eventually(lambda: _pending(fleet) == len(fleet.runs), 20)
            assert (
                len(fleet.runs) < 200
            )  # what was read ahead, or on its way to Redis, comes on top
            seen = len(fleet.runs)
            stays(lambda: (len(fleet.runs), _pending(fleet)) == (seen, seen), 1.5)
        eventually(lambda: len(runner.dead_letters) == 300, 30)
        eventually(fleet.settled, 10)
        assert len(fleet.runs) == 300


def _pending(fleet: Fleet) -> int:
    summary: Any = fleet.client.xpending(fleet.names.stream, fleet.names.group)
    return int(summary["pending"])
