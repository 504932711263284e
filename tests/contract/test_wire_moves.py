"""Keys, locks and moves against recorded Go traffic, on a live server: read, moved, released."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from taskrunner import Registry, TaskAlreadyDispatchedError, keys, message, task
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.reports import Health, Reports
from taskrunner.services.elector import Elector
from taskrunner.store import connection
from taskrunner.store.connection import Connections
from taskrunner.store.instances import OwnedKey
from tests.support import Names, OwnServer, eventually
from tests.support.fleet import Fleet

WIRE = Path(__file__).parent.parent / "wire"
KEYS = json.loads((WIRE / "keys.json").read_text())
DELAYED = json.loads((WIRE / "delayed_members.json").read_text())
ENTRIES = json.loads((WIRE / "stream_entries.json").read_text())["entries"]

UNIQUE = [
    pytest.param(each, id=each["name"])
    for each in ENTRIES
    if "fields" in each and each["task"]["unique"]
]
GROUPS = [
    pytest.param(each, id=repr(each["group"])[:20])
    for each in KEYS["groups"]
    if each["group"]  # a group without a name is refused by our configuration
]
GO_ORDER = [
    "unique",
    "unique_for",
    "unique_key",
    "unique_lock_value",
    "reservation_timeout",
    "task_name",
    "payload",
]


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


def recorded_bytes(value: dict[str, Any]) -> bytes | None:
    """The exact bytes, or None where only length and hash were recorded."""
    if "base64" not in value:
        return None
    body = base64.b64decode(value["base64"])
    assert hashlib.sha256(body).hexdigest() == value["sha256"]
    return body


def go_members() -> dict[bytes, float]:
    """All members that a Go program wrote, with their scores, those of the far future made due."""
    past = time.time() - 1
    found: dict[bytes, float] = {}
    for each in DELAYED["members"]:
        if "member" in each:
            body = recorded_bytes(each["member"])
            if body is not None:
                found[body] = min(float(each["score"]), past)
    return found


# --- the leader's key ---


@pytest.mark.parametrize("group", [pytest.param(g, id=repr(g)[:20]) for g in KEYS["leader_keys"]])
def test_a_live_elector_uses_the_key_that_go_uses(
    server: EmbeddedServer, client: redis.Redis, group: str
) -> None:
    """All 21 recorded groups: a Go and a Python elector of one group meet at one key."""
    expected = KEYS["leader_keys"][group]
    connections = Connections(server.url)
    lease = OwnedKey(connections, keys.leader(group), "python")
    elector = Elector(
        Health(Reports(), connection.lost),
        lease=lease,
        ttl=5.0,
        poll=5.0,
        channel=keys.channel(group),
        won=lambda: None,
    )
    elector.start()
    try:
        eventually(elector.is_leader)
        assert client.get(expected) == b"python"
        assert client.type(expected) == b"string"
        assert 0 < client.pttl(expected) <= 5000
    finally:
        elector.stop()
        elector.join(5)
        elector.close()
        connections.close()
    assert client.exists(expected) == 0


@pytest.mark.parametrize("recorded", GROUPS)
def test_a_runner_makes_the_keys_that_go_makes(
    own_server: Callable[..., OwnServer], recorded: dict[str, Any]
) -> None:
    """The same work under the same names leaves keys of the same names, types and lives."""
    group = recorded["group"]
    own = own_server()
    client: Any = own.client()
    gate = threading.Event()
    registry = Registry()
    task(name="plain", registry=registry)(lambda payload: None)
    task(name="uniq", unique_for=100, unique_key=lambda payload: "k", registry=registry)(
        lambda payload: gate.wait(20)
    )
    with Fleet(own.url, Names(prefix=recorded["stream_prefix"], group=group)) as fleet:
        runner = fleet.start(
            registry=registry,
            host=recorded["host"],
            num_fetchers=recorded["fetchers"],
            timings={"lease": 5, "presence": 15},
            queue={"queue": recorded["queue"]},
        )
        eventually(lambda: runner.is_leader)
        runner.dispatch_many("plain", range(5))
        runner.dispatch("uniq", 1)
        runner.dispatch("plain", 1, run_in=60)
        wanted = {each["key"]: each for each in recorded["keys_while_running"]}
        eventually(lambda: not {key.encode() for key in wanted} - set(client.keys()))

        for key, theirs in wanted.items():
            ours = client.type(key)
            assert ours == theirs["type"].encode(), key
            left: Any = client.pttl(key)
            assert (left < 0) == (theirs["pttl_ms_seen"] < 0), key
            if left > 0:
                # seen at about the same age: a second or two into the life
                assert theirs["pttl_ms_seen"] - 2600 < left <= theirs["pttl_ms_seen"] + 2600, key
        stream = f"{recorded['stream_prefix']}:{recorded['queue']}"
        consumers: Any = client.xinfo_consumers(stream, group)
        theirs_named = {each["name"].encode() for each in wanted[stream]["groups"][0]["consumers"]}
        assert theirs_named <= {each["name"] for each in consumers}
        (member, score) = client.zrange(keys.delayed(group), 0, -1, withscores=True)[0]
        assert list(json.loads(member))[:4] == ["id", "task", "time", "payload"]
        assert type(json.loads(member)["time"]) is int
        assert json.loads(member)["time"] >= score
        # Timings are written once a second: five runs may be in two of those.
        eventually(lambda: client.hget(keys.metrics(group), "plain_count") == b"5")
        fields: Any = client.hgetall(keys.metrics(group))
        assert b"plain_sum" in fields
        extra = {key.decode() for key in client.keys("*")} - set(wanted)
        assert extra <= {f"ring:{recorded['stream_prefix']}:metrics:{recorded['queue']}"}

        gate.set()
        eventually(lambda: client.xlen(stream) == 0)
        assert runner.stop(5)
        after = {key.decode() for key in client.keys("*")}
        assert set(recorded["keys_after_stop"]) <= after
        assert after - set(recorded["keys_after_stop"]) <= extra


# --- delayed members ---


def test_every_member_that_go_wrote_is_moved_with_its_text(fleet: Fleet) -> None:
    """One entry for each, of Go's fields in Go's order, the payload's text unchanged (D23)."""
    members = go_members()
    assert len(members) > 45
    fleet.client.zadd(fleet.names.delayed, members)
    poller = fleet.believer(registry=Registry())
    while poller.tick() == 0.0:
        pass
    assert fleet.members() == []
    bodies = fleet.bodies()
    assert len(bodies) == len(members)
    moved = {json.loads(body)["id"]: body.decode() for body in bodies}
    for member, score in members.items():
        plain = json.loads(member)
        text = moved[plain["id"]]
        fields = json.loads(text)
        assert list(fields) == [*GO_ORDER, "id"]
        assert fields["task_name"] == plain["task"]
        assert plain["time"] == score or plain["time"] > time.time()
        ours = dict(message.members(text))["payload"]
        theirs = dict(message.members(member.decode()))["payload"]
        assert ours == theirs
        assert fields["reservation_timeout"] > 0
        assert (fields["unique"], fields["unique_for"]) == (False, 0)
        assert (fields["unique_key"], fields["unique_lock_value"]) == ("", "")


def test_a_member_moved_by_us_is_what_a_go_leader_makes_of_it(fleet: Fleet) -> None:
    """But for its rounding of numbers, and the id that we keep."""
    poller = fleet.believer(registry=Registry())
    fleet.client.zadd(fleet.names.delayed, go_members())
    while poller.tick() == 0.0:
        pass
    ours = [json.loads(body, parse_int=float) for body in fleet.bodies()]
    theirs = [
        json.loads(body, parse_int=float)
        for each in DELAYED["stream_values_after_the_scheduler_moved_them"]
        if (body := recorded_bytes(each["value"])) is not None
    ]
    plain = [each for each in theirs if not each["unique"]]
    assert len(plain) > 40

    def what_counts(fields: dict[str, Any]) -> str:
        return json.dumps([fields["task_name"], fields["payload"]], sort_keys=True)

    made = [what_counts(each) for each in ours]
    assert all(what_counts(each) in made for each in plain)


def test_unique_members_of_go_are_moved_with_a_lock(fleet: Fleet) -> None:
    """Two of one key: one entry like Go's, and the second waits (Go leaves it in the way)."""
    twins = {
        recorded_bytes(each["member"]): 1.0
        for each in DELAYED["members"]
        if each.get("task") == "uniq_key"
    }
    assert len(twins) == 2
    (theirs,) = (
        json.loads(body)
        for each in DELAYED["stream_values_after_the_scheduler_moved_them"]
        if (body := recorded_bytes(each["value"])) is not None and b'"unique":true' in body
    )
    name = theirs["task_name"]
    fleet.client.delete(f"taskrunner:unique:{theirs['unique_key']}")
    fleet.task(name=name, unique_for=60, unique_key=str)
    fleet.client.zadd(fleet.names.delayed, twins)
    fleet.believer().tick()
    (body,) = fleet.bodies()
    fields = json.loads(body)
    for field in ("unique", "unique_for", "unique_key", "task_name", "payload"):
        assert fields[field] == theirs[field], field
    assert len(base64.b64decode(fields["unique_lock_value"])) == 16
    lock = f"taskrunner:unique:{theirs['unique_key']}"
    try:
        assert fleet.client.get(lock) == fields["unique_lock_value"].encode()
        assert 50_000 < fleet.client.pttl(lock) <= 60_000
        ((waiting, score),) = fleet.members()
        assert waiting in twins
        assert score > time.time() - 5
    finally:
        fleet.client.delete(lock)


def test_members_of_ours_are_what_go_reads(fleet: Fleet) -> None:
    """Go's four fields first, `time` a whole number not before the score; the score a number."""
    due = time.time() + 100.75
    fleet.task(name="unique-here", unique_for=1.5, unique_key=str)
    for name, payload in (("note", {"ü": [1, 2**70]}), ("unique-here", "k")):
        fleet.client.delete("taskrunner:unique:unique-here:k")
        fleet.producer.dispatch(name, payload, run_at=due)
    fleet.client.delete("taskrunner:unique:unique-here:k")
    members = fleet.members()
    assert len(members) == 2
    for text, score in members:
        fields = json.loads(text)
        assert list(fields)[:4] == ["id", "task", "time", "payload"]
        assert type(fields["time"]) is int
        assert 0 <= fields["time"] - score < 1
        if fields["task"] == "unique-here":
            assert (fields["unique"], fields["unique_for"]) == (True, 2)
            assert type(fields["unique_for"]) is int
        assert isinstance(fields["id"], str)
        assert len(fields["id"]) == 36


# --- unique entries ---


def tasks_like(recorded: dict[str, Any], registry: Registry, body: Callable[[Any], None]) -> None:
    """Register the task whose dispatch was recorded, as a user would who shares it with Go."""
    theirs = recorded["task"]
    written = json.loads(recorded_bytes(recorded["fields"][0]["value"]) or b"")["unique_key"]
    returned = recorded.get(
        "unique_key_function_returned", written.removeprefix(f"{theirs['name']}:")
    )
    task(
        name=theirs["name"],
        unique_for=max(1, theirs["unique_for"]),
        unique_key=(lambda payload: returned) if theirs["has_unique_key_function"] else None,
        registry=registry,
    )(body)


@pytest.mark.parametrize("recorded", UNIQUE)
def test_a_unique_entry_of_go_holds_and_releases_go_s_lock(
    own_server: Callable[..., OwnServer], names: Names, recorded: dict[str, Any]
) -> None:
    """Under the name Go took it, an empty unique_key included (D15); while it runs it is held."""
    own = own_server()
    client: Any = own.client()
    (lock,) = recorded["lock_keys_after_dispatch"]
    body = recorded_bytes(recorded["fields"][0]["value"])
    assert body is not None
    held: list[Any] = []
    with Fleet(own.url, names) as fleet:
        registry = Registry()
        tasks_like(recorded, registry, lambda payload: held.append(client.get(lock["key"])))
        client.set(lock["key"], lock["value"], px=lock["pttl_ms_right_after"])
        client.xadd(names.stream, {"payload": body})
        fleet.start(registry=registry)
        eventually(lambda: held)
        assert held == [lock["value"].encode()]
        eventually(fleet.settled)
        assert client.exists(lock["key"]) == 0


@pytest.mark.parametrize("recorded", UNIQUE)
def test_a_unique_entry_of_go_survives_the_delayed_set_with_its_lock(
    own_server: Callable[..., OwnServer], names: Names, recorded: dict[str, Any]
) -> None:
    """A worker that doesn't know the task moves it there and back; the lock is kept and released."""
    own = own_server()
    client: Any = own.client()
    (lock,) = recorded["lock_keys_after_dispatch"]
    body = recorded_bytes(recorded["fields"][0]["value"])
    assert body is not None
    held: list[Any] = []
    with Fleet(own.url, names) as fleet:
        client.set(lock["key"], lock["value"], px=60_000)
        client.xadd(names.stream, {"payload": body})
        ignorant = fleet.start(registry=Registry())
        ((member, _),) = eventually(fleet.members)
        assert client.get(lock["key"]) == lock["value"].encode()
        fields, theirs = json.loads(member), json.loads(body)
        for field in ("unique", "unique_for", "unique_key", "unique_lock_value"):
            assert fields[field] == theirs[field]
        ignorant.stop()
        registry = Registry()
        tasks_like(recorded, registry, lambda payload: held.append(client.get(lock["key"])))
        fleet.start(registry=registry)
        eventually(lambda: held)
        assert held == [lock["value"].encode()]
        eventually(fleet.settled)
        assert client.exists(lock["key"]) == 0


@pytest.mark.parametrize("recorded", UNIQUE)
def test_a_unique_dispatch_of_ours_takes_the_lock_that_go_takes(
    own_server: Callable[..., OwnServer], names: Names, recorded: dict[str, Any]
) -> None:
    """So that a Go and a Python producer of one task refuse each other's duplicates."""
    own = own_server()
    client: Any = own.client()
    (lock,) = recorded["lock_keys_after_dispatch"]
    text = recorded_bytes(recorded["fields"][0]["value"])
    assert text is not None
    with Fleet(own.url, names) as fleet:
        registry = Registry()
        tasks_like(recorded, registry, lambda payload: None)
        producer = fleet.make(registry=registry)
        payload = json.loads(text)["payload"]
        producer.dispatch(recorded["task"]["name"], payload)
        assert [key.decode() for key in client.keys("taskrunner:unique:*")] == [lock["key"]]
        fields = json.loads(fleet.bodies()[0])
        assert client.get(lock["key"]) == fields["unique_lock_value"].encode()
        assert list(fields)[:7] == GO_ORDER
        theirs = json.loads(text)
        for field in GO_ORDER:
            assert type(fields[field]) is type(theirs[field]), field
        client.set(lock["key"], lock["value"], px=60_000)
        with pytest.raises(TaskAlreadyDispatchedError):
            producer.dispatch(recorded["task"]["name"], payload)
