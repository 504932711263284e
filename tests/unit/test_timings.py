"""Figures summed in the process, and the thread that writes them."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskrunner.clock import ServerClock
from taskrunner.delivery import Delivery
from taskrunner.reports import Health, Reports
from taskrunner.services.metrics_writer import MetricsWriter
from taskrunner.store.metrics import Metrics
from taskrunner.timings import ClaimDelays, Timings
from tests.support import eventually

NOW = 1_700_000_000.0
MILLISECOND = 0.001


# --- run times ---


def test_take_gives_whole_milliseconds_and_runs_by_task() -> None:
    """Redis holds integers of ms, one pair a task."""
    timings = Timings()
    timings.add("a", 0.010)
    timings.add("a", 0.020)
    timings.add("b", 1.5)

    assert timings.take() == {"a": (30, 2), "b": (1500, 1)}


def test_take_carries_what_is_below_a_millisecond() -> None:
    """D39: 2,000 runs of 0.25 ms are 500 ms however often they are written."""
    timings = Timings()
    total = runs = 0
    for _ in range(2000):
        timings.add("t", 0.00025)
        milliseconds, count = timings.take().get("t", (0, 0))
        total, runs = total + milliseconds, runs + count

    assert runs == 2000
    assert 499 <= total <= 500


@given(
    st.lists(st.tuples(st.integers(0, 5_000_000), st.booleans()), max_size=200),
)
def test_take_loses_nothing_wherever_it_cuts(runs: list[tuple[int, bool]]) -> None:
    """The written sum is within 1 ms of the true one, the count exact."""
    timings = Timings()
    total = count = 0
    for nanoseconds, taken in [*runs, (0, True)]:
        timings.add("t", nanoseconds / 1e9)
        if taken:
            milliseconds, ended = timings.take().get("t", (0, 0))
            total, count = total + milliseconds, count + ended

    assert count == len(runs) + 1
    true = sum(nanoseconds for nanoseconds, _ in runs) / 1e6
    assert true - 1.001 < total <= true


def test_take_is_empty_when_nothing_ran() -> None:
    """An idle process writes nothing; not zeros either."""
    timings = Timings()
    timings.add("t", 0.0004)
    timings.take()

    assert timings.take() == {}


def test_give_back_counts_with_the_next_ones() -> None:
    """A write that failed is kept, to the nanosecond."""
    timings = Timings()
    timings.add("t", 0.0017)
    timings.give_back(timings.take())
    timings.add("t", 0.0004)

    assert timings.take() == {"t": (2, 2)}


def test_add_loses_nothing_when_many_threads_add_and_one_takes() -> None:
    """Workers add while the writer takes."""
    timings = Timings()
    taken: list[tuple[int, int]] = []
    done = threading.Event()

    def add() -> None:
        for _ in range(5000):
            timings.add("t", 0.0005)

    def take() -> None:
        while not done.is_set():
            taken.extend(timings.take().values())

    taker = threading.Thread(target=take)
    adders = [threading.Thread(target=add) for _ in range(8)]
    taker.start()
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    done.set()
    taker.join()
    taken.extend(timings.take().values())

    assert sum(count for _, count in taken) == 40_000
    assert sum(milliseconds for milliseconds, _ in taken) == pytest.approx(20_000, abs=1)


# --- claim delays ---


def _delays(now: Callable[[], float] = lambda: NOW) -> ClaimDelays:
    return ClaimDelays(ServerClock(monotonic=lambda: 0.0, wall=now))


def _added(*seconds_ago: float) -> list[Delivery]:
    """Deliveries that were added so long before NOW."""
    return [
        Delivery(f"{round((NOW - ago) * 1000)}-0".encode(), b"", "c", 1, 0.0) for ago in seconds_ago
    ]


def test_claim_delay_is_from_the_entry_id_to_the_read() -> None:
    """Nanoseconds, newest last."""
    delays = _delays()
    delays.saw(_added(3, 2))
    delays.saw(_added(1))

    assert delays.take() == pytest.approx([3e9, 2e9, 1e9])


def test_claim_delay_uses_the_servers_clock() -> None:
    """An entry id is the server's time: a clock of ours that is an hour off must not show."""
    clock = ServerClock(monotonic=lambda: 50.0, wall=lambda: NOW + 3600)
    clock.observe(NOW, 50.0, 50.0)
    delays = ClaimDelays(clock)
    delays.saw(_added(2))

    assert delays.take() == pytest.approx([2e9])


def test_claim_delay_is_never_negative() -> None:
    """An id ahead of the clock is a delay of 0: the server's clock went back, or an id was given
    by hand."""
    delays = _delays()
    delays.saw(_added(-5, 1))

    assert delays.take() == pytest.approx([0, 1e9])


def test_claim_delays_keep_the_newest_thousand() -> None:
    """More than the ring holds is not sent; what stays is the newest, newest last."""
    delays = _delays()
    for start in range(1500, 0, -100):
        delays.saw(_added(*range(start, start - 100, -1)))

    taken = delays.take()

    assert len(taken) == 1000
    assert taken == pytest.approx([ago * 1e9 for ago in range(1000, 0, -1)])


def test_claim_delays_keep_every_sample_when_batches_are_small() -> None:
    """D41: messages that come one by one are read one by one, hundreds in a tenth of a second."""
    delays = _delays()
    for ago in range(500, 0, -1):
        delays.saw(_added(ago))

    assert delays.take() == pytest.approx([ago * 1e9 for ago in range(500, 0, -1)])


def test_claim_delays_are_taken_once() -> None:
    """The ring gets each sample once."""
    delays = _delays()
    delays.saw(_added(1))
    delays.take()

    assert delays.take() == []


# --- the writer ---


class Store:
    """Stands for Redis: keeps what is written, or refuses it, or takes its time."""

    def __init__(self) -> None:
        self.written: dict[str, list[int]] = {}
        self.writes = 0
        self.ring: list[int] = []
        self.refuses_timings = False
        self.refuses_ring = False
        self.lets_in = threading.Event()
        self.lets_in.set()
        self.entered = threading.Event()

    def add(self, timings: Mapping[str, tuple[int, int]]) -> tuple[dict[str, Any], None]:
        self.writes += 1
        self.entered.set()
        self.lets_in.wait()
        if self.refuses_timings:
            raise ConnectionError("away")
        for name, (milliseconds, count) in timings.items():
            entry = self.written.setdefault(name, [0, 0])
            entry[0] += milliseconds
            entry[1] += count
        return {}, None

    def add_claim_delays(self, delays: Sequence[int]) -> None:
        if self.refuses_ring:
            raise ConnectionError("away")
        self.ring.extend(delays)


@contextmanager
def _writer(store: Store, timings: Timings, delays: ClaimDelays) -> Iterator[MetricsWriter]:
    writer = MetricsWriter(
        Health(Reports(), lambda error: True),
        metrics=cast(Metrics, store),
        timings=timings,
        claim_delays=delays,
    )
    writer.start()
    try:
        yield writer
    finally:
        store.lets_in.set()
        writer.stop()
        writer.join(10)


def test_writer_writes_within_about_a_second() -> None:
    """An operator sees figures that are a second old."""
    store, timings = Store(), Timings()
    with _writer(store, timings, _delays()):
        timings.add("t", 0.010)

        eventually(lambda: store.written == {"t": [10, 1]}, 5)


def test_writer_writes_once_a_second_at_most() -> None:
    """However many tasks run, a second costs one write."""
    store, timings = Store(), Timings()
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.001):
            timings.add("t", 0.001)

    worker = threading.Thread(target=work)
    with _writer(store, timings, _delays()):
        worker.start()
        eventually(lambda: store.writes == 3, 10)
        stop.wait(0.5)
        writes = store.writes
        stop.set()
        worker.join()

    assert writes <= 4


def test_add_is_never_held_up_by_a_slow_write() -> None:
    """D40: in Go a write of 2 s stopped every worker for 2 s."""
    store, timings = Store(), Timings()
    store.lets_in.clear()
    timings.add("t", 0.001)
    with _writer(store, timings, _delays()):
        assert store.entered.wait(5)  # and it doesn't return

        adder = threading.Thread(
            target=lambda: [timings.add("t", 0.001) for _ in range(1000)], daemon=True
        )
        adder.start()
        adder.join(5)
        assert not adder.is_alive()

        store.lets_in.set()
        eventually(lambda: store.written == {"t": [1001, 1001]}, 5)


def test_writer_keeps_what_could_not_be_written() -> None:
    """Redis may be away for a minute; the minute counts afterwards, once."""
    store, timings = Store(), Timings()
    store.refuses_timings = True
    with _writer(store, timings, _delays()):
        for _ in range(3):
            timings.add("t", 0.010)
            before = store.writes
            eventually(lambda before=before: store.writes > before, 5)
        store.refuses_timings = False

        eventually(lambda: store.written == {"t": [30, 3]}, 5)


def test_writer_writes_the_rest_at_the_stop() -> None:
    """D40: the last second is not lost."""
    store, timings, delays = Store(), Timings(), _delays()
    with _writer(store, timings, delays) as writer:
        timings.add("t", 0.010)
        eventually(lambda: store.written == {"t": [10, 1]}, 5)
        timings.add("t", 0.030)
        delays.saw(_added(1))
        writer.stop()
        assert writer.join(5)

    assert store.written == {"t": [40, 2]}
    assert len(store.ring) == 1


def test_writer_writes_timings_when_the_ring_is_refused() -> None:
    """One figure that can't be written (a key of the wrong type, an ACL) holds up no other."""
    store, timings, delays = Store(), Timings(), _delays()
    store.refuses_ring = True
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.005):
            delays.saw(_added(1))
            timings.add("t", 0.001)

    worker = threading.Thread(target=work)
    with _writer(store, timings, delays):
        worker.start()
        try:
            eventually(lambda: store.written.get("t"), 6)
        finally:
            stop.set()
            worker.join()


def test_writer_writes_claim_delays_when_timings_are_refused() -> None:
    """And the other way round."""
    store, timings, delays = Store(), Timings(), _delays()
    store.refuses_timings = True
    with _writer(store, timings, delays):
        timings.add("t", 0.001)
        assert store.entered.wait(5)
        delays.saw(_added(1))

        eventually(lambda: store.ring, 6)
