"""Faults of the Go library in leaders, unique and delayed tasks (D1 to D4, D15 to D29): not here."""

import json
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from taskrunner import (
    ConfigurationError,
    InvalidTaskPayloadError,
    Registry,
    TaskAlreadyDispatchedError,
    TaskRunner,
    current_task,
    keys,
    task,
)
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.store.instances import new_instance_id
from tests.support import Names, OwnServer, Proxy, busy, eventually, faults, stays
from tests.support.fleet import Fleet


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


@pytest.fixture
def one(names: Names) -> str:
    """A task name of this test alone: locks know no groups (D20)."""
    return f"one-{names.group}"


def lock(name: str) -> str:
    return f"taskrunner:unique:{name}"


def schedule(fleet: Fleet, numbers: range, name: str = "note", due: int = 1) -> None:
    fleet.client.zadd(
        fleet.names.delayed,
        {f'{{"id":"{n}","task":"{name}","time":{due},"payload":{n}}}': due for n in numbers},
    )


def moved(fleet: Fleet) -> int:
    try:
        info: Any = fleet.client.xinfo_stream(fleet.names.stream)
    except redis.ResponseError:
        return 0
    return int(info["entries-added"])


# --- D1 to D4: moves and leaders ---


def test_d1_a_thousand_due_members_are_moved_in_one_go(fleet: Fleet) -> None:
    """Always from the front: nothing is stepped over while members leave."""
    schedule(fleet, range(1000))
    poller = fleet.believer()
    while poller.tick() == 0.0:
        pass
    assert fleet.client.zcard(fleet.names.delayed) == 0
    assert len(fleet.bodies()) == 1000
    assert {json.loads(body)["payload"] for body in fleet.bodies()} == set(range(1000))


@pytest.mark.parametrize("action", ["cut_before", "cut_after", "hold_reply"])
def test_d2_a_move_that_fails_half_way_makes_one_entry(
    server: EmbeddedServer, names: Names, action: Any
) -> None:
    """There is no "between": the step was executed or not, and the next round sees which."""
    from taskrunner.store import delayed_set

    with Fleet(server.url, names) as fleet, Proxy(server.tcp_url) as proxy:
        rule = proxy.on("EVALSHA", action, containing=delayed_set._PROMOTE.sha)
        schedule(fleet, range(10))
        fleet.start(url=proxy.url)
        assert rule.hit.wait(10)
        if action == "hold_reply":
            faults.down_for(0.3)
            rule.release()
        fleet.wait_ran(*range(10))
        eventually(fleet.settled)
        assert moved(fleet) == 10


def test_d3_a_leader_without_an_answer_is_none_before_its_lease_is_over(
    server: EmbeddedServer, names: Names
) -> None:
    """Judged by its own clock; measured from the last renewal that can have arrived."""
    with Fleet(server.url, names) as fleet, Proxy(server.tcp_url) as proxy:
        leader = fleet.start_leader(url=proxy.url, timings={"lease": 2})
        proxy.swallow("reply")
        eventually(lambda: not leader.is_leader, 5, interval=0.001)
        # Its renewals arrive all the same, only their answers don't: the lease is still its own.
        assert fleet.client.get(fleet.lease) == leader.instance_id.encode()
        proxy.cut()
        proxy.pass_through()
        eventually(lambda: leader.is_leader)


def test_d3_two_schedulers_at_once_move_each_member_once(fleet: Fleet) -> None:
    """5,000 members, exactly 5,000 entries (Go: 1,321 surplus)."""
    schedule(fleet, range(5000))
    pollers = [fleet.believer(), fleet.believer()]

    def move(poller: Any) -> None:
        while fleet.client.zcard(fleet.names.delayed):
            poller.tick()

    threads = [threading.Thread(target=move, args=(poller,)) for poller in pollers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moved(fleet) == 5000


def test_d4_a_leader_whose_errors_nobody_reads_steps_down_all_the_same(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """No channel of errors can hold it up: not an unread one, not a hook that hangs."""
    own = own_server()
    hanging = threading.Event()
    with Fleet(own.url, names) as fleet, Proxy(own.tcp_url) as proxy:
        leader = fleet.start_leader(
            url=proxy.url, timings={"lease": 1}, on_error=lambda report: hanging.wait(30)
        )
        follower = fleet.start(timings={"lease": 1})
        proxy.refuse()
        eventually(lambda: not leader.is_leader, 1 + busy())
        eventually(lambda: follower.is_leader, 2 + busy())
        stays(lambda: not leader.is_leader, 1.0)
        proxy.pass_through()
        hanging.set()


# --- D15 to D21: unique tasks ---


def test_d15_a_lock_without_a_key_is_released_after_the_run(fleet: Fleet, one: str) -> None:
    """Taken and released under one name: a second dispatch is accepted."""
    unique = fleet.task(name=one, unique_for=600)
    fleet.start()
    for payload in ("first", "second", "third"):
        unique.delay(payload)
        fleet.wait_ran(payload)
        eventually(fleet.settled)
        assert fleet.locks(one) == {}


def test_d15_a_go_entry_with_an_empty_key_releases_its_producer_s_lock(
    fleet: Fleet, one: str
) -> None:
    """unique and no unique_key: the lock is named by the task."""
    fleet.task(name=one)
    fleet.client.set(lock(one), "LslPAnXsvpnMlX++l7NP0Q==", px=600_000)
    entry = {
        "unique": True,
        "unique_for": 600,
        "unique_key": "",
        "unique_lock_value": "LslPAnXsvpnMlX++l7NP0Q==",
        "reservation_timeout": 0,
        "task_name": one,
        "payload": "go",
    }
    fleet.client.xadd(fleet.names.stream, {"payload": json.dumps(entry)})
    fleet.start()
    fleet.wait_ran("go")
    eventually(fleet.settled)
    assert fleet.client.exists(lock(one)) == 0


@pytest.mark.parametrize("delay", [0.8, 2.5], ids=["parked", "delayed"])
def test_d16_the_lock_is_kept_until_the_retry_has_ended(
    fleet: Fleet, one: str, delay: float
) -> None:
    """Refused in between, accepted after the end; the two never run side by side."""
    gate = threading.Event()

    def body(payload: Any) -> None:
        fleet.record(payload)
        if current_task().attempt == 1:
            raise ValueError("first")
        gate.wait(20)

    unique = fleet.task(body, name=one, max_retry=2, retry_delay=delay, unique_for=600)
    fleet.start_leader(queue={"reclaim_delay": 1.5})
    unique.delay("a")
    fleet.wait_ran("a")
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay("b")
    eventually(lambda: len(fleet.runs) == 2, 15)
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay("b")
    gate.set()
    eventually(fleet.settled)
    unique.delay("c")


def test_d17_the_lock_is_released_at_ends_that_run_nothing(fleet: Fleet, one: str) -> None:
    """Unknown here, and lost too often: the handler is called, the lock is free."""
    handled: list[str] = []
    there = Registry()
    for name in (f"{one}-unknown", f"{one}-lost"):
        task(name=name, unique_for=600, max_lost=0, registry=there)(lambda payload: None)
    producer = fleet.make(registry=there)
    producer.dispatch(f"{one}-unknown", 1)
    sent = producer.dispatch(f"{one}-lost", 1)
    fleet.task(name=f"{one}-lost", unique_for=600, max_lost=0)
    client, names = fleet.client, fleet.names
    client.xgroup_create(names.stream, names.group, id="0-0")
    client.xreadgroup(names.group, f"{names.group}_dead_1", {names.stream: ">"})
    client.xclaim(
        names.stream, names.group, f"{names.group}_dead_1", 0, [sent.entry_id],
        idle=10**6, retrycount=3, justid=True,
    )  # fmt: skip
    fleet.start(
        failed_task_handler=lambda message, error: handled.append(type(error).__name__),
        unknown_task_deliveries=1,
    )
    eventually(lambda: sorted(handled) == ["MaxRetryExceededError", "TaskNotFoundError"], 20)
    eventually(fleet.settled)
    assert fleet.locks(one) == {}


def test_d18_a_dispatch_that_fails_leaves_no_lock_and_raises_the_real_error(
    own_server: Callable[..., OwnServer], names: Names, one: str
) -> None:
    """XADD refused, payload unencodable, key of the wrong type."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        unique = fleet.task(name=one, unique_for=600)
        with pytest.raises(InvalidTaskPayloadError, match=r"payload\.c"):
            unique.delay({"c": threading.Lock()})
        with faults.out_of_memory(own.client()), pytest.raises(redis.ResponseError):
            unique.delay(1)
        own.client().set(names.stream, "a string")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            unique.delay(1)
        assert fleet.locks(one) == {}
        own.client().delete(names.stream)
        unique.delay(1)


def test_d19_only_a_held_lock_is_called_already_dispatched(
    own_server: Callable[..., OwnServer], names: Names, one: str
) -> None:
    """Redis away, read-only, or forbidding: each raised as it is."""
    own = own_server()
    client: Any = own.client()
    with Fleet(own.url, names) as fleet:
        unique = fleet.task(name=one, unique_for=600)
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        for options in ({}, {"run_in": 60}):
            with pytest.raises(redis.RedisError) as raised:
                unique.delay(1, **options)
            assert not isinstance(raised.value, TaskAlreadyDispatchedError)
            assert "read only" in str(raised.value).lower()
        client.execute_command("REPLICAOF", "NO", "ONE")
        user = faults.restricted_user(client, names.prefix, "-set")
        there = Registry()
        task(name=one, unique_for=600, registry=there)(lambda payload: None)
        limited = fleet.make(url=own.client(**user), registry=there)
        with pytest.raises(redis.RedisError):
            limited.dispatch(one, 1)
        own.kill()
        with pytest.raises(redis.ConnectionError):
            unique.delay(1)
        own.start()


def test_d19_a_member_whose_lock_can_t_be_taken_is_not_swallowed(
    own_server: Callable[..., OwnServer], names: Names, one: str
) -> None:
    """The leader that meets a refusing Redis keeps the member, and says so."""
    own = own_server()
    client: Any = own.client()
    with Fleet(own.url, names) as fleet:
        fleet.task(name=one, unique_for=600)
        leader = fleet.start_leader()
        with faults.out_of_memory(client):
            before = len(leader.errors)
            schedule_now = f'{{"id":"g","task":"{one}","time":1,"payload":"late"}}'
            client.config_set("maxmemory", 0)
            client.zadd(names.delayed, {schedule_now: time.time() + 0.5})
            client.config_set("maxmemory", 1)
            faults.down_for(2.0)
            assert client.zcard(names.delayed) == 1
            assert len(leader.errors) > before
        fleet.wait_ran("late")
        eventually(fleet.settled)
        assert fleet.locks(one) == {}


def test_d20_names_that_can_share_a_lock_are_warned_of(names: Names) -> None:
    """On the wire "a:b" with key "c" is "a" with key "b:c"; and no unique_for below nothing."""
    registry = Registry()
    with pytest.warns(UserWarning, match="colon"):
        task(name="a:b", unique_for=1, registry=registry)(lambda payload: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task(name="plain:colon", registry=registry)(lambda payload: None)
        task(name="quiet", unique_for=1, registry=registry)(lambda payload: None)
    for bad in (0, -1, -0.5, float("nan")):
        with pytest.raises(ConfigurationError, match="unique_for"):
            task(name="bad", unique_for=bad, registry=registry)(lambda payload: None)


def test_d20_unique_tasks_of_two_groups_share_their_locks(fleet: Fleet, one: str) -> None:
    """The wire says so; documented, and the same in both directions."""
    runners = [
        fleet.make(registry=registry, consumer_group=f"{fleet.names.group}-{group}")
        for group in ("shop", "mail")
        if (registry := Registry()) is not None
        and task(name=one, unique_for=600, registry=registry)(lambda payload: None)
    ]
    runners[0].dispatch(one, 1)
    with pytest.raises(TaskAlreadyDispatchedError):
        runners[1].dispatch(one, 1)


def test_d21_a_task_longer_than_unique_for_keeps_its_lock(fleet: Fleet, one: str) -> None:
    """Renewed while it runs, and gone right after."""
    gate = threading.Event()
    unique = fleet.task(lambda payload: gate.wait(20), name=one, unique_for=0.6)
    fleet.start(queue={"reclaim_delay": 30})
    unique.delay(1)
    stays(lambda: fleet.locks(one) != {}, 2.5)
    gate.set()
    eventually(lambda: fleet.locks(one) == {}, 5)


# --- D22 to D28: delayed tasks, election ---


def test_d22_poison_members_leave_the_set_and_are_reported_once(fleet: Fleet) -> None:
    """Text that isn't JSON goes to the dead letters, an unknown task to the workers."""
    fleet.client.zadd(fleet.names.delayed, {"not json": 1, '{"task":3}': 2})
    schedule(fleet, range(1), name="nobody-knows", due=3)
    schedule(fleet, range(1, 50), due=4)
    leader = fleet.start(unknown_task_deliveries=1)
    fleet.wait_ran(*range(1, 50), timeout=10)
    eventually(lambda: len(fleet.producer.dead_letters) == 3)
    eventually(fleet.settled)
    kinds = sorted(letter.error_type for letter in fleet.producer.dead_letters.list())
    assert kinds == ["InvalidTaskPayloadError", "InvalidTaskPayloadError", "TaskNotFoundError"]
    failed = [report for report in leader.errors if report.action == "task_failed"]
    assert len(failed) == 3


def test_d23_digits_come_out_as_they_went_in(fleet: Fleet) -> None:
    """2^53 + 1, the ends of int64 and more, through the set and back into Python."""
    numbers = [9007199254740993, 2**63 - 1, -(2**63), 2**64 - 1, 10**40 + 1, 0.1, 1e22, -0.0]
    fleet.start()
    fleet.note.delay(numbers, run_in=0.2)
    text = json.dumps(numbers)
    member = f'{{"id":"go","task":"note","time":1,"payload":{{"n":{text}}}}}'
    fleet.client.zadd(fleet.names.delayed, {member: 1})
    fleet.wait_ran(numbers, {"n": numbers})
    assert [repr(run.payload) for run in fleet.runs if isinstance(run.payload, list)] == [
        repr(numbers)
    ]


def test_d24_no_task_is_early_at_any_phase_of_the_second(fleet: Fleet) -> None:
    """50 random due times: each starts at or after its own."""
    chance = random.Random(24)
    fleet.start_leader(num_workers=8)
    now = time.time()
    due = {number: now + 0.3 + chance.random() * 2.5 for number in range(50)}
    for number, instant in due.items():
        fleet.note.delay(number, run_at=instant)
    runs = fleet.wait_ran(*due)
    late = [run.at - instant for run, instant in zip(runs, due.values(), strict=True)]
    print(f"50 phases: between {min(late) * 1000:.1f} and {max(late) * 1000:.1f} ms late")
    assert min(late) >= 0
    assert max(late) < busy(2)
    for text, score in fleet.members():
        assert json.loads(text)["time"] >= score


@pytest.mark.parametrize("delay", [0, 0.01, 0.5])
def test_d25_any_delay_from_nothing_on_is_taken(fleet: Fleet, delay: float) -> None:
    """And runs then, not at the next tick of five seconds."""
    fleet.start_leader(timings={"poll": 30, "lease": 10})
    before = time.time()
    fleet.note.delay("x", run_in=delay)
    (run,) = fleet.wait_ran("x")
    assert delay <= run.at - before < delay + busy(2)


def test_d26_one_group_name_for_two_queues_shares_a_delayed_set(fleet: Fleet) -> None:
    """The wire names the set by the group alone: documented; a group of its own keeps them apart."""
    assert keys.delayed("g") == "taskrunner:g:delayed_tasks"
    other = Registry()
    task(name="note", registry=other)(lambda payload: None)
    shop = fleet.make(queue={"prefix": f"{fleet.names.prefix}-shop"}, registry=other)
    mail = fleet.make(
        queue={"prefix": f"{fleet.names.prefix}-mail"},
        registry=other,
        consumer_group=f"{fleet.names.group}-mail",
    )
    shop.dispatch("note", 1, run_in=60)
    mail.dispatch("note", 2, run_in=60)
    assert [each.payload for each in shop.delayed.list()] == [1]
    assert [each.payload for each in mail.delayed.list()] == [2]


def test_d27_duplicates_of_a_delayed_unique_task_don_t_pile_up(fleet: Fleet, one: str) -> None:
    """The lock is taken when it is scheduled; a second one is refused, visibly."""
    unique = fleet.task(name=one, unique_for=600)
    unique.delay("first", run_in=0.5)
    for options in ({"run_in": 0.5}, {"run_in": 60}, {}):
        with pytest.raises(TaskAlreadyDispatchedError):
            unique.delay("again", **options)
    fleet.start()
    fleet.wait_ran("first")
    eventually(fleet.settled)
    assert fleet.payloads() == ["first"]


def test_d27_a_member_that_waits_for_a_lock_holds_no_place_in_the_batch(
    fleet: Fleet, one: str
) -> None:
    """500 of them, more than a batch, and what is due behind them starts at once."""
    fleet.task(name=one, unique_for=600)
    fleet.client.set(lock(one), "another's", px=600_000)
    schedule(fleet, range(500), name=one)
    schedule(fleet, range(1000, 1010), due=2)
    fleet.start_leader()
    fleet.wait_ran(*range(1000, 1010), timeout=5)
    assert all(score > time.time() - 5 for _, score in fleet.members())
    assert len(fleet.members()) == 500
    fleet.client.delete(lock(one), fleet.names.delayed)


def test_d28_a_dead_leader_is_followed_when_its_lease_runs_out(fleet: Fleet) -> None:
    """Not six seconds later."""
    fleet.client.set(fleet.lease, "a dead one's", px=1500)
    over = time.monotonic() + 1.5
    runner = fleet.start(timings={"lease": 5, "poll": 5})
    eventually(lambda: runner.is_leader, 10, interval=0.005)
    assert time.monotonic() - over < busy()


def test_d28_a_stopped_leader_has_resigned_when_stop_returns(fleet: Fleet) -> None:
    """So a quick exit leaves no lease to run out."""
    leader = fleet.start_leader(timings={"lease": 30})
    leader.stop()
    assert not leader.is_leader
    assert fleet.client.exists(fleet.lease) == 0


def test_d29_ids_made_at_one_instant_differ() -> None:
    """8,000 by four threads (Go: 7,757 distinct)."""
    made: list[str] = []
    barrier = threading.Barrier(4)

    def make() -> None:
        barrier.wait()
        made.extend(new_instance_id() for _ in range(2000))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len(set(made)) == 8000


def test_d29_two_runners_never_renew_each_other_s_lease(fleet: Fleet) -> None:
    """Each has an id of its own, also the same runner after its next start."""
    runners: list[TaskRunner] = [fleet.make() for _ in range(50)]
    assert len({runner.instance_id for runner in runners}) == 50
    first = fleet.start_leader(timings={"lease": 1})
    second = fleet.start(timings={"lease": 1})

    def holds() -> bool:
        return bool(fleet.client.get(fleet.lease) == first.instance_id.encode())

    # Four renewals, one of which a starved machine may delay by half a second.
    stays(lambda: holds() and not second.is_leader, 2.0)
    first.stop()
    eventually(lambda: second.is_leader)
    former = first.instance_id
    first.start()
    assert first.instance_id != former
