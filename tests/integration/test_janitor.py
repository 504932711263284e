"""The leader's housekeeping: consumers nobody is behind, and streams that several groups read."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from taskrunner import RedisStreamQueue, TaskRunner, keys, scripts
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Names, eventually, stays
from tests.support.numbers import Crew, presence

OFTEN: dict[str, Any] = {"janitor": 0.3, "consumer_idle": 0.5}
ROUNDS = 2.0
"""Seconds: several of its rounds."""


@pytest.fixture
def crew(server: EmbeddedServer, names: Names) -> Iterator[Crew]:
    """Runners of one group on the shared server."""
    with Crew(server.tcp_url, names) as made:
        made.task(name="noop")
        yield made


def _create(crew: Crew, group: str | None = None, start: str = "0-0") -> None:
    crew.client.xgroup_create(crew.names.stream, group or crew.names.group, start, mkstream=True)


def _consumer(crew: Crew, host: str, number: int = 1) -> str:
    """A consumer of the group as a process on that host leaves it."""
    name = keys.consumer(crew.names.group, host, number)
    crew.client.xgroup_createconsumer(crew.names.stream, crew.names.group, name)
    return name


def _read(crew: Crew, group: str, consumer: str, count: int) -> list[bytes]:
    found: Any = crew.client.xreadgroup(group, consumer, {crew.names.stream: ">"}, count=count)
    return [entry for _, entries in found for entry, _ in entries]


def _length(crew: Crew) -> int:
    return int(crew.client.xlen(crew.names.stream))  # type: ignore[arg-type]


def _ran(crew: Crew, count: int) -> None:
    eventually(lambda: crew.figures().get("noop_count") == count, 20)


# --- consumers ---


def test_dead_consumers_are_removed(crew: Crew) -> None:
    """Nothing pending, idle for long, its host gone: nobody will miss it."""
    _create(crew)
    dead = {_consumer(crew, "gone", number) for number in range(4)}  # its parking one too

    runner = crew.start(leads=True, timings=OFTEN)

    eventually(lambda: not dead & crew.consumers(), 10)
    assert keys.consumer(crew.names.group, runner.host, 1) in crew.consumers()


def test_consumer_with_pending_stays(crew: Crew) -> None:
    """XGROUP DELCONSUMER would drop its deliveries, and nobody would ever get them."""
    _create(crew)
    holder, free = _consumer(crew, "gone", 1), _consumer(crew, "gone", 2)
    crew.make().dispatch("noop")
    assert len(_read(crew, crew.names.group, holder, 1)) == 1

    crew.start(leads=True, timings=OFTEN)

    eventually(lambda: free not in crew.consumers(), 10)
    stays(lambda: holder in crew.consumers(), ROUNDS)
    assert crew.client.xpending(crew.names.stream, crew.names.group)["pending"] == 1  # type: ignore[index]


def test_consumer_is_removed_once_its_deliveries_were_reclaimed(crew: Crew) -> None:
    """What a dead host left is run first; then its consumer goes."""
    _create(crew)
    holder = _consumer(crew, "gone")
    crew.make().dispatch_many("noop", [None] * 5)
    assert len(_read(crew, crew.names.group, holder, 5)) == 5

    crew.start(leads=True, timings=OFTEN, queue={"reclaim_delay": 1})

    _ran(crew, 5)
    eventually(lambda: holder not in crew.consumers(), 10)


def test_consumer_of_a_living_host_stays(crew: Crew) -> None:
    """Before Redis 7.2 an empty read leaves its idle time: an idle reader looks like a dead one."""
    _create(crew)
    living = {_consumer(crew, "living", number) for number in range(3)}
    gone = _consumer(crew, "gone")
    crew.client.set(presence("living"), str(uuid.uuid4()), px=60_000)
    try:
        crew.start(leads=True, timings=OFTEN)

        eventually(lambda: gone not in crew.consumers(), 10)
        stays(lambda: living <= crew.consumers(), ROUNDS)
    finally:
        crew.client.delete(presence("living"))


def test_readers_of_running_instances_stay(crew: Crew) -> None:
    """Two instances that have had nothing to do for longer than consumer_idle."""
    runners = [crew.start(timings=OFTEN, block_duration=5) for _ in range(2)]
    own = {keys.consumer(crew.names.group, r.host, number) for r in runners for number in (1, 2)}
    eventually(lambda: own <= crew.consumers(), 10)

    stays(lambda: own <= crew.consumers(), 3)
    runners[0].dispatch_many("noop", [None] * 10)
    _ran(crew, 10)


def test_consumer_that_is_not_idle_for_long_stays(crew: Crew) -> None:
    """A host whose key ran out a moment ago may be back."""
    _create(crew)
    fresh = _consumer(crew, "paused")

    crew.start(leads=True, timings={**OFTEN, "consumer_idle": 60})

    stays(lambda: fresh in crew.consumers(), ROUNDS)


def test_consumer_named_otherwise_stays(crew: Crew) -> None:
    """An operator's own reader is not ours to remove."""
    _create(crew)
    foreign = {"somebody", f"{crew.names.group}_", f"{crew.names.group}_host_x", "other_gone_1"}
    for name in foreign:
        crew.client.xgroup_createconsumer(crew.names.stream, crew.names.group, name)
    gone = _consumer(crew, "gone")

    crew.start(leads=True, timings=OFTEN)

    eventually(lambda: gone not in crew.consumers(), 10)
    assert foreign <= crew.consumers()


def test_janitor_rests_when_not_leading(crew: Crew) -> None:
    """One instance of a group does it."""
    _create(crew)
    gone = _consumer(crew, "gone")
    crew.client.set(keys.leader(crew.names.group), "somebody else", px=60_000)

    crew.start(leads=False, timings=OFTEN)

    stays(lambda: gone in crew.consumers(), ROUNDS)


@pytest.mark.parametrize(
    ("case", "removed"), [("idle", True), ("pending", False), ("living", False), ("busy", False)]
)
def test_removal_is_decided_in_one_step(crew: Crew, case: str, removed: bool) -> None:
    """What was seen before may be over: the script asks again, and removes in the same step."""
    _create(crew)
    consumer = _consumer(crew, f"{crew.names.host}-x")
    if case == "pending":
        crew.make().dispatch("noop")
        _read(crew, crew.names.group, consumer, 1)
    if case == "living":
        crew.client.set(presence(f"{crew.names.host}-x"), "an id", px=60_000)
    deliveries = crew.make().queue.for_group(crew.names.group)
    idle_ms = 3_600_000 if case == "busy" else 0

    found = deliveries.remove_consumer(consumer, f"{crew.names.host}-x", idle_ms=idle_ms)

    assert found is removed
    assert (consumer not in crew.consumers()) is removed


# --- streams of several groups ---


def test_stream_is_trimmed_up_to_what_every_group_is_past(crew: Crew) -> None:
    """The first that a group still has pending, or has not been given, is kept, and all after."""
    _create(crew, "other")
    runner = crew.start(leads=True, timings=OFTEN)
    ids = [sent.entry_id for sent in runner.dispatch_many("noop", [None] * 100) if sent]
    _ran(crew, 100)
    stays(lambda: _length(crew) == 100, ROUNDS)  # the other group has not read any

    read = _read(crew, "other", "reader", 60)
    crew.client.xack(crew.names.stream, "other", *read[:40], *read[50:])
    eventually(lambda: _length(crew) == 60, 10)  # up to the first that is pending there
    stays(lambda: _length(crew) == 60, ROUNDS)
    assert crew.client.xrange(crew.names.stream, count=1)[0][0].decode() == ids[40]  # type: ignore[index]

    crew.client.xack(crew.names.stream, "other", *read)
    eventually(lambda: _length(crew) == 40, 10)  # up to what it has not been given
    stays(lambda: _length(crew) == 40, 1)
    assert len(_read(crew, "other", "reader", 100)) == 40


def test_trimming_keeps_what_ones_own_group_still_runs(crew: Crew) -> None:
    """The other group is far ahead; what is pending here stays."""
    _create(crew, "other")
    _create(crew)
    crew.make().dispatch_many("noop", [None] * 20)
    crew.client.xack(crew.names.stream, "other", *_read(crew, "other", "reader", 100))
    held = _read(crew, crew.names.group, keys.consumer(crew.names.group, "elsewhere", 1), 20)
    crew.client.xack(crew.names.stream, crew.names.group, *held[:5], *held[6:])

    crew.start(leads=True, timings=OFTEN)

    eventually(lambda: _length(crew) == 15, 10)
    stays(lambda: _length(crew) == 15, ROUNDS)


def test_stream_is_emptied_when_one_group_is_left_again(crew: Crew) -> None:
    """What the second group never read would stay for ever: nobody's ack deletes it any more."""
    _create(crew, "other")
    runner = crew.start(leads=True, timings=OFTEN)
    runner.dispatch_many("noop", [None] * 50)
    _ran(crew, 50)
    assert _length(crew) == 50

    crew.client.xgroup_destroy(crew.names.stream, "other")

    eventually(lambda: _length(crew) == 0, 10)
    runner.dispatch_many("noop", [None] * 5)
    _ran(crew, 55)
    eventually(lambda: _length(crew) == 0, 5)


def test_finished_entries_do_not_wait_when_one_group_is_left_again(crew: Crew) -> None:
    """Until the janitor comes, a minute, the backlog must not look as long as the history."""
    _create(crew, "other")
    runner = crew.start(leads=True)
    runner.dispatch_many("noop", [None] * 50)
    _ran(crew, 50)
    eventually(lambda: runner.stats().waiting == 0)

    crew.client.xgroup_destroy(crew.names.stream, "other")

    assert (runner.stats().queue_length, runner.stats().waiting) == (50, 0)


def test_trimming_robs_no_group_that_was_set_back(crew: Crew) -> None:
    """XGROUP SETID makes a group read again what it is past; its pending list says nothing then."""
    _create(crew, "other")
    runner = crew.start(leads=True, timings={**OFTEN, "janitor": 3})
    runner.dispatch_many("noop", [None] * 30)
    _ran(crew, 30)
    read = _read(crew, "other", "reader", 30)
    crew.client.xack(crew.names.stream, "other", *read[:20])
    crew.client.xgroup_setid(crew.names.stream, "other", "0-0")
    length = _length(crew)
    assert length == 30

    stays(lambda: _length(crew) == length, 5)


@pytest.mark.parametrize("groups", [1, 2])
def test_nothing_is_trimmed_with_delete_on_ack_off(crew: Crew, groups: int) -> None:
    """Whoever sets it wants the history."""
    if groups == 2:
        _create(crew, "other")
    runner = crew.start(leads=True, timings=OFTEN, queue={"delete_on_ack": False})
    runner.dispatch_many("noop", [None] * 200)
    _ran(crew, 200)
    if groups == 2:
        crew.client.xack(crew.names.stream, "other", *_read(crew, "other", "reader", 200))

    stays(lambda: _length(crew) == 200, ROUNDS)


def test_nothing_is_trimmed_by_one_that_does_not_lead(crew: Crew) -> None:
    """The lease is checked in the step itself."""
    _create(crew, "other")
    crew.make().dispatch_many("noop", [None] * 10)
    queue = crew.make().queue
    lease = keys.leader(crew.names.group)
    crew.client.set(lease, "somebody else", px=60_000)
    crew.client.xack(crew.names.stream, "other", *_read(crew, "other", "reader", 10))

    assert _trim(queue, lease, "me", 1000) == -1
    assert _length(crew) == 10
    assert _trim(queue, lease, "somebody else", 1000) == 10


def test_trimming_takes_steps_of_bounded_size(crew: Crew) -> None:
    """A million finished entries are not deleted in one step, which nobody could pass."""
    _create(crew, "other")
    with crew.client.pipeline(transaction=False) as pipe:
        for number in range(6000):
            pipe.xadd(crew.names.stream, {"payload": "x" * (50 + number % 500)})
        pipe.execute()
    while read := _read(crew, "other", "reader", 1000):
        crew.client.xack(crew.names.stream, "other", *read)
    lease = keys.leader(crew.names.group)
    crew.client.set(lease, "me", px=60_000)

    step = _trim(crew.make().queue, lease, "me", 1000)

    assert 0 < step <= 1000


def test_trimming_of_no_stream_is_no_error(crew: Crew) -> None:
    """A leader of a queue nobody used yet."""
    lease = keys.leader(crew.names.group)
    crew.client.set(lease, "me", px=60_000)

    assert _trim(crew.make().queue, lease, "me", 1000) == 0


def test_janitor_leaves_what_is_fetched_meanwhile(crew: Crew) -> None:
    """Under full load, with a second group that keeps up, each message runs once in each."""
    _create(crew, "other")
    seen: list[int] = []
    crew.task(seen.append, name="see")
    runner = crew.start(leads=True, timings={**OFTEN, "janitor": 0.05})
    other: set[bytes] = set()
    for start in range(0, 3000, 100):
        runner.dispatch_many("see", list(range(start, start + 100)))
        read = _read(crew, "other", "reader", 90)
        other.update(read)
        crew.client.xack(crew.names.stream, "other", *read)
    eventually(lambda: len(seen) >= 3000, 30)
    while read := _read(crew, "other", "reader", 500):
        other.update(read)
        crew.client.xack(crew.names.stream, "other", *read)

    assert sorted(seen) == list(range(3000))
    assert len(other) == 3000
    eventually(lambda: _length(crew) == 0, 10)


def test_janitor_is_silent_when_there_is_nothing_to_do(crew: Crew) -> None:
    """No reports, round after round."""
    runner: TaskRunner = crew.start(leads=True, timings={**OFTEN, "janitor": 0.1})
    runner.errors.clear()

    stays(lambda: not runner.errors, 1)


def _trim(queue: RedisStreamQueue, lease: str, instance_id: str, most: int) -> int:
    script = scripts.load("trim")
    return int(queue.connections.run(script, [lease, queue.stream], [instance_id, most]))
