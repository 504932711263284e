"""BL-28: one task leaves nothing in its thread for the next; hooks come in pairs around each."""

import contextvars
import threading
from collections import Counter
from typing import Any

from taskrunner import TaskRunnerError, current_task
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Names, eventually
from tests.support.fleet import Fleet

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")


class Odd(TaskRunnerError):
    """Can't be made again from its arguments, nor printed."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("called with one argument, this class can't be made")

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_bl28_next_task_sees_no_context_of_the_one_before(
    server: EmbeddedServer, names: Names
) -> None:
    """One worker thread: a context variable that a task, its hooks or the application's start set
    is gone in the next; what hooks set is seen by the task they belong to."""
    seen: list[Any] = []

    def before(context: Any) -> None:
        seen.append(("before", context.name, variable.get()))
        variable.set(f"of the hook of {context.name}")

    def after(context: Any, error: BaseException | None) -> None:
        seen.append(("after", context.name, variable.get()))
        variable.set("left over")

    def leave(payload: Any) -> None:
        seen.append(("task", "leave", variable.get()))
        variable.set("left over")
        raise ValueError

    def look(payload: Any) -> None:
        seen.append(("task", "look", variable.get()))

    with Fleet(server.url, names) as fleet:
        fleet.task(leave, name="leave").delay(1)
        fleet.task(look, name="look").delay(2)
        variable.set("of the application")
        try:
            fleet.start(num_workers=1, before_task=before, after_task=after)
        finally:
            variable.set("clean")
        eventually(lambda: len(seen) == 6)
    assert seen == [
        ("before", "leave", "clean"),
        ("task", "leave", "of the hook of leave"),
        ("after", "leave", "left over"),
        ("before", "look", "clean"),
        ("task", "look", "of the hook of look"),
        ("after", "look", "of the hook of look"),
    ]


def test_bl28_no_current_task_between_tasks(server: EmbeddedServer, names: Names) -> None:
    """What a task can ask about itself ends with it, also for a thread it started."""
    late: list[Any] = []
    ended = threading.Event()

    def starts_a_thread(payload: Any) -> None:
        assert current_task().message.payload == payload
        context = contextvars.copy_context()

        def ask() -> None:
            ended.wait(5)
            try:
                late.append(current_task().name)
            except RuntimeError:
                late.append("none")
            late.append(context.run(lambda: current_task().name))

        threading.Thread(target=ask).start()

    with Fleet(server.url, names) as fleet:
        fleet.task(starts_a_thread, name="starts").delay("x")
        fleet.start(num_workers=1)
        eventually(fleet.settled)
        ended.set()
        eventually(lambda: len(late) == 2)
    assert late == ["none", "starts"]


def test_bl28_hooks_are_paired_one_to_one_whatever_happens(
    server: EmbeddedServer, names: Names
) -> None:
    """Success, failure, SystemExit, a time limit, a first hook that raises: both are called once for
    each attempt, in the worker's thread, the second one with the error; not for what never ran."""
    calls: Counter[str] = Counter()
    errors: dict[str, str] = {}
    threads: dict[str, set[str]] = {}

    def before(context: Any) -> None:
        calls[f"before {context.name}"] += 1
        threads.setdefault(context.id, set()).add(threading.current_thread().name)
        if context.name == "hook raises":
            raise SystemExit(1)

    def after(context: Any, error: BaseException | None) -> None:
        calls[f"after {context.name}"] += 1
        threads[context.id].add(threading.current_thread().name)
        errors[context.name] = type(error).__name__

    def fail(payload: Any) -> None:
        raise ValueError

    def leave(payload: Any) -> None:
        raise SystemExit(3)

    def late(payload: Any) -> None:
        until = threading.Event()
        while not until.wait(0.01):
            pass

    with Fleet(server.url, names) as fleet:
        tasks = [
            fleet.task(name="fine"),
            fleet.task(fail, name="fails", max_retry=2, retry_delay=0.05),
            fleet.task(leave, name="leaves"),
            fleet.task(late, name="late", time_limit=0.2),
            fleet.task(name="hook raises"),
        ]
        for task in tasks:
            task.delay("x")
        fleet.client.xadd(names.stream, {"payload": "rubbish"})
        fleet.start(num_workers=2, before_task=before, after_task=after)
        eventually(fleet.settled)
    assert calls == {
        **{f"{hook} {task.name}": 1 for hook in ("before", "after") for task in tasks},
        "before fails": 2,
        "after fails": 2,
    }
    assert errors == {
        "fine": "NoneType",
        "fails": "ValueError",
        "leaves": "SystemExit",
        "late": "TaskTimeoutError",
        "hook raises": "NoneType",
    }
    assert sorted(len(used) for used in threads.values())[:4] == [1] * 4, "in the worker's thread"


def test_bl28_hooks_that_raise_cost_the_task_nothing(server: EmbeddedServer, names: Names) -> None:
    """Whatever they raise: the task runs once and is settled, the worker lives, it is reported."""
    raised: list[type[BaseException]] = [ValueError, SystemExit, KeyboardInterrupt, MemoryError]

    def hook(*args: Any) -> None:
        number = int(args[0].message.payload)
        if number < len(raised):
            raise raised[number]
        raise Odd(1, 2)

    with Fleet(server.url, names, reclaim_delay=1) as fleet:
        runner = fleet.start(num_workers=1, before_task=hook, after_task=hook)
        for number in range(len(raised) + 1):
            fleet.note.delay(number)
        fleet.wait_ran(*range(len(raised) + 1))
        eventually(fleet.settled)
        assert fleet.payloads() == list(range(len(raised) + 1))
        assert len(runner.dead_letters) == 0
        assert sum(report.action == "service_error" for report in runner.errors) == 2 * 5
