"""Counting in memory that several processes share, one after the other."""

import os
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from taskrunner import (
    ErrorReport,
    InvalidTaskPayloadError,
    MaxRetryExceededError,
    Registry,
    Reject,
    TaskExecutionError,
    TaskNotFoundError,
    TaskRunner,
    TaskTimeoutError,
    task,
)
from taskrunner.stats import Load
from taskrunner.tally import BOUNDS, MOST_TASKS, OTHER, SIZE, Cells, Tally


class Context:
    """An attempt, as far as counting looks at it."""

    def __init__(self, name: str, attempt: int = 1, *, lost: bool = False) -> None:
        self.name = name
        self.attempt = attempt
        self.max_retry = 3
        self.lost = lost
        self.entry_id = "1000-0"


@pytest.fixture
def file() -> Iterator[int]:
    """A file without a name, as a supervisor makes it."""
    with tempfile.TemporaryFile() as made:
        made.truncate(SIZE)
        yield made.fileno()


def runner(*names: str, number: int = 0) -> TaskRunner:
    """A runner that is not started, with tasks of these names."""
    registry = Registry()
    for name in [*names, *(f"task-{i}" for i in range(number))]:
        task(name=name, registry=registry)(lambda payload: None)
    made = TaskRunner(consumer_group="g", client=redis.Redis(port=1), registry=registry)
    made.server_time = lambda: 3.0  # type: ignore[method-assign]
    return made


def run(tally: Tally, context: Any, error: BaseException | None = None) -> None:
    tally.started(context)
    tally.ended(context, error)


def test_what_one_process_counted_the_next_one_goes_on_from(file: int) -> None:
    """However the first one ended; what it did at the moment is forgotten."""
    first = Tally(runner("a"), Cells(file))
    run(first, Context("a"))
    first._runner.load = lambda: Load(held=4, running=(("a", 5.0),), workers=8)  # type: ignore[method-assign]
    first.sample()
    seen = Cells(file).read()
    assert seen[("process",)][1:4] == [4, 1, 8]
    assert seen[("running", "a")][0] == 1

    second = Tally(runner("b", "a"), Cells(file))
    run(second, Context("a"))
    run(second, Context("b"))

    found = Cells(file).read()
    assert found[("attempts", "a", "succeeded")] == [2]
    assert found[("attempts", "b", "succeeded")] == [1]
    assert sum(found[("queue_wait", "a")][:-1]) == 2
    assert found[("queue_wait", "a")][-1] == 4.0
    assert found[("process",)] == [os.getpid(), 0, 0, 0, 0, 0]
    assert found[("running", "a")] == [0, 0]


def test_who_reads_sees_what_is_added_later(file: int) -> None:
    """A supervisor's view is made before there is anything."""
    view = Cells(file)
    assert view.read() == {}
    Tally(runner("später"), Cells(file))
    assert ("attempts", "später", "retry") in view.read()


def test_ends_and_reasons_are_told_apart() -> None:
    """By what was raised, the attempt, and what was reported."""
    tally = Tally(runner("a"), Cells())
    run(tally, Context("a"), ValueError())
    run(tally, Context("a", 3), ValueError())
    run(tally, Context("a", 3), TaskTimeoutError("late"))
    run(tally, Context("a"), Reject("no"))
    run(tally, Context("a", lost=True), ValueError())
    run(tally, Context("a", lost=True))
    for name, error in (
        ("a", TaskExecutionError("a", ValueError())),
        ("a", TaskExecutionError("a", Reject("no"))),
        ("a", TaskTimeoutError("late")),
        ("a", MaxRetryExceededError("often")),
        ("hostile " + "x" * 900, TaskNotFoundError("no")),
        (None, InvalidTaskPayloadError("not JSON")),
    ):
        tally.reported(ErrorReport(action="task_failed", error=error, task_name=name))
    tally.reported(ErrorReport(action="task_retry", error=ValueError(), task_name="a"))

    found = tally.cells.read()
    nonzero = {key: values[0] for key, values in found.items() if len(values) == 1 and values[0]}
    assert nonzero == {
        ("attempts", "a", "retry"): 1,
        ("attempts", "a", "failed"): 2,
        ("attempts", "a", "rejected"): 1,
        ("attempts", "a", "lost"): 1,
        ("attempts", "a", "succeeded"): 1,
        ("timeouts", "a"): 1,
        ("failures", "a", "raised"): 1,
        ("failures", "a", "rejected"): 1,
        ("failures", "a", "timeout"): 1,
        ("failures", "a", "lost"): 1,
        ("failures", OTHER, "unknown_task"): 1,
        ("failures", OTHER, "undecodable"): 1,
        ("errors", "task_failed"): 6,
        ("errors", "task_retry"): 1,
    }


def test_a_forked_child_counts_for_itself() -> None:
    """In a copy of what was there, with a lock that nobody holds."""
    tally = Tally(runner("a"), Cells())
    run(tally, Context("a"))
    tally._lock.acquire()
    child = os.fork()
    if child == 0:
        try:
            run(tally, Context("a"))
            os._exit(int(tally.cells.read()[("attempts", "a", "succeeded")][0]))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert tally.cells.read()[("attempts", "a", "succeeded")] == [1]


def test_a_histogram_counts_by_its_upper_bounds() -> None:
    """A value on a bound is below it, as Prometheus has it; none is lost above the last."""
    tally = Tally(runner(), Cells())
    for seconds in (-1.0, 0.001, 0.0011, 1800.0, 1e9):
        tally.late("retry", seconds)
    *buckets, total = tally.cells.read()[("lateness", "retry")]
    assert len(buckets) == len(BOUNDS) + 1
    assert (buckets[0], buckets[1], buckets[-2], buckets[-1]) == (2, 1, 1, 1)
    assert total == pytest.approx(0.0021 + 1800 + 1e9)


def test_names_are_bounded() -> None:
    """By the registry, by a thousand, and by the room there is: what is beyond counts together."""
    tally = Tally(runner(number=MOST_TASKS + 50), Cells())
    beyond = sorted(f"task-{i}" for i in range(MOST_TASKS + 50))[-1]
    run(tally, Context(beyond))
    run(tally, Context("never registered"))
    found = tally.cells.read()
    assert found[("attempts", OTHER, "succeeded")] == [2]
    assert len({key[1] for key in found if key[0] == "attempts"}) == MOST_TASKS + 1

    long_names = Tally(runner(*(f"{i}-{'x' * 500}" for i in range(MOST_TASKS))), Cells())
    for i in range(MOST_TASKS):
        run(long_names, Context(f"{i}-{'x' * 500}"))
    found = long_names.cells.read()
    assert sum(values[0] for key, values in found.items() if key[0] == "attempts") == MOST_TASKS


def test_no_addition_is_lost_between_threads() -> None:
    """Two threads that add at once add two."""
    tally = Tally(runner("a"), Cells())

    def work() -> None:
        for _ in range(5000):
            run(tally, Context("a"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = tally.cells.read()
    assert found[("attempts", "a", "succeeded")] == [20_000]
    assert sum(found[("duration", "a")][:-1]) == 20_000
