"""Unique jobs: one lock for one message, from the call that takes it to the step that ends it."""

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import pytest
import redis

from taskrunner import (
    InvalidTaskPayloadError,
    Registry,
    Reject,
    Retry,
    TaskAlreadyDispatchedError,
    TaskRunner,
    current_task,
    task,
)
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.message import decode
from taskrunner.settler import lock_of
from taskrunner.store.delayed_set import SCHEDULE
from taskrunner.store.group import Park
from tests.support import Names, OwnServer, Proxy, eventually, faults, stays
from tests.support.fleet import Fleet


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


@pytest.fixture
def one(names: Names) -> str:
    """A task name of this test alone: locks are named by the task, not by the group."""
    return f"one-{names.group}"


def key_of(name: str) -> str:
    return f"taskrunner:unique:{name}"


def token_of(body: bytes) -> bytes:
    return str(json.loads(body)["unique_lock_value"]).encode()


def held_count(fleet: Fleet) -> int:
    try:
        pending: Any = fleet.client.xpending(fleet.names.stream, fleet.names.group)
    except redis.ResponseError:
        return 0
    return int(pending["pending"])


# --- the lock ---


def test_a_second_message_is_refused_until_the_first_has_ended(fleet: Fleet, one: str) -> None:
    """While it waits and while it runs; nothing is added, and the error says which lock."""
    gate = threading.Event()
    unique = fleet.task(lambda payload: gate.wait(20), name=one, unique_for=60)
    unique.delay(1)
    with pytest.raises(TaskAlreadyDispatchedError, match=key_of(one)):
        unique.delay(2)
    fleet.start()
    eventually(lambda: held_count(fleet) == 1)
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay(3)
    assert len(fleet.bodies()) == 1
    gate.set()
    eventually(fleet.settled)
    assert fleet.locks(one) == {}
    unique.delay(4)


def test_the_lock_holds_the_message_s_token_and_its_life(fleet: Fleet, one: str) -> None:
    """Lock and message carry the same names and values as Go's, unique_for in whole seconds."""
    unique = fleet.task(name=one, unique_for=41.2, unique_key=lambda payload: payload["to"])
    sent = unique.delay({"to": "a:b é"})
    fields = json.loads(fleet.bodies()[0])
    assert fields["unique"] is True
    assert fields["unique_for"] == 42
    assert type(fields["unique_for"]) is int
    assert fields["unique_key"] == f"{one}:a:b é"
    key = key_of(f"{one}:a:b é")
    assert fleet.client.get(key) == fields["unique_lock_value"].encode()
    assert 41_000 < fleet.client.pttl(key) <= 42_000
    assert fields["id"] == sent.id


def test_every_message_has_a_token_of_its_own(fleet: Fleet, one: str) -> None:
    """16 random bytes in base64, as Go's."""
    unique = fleet.task(name=one, unique_for=60, unique_key=str)
    unique.delay_many(range(200))
    tokens = {token_of(body) for body in fleet.bodies()}
    assert len(tokens) == 200
    assert {len(token) for token in tokens} == {24}


@pytest.mark.parametrize(
    ("unique_key", "expected"),
    [
        (None, ""),
        (lambda payload: "", ":{name}"),  # Go takes the task's name where the key is empty
        (lambda payload: "k", ":k"),
        (lambda payload: "ü 🚀\n", ":ü 🚀\n"),
        ("payload", ":" + sha256(b'{"a":1,"b":[2,null]}').hexdigest()),
    ],
    ids=["none", "empty", "text", "unicode", "payload"],
)
def test_the_lock_is_named_by_the_task_and_its_key(
    fleet: Fleet, one: str, unique_key: Any, expected: str
) -> None:
    """Without a key function by the task alone; it is released under the name it was taken (D15)."""
    unique = fleet.task(name=one, unique_for=60, unique_key=unique_key)
    unique.delay({"b": [2, None], "a": 1})
    assert list(fleet.locks(one)) == [key_of(one + expected.format(name=one))]
    fleet.start()
    eventually(fleet.settled)
    assert fleet.locks(one) == {}
    unique.delay({"b": [2, None], "a": 1})


def test_delay_many_puts_none_in_the_places_of_duplicates(fleet: Fleet, one: str) -> None:
    """Also of those within one call; the others are there, in order."""
    unique = fleet.task(name=one, unique_for=60, unique_key=str)
    unique.delay("b")
    sent = unique.delay_many(["a", "b", "c", "a", "d"])
    assert [each is not None for each in sent] == [True, False, True, False, True]
    payloads = [json.loads(body)["payload"] for body in fleet.bodies()]
    assert payloads == ["b", "a", "c", "d"]
    later = unique.delay_many(["a", "e", "e"], run_in=60)
    assert [each is not None for each in later] == [False, True, False]
    assert len(fleet.members()) == 1


@pytest.mark.parametrize(
    ("unique_key", "error"),
    [
        (lambda payload: 1 / 0, ZeroDivisionError),
        (lambda payload: 7, TypeError),
        (lambda payload: "x" * 1_000_000, ValueError),
        (lambda payload: "\ud800", ValueError),
    ],
    ids=["raises", "no-text", "too-long", "no-unicode"],
)
def test_a_key_function_that_fails_raises_to_the_caller(
    fleet: Fleet, one: str, unique_key: Any, error: type[Exception]
) -> None:
    """Nothing is sent, no lock stays (D18)."""
    unique = fleet.task(name=one, unique_for=60, unique_key=unique_key)
    for options in ({}, {"run_in": 60}):
        with pytest.raises(error):
            unique.delay(1, **options)
    assert fleet.locks(one) == {}
    assert fleet.bodies() == [] == fleet.members()


def test_a_payload_that_is_not_json_takes_no_lock(fleet: Fleet, one: str) -> None:
    """The good one after it is accepted (D18, BL-21 d)."""
    unique = fleet.task(name=one, unique_for=60)
    for bad in ({1, 2}, float("nan"), object(), {"a": b"x"}):
        with pytest.raises(InvalidTaskPayloadError):
            unique.delay(bad)
    assert fleet.locks(one) == {}
    unique.delay(1)


# --- the delayed ones ---


def test_a_delayed_message_takes_its_lock_at_the_call(fleet: Fleet, one: str) -> None:
    """For its delay and unique_for; a duplicate is refused from then on (D27)."""
    unique = fleet.task(name=one, unique_for=50)
    sent = unique.delay(1, run_in=100)
    assert 149_000 < fleet.locks(one)[key_of(one)] <= 150_001
    ((text, _),) = fleet.members()
    fields = json.loads(text)
    assert fields["unique"] is True
    assert (fields["unique_for"], fields["unique_key"]) == (50, one)
    assert fleet.client.get(key_of(one)) == fields["unique_lock_value"].encode()
    for options in ({}, {"run_in": 5}, {"run_at": time.time() - 5}):
        with pytest.raises(TaskAlreadyDispatchedError):
            unique.delay(2, **options)
    assert len(fleet.members()) == 1
    assert fleet.bodies() == []
    assert fleet.producer.delayed.cancel(sent.id)
    assert fleet.locks(one) == {}
    past = unique.delay(3, run_at=time.time() - 5)
    assert past.entry_id is not None
    assert 49_000 < fleet.locks(one)[key_of(one)] <= 50_000


def test_a_delayed_message_brings_its_token_along(fleet: Fleet, one: str) -> None:
    """Promotion passes the lock on to the entry; its end releases it."""
    bodies: list[bytes] = []
    unique = fleet.task(lambda payload: bodies.extend(fleet.bodies()), name=one, unique_for=50)
    unique.delay(1, run_in=0.5)
    token = fleet.client.get(key_of(one))
    fleet.start_leader()
    eventually(fleet.settled)
    assert token_of(bodies[0]) == token
    assert json.loads(bodies[0])["unique_key"] == one
    assert fleet.locks(one) == {}


def test_a_lock_of_the_year_9999_is_taken(fleet: Fleet, one: str) -> None:
    """No overflow on the way."""
    unique = fleet.task(name=one, unique_for=3600 * 24 * 365 * 100)
    unique.delay(1, run_at=253_402_300_799)
    assert fleet.locks(one)[key_of(one)] > 253_402_300_799_000 - time.time() * 1000


# --- while it is ours ---


def test_the_lock_outlives_unique_for_while_the_task_runs(fleet: Fleet, one: str) -> None:
    """It is renewed for as long as the run takes (D21), also where the heartbeat is slower."""
    gate = threading.Event()
    unique = fleet.task(
        lambda payload: gate.wait(20), name=one, unique_for=1, reservation_timeout=20
    )
    unique.delay(1)
    fleet.start(queue={"reclaim_delay": 60})
    eventually(lambda: held_count(fleet) == 1)
    token = fleet.client.get(key_of(one))
    stays(lambda: fleet.client.get(key_of(one)) == token, 3.0)
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay(2)
    gate.set()
    eventually(lambda: fleet.locks(one) == {})


def test_the_lock_outlives_unique_for_while_the_message_waits_in_our_hands(
    fleet: Fleet, one: str
) -> None:
    """Fetched and not started yet: renewed all the same."""
    gate = threading.Event()
    fleet.task(lambda payload: gate.wait(20), name="slow")
    unique = fleet.task(name=one, unique_for=1, reservation_timeout=20)
    # A pool that was quick reads ahead: the last two come in one batch, for one worker.
    fleet.note.delay_many(range(500))
    fleet.producer.dispatch("slow", 1)
    unique.delay("mine")
    fleet.start(num_workers=1, queue={"reclaim_delay": 60})
    eventually(lambda: held_count(fleet) == 2 and len(fleet.runs) == 500)
    fetched = fleet.client.get(key_of(one))
    stays(lambda: fleet.client.get(key_of(one)) == fetched, 2.5)
    gate.set()
    fleet.wait_ran("mine")
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def test_the_lock_is_kept_over_a_short_retry(fleet: Fleet, one: str) -> None:
    """Parked: for the delay and unique_for; a dispatch in between is refused (D16)."""

    def body(payload: Any) -> None:
        fleet.record(payload)
        if current_task().attempt == 1:
            raise Retry(1.5)

    unique = fleet.task(body, name=one, max_retry=2, unique_for=1)
    fleet.start()
    sent = unique.delay("first")
    fleet.wait_ran("first")
    eventually(lambda: _parked(fleet) == 1)
    assert fleet.locks(one)[key_of(one)] > 1500
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay("second")
    eventually(lambda: len(fleet.runs) == 2)
    assert [(run.attempt, run.id) for run in fleet.runs] == [(1, sent.id), (2, sent.id)]
    eventually(fleet.settled)
    assert fleet.locks(one) == {}
    unique.delay("third")
    fleet.wait_ran("third")


def test_the_lock_is_kept_over_a_long_retry(fleet: Fleet, one: str) -> None:
    """In the delayed set: the member carries the token, the lock outlives the delay (D16)."""

    def body(payload: Any) -> None:
        fleet.record(payload)
        if current_task().attempt == 1:
            raise Retry(1.5)

    unique = fleet.task(body, name=one, max_retry=2, unique_for=1)
    fleet.start_leader(queue={"reclaim_delay": 0.5})
    unique.delay("first")
    ((text, _),) = eventually(fleet.members)
    assert fleet.client.get(key_of(one)) == json.loads(text)["unique_lock_value"].encode()
    assert 1500 < fleet.locks(one)[key_of(one)] <= 2500
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay("second")
    eventually(lambda: len(fleet.runs) == 2)
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def test_the_lock_is_kept_over_a_hand_back(fleet: Fleet, one: str) -> None:
    """A stop gives the unstarted back with their locks; the next instance runs and releases."""
    gate = threading.Event()
    fleet.task(lambda payload: gate.wait(20), name="slow")
    unique = fleet.task(name=one, unique_for=60)
    first = fleet.start(num_workers=1)
    fleet.producer.dispatch("slow", 1)
    eventually(lambda: held_count(fleet) == 1)
    unique.delay("mine")
    threading.Timer(0.5, gate.set).start()
    first.stop(5)
    assert fleet.runs == []
    assert fleet.locks(one) != {}
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay("other")
    fleet.start()
    (run,) = fleet.wait_ran("mine")
    assert run.attempt == 1
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def _parked(fleet: Fleet) -> int:
    rows: Any = fleet.client.xinfo_consumers(fleet.names.stream, fleet.names.group)
    return sum(row["pending"] for row in rows if row["name"].endswith(b"_0"))


# --- every end releases it ---


class Ends:
    """Makes one message of a unique task end in some way; after each its lock must be free."""

    def __init__(self, fleet: Fleet, one: str) -> None:
        self.fleet = fleet
        self.name = one

    def start(self, body: Callable[[Any], None], handler: Any = None, **options: Any) -> None:
        unique = self.fleet.task(body, name=self.name, unique_for=600, **options)
        unique.delay(1)
        assert self.fleet.locks(self.name) != {}
        self.fleet.start(failed_task_handler=handler, unknown_task_deliveries=1)

    def success(self) -> None:
        self.start(lambda payload: None)

    def final_failure(self) -> None:
        def body(payload: Any) -> None:
            raise ValueError("always")

        self.start(body, max_retry=2, retry_delay=0.05)

    def final_failure_with_a_handler(self) -> None:
        def body(payload: Any) -> None:
            raise ValueError("always")

        self.start(body, handler=lambda message, error: None)

    def a_handler_that_raises_at_first(self) -> None:
        calls: list[Any] = []

        def body(payload: Any) -> None:
            raise ValueError("always")

        def handler(message: Any, error: Any) -> None:
            calls.append(message)
            assert self.fleet.locks(self.name) != {}
            if len(calls) == 1:
                raise RuntimeError("not yet")

        self.start(body, handler=handler)

    def rejection(self) -> None:
        def body(payload: Any) -> None:
            raise Reject("no")

        self.start(body, max_retry=5)

    def time_limit(self) -> None:
        def body(payload: Any) -> None:
            until = time.monotonic() + 20
            while time.monotonic() < until:
                time.sleep(0.005)

        self.start(body, time_limit=0.2)

    def system_exit(self) -> None:
        def body(payload: Any) -> None:
            raise SystemExit(3)

        self.start(body)

    def unknown_task(self) -> None:
        other = Registry()
        task(name=self.name, unique_for=600, registry=other)(lambda payload: None)
        producer = self.fleet.make(registry=other)
        producer.dispatch(self.name, 1)
        self.fleet.start(unknown_task_deliveries=1)

    def deliveries_lost(self) -> None:
        unique = self.fleet.task(name=self.name, unique_for=600, max_lost=0)
        unique.delay(1)
        self.lose_a_delivery(times=1)
        self.fleet.start()

    def lose_a_delivery(self, times: int) -> None:
        """Deliver to a reader that is gone, as often."""
        names = self.fleet.names
        client = self.fleet.client
        client.xgroup_create(names.stream, names.group, id="0-0", mkstream=True)
        reader = f"{names.group}_gone_1"
        rows: Any = client.xreadgroup(names.group, reader, {names.stream: ">"})
        (entry_id, _) = rows[0][1][0]
        client.xclaim(
            names.stream, names.group, reader, 0, [entry_id],
            idle=10**8, retrycount=times, justid=True,
        )  # fmt: skip

    def deletion(self) -> None:
        unique = self.fleet.task(name=self.name, unique_for=600)
        sent = unique.delay(1)
        assert self.fleet.producer.queue.delete(sent.entry_id or "")

    def purge(self) -> None:
        unique = self.fleet.task(name=self.name, unique_for=600)
        unique.delay(1)
        assert self.fleet.producer.queue.purge() == 1

    def cancelling(self) -> None:
        unique = self.fleet.task(name=self.name, unique_for=600)
        sent = unique.delay(1, run_in=600)
        assert self.fleet.producer.delayed.cancel(sent.id)


ENDS = [
    name
    for name in vars(Ends)
    if name not in ("start", "lose_a_delivery") and not name.startswith("_")
]


@pytest.mark.parametrize("end", ENDS)
def test_every_final_end_releases_the_lock(fleet: Fleet, one: str, end: str) -> None:
    """In the same step, so the next dispatch is accepted as soon as the end shows (D17)."""
    getattr(Ends(fleet, one), end)()
    eventually(fleet.settled, 20)
    assert fleet.locks(one) == {}
    unique = fleet.registry.get(one) or fleet.task(name=one, unique_for=600)
    unique.delay(2)


def test_a_requeued_letter_takes_its_lock_anew(fleet: Fleet, one: str) -> None:
    """With a new token; taken by another it stays a letter, and nothing is lost."""
    fail = threading.Event()
    fail.set()

    def body(payload: Any) -> None:
        fleet.record(payload)
        if fail.is_set():
            raise ValueError("first time")

    unique = fleet.task(body, name=one, unique_for=60)
    runner = fleet.start()
    unique.delay("dead")
    (letter,) = eventually(fleet.producer.dead_letters.list)
    eventually(fleet.settled)
    runner.stop()
    unique.delay("other")
    token = fleet.client.get(key_of(one))
    with pytest.raises(TaskAlreadyDispatchedError):
        fleet.producer.dead_letters.requeue(letter.id)
    assert fleet.client.get(key_of(one)) == token
    assert len(fleet.producer.dead_letters) == 1
    assert fleet.producer.dead_letters.requeue_all() == (0, 1)
    fleet.producer.queue.purge()
    old = token_of(letter.message.encode())
    fleet.producer.dead_letters.requeue(letter.id)
    assert fleet.client.get(key_of(one)) not in (None, token, old)
    assert token_of(fleet.bodies()[0]) == fleet.client.get(key_of(one))
    fail.clear()
    fleet.start()
    eventually(fleet.settled)
    assert [run.payload for run in fleet.runs] == ["dead", "dead"]
    assert fleet.locks(one) == {}


# --- another's lock ---


def test_the_end_of_a_run_leaves_another_message_s_lock_alone(fleet: Fleet, one: str) -> None:
    """Freed by hand and taken by the next: the old run's end releases by its own token only."""
    gates = {"a": threading.Event(), "b": threading.Event()}
    started = threading.Event()

    def body(payload: Any) -> None:
        started.set()
        gates[payload].wait(20)

    unique = fleet.task(body, name=one, unique_for=60)
    fleet.start()
    unique.delay("a")
    assert started.wait(10)  # what is only fetched takes its lock again when it starts
    assert unique.unlock("a")
    unique.delay("b")
    token = fleet.client.get(key_of(one))
    gates["a"].set()
    eventually(lambda: fleet.client.xlen(fleet.names.stream) == 1)
    assert fleet.client.get(key_of(one)) == token
    gates["b"].set()
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def test_a_delivery_whose_lock_another_holds_is_put_off_uncounted(fleet: Fleet, one: str) -> None:
    """By a second at a time; it costs no attempt, and others run meanwhile."""
    unique = fleet.task(name=one, unique_for=60)
    unique.delay("waits")
    fleet.client.set(key_of(one), "another's token", px=60_000)
    fleet.start()
    stays(lambda: fleet.runs == [], 2.5)
    fleet.note.delay("neighbour")
    fleet.wait_ran("neighbour")
    fleet.client.delete(key_of(one))
    (run,) = fleet.wait_ran("waits")
    assert run.attempt == 1
    eventually(fleet.settled)


def test_two_messages_of_one_lock_never_run_at_once(fleet: Fleet, one: str) -> None:
    """The lock lapsed in the queue, so the second was accepted: both run, one after the other."""
    spans: list[tuple[float, float]] = []

    def body(payload: Any) -> None:
        started = time.monotonic()
        time.sleep(0.4)
        spans.append((started, time.monotonic()))

    unique = fleet.task(body, name=one, unique_for=1)
    for number in range(3):
        unique.delay(number)
        eventually(lambda: fleet.locks(one) == {}, interval=0.05)
    runners = [fleet.start() for _ in range(2)]
    assert len(runners) == 2
    eventually(fleet.settled, 20)
    assert len(spans) == 3
    ordered = sorted(spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ordered))
    assert fleet.locks(one) == {}


def test_a_lapsed_lock_is_taken_again_before_the_run(fleet: Fleet, one: str) -> None:
    """A dispatch is refused while the late one runs."""
    gate = threading.Event()
    unique = fleet.task(lambda payload: gate.wait(20), name=one, unique_for=60)
    unique.delay(1)
    token = fleet.client.get(key_of(one))
    fleet.client.delete(key_of(one))
    fleet.start()
    assert eventually(lambda: fleet.client.get(key_of(one))) == token
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay(2)
    gate.set()
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def test_the_message_s_fields_decide_not_the_worker_s_registry(fleet: Fleet, one: str) -> None:
    """A worker that registered the task as not unique holds and releases the lock all the same."""
    there = Registry()
    task(name=one, unique_for=60, registry=there)(lambda payload: None)
    producer = fleet.make(registry=there)
    gate = threading.Event()
    fleet.task(lambda payload: gate.wait(20), name=one)
    producer.dispatch(one, 1)
    fleet.start()
    eventually(lambda: held_count(fleet) == 1)
    assert fleet.locks(one) != {}
    gate.set()
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def test_two_groups_run_their_copies_of_a_unique_message(fleet: Fleet, one: str) -> None:
    """The lock is the message's, not the delivery's; at the end it is free."""
    runs: list[str] = []
    runners: list[TaskRunner] = []
    for group in ("a", "b"):
        registry = Registry()

        def body(payload: Any, group: str = group) -> None:
            runs.append(group)

        task(name=one, unique_for=60, registry=registry)(body)
        runners.append(
            fleet.start(registry=registry, consumer_group=f"{fleet.names.group}-{group}")
        )
    groups: Any = None

    def both() -> bool:
        nonlocal groups
        groups = fleet.client.xinfo_groups(fleet.names.stream)
        return len(groups) == 2

    eventually(both)
    runners[0].dispatch(one, 1)
    eventually(lambda: sorted(runs) == ["a", "b"])
    eventually(lambda: fleet.locks(one) == {})


# --- lost replies ---


@pytest.mark.parametrize("how", [{}, {"run_in": 100}, {"run_at": 4_000_000_000.5}], ids=str)
def test_a_unique_dispatch_whose_reply_was_lost_is_no_duplicate_of_itself(
    server: EmbeddedServer, names: Names, one: str, how: dict[str, Any]
) -> None:
    """The lock holds its own token: it was carried out, and the caller is told so (BL-03)."""
    with Fleet(server.url, names) as fleet, Proxy(server.tcp_url) as proxy:
        fleet.task(name=one, unique_for=60, unique_key=str)
        producer = fleet.make(url=proxy.url)
        producer.dispatch(one, "warm-up", **how)
        rule = faults.lose_reply(proxy, "EVALSHA")
        before = time.time()
        sent = producer.dispatch(one, "x", **how)
        assert rule.hits == 1
        messages = [json.loads(body) for body in fleet.bodies()]
        messages += [json.loads(text) for text, _ in fleet.members()]
        assert [m["payload"] for m in messages].count("x") == 1
        assert sent.id in [m["id"] for m in messages]
        if how:
            assert sent.entry_id is None
            due = how.get("run_at", before + 100)
            assert sent.run_at == pytest.approx(due, abs=5)
        with pytest.raises(TaskAlreadyDispatchedError):
            producer.dispatch(one, "x", **how)


@pytest.mark.parametrize("how", [{}, {"run_in": 100}], ids=str)
def test_a_unique_dispatch_that_never_arrived_raises_the_lost_connection(
    server: EmbeddedServer, names: Names, one: str, how: dict[str, Any]
) -> None:
    """Nobody holds the lock: the caller may try again, and is accepted."""
    with Fleet(server.url, names) as fleet, Proxy(server.tcp_url) as proxy:
        fleet.task(name=one, unique_for=60)
        producer = fleet.make(url=proxy.url)
        producer.dispatch("note", "warm-up")
        faults.lose_request(proxy, "EVALSHA")
        with pytest.raises(redis.ConnectionError):
            producer.dispatch(one, "x", **how)
        assert fleet.locks(one) == {}
        producer.dispatch(one, "x", **how)


def test_a_unique_dispatch_is_refused_for_real_when_another_came_first_and_its_reply_was_lost(
    server: EmbeddedServer, names: Names, one: str
) -> None:
    """The lock's token is another's: not ours, so the lost reply is what the caller sees."""
    with Fleet(server.url, names) as fleet, Proxy(server.tcp_url) as proxy:
        unique = fleet.task(name=one, unique_for=60)
        producer = fleet.make(url=proxy.url)
        producer.dispatch("note", "warm-up")
        unique.delay("first")
        faults.lose_reply(proxy, "EVALSHA")
        with pytest.raises(redis.ConnectionError):
            producer.dispatch(one, "second")
        assert len([b for b in fleet.bodies() if one.encode() in b]) == 1


def test_an_unreachable_redis_is_not_a_duplicate(names: Names, one: str) -> None:
    """Whatever keeps us from the lock is raised as what it is (D19)."""
    with Fleet("redis://127.0.0.1:1/0", names) as fleet:
        unique = fleet.task(name=one, unique_for=60)
        for options in ({}, {"run_in": 60}):
            with pytest.raises(redis.ConnectionError):
                unique.delay(1, **options)
        with pytest.raises(redis.ConnectionError):
            unique.delay_many([1, 2])


def test_a_unique_dispatch_leaves_nothing_when_redis_is_out_of_memory(
    own_server: Callable[..., OwnServer], names: Names, one: str
) -> None:
    """Neither entry nor lock; afterwards it is accepted (BL-21 c)."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        unique = fleet.task(name=one, unique_for=60)
        with faults.out_of_memory(own.client()):
            for options in ({}, {"run_in": 60}):
                with pytest.raises(redis.ResponseError, match="maxmemory"):
                    unique.delay(1, **options)
        assert own.client().dbsize() == 0
        unique.delay(1)


# --- members from Go ---


def go_member(id_: str, task_name: str, payload: str, due: int = 1) -> dict[str, int]:
    return {f'{{"id":"{id_}","task":"{task_name}","time":{due},"payload":{payload}}}': due}


def test_a_member_without_a_lock_takes_the_one_its_task_has_here(fleet: Fleet, one: str) -> None:
    """Lock and reservation_timeout come from the leader's registry; its end releases the lock."""
    seen: list[tuple[bytes, Any, int]] = []

    def body(payload: Any) -> None:
        key = key_of(f"{one}:7")
        seen.append((fleet.bodies()[0], fleet.client.get(key), int(fleet.client.pttl(key))))

    fleet.task(
        body, name=one, unique_for=41.5, unique_key=lambda p: str(p["to"]), reservation_timeout=0.25
    )
    fleet.client.zadd(fleet.names.delayed, go_member("g", one, '{"to":7}'))
    fleet.start_leader()
    ((text, token, left),) = eventually(lambda: seen)
    fields = json.loads(text)
    assert (fields["unique"], fields["unique_for"]) == (True, 42)
    assert fields["unique_key"] == f"{one}:7"
    assert fields["unique_lock_value"].encode() == token
    assert fields["reservation_timeout"] == 250_000_000
    assert fields["id"] == "g"
    assert 30_000 < left <= 42_000
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def test_a_member_whose_lock_is_taken_is_put_off_and_blocks_nothing(
    fleet: Fleet, one: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its score alone changes: by 1 s, then 2, then 4; one warning; it runs in the end (D27)."""
    fleet.task(name=one, unique_for=60)
    fleet.client.set(key_of(one), "another's", px=60_000)
    fleet.client.zadd(fleet.names.delayed, go_member("g", one, '"late"'))
    fleet.client.zadd(fleet.names.delayed, go_member("n", "note", '"behind"', 2))
    fleet.start_leader()
    fleet.wait_ran("behind", timeout=5)
    ((text, first),) = fleet.members()
    assert text.decode() in go_member("g", one, '"late"')
    scores = [first]

    def thrice() -> bool:
        ((_, score),) = fleet.members()
        if score != scores[-1]:
            scores.append(score)
        return len(scores) == 3

    eventually(thrice, 15)
    steps = [b - a for a, b in itertools.pairwise(scores)]
    assert 1.9 < steps[0] < 2 + 1.5
    assert 3.9 < steps[1] < 4 + 1.5
    waiting = [r for r in caplog.records if key_of(one) in r.getMessage()]
    assert len(waiting) == 1
    assert fleet.payloads() == ["behind"]
    fleet.client.delete(key_of(one))
    fleet.wait_ran("late", timeout=15)
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def test_two_members_of_one_lock_go_one_after_the_other(fleet: Fleet, one: str) -> None:
    """In one batch: the first takes the lock, the second is put off until it is free."""
    fleet.task(name=one, unique_for=60)
    for number in range(3):
        fleet.client.zadd(fleet.names.delayed, go_member(str(number), one, str(number)))
    fleet.start_leader()
    fleet.wait_ran(0, 1, 2, timeout=20)
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def test_a_member_of_a_task_unknown_to_the_leader_is_moved_as_not_unique(
    fleet: Fleet, one: str
) -> None:
    """The leader can't know its key; a worker that knows the task runs it."""
    fleet.client.zadd(fleet.names.delayed, go_member("g", one, "1"))
    fleet.start_leader()
    ((text, _),) = eventually(lambda: [m for m in fleet.members() if b"unknown" in m[0]])
    assert b'"unique":true' not in text
    assert fleet.locks(one) == {}


@pytest.mark.parametrize(
    "unique_key",
    [
        pytest.param(lambda payload: payload["missing"], id="raises"),
        pytest.param(lambda payload: 7, id="no-text"),
        pytest.param(lambda payload: "\ud800", id="half-a-character"),
    ],
)
def test_a_key_function_that_fails_in_the_leader_blocks_nothing(
    fleet: Fleet, one: str, unique_key: Any
) -> None:
    """The member runs as not unique, and the fault is reported; what lies behind it runs too."""
    fleet.task(name=one, unique_for=60, unique_key=unique_key)
    fleet.client.zadd(fleet.names.delayed, go_member("g", one, '{"a":1}'))
    fleet.client.zadd(fleet.names.delayed, go_member("n", "note", '"behind"', 2))
    leader = fleet.start_leader()
    fleet.wait_ran("behind", {"a": 1}, timeout=6)
    assert any(report.task_name == one for report in leader.errors)
    eventually(fleet.settled)


def test_a_member_that_brings_its_token_does_not_wait_for_its_own_lock(
    fleet: Fleet, one: str
) -> None:
    """Ours carries the unique keys: promoted whatever the lock holds, the worker sorts it out."""
    unique = fleet.task(name=one, unique_for=60)
    unique.delay("mine", run_in=0.3)
    assert fleet.client.get(key_of(one)) is not None
    fleet.start_leader()
    fleet.wait_ran("mine", timeout=5)
    eventually(fleet.settled)


def test_the_put_off_scores_never_grow_beyond_a_minute(fleet: Fleet, one: str) -> None:
    """1, 2, 4 … 60 s: seen at the step itself, with the server's own now."""
    fleet.task(name=one, unique_for=600)
    fleet.client.set(key_of(one), "another's", px=600_000)
    poller = fleet.believer()
    (text,) = go_member("g", one, "1")
    steps = []
    for _ in range(9):
        fleet.client.zadd(fleet.names.delayed, {text: 1})
        before = time.time()
        assert poller.tick() == 0.0
        ((_, score),) = fleet.members()
        steps.append(score - before)
    expected = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [math.floor(step + 0.1) for step in steps] == expected


def test_the_schedule_step_for_a_unique_message_checks_before_it_adds(
    fleet: Fleet, one: str
) -> None:
    """Nothing is written where the lock is another's, not even a changed TTL."""
    unique = fleet.task(name=one, unique_for=60)
    fleet.client.set(key_of(one), "another's", px=5000)
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay(1, run_in=60)
    assert fleet.client.get(key_of(one)) == b"another's"
    assert fleet.client.pttl(key_of(one)) <= 5000
    assert fleet.members() == []
    assert SCHEDULE.name == "schedule"


@pytest.mark.parametrize("unique_for", [2**63 - 1, 2**62, 10**16, -(2**63)])
def test_a_monstrous_unique_for_harms_no_neighbour(fleet: Fleet, one: str, unique_for: int) -> None:
    """Whatever a producer claims: what is held beside its message is renewed, parked and ended."""
    token = "monster"
    fields = {
        "unique": True,
        "unique_for": unique_for,
        "unique_key": one,
        "unique_lock_value": token,
        "reservation_timeout": 10**9,
        "task_name": one,
        "payload": 1,
    }
    group = fleet.producer.queue.for_group(fleet.names.group)
    group.create()
    fleet.note.delay("neighbour")
    fleet.client.xadd(fleet.names.stream, {"payload": json.dumps(fields)})
    fleet.client.set(key_of(one), token, px=60_000)
    link = group.connections.open(read_timeout=10)
    deliveries = group.read(link, f"{fleet.names.group}_h_1", 10, 100)
    link.close()
    message = decode(deliveries[1].body or b"")
    lock = lock_of(message, message.unique_for * 1000)
    held = [(deliveries[0], None), (deliveries[1], lock)]
    assert group.renew(held) == [1, 1]
    parks = [Park(delivery, 0, None, lock) for delivery, lock in held]
    assert group.park(parks, "h") == [1, 1]
    fleet.client.delete(key_of(one))
    fleet.task(name=one, unique_for=60)
    fleet.start(queue={"reclaim_delay": 0.5})
    fleet.wait_ran("neighbour", 1, timeout=20)
    eventually(fleet.settled)
    assert fleet.locks(one) == {}
