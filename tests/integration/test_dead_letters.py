"""Dead letters: what ends there, what is known of it, and how it comes back."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest

from taskrunner import (
    DeadLetter,
    InvalidTaskPayloadError,
    Reject,
    TaskAlreadyDispatchedError,
    TaskMessage,
    TaskNotFoundError,
    TaskRunnerError,
    current_task,
    keys,
)
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Names, eventually, stays
from tests.support.fleet import Fleet


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


class Broken:
    """A task body that fails until it is mended."""

    def __init__(self, fleet: Fleet, error: BaseException | None = None) -> None:
        self.mended = False
        self._fleet = fleet
        self._error = error or ValueError("broken")

    def __call__(self, payload: Any) -> None:
        self._fleet.record(payload)
        if not self.mended:
            raise self._error


def letters(fleet: Fleet, count: int) -> list[DeadLetter]:
    """Wait for so many letters, and for everything else to be settled."""
    eventually(lambda: len(fleet.producer.dead_letters) == count)
    eventually(fleet.settled)
    return fleet.producer.dead_letters.list(limit=1000)


# --- how a message gets there ---


def test_a_letter_says_what_failed_how_often_and_why(fleet: Fleet) -> None:
    """All that somebody needs who looks at it in the morning."""
    body = Broken(fleet)
    made = fleet.task(body, name="broken", max_retry=2, retry_delay=0.05)
    fleet.start()
    before = time.time()
    sent = made.delay({"a": [1, "ä"]})

    (letter,) = letters(fleet, 1)

    assert letter.task_name == "broken"
    assert letter.payload == {"a": [1, "ä"]}
    assert letter.error_type == "ValueError"
    assert "broken" in letter.error
    assert "ValueError: broken" in letter.traceback
    assert "in __call__" in letter.traceback
    assert letter.attempts == 2
    assert letter.message_id == sent.id
    assert before - 1 < letter.failed_at < time.time() + 1
    assert fleet.producer.dead_letters.get(letter.id) == letter


def test_nothing_of_a_letter_s_message_has_changed(fleet: Fleet) -> None:
    """Numbers keep their digits, and text its characters."""
    payload = {"n": 2**70, "f": 1e-7, "s": "\u2028 <&> \U0001f600", "e": [], "z": -0.0}
    fleet.task(Broken(fleet), name="broken").delay(payload)
    (body,) = fleet.bodies()
    fleet.start()

    (letter,) = letters(fleet, 1)

    assert letter.message.encode() == body
    assert letter.payload == payload


def test_an_error_of_any_kind_is_told(fleet: Fleet) -> None:
    """Rejected, timed out, too deep, ended by force: each with its own type."""

    def deep(payload: Any) -> None:
        deep(payload)

    def hangs(payload: Any) -> None:
        while True:
            time.sleep(0.01)

    fleet.task(Broken(fleet, Reject("not wanted")), name="reject", max_retry=5).delay(1)
    fleet.task(Broken(fleet, SystemExit(3)), name="exit").delay(1)
    fleet.task(deep, name="deep").delay(1)
    fleet.task(hangs, name="hangs", time_limit=0.2).delay(1)
    fleet.start()

    found = {letter.task_name: letter for letter in letters(fleet, 4)}

    assert {name: letter.error_type for name, letter in found.items()} == {
        "reject": "Reject",
        "exit": "SystemExit",
        "deep": "RecursionError",
        "hangs": "TaskTimeoutError",
    }
    assert "not wanted" in found["reject"].error
    assert found["reject"].attempts == 1
    assert "time_limit=0.2" in found["hangs"].error
    assert len(found["deep"].traceback) <= 20_000


def test_what_was_lost_with_its_process_too_often_is_a_letter(fleet: Fleet) -> None:
    """It may have killed them: it is not run once more."""
    made = fleet.task(name="t", max_retry=1, max_lost=1)
    made.delay("guilty")
    client, names = fleet.client, fleet.names
    client.xgroup_create(names.stream, names.group, "0-0")
    dead = keys.consumer(names.group, "dead", 1)
    ((_, ((entry_id, _),)),) = cast(
        Any, client.xreadgroup(names.group, dead, {names.stream: ">"}, 1)
    )
    client.xclaim(names.stream, names.group, dead, 0, [entry_id], retrycount=2)
    fleet.start(queue={"reclaim_delay": 0.5})

    (letter,) = letters(fleet, 1)

    assert fleet.runs == []
    assert letter.error_type == "MaxRetryExceededError"
    assert "may never have started" in letter.error


def test_an_unknown_task_is_a_letter_when_no_instance_knows_it(fleet: Fleet) -> None:
    """After so many rounds; its attempts were never spent."""
    other = Fleet(fleet.url, fleet.names)
    with other:
        other.task(name="unknown").delay(5)
        fleet.start(unknown_task_deliveries=1, timings={"poll": 0.2})

        (letter,) = letters(fleet, 1)

    assert (letter.task_name, letter.payload) == ("unknown", 5)
    assert letter.error_type == TaskNotFoundError.__name__
    assert "unknown" in letter.error


def test_with_a_handler_there_are_no_letters(fleet: Fleet) -> None:
    """It was told, and what becomes of the message is its affair."""
    failed: list[tuple[TaskMessage, TaskRunnerError]] = []
    made = fleet.task(Broken(fleet), name="broken", max_retry=2, retry_delay=0.05)
    fleet.start(failed_task_handler=lambda message, error: failed.append((message, error)))
    sent = made.delay("p")

    eventually(lambda: failed)
    eventually(fleet.settled)

    ((message, error),) = failed
    assert (message.id, message.task_name, message.payload) == (sent.id, "broken", "p")
    assert message.attempt == 2
    assert message.enqueued_at is not None
    assert str(error.__cause__) == "broken"
    assert len(fleet.producer.dead_letters) == 0


def test_the_newest_letters_are_kept(fleet: Fleet) -> None:
    """As many as dead_letter_limit says; 0 drops them, after the log said so."""
    made = fleet.task(Broken(fleet), name="broken")
    runner = fleet.start(num_workers=1, dead_letter_limit=3)
    made.delay_many(range(8))
    eventually(lambda: len(fleet.runs) == 8)
    eventually(fleet.settled)
    assert [letter.payload for letter in runner.dead_letters.list()] == [5, 6, 7]

    assert runner.stop(5)
    runner = fleet.start(num_workers=1, dead_letter_limit=0)
    made.delay(8)
    eventually(lambda: len(fleet.runs) == 9)
    eventually(fleet.settled)
    assert [letter.payload for letter in runner.dead_letters.list()] == [5, 6, 7]
    assert any(one.action == "task_failed" for one in runner.errors)


# --- looking ---


def test_an_empty_place_is_empty(fleet: Fleet) -> None:
    """Before anything failed there is no key; nothing raises, and it is true as a thing."""
    view = fleet.producer.dead_letters

    assert view.list() == []
    assert len(view) == 0
    assert bool(view)
    assert view.get("1-1") is None
    assert view.requeue_all() == (0, 0)
    assert view.delete("1-1") is False
    assert view.purge() == 0
    with pytest.raises(KeyError):
        view.requeue("1-1")


def test_list_pages_from_the_oldest(fleet: Fleet) -> None:
    """`after` is the last id of the page before."""
    made = fleet.task(Broken(fleet), name="broken")
    made.delay_many(range(25))
    fleet.start(num_workers=1)
    everything = letters(fleet, 25)
    view = fleet.producer.dead_letters
    pages: list[DeadLetter] = []

    while page := view.list(limit=10, after=pages[-1].id if pages else None):
        assert len(page) <= 10
        pages += page

    assert pages == everything
    assert [letter.payload for letter in pages] == list(range(25))
    assert view.list(limit=0) == []


def test_delete_and_purge(fleet: Fleet) -> None:
    """One, or all; and it is said what was there."""
    fleet.task(Broken(fleet), name="broken").delay_many(range(5))
    fleet.start(num_workers=1)
    first, *_ = letters(fleet, 5)
    view = fleet.producer.dead_letters

    assert view.delete(first.id) is True
    assert view.delete(first.id) is False
    assert view.get(first.id) is None
    assert len(view) == 4
    assert view.purge() == 4
    assert len(view) == 0


# --- coming back ---


def test_a_requeued_message_has_fresh_attempts_and_its_own_id(fleet: Fleet) -> None:
    """Whoever mended the fault wants it run as if for the first time."""
    body = Broken(fleet)
    made = fleet.task(body, name="broken", max_retry=2, retry_delay=0.05)
    fleet.start()
    sent = made.delay({"a": 1})
    (letter,) = letters(fleet, 1)
    body.mended = True

    entry_id = fleet.producer.dead_letters.requeue(letter.id)

    eventually(lambda: len(fleet.runs) == 3)
    assert [run.attempt for run in fleet.runs] == [1, 2, 1]
    assert {run.id for run in fleet.runs} == {sent.id}
    assert fleet.runs[-1].payload == {"a": 1}
    assert "-" in entry_id
    assert len(fleet.producer.dead_letters) == 0
    eventually(fleet.settled)
    with pytest.raises(KeyError):
        fleet.producer.dead_letters.requeue(letter.id)


def test_a_requeued_message_may_fail_again(fleet: Fleet) -> None:
    """Then it is a letter again, with the same message id."""
    made = fleet.task(Broken(fleet), name="broken")
    fleet.start()
    sent = made.delay(1)
    (first,) = letters(fleet, 1)

    fleet.producer.dead_letters.requeue(first.id)

    eventually(lambda: len(fleet.runs) == 2)
    (second,) = letters(fleet, 1)
    assert second.id != first.id
    assert second.message_id == first.message_id == sent.id
    assert second.attempts == 1


def test_requeue_all_brings_back_what_is_there_now(fleet: Fleet) -> None:
    """Each once, also where they fail again at once; what can't be run stays and is counted."""
    made = fleet.task(Broken(fleet), name="broken")
    fleet.start()
    made.delay_many(range(250))
    fleet.producer.queue.add("no message")
    letters(fleet, 251)
    fleet.runs.clear()

    assert fleet.producer.dead_letters.requeue_all() == (250, 1)

    eventually(lambda: len(fleet.runs) == 250, 30)  # pytest keeps each traceback: slow
    letters(fleet, 251)
    assert Counter(fleet.payloads()) == dict.fromkeys(range(250), 1)


def test_what_is_no_message_can_not_be_requeued(fleet: Fleet) -> None:
    """It would be back in a moment. It stays, to be looked at or deleted."""
    fleet.producer.queue.add('{"task_name": "note", "payload": ')
    fleet.client.xadd(fleet.names.stream, {"other": "field"})
    fleet.start()

    for letter in letters(fleet, 2):
        assert letter.payload is None
        with pytest.raises(InvalidTaskPayloadError, match=letter.id):
            fleet.producer.dead_letters.requeue(letter.id)

    assert len(fleet.producer.dead_letters) == 2


def test_a_requeued_unique_message_takes_its_lock(fleet: Fleet) -> None:
    """With a new token; it is free while the letter lies there, and held until the next end."""
    release = threading.Event()
    body = Broken(fleet)

    def unique(payload: Any) -> None:
        body(payload)
        assert release.wait(30)

    made = fleet.task(unique, name="unique", unique_for=60, unique_key=str)
    fleet.start()
    made.delay("k")
    (letter,) = letters(fleet, 1)
    assert fleet.locks("unique") == {}
    body.mended = True

    fleet.producer.dead_letters.requeue(letter.id)

    eventually(lambda: len(fleet.runs) == 2)
    (left,) = fleet.locks("unique").values()
    assert 50_000 < left <= 60_000
    with pytest.raises(TaskAlreadyDispatchedError):
        made.delay("k")
    release.set()
    eventually(fleet.settled)
    assert fleet.locks("unique") == {}


def test_a_letter_stays_where_another_message_holds_its_lock(fleet: Fleet) -> None:
    """Two of a unique kind would be on their way at once."""
    body = Broken(fleet)
    made = fleet.task(body, name="unique", unique_for=60, unique_key=str)
    runner = fleet.start()
    made.delay("k")
    (letter,) = letters(fleet, 1)
    assert runner.stop(5)
    made.delay("k")

    with pytest.raises(TaskAlreadyDispatchedError, match=letter.id):
        fleet.producer.dead_letters.requeue(letter.id)

    assert fleet.producer.dead_letters.get(letter.id) == letter
    assert len(fleet.bodies()) == 1
    assert fleet.producer.dead_letters.requeue_all() == (0, 1)


def test_a_requeued_message_is_its_own_groups_alone(fleet: Fleet) -> None:
    """The other group on the stream had it long ago, and did not fail."""
    names = fleet.names
    seen: list[Any] = []
    body = Broken(fleet)
    fleet.task(body, name="broken")
    second = Fleet(fleet.url, names)
    with second:
        second.task(seen.append, name="broken")
        second.start(consumer_group=f"{names.group}-second")
        fleet.start()
        eventually(lambda: len(cast(Any, fleet.client.xinfo_groups(names.stream))) == 2)
        fleet.producer.dispatch("broken", 1)
        eventually(lambda: len(fleet.producer.dead_letters) == 1)
        eventually(lambda: seen == [1])
        body.mended = True
        (letter,) = fleet.producer.dead_letters.list()

        fleet.producer.dead_letters.requeue(letter.id)

        eventually(lambda: len(fleet.runs) == 2)
        stays(lambda: seen == [1], 0.5)
        eventually(lambda: fleet.client.xlen(names.stream) == 0, 15)


def test_a_retried_message_keeps_its_attempts_in_its_letter(fleet: Fleet) -> None:
    """Also where it waited in the delayed set between two of them."""

    def fails(payload: Any) -> None:
        fleet.record(payload)
        raise ValueError(current_task().attempt)

    made = fleet.task(fails, name="fails", max_retry=3, retry_delay=0.8)
    fleet.start(queue={"reclaim_delay": 0.5}, timings={"poll": 0.2})
    made.delay(1)

    (letter,) = letters(fleet, 1)

    assert [run.attempt for run in fleet.runs] == [1, 2, 3]
    assert letter.attempts == 3
    assert "3" in letter.error
