"""What users' tests see is what a worker does: the same cases in eager mode, by a drain, and by a
started runner on a real server."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import pytest
import redis

from taskrunner import (
    RedisStreamQueue,
    Registry,
    Reject,
    Retry,
    TaskContext,
    TaskMessage,
    TaskRunner,
    TaskRunnerError,
    current_task,
    keys,
    task,
)
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.message import encode
from taskrunner.testing import (
    MovableClock,
    clean_up,
    drain,
    eager,
)
from tests.support.names import Names
from tests.support.server import OwnServer
from tests.support.waiting import eventually

RECLAIM = 0.6
"""Seconds: what waits longer than this goes through the delayed set, what is shorter is parked."""


@attrs.define
class Outcome:
    """All that a user could tell one way of running tasks from another by."""

    events: dict[str, list[Any]] = attrs.field(factory=lambda: defaultdict(list))  # by message
    dispatched: list[Any] = attrs.field(factory=list)
    letters: list[Any] = attrs.field(factory=list)
    actions: list[str] = attrs.field(factory=list)


class Play:
    """The tasks of the cases, and an outcome that everything is entered in."""

    def __init__(self, *, handler: bool) -> None:
        self.outcome = Outcome()
        self.registry = Registry()
        self.settings: dict[str, Any] = {
            "before_task": lambda context: self.note(context.message.payload, "before"),
            "after_task": self._after,
            "failed_task_handler": self._handle if handler else None,
            "unknown_task_deliveries": 2,
        }
        self._refused: set[str] = set()

        def define(**options: Any) -> Callable[[Callable[[Any], object]], Any]:
            return task(registry=self.registry, **options)

        @define(name="works", max_retry=3, retry_delay=0.05)
        def works(payload: Any) -> None:
            here = current_task()
            self.note(payload, ("run", here.attempt, here.max_retry, here.name, payload))
            if here.attempt < payload.get("works_on", 1):
                raise ValueError(f"attempt {here.attempt}")

        @define(name="rejects", max_retry=5)
        def rejects(payload: Any) -> None:
            raise Reject("not wanted")

        @define(name="asks-again", max_retry=3)
        def asks_again(payload: Any) -> None:
            if current_task().attempt == 1:
                raise Retry(payload["delay"])

        @define(name="exits", max_retry=2, retry_delay=0.05)
        def exits(payload: Any) -> None:
            raise SystemExit(3)

        @define(name="takes-long", max_retry=2, retry_delay=0.05, time_limit=0.05)
        def takes_long(payload: Any) -> None:
            until = time.monotonic() + 5
            while time.monotonic() < until:
                time.sleep(0.001)

        @define(name="bad-delay", max_retry=2, retry_delay=lambda attempt, error: 1 / 0)
        def bad_delay(payload: Any) -> None:
            self.note(payload, current_task().attempt)
            if current_task().attempt == 1:
                raise KeyError("x")

        @define(name="parent")
        def parent(payload: Any) -> None:
            works.delay({"id": "child"})
            works.delay({"id": "late child"}, run_in=0.1)

        @define(
            name="unique",
            max_retry=2,
            retry_delay=0.05,
            unique_for=60,
            unique_key=lambda payload: payload["id"].split()[0],
        )
        def unique(payload: Any) -> None:
            self.note(payload, current_task().attempt)
            if payload.get("fails"):
                raise ValueError("unique")

        @define(name="nothing")
        def nothing() -> None:
            self.note({"id": "nothing"}, current_task().message.payload)

    def note(self, payload: Any, what: Any) -> None:
        key = payload["id"] if isinstance(payload, dict) else repr(payload)
        self.outcome.events[key].append(what)

    def _after(self, context: TaskContext, error: BaseException | None) -> None:
        self.note(context.message.payload, ("after", context.attempt, type(error).__name__))

    def _handle(self, message: TaskMessage, error: TaskRunnerError) -> None:
        cause = type(error.__cause__).__name__
        self.note(message.payload, ("handler", message.attempt, type(error).__name__, cause))
        if message.task_name == "rejects" and message.id not in self._refused:
            self._refused.add(message.id)
            raise OSError("the handler is called again")

    def dispatch(self, runner: TaskRunner) -> None:
        """Send every case, and note what dispatching says."""
        send = runner.dispatch
        soon = datetime.now(UTC) + timedelta(milliseconds=500)
        for name, payload, options in (
            ("works", {"id": "at"}, {"run_at": soon}),
            (
                "works",
                {"id": "plain", "kinds": [1, 2.5, None, "ü", {"a": [True]}], "big": 2**70},
                {},
            ),
            ("works", {"id": "tuple", "pair": (1, 2)}, {}),
            ("works", {"id": "third time", "works_on": 3}, {}),
            ("works", {"id": "never", "works_on": 9}, {}),
            ("works", {"id": "late", "works_on": 2}, {"run_in": 0.1}),
            ("works", {"id": "past"}, {"run_at": 5.0}),
            ("works", {"id": "naive"}, {"run_at": datetime(2030, 1, 1)}),
            ("works", {"id": "both"}, {"run_at": 5.0, "run_in": 5}),
            ("works", {"id": "not JSON", "when": soon}, {}),
            ("works", {"id": "huge", "text": "x" * 11_000_000}, {}),
            ("missing", {"id": "missing"}, {}),
            ("rejects", {"id": "rejected"}, {}),
            ("asks-again", {"id": "soon", "delay": 0.05}, {}),
            ("asks-again", {"id": "later", "delay": 2 * RECLAIM}, {}),
            ("exits", {"id": "exits"}, {}),
            ("takes-long", {"id": "long"}, {}),
            ("bad-delay", {"id": "bad delay"}, {}),
            ("parent", {"id": "parent"}, {}),
            ("unique", {"id": "lock a"}, {"run_in": 0.3}),
            ("unique", {"id": "lock b"}, {}),
            ("unique", {"id": "other a", "fails": True}, {"run_in": 0.1}),
            ("nothing", None, {}),
        ):
            try:
                sent = send(name, payload, **options)
                self.outcome.dispatched.append((sent.task_name, sent.entry_id is None))
            except Exception as error:
                self.outcome.dispatched.append((type(error).__name__, str(error)))
        many = [{"id": f"many {i}"} for i in range(3)]
        for sent in runner.dispatch_many("unique", many, run_in=0.2):
            self.outcome.dispatched.append(sent is None)
        body = encode(
            "unknown", '{"id":"u"}', id="u", enqueued_at=1.0, reservation_timeout_ns=10**9
        )
        for text in (body, '{"task_name":"works"', "[]"):
            runner.queue.add(text)

    def collect(self, runner: TaskRunner) -> Outcome:
        """What is left when nothing waits any more."""
        assert (len(runner.queue), len(runner.delayed)) == (0, 0)
        self.outcome.letters = sorted(
            (
                letter.task_name,
                repr(letter.payload),
                letter.error_type,
                letter.error,
                letter.attempts,
            )
            for letter in runner.dead_letters.list(1000)
        )
        self.outcome.actions = sorted(report.action for report in runner.errors)
        outcome = attrs.evolve(self.outcome, events=copy.deepcopy(dict(self.outcome.events)))
        for name in ("lock", "other", "many"):
            assert runner.dispatch("unique", {"id": name}).task_name == "unique"  # lock released
        return outcome


def by_worker(play: Play, server: EmbeddedServer, names: Names) -> Outcome:
    """Run by a started runner, as in production."""
    with on_server(play, server, names) as runner:
        runner.start()
        play.dispatch(runner)
        eventually(lambda: len(runner.queue) == 0 and len(runner.delayed) == 0, 30, interval=0.05)
        runner.stop()
        return play.collect(runner)


def by_drain(play: Play, server: EmbeddedServer, names: Names) -> Outcome:
    """Run in the test, from the same server."""
    with on_server(play, server, names) as runner:
        play.dispatch(runner)
        assert drain(runner, everything=True, raises=False).waiting == 0
        return play.collect(runner)


def by_eager(play: Play, server: EmbeddedServer, names: Names) -> Outcome:
    """Run in the test, from memory."""
    runner = make_runner(play, "redis://nowhere.invalid", names)
    with eager(runner, raises=False) as tasks:
        play.dispatch(runner)
        tasks.drain(everything=True)
        return play.collect(runner)


def make_runner(play: Play, url: str, names: Names) -> TaskRunner:
    return TaskRunner(
        consumer_group=names.group,
        queue=RedisStreamQueue(url, prefix=names.prefix, reclaim_delay=RECLAIM),
        registry=play.registry,
        **play.settings,
    )


class on_server:
    """A runner on the server, and nothing left of it afterwards."""

    def __init__(self, play: Play, server: EmbeddedServer, names: Names) -> None:
        self.runner = make_runner(play, server.url, names)

    def __enter__(self) -> TaskRunner:
        return self.runner

    def __exit__(self, *_: object) -> None:
        self.runner.stop()
        clean_up(self.runner)


@pytest.mark.parametrize("handler", [False, True], ids=["dead letters", "handler"])
def test_eager_mode_and_a_drain_end_as_a_worker_does(server: EmbeddedServer, handler: bool) -> None:
    """Attempts, order of hooks, errors, handler calls, dead letters and reports: a test that passes
    must mean the same as production."""
    names = Names()
    wanted = by_worker(Play(handler=handler), server, names)

    drained = by_drain(Play(handler=handler), server, names)
    in_memory = by_eager(Play(handler=handler), server, names)

    assert len(wanted.events) > 20
    assert attrs.asdict(drained) == attrs.asdict(wanted)
    assert attrs.asdict(in_memory) == attrs.asdict(wanted)


# --- a drain, beside others ---


@pytest.fixture
def play() -> Play:
    return Play(handler=False)


def test_a_retrys_wait_goes_on_from_drain_to_drain(
    server: EmbeddedServer, names: Names, play: Play
) -> None:
    """By one clock: what was due 20 s after a moved instant is not due a second after it, whether
    it is parked or, as the second, in the delayed set."""

    @task(name="slow", max_retry=3, retry_delay=0.5, registry=play.registry)
    def parked(payload: Any) -> None:
        raise ValueError

    @task(name="slower", max_retry=3, retry_delay=50, registry=play.registry)
    def postponed(payload: Any) -> None:
        raise ValueError

    with on_server(play, server, names) as runner:
        moved = MovableClock()
        runner.dispatch("slow", {"id": "a"})
        runner.dispatch("slower", {"id": "b"})

        def ran(by: float) -> list[tuple[str, int]]:
            moved.move(by)
            done = drain(runner, clock=moved, raises=False)
            return [(run.task_name, run.attempt) for run in done.runs]

        assert ran(0) == [("slow", 1), ("slower", 1)]
        assert ran(0.5) == [("slow", 2)]
        assert ran(49.5) == [("slow", 3), ("slower", 2)]
        assert ran(30) == []
        assert ran(20) == [("slower", 3)]
        assert [letter.attempts for letter in runner.dead_letters.list()] == [3, 3]


def test_a_drain_takes_what_a_dead_worker_left_and_leaves_what_a_living_one_holds(
    server: EmbeddedServer, names: Names, play: Play, client: redis.Redis
) -> None:
    """The one is due a reclaim_delay after its last sign of life; the other is being run."""
    with on_server(play, server, names) as runner:
        drain(runner)  # makes the group
        for host in ("dead", "living"):
            runner.dispatch("works", {"id": host})
            consumer = keys.consumer(names.group, names.host + host, 1)
            client.xreadgroup(names.group, consumer, {names.stream: ">"}, count=1)
        client.set(keys.presence(names.host + "living"), "someone", ex=60)

        moved = MovableClock()
        assert drain(runner, clock=moved).runs == []
        moved.move(2 * RECLAIM)
        done = drain(runner, clock=moved)

        assert [(run.payload["id"], run.attempt) for run in done.runs] == [("dead", 2)]
        assert done.waiting == 1


def test_a_drain_ahead_of_a_leading_worker_says_so(
    server: EmbeddedServer, names: Names, play: Play, client: redis.Redis
) -> None:
    """Only the leader moves delayed messages, and it goes by Redis's own clock."""
    with on_server(play, server, names) as runner:
        client.set(keys.leader(names.group), "another", ex=60)
        runner.dispatch("works", {"id": "late"}, run_in=60)

        assert drain(runner).waiting == 1
        with pytest.raises(RuntimeError, match="leads group .* stop it before a drain"):
            drain(runner, everything=True)


def test_clean_up_leaves_no_key(
    own_server: Callable[..., OwnServer], names: Names, play: Play
) -> None:
    """Whatever state the messages are in; locks included."""
    server = own_server(tcp=False)
    client = server.client()
    runner = make_runner(play, server.url, names)
    runner.dispatch("unique", {"id": "now"})
    runner.dispatch("unique", {"id": "later"}, run_in=60)
    runner.dispatch("rejects", {"id": "dead"})
    drain(runner, raises=False)
    runner.dispatch("unique", {"id": "again"})
    with runner:
        eventually(lambda: runner.is_leader, 20)
    runner.dispatch("unique", {"id": "last"})

    clean_up(runner)

    assert client.keys("*") == []
