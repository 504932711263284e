"""BL-21: a unique lock ends with its message: after a crash, a failure, a refused enqueue, a lost body."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from taskrunner import InvalidTaskPayloadError, TaskAlreadyDispatchedError
from tests.support import Ledger, Names, OwnServer, WorkerProcess, eventually, faults
from tests.support.fleet import Fleet

pytestmark = pytest.mark.chaos

TASKS = """
    key = {"unique_for": 600, "unique_key": lambda payload: str(payload["id"])}

    @task(name="held", max_lost=50, **key)
    def held(payload):
        with record(payload["id"]):
            time.sleep(payload.get("seconds", 0))

    @task(name="fails", max_retry=2, retry_delay=0.1, **key)
    def fails(payload):
        with record(payload["id"]):
            raise ValueError("always")

    @task(name="kills", max_retry=1, max_lost=1, **key)
    def kills(payload):
        with record(payload["id"]):
            os.kill(os.getpid(), signal.SIGKILL)

    @task(name="note")
    def note(payload):
        with record(payload):
            pass
"""


@pytest.fixture
def tasks(tasks_file: Callable[[str], Path]) -> Path:
    return tasks_file(TASKS)


@pytest.fixture
def own(own_server: Callable[..., OwnServer]) -> OwnServer:
    return own_server()


def define(fleet: Fleet) -> None:
    """The same tasks here, to dispatch them."""
    for name in ("held", "fails", "kills"):
        fleet.task(
            name=name, unique_for=600, unique_key=lambda payload: str(payload["id"]), max_lost=50
        )


def locks(client: Any) -> dict[str, int]:
    return {key.decode(): client.pttl(key) for key in client.keys("taskrunner:unique:*")}


def test_bl21_a_killed_worker_s_lock_is_released_by_who_finishes(
    own: OwnServer,
    names: Names,
    tasks: Path,
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """(a) SIGKILL in the midst of the run: the lock holds until another has run it, and no longer."""
    client: Any = own.client()
    with Fleet(own.url, names) as fleet:
        define(fleet)
        first = make_worker(url=own.url, tasks_file=tasks)
        fleet.producer.dispatch("held", {"id": "a", "seconds": 2})
        ledger.wait_started("a")
        first.kill()
        with pytest.raises(TaskAlreadyDispatchedError):
            fleet.producer.dispatch("held", {"id": "a"})
        make_worker(url=own.url, tasks_file=tasks)
        run = ledger.wait_started("a", 15, times=2)
        with pytest.raises(TaskAlreadyDispatchedError):
            fleet.producer.dispatch("held", {"id": "a"})
        ledger.wait_finished(["a"], 15)
        eventually(fleet.settled)
        assert locks(client) == {}
        fleet.producer.dispatch("held", {"id": "a"})
        assert run.pid != first.pid
        eventually(lambda: ledger.finished()["a"] == 2)


def test_bl21_a_final_failure_releases_the_lock(
    own: OwnServer,
    names: Names,
    tasks: Path,
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """(b) past max_retry, and past max_lost: dead-lettered, and a new one is accepted at once."""
    client: Any = own.client()
    with Fleet(own.url, names) as fleet:
        define(fleet)
        workers = [
            make_worker(url=own.url, tasks_file=tasks, queue={"reclaim_delay": 1}, wait=False)
            for _ in range(3)
        ]
        # One after the other: what lies beside "kills" in its process may lose a delivery with it.
        fleet.producer.dispatch("fails", {"id": "f"})
        eventually(lambda: len(fleet.producer.dead_letters) == 1, 30)
        fleet.producer.dispatch("kills", {"id": "k"})
        eventually(lambda: len(fleet.producer.dead_letters) == 2, 30)
        assert locks(client) == {}
        assert sorted(letter.task_name for letter in fleet.producer.dead_letters.list()) == [
            "fails",
            "kills",
        ]
        counts = ledger.counts()
        assert (counts["f"], counts["k"]) == (2, 2)
        assert sum(worker.running for worker in workers) == 1
        fleet.producer.dispatch("fails", {"id": "f"})
        eventually(lambda: len(fleet.producer.dead_letters) == 3, 15)


def test_bl21_an_enqueue_that_failed_leaves_no_lock(own: OwnServer, names: Names) -> None:
    """(c) out of memory, (d) a payload that is none: the next call with the key is accepted."""
    client: Any = own.client()
    with Fleet(own.url, names) as fleet:
        define(fleet)
        with faults.out_of_memory(client), pytest.raises(redis.ResponseError, match="maxmemory"):
            fleet.producer.dispatch("held", {"id": "c"})
        with pytest.raises(InvalidTaskPayloadError):
            fleet.producer.dispatch("held", {"id": "c", "x": {1, 2}})
        assert locks(client) == {}
        fleet.producer.dispatch("held", {"id": "c"})


def test_bl21_a_body_deleted_by_hand_frees_the_lock_when_it_runs_out(
    own: OwnServer,
    names: Names,
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """(e) XDEL of a waiting entry: nobody knows its lock any more, so its life ends it."""
    file = tasks_file(
        """
        @task(name="short", unique_for=2)
        def short(payload):
            with record(payload):
                pass
        """
    )
    client: Any = own.client()
    with Fleet(own.url, names) as fleet:
        short = fleet.task(name="short", unique_for=2)
        sent = short.delay("gone")
        assert client.xdel(names.stream, sent.entry_id) == 1
        with pytest.raises(
            TaskAlreadyDispatchedError
        ):  # before the worker: its start takes a while
            short.delay("early")
        make_worker(url=own.url, tasks_file=file)
        eventually(lambda: locks(client) == {}, 5)
        short.delay("late")
        ledger.wait_finished(["late"])
        eventually(fleet.settled)
        ledger.assert_once(["late"])


def test_bl21_a_body_deleted_under_a_running_task_frees_the_lock_at_its_end(
    own: OwnServer,
    names: Names,
    tasks: Path,
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """(e) who holds the message still knows its lock."""
    client: Any = own.client()
    with Fleet(own.url, names) as fleet:
        define(fleet)
        make_worker(url=own.url, tasks_file=tasks, queue={"reclaim_delay": 1})
        sent = fleet.producer.dispatch("held", {"id": "x", "seconds": 2})
        ledger.wait_started("x")
        assert client.xdel(names.stream, sent.entry_id) == 1
        ledger.wait_finished(["x"])
        eventually(lambda: locks(client) == {}, 10)
        eventually(fleet.settled)
        ledger.assert_once(["x"])


def test_bl21_a_message_deleted_while_a_worker_has_it_waiting_leaves_no_lock(
    own: OwnServer, names: Names
) -> None:
    """`queue.delete` releases the lock; the worker that had read it must not take it again."""
    with Fleet(own.url, names, reclaim_delay=60) as fleet:
        fleet.task(time.sleep, name="slow")
        held = fleet.task(name="held", unique_for=600)
        fleet.note.delay_many(range(500))
        fleet.producer.dispatch("slow", 1.5)
        sent = held.delay("deleted")
        fleet.start(num_workers=1)
        # The pool was quick, so it has read ahead: the unique one waits behind the slow one.
        eventually(lambda: len(fleet.runs) == 500 and _held(fleet) == 2, 20)
        assert fleet.producer.queue.delete(sent.entry_id or "")
        assert locks(fleet.client) == {}
        eventually(fleet.settled)
        faults.down_for(0.5)
        assert locks(fleet.client) == {}, "taken again by a message that is gone"
        held.delay("next")


def _held(fleet: Fleet) -> int:
    pending: Any = fleet.client.xpending(fleet.names.stream, fleet.names.group)
    return int(pending["pending"])


def test_bl21_a_message_finished_by_another_leaves_no_lock_behind_its_second_run(
    own: OwnServer,
    names: Names,
    tasks: Path,
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """Frozen, taken over, thawed: whoever ends it last, the lock is free then."""
    client: Any = own.client()
    with Fleet(own.url, names) as fleet:
        define(fleet)
        workers = [
            make_worker(url=own.url, tasks_file=tasks, queue={"reclaim_delay": 1}) for _ in range(2)
        ]
        fleet.producer.dispatch("held", {"id": "z", "seconds": 1})
        ledger.wait_started("z")
        (run,) = ledger.runs("z")
        first, second = sorted(workers, key=lambda worker: worker.pid != run.pid)
        with faults.frozen(first):
            ledger.wait_started("z", 15, times=2)
        eventually(lambda: all(run.end is not None for run in ledger.runs("z")), 15)
        eventually(fleet.settled)
        eventually(lambda: locks(client) == {}, 5)
        fleet.producer.dispatch("held", {"id": "z"})
        eventually(lambda: locks(client) == {}, 10)
        assert second.running


@pytest.mark.slow
def test_bl21_everything_with_a_life_of_its_own_expires_whoever_is_killed(
    own: OwnServer,
    names: Names,
    tasks: Path,
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """(f) SIGKILL at random: each string key has a TTL all the while, and at the end no lock is left."""
    client: Any = own.client()
    chance = random.Random(21)
    with Fleet(own.url, names) as fleet:
        define(fleet)
        queue = {"reclaim_delay": 1}
        workers = [
            make_worker(url=own.url, tasks_file=tasks, queue=queue, wait=False) for _ in range(3)
        ]
        number, until = 0, time.monotonic() + 20
        while time.monotonic() < until:
            for _ in range(20):
                number += 1
                options = {"run_in": chance.uniform(0, 2)} if number % 3 == 0 else {}
                fleet.producer.dispatch("held", {"id": number, "seconds": 0.05}, **options)
            faults.down_for(chance.uniform(0.3, 0.9))
            worker = chance.choice(workers)
            worker.kill()
            worker.close()
            worker.start(wait=False)
            for key in client.keys("*"):
                if client.type(key) == b"string":
                    assert client.pttl(key) != -1, f"{key} never expires"
        ledger.wait_finished(range(1, number + 1), 60)
        eventually(fleet.settled, 30)
        eventually(lambda: locks(client) == {}, 10, message=lambda: str(locks(client)))
        print(f"{number} unique tasks, {sum(ledger.counts().values()) - number} ran again")
        for again in range(1, number + 1):
            fleet.producer.dispatch("held", {"id": again, "seconds": 0})
        eventually(fleet.settled, 60)
