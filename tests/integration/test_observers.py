"""The seam for those who watch: told what happened, beside the application's hooks, and harmless."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from taskrunner import AlreadyStartedError, ErrorReport, Reject, Retry, TaskContext
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.observer import Observer, Sender, Waited
from tests.support import eventually
from tests.support.fleet import Fleet
from tests.support.names import Names


class Diary(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def started(self, context: TaskContext) -> None:
        self.lines.append(("started", context.attempt, threading.current_thread().name))

    def ended(self, context: TaskContext, error: BaseException | None) -> None:
        self.lines.append(
            ("ended", context.attempt, type(error).__name__, threading.current_thread().name)
        )

    def late(self, waited: Waited, seconds: float) -> None:
        self.lines.append((waited, seconds))

    def unknown(self, task_name: str) -> None:
        self.lines.append(("unknown", task_name))

    def reclaimed(self) -> None:
        self.lines.append(("reclaimed",))

    def reported(self, report: ErrorReport) -> None:
        self.lines.append(("reported", report.action))

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [line for line in list(self.lines) if line[0] in kinds]


class Broken(Observer):
    """Raises wherever it is told something."""

    def started(self, *_: Any) -> None:
        raise ValueError("started")

    ended = late = reclaimed = reported = started  # type: ignore[assignment]


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    """Runners of this test."""
    with Fleet(server.url, names) as made:
        yield made


def test_an_observer_is_told_what_happens_beside_the_hooks(fleet: Fleet) -> None:
    """Once for each attempt, in its thread, around the application's hooks; and with its reports,
    the lateness of what waited, whatever another observer or a hook raises."""
    diary = Diary()
    order: list[str] = []
    reports: list[ErrorReport] = []

    def before(context: TaskContext) -> None:
        order.append(f"before {context.attempt} after {len(diary.of('started'))} started")
        raise ValueError("a hook of the application")

    def after(context: TaskContext, error: BaseException | None) -> None:
        order.append(f"after {context.attempt} before {len(diary.of('ended'))} ended")
        raise ValueError("a hook of the application")

    runner = fleet.make(before_task=before, after_task=after, on_error=reports.append)
    runner.observe(Broken())
    runner.observe(diary)

    def body(payload: Any) -> None:
        if len(diary.of("started")) == 1:
            raise Retry(0.05)
        raise Reject("no")

    made = fleet.task(body, name="twice", max_retry=5)
    with runner:
        made.delay(1, run_in=0.1)
        eventually(lambda: len(diary.of("reported")) == 6 and len(diary.of("ended")) == 2, 15)

        with pytest.raises(AlreadyStartedError):
            runner.observe(diary)

    assert order == [
        *("before 1 after 1 started", "after 1 before 0 ended"),
        *("before 2 after 2 started", "after 2 before 1 ended"),
    ]
    attempts = diary.of("started", "ended")
    assert [line[:-1] for line in attempts] == [
        *(("started", 1), ("ended", 1, "Retry"), ("started", 2), ("ended", 2, "Reject"))
    ]
    assert all(line[-1].startswith("taskrunner-worker") for line in attempts)
    (delayed,) = diary.of("delayed")
    (retry,) = diary.of("retry")
    assert 0 <= delayed[1] < 5
    assert 0 <= retry[1] < 5
    actions = sorted(action for _, action in diary.of("reported"))
    assert actions == ["service_error"] * 4 + ["task_failed", "task_retry"]
    assert eventually(lambda: len(reports) == 6)


def test_an_observer_is_told_of_a_delivery_taken_over(fleet: Fleet) -> None:
    """What a silent consumer held."""
    diary = Diary()
    fleet.note.delay("lost")
    fleet.producer.queue.for_group(fleet.names.group).create()
    held = fleet.client.xreadgroup(
        fleet.names.group, f"{fleet.names.group}_gone_1", {fleet.names.stream: ">"}
    )
    assert held
    runner = fleet.make(queue={"reclaim_delay": 0.5})
    runner.observe(diary)
    with runner:
        fleet.wait_ran("lost")
    assert diary.of("reclaimed") == [("reclaimed",)]


def test_an_observer_is_told_of_a_task_that_nobody_knows(fleet: Fleet) -> None:
    """Each time its message is put back."""
    diary = Diary()
    fleet.producer.queue.add('{"task_name":"stranger","payload":1}')
    runner = fleet.make()
    runner.observe(diary)
    with runner:
        eventually(lambda: diary.of("unknown") == [("unknown", "stranger")])


def test_an_observer_may_stand_around_what_dispatches(fleet: Fleet) -> None:
    """It puts keys beside the message's fields; the bytes of a payload stay out of its hands."""

    class Stamp(Observer):
        def sender(self, sender: Sender) -> Sender:
            class Stamped:
                unlock = sender.unlock

                def dispatch(self, task: Any, payload: Any, **options: Any) -> Any:
                    return sender.dispatch(task, payload, **options, extra={"stamp": "one"})

                def dispatch_many(self, task: Any, payloads: Any, **options: Any) -> Any:
                    return sender.dispatch_many(task, payloads, **options, extra={"stamp": "many"})

            return Stamped()

    fleet.producer.observe(Stamp())
    fleet.note.delay(1)
    fleet.note.delay_many([2])
    fleet.producer.dispatch("note", 3)
    fleet.note.delay(4, run_in=60)

    stamps = [body.rpartition(b',"stamp":')[2] for body in fleet.bodies()]
    assert stamps == [b'"one"}', b'"many"}', b'"one"}']
    assert b'"stamp":"one"' in fleet.members()[0][0]
