"""The faults seen in the Go library, each as a test of the right behaviour; named after their case."""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any, cast

import pytest
import redis

from taskrunner import (
    ConfigurationError,
    InvalidTaskPayloadError,
    RedisStreamQueue,
    Retry,
    TaskExecutionError,
    TaskMessage,
    TaskRunner,
    TaskRunnerConfig,
    TaskRunnerError,
    TaskTimeoutError,
    current_task,
    keys,
    scripts,
)
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Names, OwnServer, Proxy, busy, eventually, faults, stays
from tests.support.fleet import Fleet
from tests.support.numbers import measure

"""Seconds that a busy machine may add to a promised time."""


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


def consumers(fleet: Fleet) -> dict[str, int]:
    """Pending by name of each consumer of the group."""
    try:
        rows = cast(Any, fleet.client.xinfo_consumers(fleet.names.stream, fleet.names.group))
    except redis.ResponseError:
        return {}
    return {row["name"].decode(): row["pending"] for row in rows}


def pending(fleet: Fleet) -> list[Any]:
    return cast(
        Any, fleet.client.xpending_range(fleet.names.stream, fleet.names.group, "-", "+", 1000)
    )


def read_as(fleet: Fleet, host: str, count: int, number: int = 1) -> list[bytes]:
    """Another instance takes `count` entries, and is silent from then on."""
    client, names = fleet.client, fleet.names
    with suppress(redis.ResponseError):  # it is there
        client.xgroup_create(names.stream, names.group, "0-0", mkstream=True)
    reply = cast(
        Any,
        client.xreadgroup(
            names.group, keys.consumer(names.group, host, number), {names.stream: ">"}, count
        ),
    )
    return [entry_id for entry_id, _ in reply[0][1]]


def calls(client: redis.Redis) -> Counter[str]:
    """How often each command was called on this server."""
    return Counter(
        {
            name.removeprefix("cmdstat_"): int(row["calls"])
            for name, row in cast(Any, client.info("commandstats")).items()
        }
    )


class Gate:
    """A task body that waits until the test opens the gate."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.open = threading.Event()
        self.runs = 0
        self.contexts: list[Any] = []

    def __call__(self, payload: Any = None) -> None:
        self.runs += 1
        self.contexts.append(current_task())
        self.started.set()
        assert self.open.wait(60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


# --- A. Work lost, doubled or stuck ---


def test_d05_what_waits_for_a_worker_is_renewed_too(fleet: Fleet) -> None:
    """A batch that waits in this process is held: nobody else takes it for abandoned."""

    def slow(payload: Any) -> None:
        fleet.record(payload)
        time.sleep(0.3)

    made = fleet.task(slow, name="slow")
    made.delay_many(range(20))
    for _ in range(2):
        fleet.start(num_workers=1, batch_size=20, queue={"reclaim_delay": 1})

    fleet.wait_ran(*range(20), timeout=30)
    eventually(fleet.settled)

    assert Counter(fleet.payloads()) == dict.fromkeys(range(20), 1)
    assert {run.attempt for run in fleet.runs} == {1}


def test_d06_a_task_hears_that_its_message_was_taken_over(fleet: Fleet, gate: Gate) -> None:
    """And its failure then neither retries nor buries what another runs now."""

    def fails(payload: Any) -> None:
        gate(payload)
        raise ValueError("too late")

    made = fleet.task(fails, name="fails", max_retry=1)
    runner = fleet.start(queue={"reclaim_delay": 3})
    sent = made.delay(1)
    assert gate.started.wait(10)
    thief = keys.consumer(fleet.names.group, "thief", 1)
    fleet.client.xclaim(fleet.names.stream, fleet.names.group, thief, 0, [cast(str, sent.entry_id)])

    eventually(lambda: gate.contexts[0].lost, 10)
    gate.open.set()
    eventually(lambda: any(one.action == "delivery_lost" for one in runner.errors), 10)
    assert runner.stop(10)

    (row,) = pending(fleet)
    assert (row["consumer"].decode(), row["times_delivered"]) == (thief, 2)
    assert len(fleet.producer.dead_letters) == 0
    assert fleet.members() == []


def test_d06_a_late_success_ends_the_message(fleet: Fleet, gate: Gate) -> None:
    """The work is done: whoever took it over need not do it again."""
    made = fleet.task(gate, name="gate")
    fleet.start(queue={"reclaim_delay": 3})
    sent = made.delay(1)
    assert gate.started.wait(10)
    thief = keys.consumer(fleet.names.group, "thief", 1)
    fleet.client.xclaim(fleet.names.stream, fleet.names.group, thief, 0, [cast(str, sent.entry_id)])
    eventually(lambda: gate.contexts[0].lost, 10)

    gate.open.set()

    eventually(fleet.settled)
    assert gate.runs == 1


@pytest.mark.parametrize("reservation_timeout", [None, 30, 0.05])
def test_d06_a_task_longer_than_reclaim_delay_runs_once(
    fleet: Fleet, reservation_timeout: float | None
) -> None:
    """Whatever heartbeat it asks for, it is renewed in time (BL-13)."""

    def long(payload: Any) -> None:
        fleet.record(payload)
        time.sleep(2.5)

    made = fleet.task(long, name="long", reservation_timeout=reservation_timeout)
    for _ in range(2):
        fleet.start(queue={"reclaim_delay": 1})
    made.delay(1)

    fleet.wait_ran(1)
    eventually(fleet.settled)

    assert fleet.payloads() == [1]


def test_d07_a_dead_consumers_messages_are_delivered_before_it_is_removed(fleet: Fleet) -> None:
    """XGROUP DELCONSUMER drops pending entries with the consumer: nobody would ever get them."""
    fleet.note.delay_many(range(3))
    assert len(read_as(fleet, "dead", 3)) == 3
    dead = keys.consumer(fleet.names.group, "dead", 1)

    runner = fleet.start(
        queue={"reclaim_delay": 1}, timings={"consumer_idle": 1.5, "janitor": 0.2, "poll": 0.5}
    )

    fleet.wait_ran(0, 1, 2)
    eventually(lambda: dead not in consumers(fleet), 15)
    assert Counter(fleet.payloads()) == dict.fromkeys(range(3), 1)
    assert any(name.startswith(f"{fleet.names.group}_{runner.host}_") for name in consumers(fleet))


def test_d07_a_clean_stop_leaves_no_consumer(fleet: Fleet) -> None:
    """Names would pile up with every deploy (BL-10)."""
    fleet.note.delay_many(range(50))
    for _ in range(5):
        runner = fleet.start(num_fetchers=2)
        eventually(lambda runner=runner: len(consumers(fleet)) >= 3)
        assert runner.stop(10)

    assert {name for name in consumers(fleet) if not name.endswith("_0")} == set()
    assert fleet.client.keys(f"taskrunner:replication:{fleet.names.host}*") == []


@pytest.mark.parametrize("hook", [None, "hangs"])
def test_d08_errors_that_nobody_reads_hold_up_nothing(
    fleet: Fleet, gate: Gate, hook: str | None
) -> None:
    """Neither the tasks behind the failing ones nor the stop; also where the hook hangs."""

    def fails(payload: Any) -> None:
        raise ValueError(payload)

    failing = fleet.task(fails, name="fails")
    failing.delay_many(range(4))
    fleet.note.delay_many(range(10))
    runner = fleet.start(
        num_workers=2, on_error=(lambda report: gate.open.wait(60)) if hook else None
    )

    fleet.wait_ran(*range(10))
    eventually(fleet.settled)
    assert len([one for one in runner.errors if one.action == "task_failed"]) == 4
    started = monotonic()
    assert runner.stop(10)
    assert monotonic() - started < 1 + busy()


def test_d08_the_hook_hears_of_every_failure(fleet: Fleet) -> None:
    """In order, with the task's name and the message's id."""
    heard: list[Any] = []

    def fails(payload: Any) -> None:
        raise ValueError(payload)

    failing = fleet.task(fails, name="fails")
    runner = fleet.start(on_error=heard.append)
    ids = [sent and sent.id for sent in failing.delay_many(range(5))]

    eventually(lambda: len([one for one in heard if one.action == "task_failed"]) == 5)

    failed = [one for one in heard if one.action == "task_failed"]
    assert {one.task_name for one in failed} == {"fails"}
    assert sorted(one.message_id for one in failed) == sorted(cast(list[str], ids))
    assert all(isinstance(one.error, TaskExecutionError) for one in failed)
    assert {str(one.error.__cause__) for one in failed} == {"0", "1", "2", "3", "4"}
    assert runner.stop(10)


BAD: list[dict[bytes, bytes]] = [
    {b"other": b"x"},
    {b"Payload": b'{"task_name":"note","payload":1}'},
    {b"payload": b""},
    {b"payload": b"\xff\xfe\x00"},
    {b"payload": b'{"task_name":"note","payload":'},
    {b"payload": b"null"},
    {b"payload": b"[1,2]"},
    {b"payload": b'"text"'},
    {b"payload": b"17"},
    {b"payload": b'{"payload":1}'},
    {b"payload": b'{"task_name":5,"payload":1}'},
    {b"payload": b'{"task_name":"","payload":1}'},
    {b"payload": b'{"task_name":"note","payload":1,"reservation_timeout":1.5}'},
    {b"payload": b'{"task_name":"note","payload":NaN}'},
    {b"payload": b'{"task_name":"note","payload":1,"attempt":"many"}'},
    {b"payload": b'{"task_name":"note","payload":1,"attempt":-5}'},
    {b"payload": b'{"task_name":"note","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}"},
    {b"payload": b'{"task_name":"note","payload":' + b"9" * 5000 + b"}"},
]


def test_d09_a_malformed_entry_goes_alone_to_the_dead_letters(fleet: Fleet) -> None:
    """Its neighbours in the batch run once; the entry is kept with its reason, and acknowledged."""
    for number, fields in enumerate(BAD):
        fleet.note.delay(number)
        fleet.client.xadd(fleet.names.stream, cast(Any, fields))
    fleet.note.delay("last")
    runner = fleet.start(queue={"reclaim_delay": 1})

    fleet.wait_ran(*range(len(BAD)), "last")
    eventually(fleet.settled)

    assert Counter(fleet.payloads()) == dict.fromkeys([*range(len(BAD)), "last"], 1)
    letters = runner.dead_letters.list()
    assert len(letters) == len(BAD)
    assert {letter.error_type for letter in letters} == {"InvalidTaskPayloadError"}
    assert all(letter.error for letter in letters)
    assert len([one for one in runner.errors if one.action == "task_failed"]) == len(BAD)
    stays(lambda: len(runner.dead_letters) == len(BAD), 1.5)


def test_d09_the_failed_task_handler_gets_it_as_it_came(fleet: Fleet) -> None:
    """With what can be known of it, and the error that says what is wrong."""
    failed: list[tuple[TaskMessage, TaskRunnerError]] = []
    for fields in BAD:
        fleet.client.xadd(fleet.names.stream, cast(Any, fields))
    fleet.start(failed_task_handler=lambda message, error: failed.append((message, error)))

    eventually(lambda: len(failed) == len(BAD))
    eventually(fleet.settled)

    assert {type(error) for _, error in failed} == {InvalidTaskPayloadError}
    assert len(fleet.producer.dead_letters) == 0
    raws = {message.raw for message, _ in failed}
    assert '{"task_name":5,"payload":1}' in raws
    assert "[1,2]" in raws


def test_d10_without_a_handler_an_exhausted_task_is_a_dead_letter(fleet: Fleet) -> None:
    """Delivered as often as max_retry says, and then no more."""
    attempts: list[int] = []

    def fails(payload: Any) -> None:
        attempts.append(current_task().attempt)
        raise ValueError("always")

    made = fleet.task(fails, name="fails", max_retry=3, retry_delay=0.1)
    runner = fleet.start(queue={"reclaim_delay": 0.5})
    made.delay({"a": 1})

    eventually(lambda: len(runner.dead_letters) == 1)

    assert attempts == [1, 2, 3]
    assert fleet.settled()
    stays(lambda: len(attempts) == 3 and len(runner.dead_letters) == 1, 1.5)
    (letter,) = runner.dead_letters.list()
    assert (letter.task_name, letter.payload, letter.attempts) == ("fails", {"a": 1}, 3)


def test_d11_all_that_is_stuck_is_taken_in_the_first_round(fleet: Fleet) -> None:
    """Not one batch per reclaim delay: ten thousand messages of a crashed worker took hours."""
    fleet.note.delay_many(range(50))
    assert len(read_as(fleet, "dead", 50)) == 50

    fleet.start(batch_size=10, num_workers=2, queue={"reclaim_delay": 2})

    runs = fleet.wait_ran(*range(50), timeout=20)
    eventually(fleet.settled)
    assert max(run.at for run in runs) - min(run.at for run in runs) < 1 + busy()
    assert Counter(fleet.payloads()) == dict.fromkeys(range(50), 1)


def test_d11_a_retry_comes_after_its_own_delay(fleet: Fleet) -> None:
    """Whatever reclaim_delay is."""

    def flaky(payload: Any) -> None:
        fleet.record(payload)
        if current_task().attempt == 1:
            raise ValueError("first")

    made = fleet.task(flaky, name="flaky", max_retry=2, retry_delay=0.3)
    fleet.start(queue={"reclaim_delay": 30})
    made.delay(1)

    eventually(lambda: len(fleet.runs) == 2)

    first, second = fleet.runs
    assert 0.29 <= second.at - first.at < 0.3 + busy()
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.id == second.id
    eventually(fleet.settled)


@pytest.mark.parametrize("version", ["6.0.16", None])
def test_d12_a_dead_message_behind_living_ones_is_found(fleet: Fleet, version: str | None) -> None:
    """Messages that others keep alive fill the first page of what is pending; the search goes on
    behind them, also on servers that can't filter by idle time."""
    fleet.note.delay_many(range(151))
    living = read_as(fleet, "living", 150)
    (dead,) = read_as(fleet, "dead", 1)
    name = keys.consumer(fleet.names.group, "living", 1)
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.2):
            fleet.client.xclaim(
                fleet.names.stream, fleet.names.group, name, 0, cast(Any, living), justid=True
            )

    heartbeat = threading.Thread(target=renew)
    heartbeat.start()
    try:
        fleet.start(num_workers=2, queue={"reclaim_delay": 1.5, "redis_version": version})
        fleet.wait_ran(150, timeout=10)
        stays(lambda: fleet.payloads() == [150], 1)
    finally:
        stop.set()
        heartbeat.join()
    assert dead not in {row["message_id"] for row in pending(fleet)}


@pytest.mark.parametrize("fault", ["cut_before", "cut_after"])
@pytest.mark.parametrize("unique", [False, True], ids=["plain", "unique"])
def test_d13_an_ack_that_meets_a_fault_is_made_good(
    make_proxy: Callable[[str], Proxy],
    fleet: Fleet,
    server: EmbeddedServer,
    fault: Any,
    unique: bool,
) -> None:
    """One step, sent again until it is accepted: nothing stays in either list, nothing runs twice."""
    made = fleet.task(name="t", unique_for=60 if unique else None)
    proxy = make_proxy(server.tcp_url)
    runner = fleet.start(url=proxy.url, queue={"reclaim_delay": 3})
    made.delay("first")  # the server knows the step from now on
    fleet.wait_ran("first")
    eventually(fleet.settled)
    step = scripts.load("ack_unique" if unique else "ack")
    rule = proxy.on("EVALSHA", fault, containing=step.sha, times=2)

    made.delay("second")

    fleet.wait_ran("second")
    assert rule.hit.wait(10)
    eventually(fleet.settled)
    assert fleet.payloads() == ["first", "second"]
    assert fleet.locks("t") == {}
    assert [one.action for one in runner.errors] == ["service_error"] * len(runner.errors)
    assert len(runner.errors) <= 2


def test_d13_two_groups_on_one_stream_get_everything_each(fleet: Fleet) -> None:
    """And when both are past it, the stream is emptied."""
    names = fleet.names
    seen: dict[str, list[Any]] = {"a": [], "b": []}
    for which, payloads in seen.items():
        fleet.start(
            consumer_group=f"{names.group}-{which}",
            before_task=lambda context, to=payloads: to.append(context.message.payload),
            timings={"janitor": 0.5},
        )
    eventually(lambda: len(cast(Any, fleet.client.xinfo_groups(names.stream))) == 2)
    fleet.note.delay_many(range(200))

    for payloads in seen.values():
        eventually(lambda payloads=payloads: len(payloads) >= 200, 20)
    eventually(lambda: fleet.client.xlen(names.stream) == 0, 15)

    assert sorted(seen["a"]) == sorted(seen["b"]) == list(range(200))


def test_d14_a_failed_start_leaves_nothing_running(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All or nothing: what was started is stopped, and the next start works."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "taskrunner-janitor":
            time.sleep(0.5)  # the readers have begun to wait in Redis
            raise RuntimeError("can't start new thread")
        start(thread)

    runner = fleet.make(block_duration=30)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            runner.start()

    assert runner.state == "stopped"
    eventually(
        lambda: not [t.name for t in threading.enumerate() if t.name.startswith("taskrunner-")], 5
    )
    fleet.note.delay(1)
    stays(lambda: fleet.runs == [], 0.5)
    runner.start()
    fleet.wait_ran(1)


# --- D. Heartbeat, stop, errors ---


@pytest.fixture
def lone(own_server: Callable[..., OwnServer], names: Names) -> Iterator[Fleet]:
    """A fleet with a server of its own, so that commands can be counted."""
    with Fleet(own_server().url, names) as made:
        yield made


def go_entry(task_name: str, payload: Any, **fields: Any) -> str:
    """A message as Go writes one that asks for no heartbeat of its own."""
    return json.dumps(
        {
            "unique": False,
            "unique_for": 0,
            "unique_key": "",
            "unique_lock_value": "",
            "reservation_timeout": 0,
            "task_name": task_name,
            "payload": payload,
            **fields,
        }
    )


@pytest.mark.parametrize("nanoseconds", [0, 1, -1, 2**62])
def test_d30_a_heartbeat_of_nothing_does_not_spin(
    lone: Fleet, gate: Gate, nanoseconds: int
) -> None:
    """A third of reclaim_delay where none is asked for, and never more than some in a second."""
    lone.task(gate, name="gate")
    lone.start(queue={"reclaim_delay": 3})
    lone.producer.queue.add(go_entry("gate", 1, reservation_timeout=nanoseconds))
    assert gate.started.wait(10)

    before = calls(lone.client)
    seconds = measure(2)
    made = calls(lone.client) - before

    gate.open.set()
    renewals = seconds * (1 if nanoseconds in (0, 2**62, -1) else 110)
    assert made["xclaim"] <= renewals + 2
    assert made.total() < 30 * seconds + 4 * renewals, made


@pytest.mark.parametrize("how", ["purged", "deleted", "group lost", "flushed"])
def test_d30_a_heartbeat_does_not_spin_for_what_is_gone(lone: Fleet, gate: Gate, how: str) -> None:
    """Somebody removed the message while its task runs: there is nothing to renew, and no reason to
    ask a hundred times a second until the task ends."""
    made = lone.task(gate, name="gate")
    lone.start(queue={"reclaim_delay": 1.5})
    sent = made.delay(1)
    assert gate.started.wait(10)

    if how == "purged":
        assert lone.producer.queue.purge() == 1
    elif how == "deleted":
        assert lone.client.xdel(lone.names.stream, cast(str, sent.entry_id)) == 1
    elif how == "group lost":
        lone.client.delete(lone.names.stream)
    else:
        lone.client.flushall()
    faults.down_for(2)  # longer than reclaim_delay
    before = calls(lone.client)
    seconds = measure(2)
    asked = calls(lone.client) - before

    assert asked.total() < 50 * seconds, asked
    gate.open.set()
    eventually(lone.settled)


@pytest.mark.parametrize("how", ["purged", "deleted", "flushed"])
def test_d30_others_are_retried_and_reclaimed_beside_what_is_gone(
    lone: Fleet, gate: Gate, how: str
) -> None:
    """One long task whose message was removed must not stop the whole instance from retrying."""

    def flaky(payload: Any) -> None:
        lone.record(payload)
        if current_task().attempt == 1:
            raise ValueError("first")

    flaky_task = lone.task(flaky, name="flaky", max_retry=2, retry_delay=0.2)
    gate_task = lone.task(gate, name="gate")
    lone.start(queue={"reclaim_delay": 1})
    sent = gate_task.delay(1)
    assert gate.started.wait(10)
    if how == "purged":
        assert lone.producer.queue.purge() == 1
    elif how == "deleted":
        assert lone.client.xdel(lone.names.stream, cast(str, sent.entry_id)) == 1
    else:
        lone.client.flushall()
    faults.down_for(1.2)  # longer than reclaim_delay

    flaky_task.delay("fresh")
    eventually(lambda: len(lone.runs) == 2, 5)
    lone.note.delay("stranded")
    lone.client.xgroup_createconsumer(lone.names.stream, lone.names.group, "x")

    eventually(lambda: "stranded" in lone.payloads(), 5)
    assert gate.runs == 1


def test_d31_a_stop_hands_back_what_was_not_started(fleet: Fleet) -> None:
    """It takes as long as the running task, not as the batch; others run the rest at once, and it
    cost no attempt."""

    def slow(payload: Any) -> None:
        fleet.record(payload)
        time.sleep(0.3)

    made = fleet.task(slow, name="slow")
    leaving = fleet.start(num_workers=1, batch_size=20)
    made.delay_many(range(20))
    eventually(lambda: len(fleet.runs) == 1)
    fleet.start(num_workers=20, batch_size=20)

    started = monotonic()
    assert leaving.stop(10)
    assert monotonic() - started < 0.3 + 0.3 + busy()
    stopped = time.time()

    fleet.wait_ran(*range(20), timeout=10)
    eventually(fleet.settled)
    assert max(run.at for run in fleet.runs) - stopped < 1 + busy()
    assert Counter(fleet.payloads()) == dict.fromkeys(range(20), 1)
    assert {run.attempt for run in fleet.runs} == {1}


@pytest.mark.parametrize("served", [False, True], ids=["at once", "after work"])
def test_d31_an_idle_stop_takes_a_moment(fleet: Fleet, served: bool) -> None:
    """Not the rest of a blocking read. No thread and no connection is left."""
    runner = fleet.start(block_duration=30, num_fetchers=3)
    if served:
        fleet.note.delay_many(range(100))
        fleet.wait_ran(*range(100))
        eventually(fleet.settled)

    started = monotonic()
    assert runner.stop()

    assert monotonic() - started < 0.3 + busy() / 2
    assert runner.state == "stopped"
    eventually(
        lambda: not [t.name for t in threading.enumerate() if t.name.startswith("taskrunner-")], 1
    )


def test_d31_a_running_task_hears_of_the_stop(fleet: Fleet) -> None:
    """A long task may end early; the stop waits for it, no longer."""

    def until_stopping(payload: Any) -> None:
        fleet.record(payload)
        while not current_task().stopping:
            time.sleep(0.01)

    made = fleet.task(until_stopping, name="until-stopping")
    runner = fleet.start()
    made.delay(1)
    fleet.wait_ran(1)

    started = monotonic()
    assert runner.stop(10)

    assert monotonic() - started < 0.5 + busy()
    assert fleet.settled()


def test_d31_the_stop_ends_in_time_and_the_task_is_settled_later(fleet: Fleet, gate: Gate) -> None:
    """In a living process it goes on, renewed, until it ends; then the runner is stopped."""
    made = fleet.task(gate, name="gate")
    runner = fleet.start(queue={"reclaim_delay": 1})
    made.delay(1)
    assert gate.started.wait(10)

    started = monotonic()
    assert not runner.stop(0.5)
    assert 0.45 < monotonic() - started < 0.5 + 1 + busy()
    assert runner.state == "stopping"
    stays(lambda: pending(fleet)[0]["time_since_delivered"] < 1000, 2)
    gate.open.set()

    eventually(lambda: runner.state == "stopped")
    assert fleet.settled()
    assert gate.runs == 1
    runner.start()
    fleet.note.delay("again")
    fleet.wait_ran("again")


class Own(TaskRunnerError):
    """An application's error, with a constructor of its own."""

    def __init__(self, first: str, *, second: str) -> None:
        super().__init__(first, second)


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


ODD: list[BaseException] = [
    ValueError("bad"),
    SystemExit(3),
    KeyboardInterrupt(),
    Unspeakable(),
    Own("a", second="b"),
    BaseExceptionGroup("several", [SystemExit(1)]),
]


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("hook", ["before_task", "after_task", "on_error"])
def test_d32_a_raising_hook_takes_nothing_down(
    fleet: Fleet, hook: str, error: BaseException
) -> None:
    """Its error is told; each task runs once, as if there were no hook."""
    called: list[Any] = []

    def raising(*args: Any) -> None:
        called.append(args)
        raise error

    def fails(payload: Any) -> None:
        raise ValueError("told to on_error")

    failing = fleet.task(fails, name="fails")
    runner = fleet.start(num_workers=2, queue={"reclaim_delay": 1}, **{hook: raising})
    failing.delay_many(range(3))
    fleet.note.delay_many(range(20))

    fleet.wait_ran(*range(20))
    eventually(fleet.settled)
    eventually(lambda: len(called) >= (23 if hook != "on_error" else 3))

    assert Counter(fleet.payloads()) == dict.fromkeys(range(20), 1)
    assert len(runner.dead_letters) == 3
    assert runner.stop(10)


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_d32_a_raising_handler_is_asked_again(fleet: Fleet, error: BaseException) -> None:
    """After reclaim_delay, the handler alone: the code failed as often as it may."""
    asked: list[float] = []

    def handler(message: TaskMessage, failure: TaskRunnerError) -> None:
        asked.append(time.time())
        if len(asked) < 3:
            raise error

    def fails(payload: Any) -> None:
        fleet.record(payload)
        raise ValueError("always")

    made = fleet.task(fails, name="fails", max_retry=1)
    runner = fleet.start(failed_task_handler=handler, queue={"reclaim_delay": 0.5})
    made.delay(1)

    eventually(lambda: len(asked) == 3)
    eventually(fleet.settled)

    assert fleet.payloads() == [1]
    assert min(b - a for a, b in itertools.pairwise(asked)) > 0.45
    assert len(runner.dead_letters) == 0
    assert runner.stop(10)


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_d32_a_raising_retry_delay_falls_back_to_the_default(
    fleet: Fleet, error: BaseException
) -> None:
    """The task is retried all the same, and the fault is told."""

    def no_delay(attempt: int, failure: BaseException) -> float:
        raise error

    def flaky(payload: Any) -> None:
        fleet.record(payload)
        if current_task().attempt == 1:
            raise ValueError("first")

    made = fleet.task(flaky, name="flaky", max_retry=2, retry_delay=no_delay)
    runner = fleet.start()
    made.delay(1)

    eventually(lambda: len(fleet.runs) == 2)
    eventually(fleet.settled)
    assert any(one.action == "service_error" for one in runner.errors)
    assert runner.stop(10)


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_d32_a_task_may_raise_anything(fleet: Fleet, error: BaseException) -> None:
    """It is one failed attempt; the worker, its slot and the others' messages are unharmed."""

    def odd(payload: Any) -> None:
        fleet.record(payload)
        raise error

    made = fleet.task(odd, name="odd", max_retry=2, retry_delay=0.05)
    runner = fleet.start(num_workers=1)
    made.delay("odd")
    fleet.note.delay_many(range(20))

    fleet.wait_ran(*range(20))
    eventually(lambda: len(runner.dead_letters) == 1)
    assert fleet.payloads().count("odd") == 2
    (letter,) = runner.dead_letters.list()
    assert letter.error_type == type(error).__name__
    assert letter.attempts == 2
    eventually(fleet.settled)


def test_d32_tasks_may_be_registered_while_it_runs(fleet: Fleet) -> None:
    """A live map is read by workers and statistics meanwhile."""
    runner = fleet.start(long_queue_threshold=0.02)
    for number in range(1000):
        made = fleet.task(fleet.record_of(), name=f"late-{number}")
        runner.register(made)
        made.delay(number)

    fleet.wait_ran(*range(1000), timeout=20)
    eventually(fleet.settled)
    assert [one for one in runner.errors if one.action != "service_error"] == []


def test_d32_nothing_goes_wrong_after_a_stop(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """The server ends beside the runner, before it and after it; threads that die of an error would
    fail this test."""
    server = own_server()
    with Fleet(server.url, names) as fleet:
        for _ in range(3):
            runner = fleet.start(timings={"poll": 0.05, "lease": 0.2})
            fleet.note.delay(1)
            eventually(lambda: fleet.runs)
            fleet.runs.clear()
            server.kill()
            runner.stop(1)
            server.start()
            assert runner.state == "stopped"


@pytest.mark.parametrize("num_fetchers", [1, 10])
def test_d33_an_outage_is_told_once_and_work_resumes_at_once(
    own_server: Callable[..., OwnServer], names: Names, num_fetchers: int
) -> None:
    """Five seconds without a server: few tries, one line, and a second after its return all is as
    before."""
    server = own_server(appendonly=True)
    with Fleet(server.tcp_url, names) as fleet:
        runner = fleet.start(num_fetchers=num_fetchers)
        fleet.note.delay("before")
        fleet.wait_ran("before")
        eventually(fleet.settled)
        runner.errors.clear()

        with faults.killed(server):
            cpu = time.process_time()
            faults.down_for(5)
            cpu = time.process_time() - cpu
        back = time.time()
        eventually(lambda: fleet.note.delay("after"), 5)

        (run,) = fleet.wait_ran("after")
        eventually(fleet.settled)
        assert run.at - back < 1 + busy() / 2
        assert len(runner.errors) == 1, list(runner.errors)
        assert cpu < 1.5


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError(), "ValueError"),
        (KeyError(None), "KeyError: None"),
        (StopIteration(7), "StopIteration: 7"),
        (AssertionError(), "AssertionError"),
        (Retry(), "run again"),
    ],
    ids=["ValueError", "KeyError", "StopIteration", "AssertionError", "Retry"],
)
def test_d34_a_failure_always_says_what_it_was(
    fleet: Fleet, error: BaseException, text: str
) -> None:
    """Also an error without a text: "Panic: <nil>" helps nobody."""
    failed: list[TaskRunnerError] = []

    def fails(payload: Any) -> None:
        raise error

    made = fleet.task(fails, name="fails")
    fleet.start(failed_task_handler=lambda message, failure: failed.append(failure))
    made.delay(1)

    eventually(lambda: failed)
    assert isinstance(failed[0], TaskExecutionError)
    assert failed[0].task_name == "fails"
    assert failed[0].__cause__ is error
    assert text in str(failed[0])


def test_d35_a_task_may_have_a_time_limit(fleet: Fleet) -> None:
    """A hung one does not hold its worker and its message for ever."""
    failed: list[tuple[TaskMessage, TaskRunnerError]] = []

    def hangs(payload: Any) -> None:
        fleet.record(payload)
        while True:
            time.sleep(0.01)

    made = fleet.task(hangs, name="hangs", time_limit=0.3)
    fleet.start(
        num_workers=1,
        failed_task_handler=lambda message, error: failed.append((message, error)),
    )
    made.delay("hang")
    fleet.note.delay("behind")

    (run,) = fleet.wait_ran("behind")
    eventually(lambda: failed)

    assert 0.3 <= run.at - fleet.runs[0].at < 0.3 + busy()
    assert isinstance(failed[0][1], TaskTimeoutError)
    eventually(fleet.settled)


@pytest.mark.parametrize("name", ["num_fetchers", "num_workers", "batch_size"])
def test_d36_none_of_the_counts_may_be_zero(name: str) -> None:
    """0 meant "as many as a batch" here and "without limit" there: it is refused."""
    with pytest.raises(ConfigurationError, match=f"{name}=0 is below 1"):
        TaskRunnerConfig(consumer_group="g", **{name: 0})
    assert TaskRunnerConfig(consumer_group="g").num_fetchers == 1


@pytest.mark.parametrize("num_fetchers", [1, 3])
def test_d36_idle_fetchers_use_no_processor(fleet: Fleet, num_fetchers: int) -> None:
    """After work as before: however many there are, they wait in Redis or for room."""
    fleet.start(num_fetchers=num_fetchers, batch_size=10, block_duration=2)
    fleet.note.delay_many(range(3000))
    eventually(fleet.settled, 30)
    faults.down_for(0.5)

    cpu = time.process_time()
    seconds = measure(2)

    assert (time.process_time() - cpu) / seconds < 0.2


def test_d36_each_message_is_fetched_once_by_several_fetchers(fleet: Fleet) -> None:
    """They share the room of one pool."""
    fleet.note.delay_many(range(2000))
    fleet.start(num_fetchers=5, num_workers=3, batch_size=20)

    fleet.wait_ran(*range(2000), timeout=30)
    eventually(fleet.settled)
    assert Counter(fleet.payloads()) == dict.fromkeys(range(2000), 1)


@pytest.mark.parametrize("command", ["HINCRBY", "LPUSH"])
def test_d40_a_slow_write_of_metrics_stalls_no_worker(
    make_proxy: Callable[[str], Proxy], fleet: Fleet, server: EmbeddedServer, command: str
) -> None:
    """Nobody waits for figures; the stop, which writes the last ones, no longer than for anything
    else that Redis does."""
    proxy = make_proxy(server.tcp_url)
    runner = fleet.start(url=proxy.url, num_workers=1)
    rule = proxy.on(command, "hold_request", times=None)
    fleet.note.delay(0)
    assert rule.hit.wait(10)

    for number in range(1, 11):
        sent = time.time()
        fleet.note.delay(number)
        (run,) = fleet.wait_ran(number)
        assert run.at - sent < 0.3 + busy() / 2
    eventually(fleet.settled)

    started = monotonic()
    assert runner.stop()
    assert monotonic() - started < runner.config.shutdown_timeout + 2 + busy() / 2


def test_d42_the_order_of_the_options_changes_nothing(fleet: Fleet) -> None:
    """One rule for the name of the stream, whatever was given, with colons too."""
    prefix = f"{fleet.names.prefix}:a:b"
    runner = TaskRunner(
        consumer_group=fleet.names.group,
        host=fleet.names.host,
        queue=RedisStreamQueue(fleet.url, queue="jobs", prefix=prefix),
        registry=fleet.registry,
    )
    runner.dispatch("note", 1)

    assert runner.queue.stream == f"{prefix}:jobs"
    assert fleet.client.xlen(f"{prefix}:jobs") == 1
    with runner:
        fleet.wait_ran(1)


def test_d43_instances_on_one_host_have_names_of_their_own(fleet: Fleet) -> None:
    """Two that share a consumer name take each other's deliveries for their own."""
    host = fleet.names.host
    lasting = {"presence": 15}  # a busy machine may renew late; nothing here waits for a key to end
    runners = [fleet.start(host=host, num_workers=1, timings=lasting) for _ in range(3)]
    eventually(lambda: {runner.host for runner in runners} == {host, f"{host}-2", f"{host}-3"})
    fleet.note.delay_many(range(300))

    fleet.wait_ran(*range(300))
    eventually(fleet.settled)

    assert Counter(fleet.payloads()) == dict.fromkeys(range(300), 1)
    eventually(lambda: len(consumers(fleet)) >= 6)
    assert fleet.producer.replications() == 3
    first = next(runner for runner in runners if runner.host == host)  # whichever was quickest
    assert first.stop(10)
    assert fleet.client.exists(keys.presence(host)) == 0
    assert fleet.client.exists(keys.presence(f"{host}-2")) == 1
    following = fleet.start(host=host, timings=lasting)
    value = following.instance_id.encode()
    eventually(lambda: fleet.client.get(keys.presence(host)) == value)
