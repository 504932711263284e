"""BL-13: a task that takes longer than reclaim_delay runs once, for its process lives."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Desk, Ledger, WorkerProcess, eventually

pytestmark = pytest.mark.chaos

SECONDS = 4.0  # four times reclaim_delay


@pytest.mark.parametrize("workers", [3, 1])
def test_bl13_long_tasks_run_once_and_are_never_claimed(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
    workers: int,
) -> None:
    """Sleeping tasks and some that burn the processor in Python, side by side in one process:
    each runs once, is renewed well in time, and its delivery count stays at 1."""
    for _ in range(workers):
        make_worker(queue={"reclaim_delay": 1}, config={"num_workers": 4})
    desk = make_desk(server.url, reclaim_delay=1)
    sleeping = [f"sleeping-{n}" for n in range(workers)]
    burning = [f"burning-{n}" for n in range(2)]
    desk.send("sleep", [{"id": id_, "seconds": SECONDS} for id_ in sleeping])
    desk.send("spin", [{"id": id_, "seconds": SECONDS} for id_ in burning])
    ids = sleeping + burning
    for id_ in ids:
        ledger.wait_started(id_)
    until = time.monotonic() + SECONDS - 0.5
    longest = 0.0
    while time.monotonic() < until:
        for held in desk.held():
            assert held.count == 1, held
            longest = max(longest, held.idle)
        time.sleep(0.05)
    assert 0.2 < longest < 0.9, "renewed at about a third of reclaim_delay"
    ledger.wait_finished(ids)
    eventually(desk.is_empty)
    ledger.assert_once(ids)


def test_bl13_long_task_is_renewed_at_its_own_reservation_timeout(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """The message's own interval holds, where it is shorter than a third of reclaim_delay."""
    make_worker(queue={"reclaim_delay": 60})
    desk = make_desk(server.url, reclaim_delay=60)
    desk.define("sleep", reservation_timeout=0.3)
    desk.send("sleep", [{"id": "long", "seconds": 2.5}])
    ledger.wait_started("long")
    longest = 0.0
    while not ledger.finished():
        longest = max([longest, *(held.idle for held in desk.held())])
        time.sleep(0.02)
    assert longest < 0.8
    eventually(desk.is_empty)
    ledger.assert_once(["long"])


def test_bl13_buffered_messages_are_renewed_too(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """What waits behind long tasks in the worker that read it is held as well: run once, there."""
    make_worker(queue={"reclaim_delay": 1}, config={"num_workers": 1, "batch_size": 20})
    desk = make_desk(server.url, reclaim_delay=1)
    ids = [f"long-{n}" for n in range(4)]
    desk.send("noop", range(2000))  # a fast pace, so that it reads ahead
    desk.send("sleep", [{"id": id_, "seconds": 1.2} for id_ in ids])
    ledger.wait_started(ids[0])
    assert len(desk.held()) > 1
    ledger.wait_finished(ids, 20)
    eventually(desk.is_empty)
    ledger.assert_once(ids)


def test_bl13_worker_never_claims_what_it_holds_itself(
    make_worker: Callable[..., WorkerProcess], desk: Desk, ledger: Ledger, tmp_path: Path
) -> None:
    """However overdue it looks: here its idle time is set by hand, again and again, while the
    worker looks about once a second and renews every three."""
    make_worker(queue={"reclaim_delay": 9})
    gate = tmp_path / "gate"
    desk.send("wait-for-file", [{"id": "held", "path": str(gate)}])
    ledger.wait_started("held")
    (held,) = desk.held()
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        desk.client.xclaim(
            desk.names.stream, desk.names.group, held.consumer, 0, [held.entry_id], idle=60_000, justid=True
        )  # fmt: skip
        (now,) = desk.held()
        assert (now.consumer, now.count) == (held.consumer, 1)
        time.sleep(0.02)
    gate.touch()
    desk.wait_done()
    ledger.assert_once(["held"])
