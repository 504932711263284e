"""The one contract of every thread: start, stop, sleep, wake, fail and go on."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest

from taskrunner.reports import Health, Reports
from taskrunner.service import LONGEST_BACKOFF, Backoff, Service
from tests.support.waiting import busy, eventually, stays


class Rounds(Service):
    """Counts its rounds; what a round does and how long it sleeps is up to the test."""

    jitter = 0.0

    def __init__(
        self, health: Health, work: Callable[[], float] = lambda: 3600.0, name: str = "rounds"
    ) -> None:
        super().__init__(name, health)
        self.rounds = 0
        self.closed = 0
        self.threads: list[threading.Thread] = []
        self._work = work

    def tick(self) -> float:
        self.rounds += 1
        self.threads.append(threading.current_thread())
        return self._work()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def make(reports: Reports) -> Iterator[Callable[..., Rounds]]:
    made: list[Rounds] = []
    health = Health(reports, lambda error: isinstance(error, ConnectionError))

    def make(*args: Any, **kwargs: Any) -> Rounds:
        made.append(Rounds(health, *args, **kwargs))
        return made[-1]

    yield make
    for service in made:
        service.stop()
        assert service.join(10)


# --- start and stop ---


def test_a_round_runs_at_once_in_a_named_daemon_thread(make: Callable[..., Rounds]) -> None:
    """Nobody waits for the first pause, and a thread dump can be read."""
    service = make(name="elector")

    service.start()

    eventually(lambda: service.rounds == 1, 10)
    (thread,) = service.threads
    assert thread.name == "taskrunner-elector"
    assert thread.daemon
    assert service.alive
    assert not service.died


def test_starting_twice_makes_one_thread(make: Callable[..., Rounds]) -> None:
    """Two threads of one service would do everything twice."""
    service = make()

    service.start()
    service.start()

    eventually(lambda: service.rounds == 1, 10)
    stays(lambda: service.rounds == 1, 0.05)


def test_a_stop_in_mid_sleep_ends_it_at_once(make: Callable[..., Rounds]) -> None:
    """However long the pause was to be."""
    service = make()
    service.start()
    eventually(lambda: service.rounds == 1, 10)

    started = monotonic()
    service.stop()

    assert service.join(5)
    assert monotonic() - started < 0.1 + busy(0.4)
    assert (service.closed, service.alive, service.died) == (1, False, False)


def test_stopping_twice_or_before_the_start_is_nothing(make: Callable[..., Rounds]) -> None:
    """A half-made runner is taken apart by the same calls as a whole one."""
    service = make()

    service.stop()
    service.stop()
    assert service.join(1)
    assert not service.died
    service.start()
    eventually(lambda: service.rounds == 1, 10)
    service.stop()
    service.stop()

    assert service.join(5)
    assert service.closed == 1


def test_it_can_be_started_again(make: Callable[..., Rounds]) -> None:
    """A stopped runner starts again, and the watchdog restarts what died."""
    service = make()
    for number in range(1, 4):
        service.start()
        eventually(lambda number=number: service.rounds == number, 10)
        service.stop()
        assert service.join(5)

    assert service.closed == 3
    assert len(set(service.threads)) == 3


def test_a_start_right_after_a_stop_counts(make: Callable[..., Rounds]) -> None:
    """Start and stop may be called in any order: the last word holds, also where the former thread
    has not ended yet."""
    gate = threading.Event()

    def work() -> float:
        gate.wait(10)
        return 3600.0

    service = make(work)
    service.start()
    eventually(lambda: service.rounds == 1, 10)

    service.stop()
    service.start()
    gate.set()

    eventually(lambda: service.rounds >= 2, 5)
    stays(lambda: service.alive, 0.1)


def test_a_stop_during_a_round_waits_for_its_end(make: Callable[..., Rounds]) -> None:
    """A round is never cut in two; `join` says whether it ended in time."""
    gate = threading.Event()

    def work() -> float:
        gate.wait(10)
        return 0.0

    service = make(work)
    service.start()
    eventually(lambda: service.rounds == 1, 10)
    service.stop()

    assert not service.join(0.05)
    assert service.stopping
    gate.set()
    assert service.join(5)
    assert service.rounds == 1


def test_it_may_join_itself(make: Callable[..., Rounds]) -> None:
    """A hook that stops the runner runs in one of its threads."""
    answers: list[bool] = []
    service: Rounds

    def work() -> float:
        service.stop()
        answers.append(service.join(5))
        return 0.0

    service = make(work)
    service.start()

    eventually(lambda: answers == [True], 3)
    assert service.join(5)


# --- sleeping ---


def test_a_wake_ends_the_pause(make: Callable[..., Rounds]) -> None:
    """Something is due earlier than was thought."""
    service = make()
    service.start()
    for number in range(1, 5):
        eventually(lambda number=number: service.rounds == number, 10)
        service.wake()
    eventually(lambda: service.rounds == 5, 10)
    stays(lambda: service.rounds == 5, 0.05)


def test_a_wake_during_a_round_is_not_lost(make: Callable[..., Rounds]) -> None:
    """What happened while it looked elsewhere is looked at next."""
    gate = threading.Event()

    def work() -> float:
        gate.wait(10)
        return 3600.0

    service = make(work)
    service.start()
    eventually(lambda: service.rounds == 1, 10)

    service.wake()
    gate.set()

    eventually(lambda: service.rounds == 2, 5)


def test_a_pause_inside_a_round_ends_at_a_stop(make: Callable[..., Rounds]) -> None:
    """No thread sleeps where a stop can't reach it."""
    service: Rounds

    def work() -> float:
        service.pause(3600)
        return 3600.0

    service = make(work)
    service.start()
    eventually(lambda: service.rounds == 1, 10)

    service.stop()

    assert service.join(5)


def test_pauses_are_jittered(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances started together drift apart, by a tenth either way."""
    service = Service("plain", Health(reports, lambda error: False))
    slept: list[float] = []
    monkeypatch.setattr(service, "tick", lambda: 10.0)

    class Signal(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            slept.append(timeout)
            if len(slept) == 200:
                service.stop()
            return True

    monkeypatch.setattr(service, "_signal", Signal())
    service.start()

    assert service.join(10)
    assert all(9 <= seconds <= 11 for seconds in slept)
    assert max(slept) - min(slept) > 1


# --- failing ---


def test_a_failing_round_does_not_end_it(
    make: Callable[..., Rounds], reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop outlives whatever one round meets, and tells it once (BL-08)."""
    service: Rounds

    def work() -> float:
        if service.rounds < 4:
            raise ConnectionError("away")
        return 3600.0

    service = make(work)
    with caplog.at_level(logging.INFO, "taskrunner"):
        service.start()
        eventually(lambda: service.rounds == 4, 10)
        eventually(lambda: len(caplog.records) == 2, 10)

    assert [record.__dict__["action"] for record in caplog.records] == [
        "service_error",
        "service_recovered",
    ]
    assert len(reports.recent) == 1
    assert service.alive


def test_a_failing_round_is_tried_again_with_growing_pauses(
    make: Callable[..., Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is away is not hammered (D33); a wake or a stop still ends the pause."""
    slept: list[float] = []

    def work() -> float:
        raise ConnectionError

    service = make(work)

    class Signal(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            slept.append(timeout)
            if len(slept) == 12:
                service.stop()
            return True

    monkeypatch.setattr(service, "_signal", Signal())
    service.start()

    assert service.join(10)
    assert slept[0] < 0.1
    assert all(later > earlier for earlier, later in itertools.pairwise(slept[:5]))
    assert max(slept) <= LONGEST_BACKOFF * 1.3
    assert min(slept[8:]) > LONGEST_BACKOFF / 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_by_itself_is_seen_to_have_died(make: Callable[..., Rounds]) -> None:
    """The watchdog restarts it; it is closed as after a stop."""
    service: Rounds

    def work() -> float:
        if service.rounds == 1:
            raise SystemExit(3)
        return 3600.0

    service = make(work)
    service.start()

    eventually(lambda: service.died, 10)
    assert service.closed == 1
    service.start()
    eventually(lambda: service.rounds == 2, 10)
    assert not service.died


def test_an_error_at_the_stop_is_not_told(make: Callable[..., Rounds], reports: Reports) -> None:
    """Closing connections under a blocked read is how a stop works."""
    gate = threading.Event()

    def work() -> float:
        gate.wait(10)
        raise ConnectionError("closed under us")

    service = make(work)
    service.start()
    eventually(lambda: service.rounds == 1, 10)
    service.stop()
    gate.set()

    assert service.join(5)
    assert len(reports.recent) == 0


# --- backoff ---


def test_backoff_doubles_up_to_its_longest_and_starts_again() -> None:
    """From 50 ms, jittered by a third."""
    backoff = Backoff()
    assert not backoff.waiting

    delays = [backoff.next() for _ in range(2000)]

    assert backoff.waiting
    for delay, step in zip(delays, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2], strict=False):
        right = min(step, LONGEST_BACKOFF)
        assert right * 0.69 < delay < right * 1.31
    assert max(delays) <= LONGEST_BACKOFF * 1.31
    backoff.reset()
    assert not backoff.waiting
    assert backoff.next() < 0.1


def test_backoff_never_waits_longer_than_work_may_wait_for_a_server_that_is_back() -> None:
    """When Redis returns, all goes on within a second (D33), whatever pause was drawn last."""
    backoff = Backoff()

    assert max(backoff.next() for _ in range(2000)) <= 1.0


def test_backoff_may_be_shorter() -> None:
    """A lease of 100 ms is not kept by waiting two seconds."""
    backoff = Backoff(0.02)

    assert max(backoff.next() for _ in range(100)) <= 0.02 * 1.31
