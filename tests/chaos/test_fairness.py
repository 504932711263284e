"""Nothing waits behind what others could do: slow tasks hold no hostages, old and new both go on."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support import Desk, Ledger, OwnServer, WorkerProcess, eventually
from tests.support.ledger import Run
from tests.support.worker import DEFAULTS

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("later", ["small", "large"])
def test_slow_tasks_behind_fast_ones_are_shared_by_all_instances(
    later: str, desk: Desk, ledger: Ledger, make_worker: Callable[..., WorkerProcess]
) -> None:
    """3,000 no-ops, then 300 tasks of a second, on 8 workers beside 64: done within 10 s.

    The pace of the no-ops makes the small instance buffer; what then waits for a second there is
    handed back and taken by the large one (semantics §3, Fetching).
    """
    sizes = {"small": 8, "large": 64}
    defaults: dict[str, Any] = {**DEFAULTS, "timings": {**DEFAULTS["timings"], "presence": 3}}
    started = {}
    for name in sorted(sizes, key=lambda name: name == later):
        started[name] = make_worker(
            **{**defaults, "config": {**DEFAULTS["config"], "num_workers": sizes[name]}}
        )
    eventually(lambda: desk.runner.replications() == 2, 15)
    begun = time.monotonic()
    desk.send("noop", range(3000))
    ids = [f"slow-{number}" for number in range(300)]
    desk.send("sleep", [{"id": id_, "seconds": 1} for id_ in ids])
    ledger.wait_finished(ids, 60)
    took = max(run.end or 0 for run in ledger.runs()) - begun
    by_pid = [sum(run.pid == worker.pid for run in ledger.runs()) for worker in started.values()]
    print(f"all done after {took:.2f} s; {dict(zip(started, by_pid, strict=True))}")
    desk.wait_done()
    ledger.assert_once(ids)
    assert took <= 10


MOMENT = """
    @task(name="moment")
    def moment(payload):
        with record(payload):
            time.sleep(0.005)
"""


@pytest.mark.parametrize(
    ("number", "deliveries"), [(3000, 1), (100, 2)], ids=["lost once", "lost twice"]
)
def test_orphans_and_new_tasks_both_go_on(
    number: int,
    deliveries: int,
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """The deliveries of a dead reader beside a backlog that never ends, on 4 workers.

    All orphans are done within 60 s, and new tasks meanwhile: neither starves (semantics §3,
    Reclaim). Those lost twice may have killed their process, and run one at a time.
    """
    server = own_server()
    desk = make_desk(server.url)
    desk.send("moment", [f"orphan-{one}" for one in range(number)])
    _deliver_to_a_dead_reader(desk, deliveries)
    worker = make_worker(
        url=server.url, tasks_file=tasks_file(MOMENT), config={"num_workers": 4}, start=False
    )
    stop = threading.Event()
    sent: list[str] = []
    feeder = threading.Thread(target=_keep_waiting, args=(desk, 1000, stop, sent))
    feeder.start()
    try:
        eventually(lambda: len(sent) >= 1000, 10)
        worker.start()
        begun = time.monotonic()
        eventually(
            lambda: len(_done(ledger, "orphan")) == number,
            60,
            interval=0.5,  # the ledger grows long
            message=lambda: (
                f"{len(_done(ledger, 'orphan'))} orphans, {len(_done(ledger, 'new'))} new"
            ),
        )
    finally:
        stop.set()
        feeder.join()
    orphans, new = _done(ledger, "orphan"), _done(ledger, "new")
    took = max(run.end or 0 for run in orphans) - begun
    halves = [sum(h <= (run.start - begun) / took * 2 < h + 1 for run in new) for h in (0, 1)]
    print(f"{number} orphans took {took:.1f} s; new ones in each half of it: {halves}")
    assert len({run.id for run in orphans}) == number
    assert min(halves) >= took / 2 * 20, "new tasks starve"
    if deliveries > 1:
        pairs = itertools.pairwise(sorted(orphans, key=lambda run: run.start))
        assert all((before.end or 0) <= after.start for before, after in pairs), "not one at a time"
    desk.runner.queue.purge()


def _done(ledger: Ledger, kind: str) -> list[Run]:
    runs = ledger.runs()
    return [run for run in runs if run.end and str(run.id).startswith(kind)]


def _deliver_to_a_dead_reader(desk: Desk, deliveries: int) -> None:
    """Give all that waits to a consumer whose host is gone, so often and so long ago."""
    names, client = desk.names, desk.client
    dead = f"{names.group}_dead_1"
    client.xgroup_create(names.stream, names.group, "0-0")
    rows: Any = client.xreadgroup(names.group, dead, {names.stream: ">"}, count=10_000)
    ids = [entry_id for entry_id, _ in rows[0][1]]
    for start in range(0, len(ids), 500):
        client.xclaim(
            names.stream, names.group, dead, 0, ids[start : start + 500],
            idle=3_600_000, retrycount=deliveries, justid=True,
        )  # fmt: skip
    held = desk.held()
    assert {(one.consumer, one.count) for one in held} == {(dead, deliveries)}
    assert len(held) == len(ids)


def _keep_waiting(desk: Desk, backlog: int, stop: threading.Event, sent: list[str]) -> None:
    """Keep so many new tasks waiting in the stream."""
    while not stop.is_set():
        try:
            info: Any = desk.client.xinfo_groups(desk.names.stream)
            waiting = desk.length() - info[0]["pending"]
        except redis.RedisError:
            return
        if waiting < backlog:
            fresh = [f"new-{number}" for number in range(len(sent), len(sent) + backlog // 2)]
            desk.send("moment", fresh)
            sent += fresh
        stop.wait(0.02)
