"""Looking into the delayed set, cancelling, and freeing a unique lock by hand."""

import json
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from taskrunner import InvalidTaskPayloadError, TaskAlreadyDispatchedError
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Names, Proxy, eventually
from tests.support.fleet import Fleet


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


def lock_of(name: str) -> str:
    return f"taskrunner:unique:{name}"


def test_list_shows_what_waits_the_next_due_first(fleet: Fleet) -> None:
    """Id, task, payload, due time and spent attempts; the payload stays out of the repr."""
    due = time.time() + 100
    late = fleet.note.delay({"secret": 9007199254740993}, run_at=due + 5.5)
    early = fleet.note.delay("early", run_at=due)
    found = fleet.producer.delayed.list()
    assert [each.id for each in found] == [early.id, late.id]
    assert [each.task_name for each in found] == ["note", "note"]
    assert found[1].payload == {"secret": 9007199254740993}
    assert found[1].run_at == pytest.approx(due + 5.5, abs=1e-5)
    assert found[1].run_at == late.run_at
    assert [each.attempt for each in found] == [0, 0]
    assert "secret" not in repr(found[1])


def test_list_is_bounded_by_its_limit(fleet: Fleet) -> None:
    """100 unless asked otherwise; nothing where nothing was asked for."""
    fleet.note.delay_many(range(150), run_in=100)
    delayed = fleet.producer.delayed
    assert len(delayed.list()) == 100
    assert len(delayed.list(limit=7)) == 7
    assert len(delayed.list(1000)) == 150
    assert delayed.list(0) == []


def test_len_counts_and_the_set_is_always_true(fleet: Fleet) -> None:
    """`bool()` sends nothing, also where nothing waits."""
    delayed = fleet.producer.delayed
    assert len(delayed) == 0
    assert bool(delayed)
    assert delayed.list() == []
    fleet.note.delay_many(range(3), run_in=100)
    assert len(delayed) == 3


def test_get_finds_a_message_by_its_id(fleet: Fleet) -> None:
    """On whatever page it lies; None for what isn't there."""
    sent = fleet.note.delay_many(range(250), run_in=100)
    for position in (0, 99, 100, 101, 249):
        one = sent[position]
        assert one is not None
        found = fleet.producer.delayed.get(one.id)
        assert found is not None
        assert (found.id, found.payload) == (one.id, position)
    assert fleet.producer.delayed.get("no such id") is None


def test_cancel_takes_one_message_out(fleet: Fleet) -> None:
    """True once, then False; the others stay, and only they run."""
    kept = fleet.note.delay("kept", run_in=0.6)
    gone = fleet.note.delay("gone", run_in=0.6)
    assert fleet.producer.delayed.cancel(gone.id) is True
    assert fleet.producer.delayed.cancel(gone.id) is False
    assert fleet.producer.delayed.cancel("no such id") is False
    assert [each.id for each in fleet.producer.delayed.list()] == [kept.id]
    fleet.start_leader()
    fleet.wait_ran("kept")
    eventually(fleet.settled)
    assert fleet.payloads() == ["kept"]


def test_cancel_says_false_for_what_was_dispatched(fleet: Fleet) -> None:
    """Too late is no success."""
    sent = fleet.note.delay("now", run_in=0.2)
    fleet.start_leader()
    fleet.wait_ran("now")
    assert fleet.producer.delayed.cancel(sent.id) is False


def test_cancel_and_the_leader_never_both_have_a_message(fleet: Fleet) -> None:
    """Each is cancelled or runs: the answer says which."""
    fleet.start_leader()
    sent = [fleet.note.delay(number, run_in=0.02 + 0.0007 * number) for number in range(150)]
    cancelled = set()

    def cancel(numbers: range) -> None:
        for number in numbers:
            if fleet.producer.delayed.cancel(sent[number].id):
                cancelled.add(number)

    threads = [threading.Thread(target=cancel, args=(range(start, 150, 3),)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(fleet.settled)
    eventually(lambda: len(cancelled) + len(fleet.runs) >= 150)
    assert sorted([*cancelled, *fleet.payloads()]) == list(range(150))


def test_a_message_is_found_though_others_leave_the_set_meanwhile(
    fleet: Fleet, server: EmbeddedServer
) -> None:
    """The leader moves what is due while we look: what stays is found all the same."""
    for look in ("get", "cancel"):
        sent = fleet.note.delay_many(range(150), run_in=100)
        target = sent[120]
        assert target is not None
        with Proxy(server.tcp_url) as proxy:
            looking = fleet.make(url=proxy.url).delayed
            second_page = proxy.on("ZRANGE", "hold_request", containing="\r\n100\r\n")
            proxy.on("ZSCAN", "delay_reply", seconds=0.05, times=None)
            found: list[Any] = []
            thread = threading.Thread(
                target=lambda looking=looking, look=look, found=found, target=target: found.append(
                    getattr(looking, look)(target.id)
                )
            )
            thread.start()
            second_page.hit.wait(2)
            fleet.client.zremrangebyrank(fleet.names.delayed, 0, 49)
            second_page.release()
            thread.join()
        assert found[0], f"{look} missed a message that was in the set all the time"
        fleet.client.delete(fleet.names.delayed)


def test_members_that_are_no_message_don_t_break_the_looking(fleet: Fleet) -> None:
    """They are listed with nothing but their time, until the leader buries them."""
    fleet.client.zadd(fleet.names.delayed, {b"\xffjunk": 5, b"{}": 6})
    sent = fleet.note.delay(1, run_in=100)
    found = fleet.producer.delayed.list()
    assert [(each.id, each.task_name, each.run_at) for each in found[:2]] == [
        ("", "", 5.0),
        ("", "", 6.0),
    ]
    assert fleet.producer.delayed.get(sent.id) is not None
    assert fleet.producer.delayed.cancel(sent.id)
    assert len(fleet.producer.delayed) == 2


def test_an_empty_id_is_nobody_s(fleet: Fleet) -> None:
    """A variable left empty in a script must not cancel what merely has no id."""
    fleet.client.zadd(fleet.names.delayed, {'{"task":"note","time":4000000000,"payload":1}': 4e9})
    fleet.client.zadd(fleet.names.delayed, {"junk": 4e9})
    assert fleet.producer.delayed.get("") is None
    assert fleet.producer.delayed.cancel("") is False
    assert len(fleet.producer.delayed) == 2


def test_members_from_go_are_listed_and_cancelled_too(fleet: Fleet) -> None:
    """Four fields are all it takes."""
    text = '{"id":"8ddcff0c","task":"echo","time":4000000000,"payload":{"n":1e400000}}'
    good = '{"id":"9eedff0c","task":"echo","time":4000000000,"payload":[1,2]}'
    fleet.client.zadd(fleet.names.delayed, {text: 4e9, good: 4e9})
    found = fleet.producer.delayed.get("9eedff0c")
    assert found is not None
    assert (found.task_name, found.payload, found.run_at) == ("echo", [1, 2], 4e9)
    assert fleet.producer.delayed.cancel("9eedff0c")
    assert len(fleet.producer.delayed) == 1


def test_cancelling_a_unique_message_frees_its_lock(fleet: Fleet) -> None:
    """In the same step, and only where the lock holds the message's token."""
    name = f"one-{secrets.token_hex(4)}"
    unique = fleet.task(name=name, unique_for=60)
    first = unique.delay(1, run_in=600)
    assert fleet.producer.delayed.cancel(first.id)
    assert fleet.client.exists(lock_of(name)) == 0
    second = unique.delay(2, run_in=600)
    unique.unlock(2)
    unique.delay(3)
    token = fleet.client.get(lock_of(name))
    assert fleet.producer.delayed.cancel(second.id)
    assert fleet.client.get(lock_of(name)) == token


def test_a_waiting_long_retry_shows_its_attempts_and_may_be_cancelled(fleet: Fleet) -> None:
    """It is a delayed message like any other; its lock goes with it."""
    name = f"one-{secrets.token_hex(4)}"
    unique = fleet.task(
        lambda payload: 1 / 0, name=name, max_retry=5, retry_delay=600, unique_for=60
    )
    fleet.start(queue={"reclaim_delay": 1})
    sent = unique.delay(1)
    (waiting,) = eventually(fleet.producer.delayed.list)
    assert (waiting.id, waiting.attempt, waiting.task_name) == (sent.id, 1, name)
    assert 500 < waiting.run_at - time.time() <= 600
    assert fleet.producer.delayed.cancel(sent.id)
    assert fleet.client.exists(lock_of(name)) == 0
    eventually(fleet.settled)


# --- Task.unlock ---


def test_unlock_frees_the_lock_of_its_payload(fleet: Fleet) -> None:
    """Whoever holds it; True where there was one."""
    name = f"one-{secrets.token_hex(4)}"
    unique = fleet.task(name=name, unique_for=60, unique_key=lambda payload: str(payload["to"]))
    assert unique.unlock({"to": 1}) is False
    unique.delay({"to": 1})
    unique.delay({"to": 2})
    assert unique.unlock({"to": 1}) is True
    assert unique.unlock({"to": 1}) is False
    unique.delay({"to": 1})
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay({"to": 2})


def test_unlock_finds_the_lock_of_a_hashed_payload(fleet: Fleet) -> None:
    """By the same canonical form that took it."""
    name = f"one-{secrets.token_hex(4)}"
    unique = fleet.task(name=name, unique_for=60, unique_key="payload")
    unique.delay({"b": (1, 2), "a": None})
    assert unique.unlock({"a": None, "b": [1, 2]}) is True


def test_unlock_of_a_task_without_a_key_needs_no_payload(fleet: Fleet) -> None:
    """One lock for the task."""
    name = f"one-{secrets.token_hex(4)}"
    unique = fleet.task(name=name, unique_for=60)
    unique.delay(1)
    assert unique.unlock() is True


def test_unlock_of_a_task_that_is_not_unique_is_false(fleet: Fleet) -> None:
    """There is no lock to free."""
    assert fleet.note.unlock(1) is False


def test_unlock_refuses_what_could_not_be_dispatched(fleet: Fleet) -> None:
    """The same payload rules as at the dispatch."""
    unique = fleet.task(name=f"one-{secrets.token_hex(4)}", unique_for=60)
    with pytest.raises(InvalidTaskPayloadError):
        unique.unlock({1, 2})


def test_a_body_deleted_by_hand_leaves_a_lock_that_unlock_frees(fleet: Fleet) -> None:
    """XDEL of an entry nobody holds: its lock would run out by itself (BL-21 e)."""
    name = f"one-{secrets.token_hex(4)}"
    unique = fleet.task(name=name, unique_for=600)
    sent = unique.delay(1)
    fleet.client.xdel(fleet.names.stream, sent.entry_id or "")
    assert fleet.client.pttl(lock_of(name)) > 0
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay(2)
    assert unique.unlock(1)
    fleet.start()
    unique.delay(3)
    fleet.wait_ran(3)
    assert fleet.payloads() == [3]


def test_queue_delete_and_purge_free_locks_of_what_they_delete(fleet: Fleet) -> None:
    """By token: another message's lock of the same name stays."""
    name = f"one-{secrets.token_hex(4)}"
    unique = fleet.task(name=name, unique_for=60)
    first = unique.delay(1)
    unique.unlock(1)
    unique.delay(2)
    token = fleet.client.get(lock_of(name))
    assert token is not None
    assert fleet.producer.queue.delete(first.entry_id or "")
    assert fleet.client.get(lock_of(name)) == token
    (body,) = fleet.bodies()
    assert json.loads(body)["unique_lock_value"].encode() == token
    assert fleet.producer.queue.purge() == 1
    assert fleet.client.exists(lock_of(name)) == 0
