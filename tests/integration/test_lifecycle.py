"""Starting and stopping a runner in every order, from everywhere, and with unusual settings."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Any, cast

import pytest

from taskrunner import AlreadyStartedError, Registry, TaskRunner, Timings, keys, task
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.parts import Parts
from tests.support import Names, busy, eventually, stays
from tests.support.desk import Desk
from tests.support.fleet import Fleet


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


def service_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("taskrunner-")]


def connections(fleet: Fleet) -> int:
    return len(cast(Any, fleet.client.client_list()))


def test_many_starts_and_stops_lose_and_double_nothing(fleet: Fleet) -> None:
    """A deploy is a stop and a start; here are twenty in a row under load."""
    made = fleet.task(lambda payload: (fleet.record(payload), time.sleep(0.002)), name="t")
    runner = fleet.make(num_workers=3, batch_size=20)
    made.delay_many(range(2000))

    for _ in range(20):
        runner.start()
        time.sleep(0.05)
        assert runner.stop(10)
    runner.start()

    fleet.wait_ran(*range(2000), timeout=40)
    eventually(fleet.settled, 15)
    assert Counter(fleet.payloads()) == dict.fromkeys(range(2000), 1)
    assert {run.attempt for run in fleet.runs} == {1}


def test_a_stopped_runner_holds_no_thread_and_no_connection(fleet: Fleet) -> None:
    """Whoever starts and stops for weeks must not run out of either."""
    runner = fleet.make(block_duration=60, num_fetchers=3)
    fleet.note.delay(0)
    runner.start()
    fleet.wait_ran(0)
    assert runner.stop(5)
    eventually(lambda: service_threads() == [])
    before = connections(fleet)

    for number in range(1, 6):
        runner.start()
        fleet.note.delay(number)
        fleet.wait_ran(number)
        assert runner.stop(5)

    eventually(lambda: service_threads() == [], 2)
    eventually(lambda: connections(fleet) <= before + 1, 5)


def test_a_stop_right_after_the_start_leaves_nothing(fleet: Fleet) -> None:
    """Before any thread has done its first round."""
    runner = fleet.make(block_duration=60)
    for _ in range(10):
        runner.start()
        started = monotonic()
        assert runner.stop(5)
        assert monotonic() - started < 1 + busy()

    eventually(lambda: service_threads() == [], 3)
    assert fleet.client.exists(keys.presence(runner.config.host)) == 0
    assert fleet.client.exists(fleet.lease) == 0


def test_stopping_from_many_threads_is_one_stop(fleet: Fleet) -> None:
    """A health check, a signal and an exit hook may all ask for it."""
    runner = fleet.start()
    fleet.note.delay(1)
    fleet.wait_ran(1)
    answers: list[bool] = []

    threads = [threading.Thread(target=lambda: answers.append(runner.stop(5))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert answers == [True] * 8
    assert runner.state == "stopped"
    eventually(lambda: service_threads() == [], 3)


def test_starting_from_many_threads_is_one_start(fleet: Fleet) -> None:
    """One wins, the others hear of it."""
    runner = fleet.make()
    outcomes: list[str] = []

    def start() -> None:
        try:
            runner.start()
            outcomes.append("started")
        except AlreadyStartedError:
            outcomes.append("refused")

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert sorted(outcomes) == ["refused"] * 7 + ["started"]
    names = Counter(service_threads())
    assert names["taskrunner-elector"] == 1


@pytest.mark.parametrize("where", ["task", "before_task", "after_task", "handler", "on_error"])
def test_the_runner_may_be_stopped_from_inside(fleet: Fleet, where: str) -> None:
    """Whatever code of the application runs in our threads: no deadlock, and in the end it is
    stopped and everything settled."""
    runner: TaskRunner
    answers: list[bool] = []

    def stop(*_: Any) -> None:
        answers.append(runner.stop(3))

    def fails(payload: Any) -> None:
        raise ValueError("bad")

    settings: dict[str, Any] = {}
    made = fleet.note
    if where == "task":
        made = fleet.task(stop, name="stops")
    elif where == "handler":
        made = fleet.task(fails, name="fails")
        settings["failed_task_handler"] = stop
    elif where == "on_error":
        made = fleet.task(fails, name="fails")
        settings["on_error"] = stop
    else:
        settings[where] = stop
    runner = fleet.start(**settings)
    started = monotonic()
    made.delay(1)

    eventually(lambda: answers, 15)
    eventually(lambda: runner.state == "stopped", 15)
    assert monotonic() - started < 9
    eventually(fleet.settled)
    eventually(lambda: service_threads() == [], 5)


def test_with_starts_and_stops(fleet: Fleet) -> None:
    """Also where the block raises."""
    runner = fleet.make()

    def inside() -> None:
        with runner as entered:
            assert entered is runner
            assert runner.state == "started"
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        inside()

    assert runner.state == "stopped"
    with runner:
        fleet.note.delay(1)
        fleet.wait_ran(1)


def test_a_runner_dispatches_in_every_state(fleet: Fleet) -> None:
    """A producer need not be started, and one that stopped can still dispatch."""
    runner = fleet.make()
    runner.dispatch("note", "init")
    runner.start()
    runner.dispatch("note", "started")
    fleet.wait_ran("init", "started")
    assert runner.stop(5)
    runner.dispatch("note", "stopped")
    runner.start()

    fleet.wait_ran("stopped")


def test_a_producer_that_stops_holds_no_connection(fleet: Fleet) -> None:
    """A web process that shuts down in order; and it may dispatch again."""
    before = connections(fleet)
    runner = fleet.make()
    runner.dispatch("note", 1)
    assert connections(fleet) == before + 1

    assert runner.stop()
    eventually(lambda: connections(fleet) == before)
    runner.dispatch("note", 2)
    assert len(runner.queue) == 2


def test_a_task_may_dispatch_others(fleet: Fleet) -> None:
    """From a worker thread, from many at once."""

    def spreads(payload: int) -> None:
        fleet.note.delay_many(range(payload * 10, payload * 10 + 10))

    fleet.task(spreads, name="spreads").delay_many(range(30))
    fleet.start(num_workers=8)

    fleet.wait_ran(*range(300), timeout=20)
    eventually(fleet.settled)
    assert Counter(fleet.payloads()) == dict.fromkeys(range(300), 1)


# --- unusual settings ---


@pytest.mark.parametrize(
    "name",
    [
        "with space",
        "a_b_1",
        "_",
        "a:b:c",
        "{tag}",
        "ünï-\u2028-\U0001f600",
        "x" * 2000,
        "*?[a]",
        "'\"\\\r\n\t",
        "taskrunner",
    ],
    ids=lambda name: ascii(name)[:20],
)
def test_any_text_may_be_a_name(fleet: Fleet, name: str) -> None:
    """Of a group, a host, a prefix and a queue: dispatch, run, retry, fail, delay and stop."""
    unique = f"{name}{fleet.names.group}"
    registry = Registry()
    runs: list[Any] = []

    def body(payload: Any) -> None:
        runs.append(payload)
        if payload == "fails" or runs.count(payload) == 1 == len(runs):
            raise ValueError(payload)

    made = task(name="t", max_retry=2, retry_delay=0.05, registry=registry)(body)
    runner = TaskRunner(
        consumer_group=unique,
        host=unique,
        queue=type(fleet.producer.queue)(fleet.url, prefix=unique, queue=name, reclaim_delay=2),
        registry=registry,
        timings=Timings(poll=0.2),
        shutdown_timeout=5,
    )
    with runner:
        made.delay("first")
        eventually(lambda: runs.count("first") == 2)
        made.delay("fails")
        made.delay("later", run_in=0.3)
        eventually(lambda: runs.count("fails") == 2 and "later" in runs)
        eventually(lambda: len(runner.dead_letters) == 1)
        eventually(lambda: len(runner.queue) == 0)
        assert runner.replications() == 1
    (group,) = cast(Any, fleet.client.xinfo_groups(runner.queue.stream))
    assert group["pending"] == 0
    assert {
        consumer["name"].decode()
        for consumer in cast(Any, fleet.client.xinfo_consumers(runner.queue.stream, unique))
    } <= {keys.consumer(unique, unique, keys.PARKING)}
    runner.dead_letters.purge()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 1, "batch_size": 1, "num_fetchers": 1},
        {"num_workers": 1, "batch_size": 1, "num_fetchers": 8},
        {"num_workers": 100, "batch_size": 1},
        {"num_workers": 2, "batch_size": 10_000},
        {"block_duration": 0.001},
        {"block_duration": timedelta(days=100)},
        {"shutdown_timeout": timedelta(days=36_500)},
        {"timings": {"lease": 0.1, "presence": 0.1, "poll": 0.01, "janitor": 0.05}},
        {"timings": {"lease": 1e9, "presence": 1e9, "poll": 1e9, "janitor": 1e9}},
        {"timings": {"hand_back_after": 0.001, "consumer_idle": 0.001, "janitor": 0.01}},
        {"queue": {"reclaim_delay": 0.1}},
        {"queue": {"reclaim_delay": timedelta(days=11)}},
        {"max_payload_bytes": 10**15},
        {"long_queue_threshold": 0.002},
        {"metrics_reset_interval": 0.001, "long_queue_threshold": 0.02},
    ],
    ids=lambda settings: str(settings)[:60],
)
def test_an_extreme_setting_works(fleet: Fleet, settings: dict[str, Any]) -> None:
    """What is allowed must do: every message once, nothing left, and a stop in a moment."""

    def flaky(payload: Any) -> None:
        fleet.record(payload)
        if payload == "flaky" and fleet.payloads().count("flaky") == 1:
            raise ValueError("first")

    made = fleet.task(flaky, name="t", max_retry=2, retry_delay=0.05)
    runner = fleet.start(**settings)
    made.delay_many(range(300))
    made.delay("flaky")
    made.delay("later", run_in=0.2)

    fleet.wait_ran(*range(300), "later", timeout=20)
    eventually(lambda: fleet.payloads().count("flaky") == 2)
    eventually(fleet.settled)
    stays(fleet.settled, 0.1)
    assert Counter(fleet.payloads()) == {
        **dict.fromkeys(range(300), 1), "flaky": 2, "later": 1,
    }  # fmt: skip
    started = monotonic()
    assert runner.stop()
    assert monotonic() - started < 1 + busy()
    assert [one for one in runner.errors if one.action == "service_error"] == []


def test_a_hand_back_is_taken_at_once_whatever_reclaim_delay_is(fleet: Fleet) -> None:
    """A deploy must not make messages wait for the longest reclaim_delay that is allowed."""
    fleet.task(lambda payload: (fleet.record(payload), time.sleep(0.3)), name="t")
    leaving = fleet.start(num_workers=1, queue={"reclaim_delay": timedelta(days=11)})
    fleet.producer.dispatch_many("t", range(4))
    eventually(lambda: len(fleet.runs) == 1)
    assert leaving.stop(5)
    fleet.start(num_workers=4, queue={"reclaim_delay": timedelta(days=11)})

    fleet.wait_ran(*range(4), timeout=5)
    eventually(fleet.settled)


def test_more_workers_than_there_can_be_is_a_failed_start(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses threads: the start raises, and those that were made end."""
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "taskrunner-worker-50":
            raise RuntimeError("can't start new thread")
        start(thread)

    runner = fleet.make(num_workers=100)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            runner.start()

    assert runner.state == "stopped"
    eventually(lambda: service_threads() == [], 5)
    runner.start()
    fleet.note.delay(1)
    fleet.wait_ran(1)


def test_a_runner_told_to_stop_while_it_starts_stops(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor may end at any moment of its child's life."""
    started, told = Parts.start, threading.Event()

    def start(parts: Parts) -> None:
        told.wait(10)
        started(parts)

    monkeypatch.setattr(Parts, "start", start)
    starter = threading.Thread(target=desk.runner.start)
    starter.start()
    eventually(lambda: desk.runner.state == "starting", 10)
    desk.runner.stop_soon()
    told.set()
    starter.join(10)
    eventually(lambda: desk.runner.state == "stopped", 10)
