"""The pool: its threads, its hand-off, and how much it says may be taken from Redis."""

import itertools
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest

from taskrunner import worker_pool
from taskrunner.delivery import Delivery
from taskrunner.worker_pool import WorkerPool
from tests.support.waiting import busy, eventually, stays

_numbers = itertools.count(1)


def delivery() -> Delivery:
    return Delivery(f"{next(_numbers)}-0".encode(), b"{}", "g_h_1", 1, monotonic())


def deliveries(count: int) -> list[Delivery]:
    return [delivery() for _ in range(count)]


class Work:
    """What the workers do: note the delivery, and wait while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started: list[Delivery] = []
        self.ended: list[Delivery] = []
        self.threads: set[str] = set()
        self.present = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self, delivery: Delivery) -> None:
        with self._lock:
            self.started.append(delivery)
            self.threads.add(threading.current_thread().name)
            self.present += 1
            self.most = max(self.most, self.present)
        self.gate.wait(20)
        with self._lock:
            self.present -= 1
            self.ended.append(delivery)


class FakeClock:
    """The pool's clock, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def make_pool(work: Work) -> Iterator[Callable[..., WorkerPool]]:
    made: list[WorkerPool] = []

    def make(size: int = 4, batch_size: int = 100, execute: Any = None) -> WorkerPool:
        pool = WorkerPool(execute or work, size=size, batch_size=batch_size)
        made.append(pool)
        pool.start()
        return pool

    yield make
    work.gate.set()
    for pool in made:
        pool.stop()
        assert pool.join(10)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(worker_pool, "monotonic", clock)
    return clock


def keep_busy(pool: WorkerPool, work: Work, count: int) -> None:
    """Have `count` workers run something until the gate opens."""
    work.gate.clear()
    pool.submit(deliveries(count))
    eventually(lambda: work.present == count, 10)


# --- running ---


def test_what_is_submitted_is_run_once_in_named_daemon_threads(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """A thread dump tells the workers by name, and none keeps the process from ending."""
    pool = make_pool(size=3)
    batch = deliveries(200)

    pool.submit(batch)

    eventually(lambda: len(work.ended) == 200, 10)
    assert set(work.started) == set(batch)
    assert work.threads <= {f"taskrunner-worker-{number}" for number in (1, 2, 3)}
    assert all(
        thread.daemon
        for thread in threading.enumerate()
        if thread.name.startswith("taskrunner-worker")
    )


def test_no_more_run_at_once_than_the_size_says(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """The size is a promise to what the tasks talk to: a database with few connections."""
    pool = make_pool(size=3)

    keep_busy(pool, work, 3)
    pool.submit(deliveries(20))

    stays(lambda: work.present == 3, 0.1)
    assert pool.buffered == 20
    assert len(pool.running()) == 3
    assert not pool.idle
    work.gate.set()
    eventually(lambda: pool.idle, 10)
    assert work.most == 3


def test_one_waits_for_the_other_in_order(make_pool: Callable[..., WorkerPool], work: Work) -> None:
    """First come, first served."""
    pool = make_pool(size=1)
    batch = deliveries(50)

    pool.submit(batch)

    eventually(lambda: len(work.ended) == 50, 10)
    assert work.started == batch


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [SystemExit, MemoryError, KeyboardInterrupt])
def test_a_thread_that_dies_is_replaced(
    make_pool: Callable[..., WorkerPool], work: Work, error: type[BaseException]
) -> None:
    """The executor raises nothing; should it do so all the same, no slot is lost for good."""
    bad = delivery()

    def execute(one: Delivery) -> None:
        if one is bad:
            raise error
        work(one)

    pool = make_pool(size=2, execute=execute)
    pool.submit([bad])
    eventually(lambda: pool.threads_alive == 1, 10)
    assert pool.running() == []

    pool.ensure()

    assert pool.threads_alive == 2
    keep_busy(pool, work, 2)


# --- size ---


def test_it_grows_at_once(make_pool: Callable[..., WorkerPool], work: Work) -> None:
    """What waits is taken by the new threads."""
    pool = make_pool(size=1)
    keep_busy(pool, work, 1)
    pool.submit(deliveries(5))

    pool.resize(4)

    eventually(lambda: work.present == 4, 10)
    assert (pool.size, pool.threads_alive, pool.free) == (4, 4, 0)


def test_it_shrinks_by_idle_threads_only(make_pool: Callable[..., WorkerPool], work: Work) -> None:
    """A running task is never interrupted for the sake of the size."""
    pool = make_pool(size=4)
    keep_busy(pool, work, 2)

    pool.resize(1)

    eventually(lambda: pool.threads_alive == 2, 10)
    assert work.present == 2
    assert pool.size == 1
    work.gate.set()
    eventually(lambda: pool.threads_alive == 1, 10)
    pool.submit(deliveries(10))
    eventually(lambda: len(work.ended) == 12, 10)
    stays(lambda: pool.threads_alive == 1, 0.05)


def test_sizes_may_change_faster_than_threads_end(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """Whatever was asked for in between, the last word counts."""
    pool = make_pool(size=8)
    keep_busy(pool, work, 8)

    for size in (2, 8, 1, 5, 3, 7, 3):
        pool.resize(size)
    work.gate.set()

    eventually(lambda: pool.threads_alive == 3, 10)
    pool.submit(deliveries(30))
    eventually(lambda: len(work.ended) == 38, 10)
    stays(lambda: pool.threads_alive == 3, 0.05)


def test_a_shrinking_pool_counts_only_deliveries_as_waiting(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """Else it would take less from Redis than it has room for, for as long as its tasks run."""
    pool = make_pool(size=8, batch_size=10)
    keep_busy(pool, work, 8)

    pool.resize(2)

    assert pool.buffered == 0


def test_nothing_is_lost_or_doubled_while_the_size_changes(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """Tuning happens under load; it must not be felt."""
    pool = make_pool(size=4)
    batch = deliveries(3000)

    for number, start in enumerate(range(0, len(batch), 100)):
        pool.submit(batch[start : start + 100])
        pool.resize(1 + number * 7 % 9)
    pool.resize(5)

    eventually(lambda: len(work.ended) == len(batch), 20)
    assert set(work.ended) == set(batch)
    eventually(lambda: pool.threads_alive == 5, 10)
    assert pool.idle


# --- the end ---


def test_stop_lets_running_ones_end(make_pool: Callable[..., WorkerPool], work: Work) -> None:
    """`join` waits as long as it is told to, and says whether all ended."""
    pool = make_pool(size=2)
    keep_busy(pool, work, 2)

    pool.stop()

    started = monotonic()
    assert not pool.join(0.2)
    assert 0.15 < monotonic() - started < 5
    work.gate.set()
    assert pool.join(10)
    assert pool.threads_alive == 0
    assert len(work.ended) == 2


def test_an_idle_pool_stops_at_once(make_pool: Callable[..., WorkerPool]) -> None:
    """An idle worker process ends in a moment."""
    pool = make_pool(size=8)

    started = monotonic()
    pool.stop()

    assert pool.join(5)
    assert monotonic() - started < busy(0.5)


def test_stop_and_ensure_may_come_in_any_order(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """The watchdog's last look must not bring threads back."""
    pool = make_pool(size=2)
    pool.stop()
    pool.stop()
    assert pool.join(5)

    pool.ensure()

    assert pool.threads_alive == 0
    pool.start()
    pool.submit(deliveries(5))
    eventually(lambda: len(work.ended) == 5, 10)
    assert pool.threads_alive == 2


def test_a_worker_may_wait_for_the_others(make_pool: Callable[..., WorkerPool], work: Work) -> None:
    """A task that stops its own runner must not wait for itself."""
    answers: list[bool] = []
    pool: WorkerPool

    def execute(one: Delivery) -> None:
        pool.stop()
        answers.append(pool.join(5))

    pool = make_pool(size=3, execute=execute)
    started = monotonic()
    pool.submit([delivery()])

    eventually(lambda: answers, 10)
    assert answers == [False]  # it runs still
    assert monotonic() - started < 4
    assert pool.join(5)


def test_a_worker_that_was_just_given_something_is_not_free(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """Though its thread has not run since: else a fetcher takes one that another process is free
    for."""
    pool = make_pool(size=1)
    for _ in range(20):
        eventually(lambda: pool.idle)
        work.gate.clear()
        pool.submit(deliveries(1))
        assert (pool.free, pool.idle) == (0, False)
        work.gate.set()


# --- taking back ---


def test_take_back_gives_the_longest_waiting_first(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """What others could run goes back; what runs here stays."""
    pool = make_pool(size=1)
    keep_busy(pool, work, 1)
    batch = deliveries(5)
    pool.submit(batch)

    assert pool.take_back(2) == batch[:2]
    assert pool.take_back(100) == batch[2:]
    assert pool.take_back(100) == []
    assert len(pool.running()) == 1


def test_take_back_leaves_a_stop_under_way(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """Handing back at a stop meets the marks that end the threads."""
    pool = make_pool(size=2)
    keep_busy(pool, work, 2)
    batch = deliveries(3)
    pool.submit(batch)
    pool.stop()

    assert pool.take_back(100) == batch

    work.gate.set()
    assert pool.join(5)


# --- room ---


def test_an_idle_pool_has_room_for_its_workers(make_pool: Callable[..., WorkerPool]) -> None:
    """Nobody knows yet how long the tasks take: no more than can be started now."""
    assert make_pool(size=4).room() == 4
    assert make_pool(size=4, batch_size=1).room() == 2


def test_a_busy_pool_has_no_room(
    make_pool: Callable[..., WorkerPool], work: Work, clock: FakeClock
) -> None:
    """Slow tasks hold no others hostage (BL-27)."""
    pool = make_pool(size=4)
    pool.room()
    keep_busy(pool, work, 4)
    clock.now += 1

    assert pool.room() == 0
    assert pool.room_for_old() == 0
    assert pool.free == 0


def test_one_free_worker_is_room_for_one(
    make_pool: Callable[..., WorkerPool], work: Work, clock: FakeClock
) -> None:
    """A slot is never left empty because half a batch has no room."""
    pool = make_pool(size=4)
    pool.room()
    keep_busy(pool, work, 3)
    clock.now += 1

    assert (pool.free, pool.room(), pool.room_for_old()) == (1, 1, 1)


def test_room_follows_the_pace(
    make_pool: Callable[..., WorkerPool], work: Work, clock: FakeClock
) -> None:
    """What ended in the last 100 ms may wait: fast tasks travel in full batches."""
    pool = make_pool(size=2, batch_size=20)
    assert pool.room() == 2  # the first look: nothing is known

    pool.submit(deliveries(30))
    eventually(lambda: pool.idle, 10)
    eventually(lambda: len(work.ended) == 30, 10)
    clock.now += 0.1
    assert pool.room() in (30, 31, 32)  # a thread counts its task just after it ended

    pool.submit(deliveries(500))
    eventually(lambda: pool.idle, 10)
    clock.now += 0.1
    assert pool.room() == 40  # never more than two batches

    for _ in range(3):
        clock.now += 0.1
        pool.room()
    assert pool.room() == 2  # the pace of long ago says nothing


def test_what_waits_already_is_taken_off(
    make_pool: Callable[..., WorkerPool], work: Work, clock: FakeClock
) -> None:
    """At most two batches are held unstarted, whatever the pace."""
    pool = make_pool(size=1, batch_size=10)
    pool.room()
    pool.submit(deliveries(100))
    eventually(lambda: pool.idle, 10)
    clock.now += 0.1
    keep_busy(pool, work, 1)
    pool.submit(deliveries(12))

    assert pool.room() == 8
    assert pool.room_for_old() == 8
    pool.submit(deliveries(4))
    assert pool.room() == 0  # less than half a batch and nobody is idle: it pays to wait
    assert pool.room_for_old() == 4


def test_waiting_for_room_ends_when_a_worker_made_some(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """Sooner than the next look, so that the workers never run dry."""
    pool = make_pool(size=1, batch_size=10)
    keep_busy(pool, work, 1)
    assert pool.room() == 0

    threading.Timer(0.1, work.gate.set).start()
    started = monotonic()
    pool.wait_for_room(10)

    assert monotonic() - started < 5
    eventually(lambda: pool.room() > 0, 5)


def test_waiting_for_room_ends_at_a_wake(make_pool: Callable[..., WorkerPool], work: Work) -> None:
    """A fetcher that waits for room must hear of a stop."""
    pool = make_pool(size=1)
    keep_busy(pool, work, 1)
    assert pool.room() == 0

    threading.Timer(0.05, pool.wake).start()
    started = monotonic()
    pool.wait_for_room(10)

    assert monotonic() - started < 5


# --- sharing the room ---


def test_what_one_fetcher_asks_for_is_not_asked_for_twice(
    make_pool: Callable[..., WorkerPool],
) -> None:
    """Two fetchers would otherwise bring twice what the pool has room for."""
    pool = make_pool(size=4)

    assert pool.reserve(3) == 3
    assert pool.reserve(3) == 1
    assert pool.reserve(3) == 0
    pool.reading(-4)
    assert pool.reserve(9) == 4


def test_a_fetcher_without_a_share_really_waits(
    make_pool: Callable[..., WorkerPool], work: Work
) -> None:
    """While another one reads for the whole room there is nothing to do: it must not spin."""
    pool = make_pool(size=1, batch_size=10)
    keep_busy(pool, work, 1)
    assert pool.room() == 0
    work.gate.set()
    eventually(lambda: pool.idle, 5)
    pool.wait_for_room(5)  # a worker made room, and said so
    assert pool.reserve(10) > 0

    started = monotonic()
    for _ in range(3):
        assert pool.room_for_new() == 0
        pool.wait_for_room(0.1)

    assert monotonic() - started > 0.25


@pytest.mark.parametrize("size", [2, 3, 8, 9])
def test_while_overdue_entries_wait_new_ones_get_half(
    make_pool: Callable[..., WorkerPool], size: int
) -> None:
    """Neither the old nor the new starves."""
    pool = make_pool(size=size)

    pool.overdue(True)
    new, old = pool.room_for_new(), pool.room_for_old()

    assert new >= 1
    assert old >= 1
    assert new + old == size
    pool.overdue(False)
    assert pool.room_for_new() == size


def test_a_room_of_one_goes_in_turn(make_pool: Callable[..., WorkerPool]) -> None:
    """With one worker the old and the new take turns."""
    pool = make_pool(size=1)

    pool.overdue(True)

    for _ in range(3):
        assert pool.room_for_new() == 1
        assert pool.room_for_new() == 0, "the next turn is the old one's"
        assert pool.room_for_old() == 1
        assert pool.room_for_old() == 0
    eventually(lambda: pool.room_for_old() == 1, 5, message="who does not take its turn loses it")
