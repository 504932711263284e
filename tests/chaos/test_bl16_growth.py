"""BL-16: whatever way a message ends, nothing of it stays behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import Desk, Ledger, Names, OwnServer, WorkerProcess, eventually

TASKS = """
    from taskrunner import Reject

    @task(name="note")
    def note(payload):
        pass

    @task(name="retry", max_retry=2, retry_delay=0.05)
    def retry(payload):
        if current_task().attempt == 1:
            raise ValueError

    @task(name="retry-later", max_retry=2, retry_delay=1.5)
    def retry_later(payload):
        if current_task().attempt == 1:
            raise ValueError

    @task(name="fail")
    def fail(payload):
        raise ValueError

    @task(name="reject")
    def reject(payload):
        raise Reject("no")

    @task(name="late", time_limit=0.01)
    def late(payload):
        time.sleep(0.02)

    @task(name="unique", unique_for=600)
    def unique(payload):
        pass

    @task(name="unique-fail", unique_for=600, max_retry=2, retry_delay=1.5)
    def unique_fail(payload):
        raise ValueError
"""

FAILING = ("fail", "reject", "late", "unique-fail")
EACH = 150


def test_bl16_nothing_is_left_when_messages_of_all_kinds_have_ended(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    names: Names,
    ledger: Ledger,
) -> None:
    """Success, retry, final failure, undecodable, unknown, delayed, unique: stream, pending list and
    delayed set are empty; the keys are those of an idle system and the dead letters, which are
    capped; every key without an expiry can be explained."""
    server = own_server()
    worker = make_worker(
        url=server.tcp_url,
        tasks_file=tasks_file(TASKS),
        queue={"reclaim_delay": 1},
        config={"unknown_task_deliveries": 1, "dead_letter_limit": 100, "num_workers": 8},
    )
    desk = make_desk(server.url, reclaim_delay=1)
    client = server.client(decode_responses=True)
    eventually(lambda: worker.status()["is_leader"])
    desk.send("note", range(20))

    def figures() -> bool:
        return bool(client.exists(names.metrics, names.ring) == 2)

    eventually(figures)
    eventually(desk.is_empty)
    idle = set(client.scan_iter())

    for name in ("unique", "unique-fail"):
        desk.define(name, unique_for=600, unique_key="payload")
    for start in range(0, EACH, 50):
        part = range(start, start + 50)
        for name in ("note", "retry", "fail", "reject", "late", "unique", "unique-fail", "unknown"):
            desk.send(name, part)
        desk.send("retry-later", part)
        desk.send("note", part, run_in=0.5)
        desk.send("unique", [f"delayed-{n}" for n in part], run_in=0.5)
        desk.send("unknown", part, run_in=0.5)
        with client.pipeline() as pipe:
            for number in part:
                pipe.xadd(names.stream, {"payload": f"rubbish {number}"})
                pipe.xadd(names.stream, {"other": "rubbish"})
                pipe.zadd(names.delayed, {f"rubbish {number}": number})
            pipe.execute()
    eventually(desk.is_empty, 30, message=lambda: f"{desk.length()} {worker.log()[-2000:]}")

    assert len(desk.letters()) == 100
    left = set(client.scan_iter())
    assert left - idle == {names.dead}
    assert not {key for key in left if key.startswith("taskrunner:unique:")}
    forever = {key for key in left if client.ttl(key) == -1}
    assert forever == {names.stream, names.metrics, names.ring, names.dead}
    assert int(client.memory_usage(names.stream) or 0) < 20_000
    assert 0 < int(client.llen(names.ring)) <= 1000
    info: Any = client.xinfo_stream(names.stream)
    assert info["length"] == 0


def test_bl16_stream_is_never_trimmed_by_length(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
) -> None:
    """A backlog waits for its workers however long it is; each is run, once."""
    server = own_server()
    desk = make_desk(server.url)
    desk.send("noop", range(20_000))
    desk.send("note", range(200))
    assert desk.length() == 20_200
    for _ in range(2):
        make_worker(url=server.tcp_url, timings={"janitor": 0.1})
    ledger.wait_finished(range(200), 30)
    eventually(desk.is_empty, 30)
    ledger.assert_once(range(200))
    assert desk.added() == 20_200
