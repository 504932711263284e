"""Floor 5: what happened here, counted in a piece of memory that others may read.

The memory is this process's own, or shared with a supervisor: then it outlives this process however
that ends, and the next one goes on counting where it stopped. So no count is lost by a kill, and
none goes back. Nothing here knows how the figures are shown; `prometheus` does.

Memory is a sequence of words of 8 bytes: how many are in use, then records: length of the key in
bytes, number of cells, the key (a JSON list of texts, padded), the cells (floats). A record is
written before it is counted as in use, and never moves: readers need no lock.
"""

import json
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from typing import Final, TypeAlias, get_args

import attrs

from taskrunner import clock
from taskrunner.clock import monotonic
from taskrunner.context import TaskContext
from taskrunner.errors import (
    InvalidTaskPayloadError,
    MaxRetryExceededError,
    Reject,
    TaskNotFoundError,
    TaskTimeoutError,
)
from taskrunner.observer import Observer, Waited
from taskrunner.reports import ErrorReport
from taskrunner.retry import Outcome, outcome
from taskrunner.runner import TaskRunner

SIZE: Final = 4 * 1024 * 1024
"""Bytes of a memory; only what is used is ever taken from the machine."""

MOST_TASKS: Final = 1000
OTHER: Final = "(other)"
"""Stands for every task name that is not registered, or beyond the first thousand."""

BOUNDS: Final = (
    0.001,
    0.005,
    0.025,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    1800.0,
)
"""Upper ends in seconds of a histogram's cells; a last cell takes what is above, another the sum."""

Key: TypeAlias = tuple[str, ...]
"""What a record counts, then its labels."""

ATTEMPTS: Final = "attempts"  # task, outcome
TIMEOUTS: Final = "timeouts"  # task
DURATION: Final = "duration"  # task; a histogram
QUEUE_WAIT: Final = "queue_wait"  # task; a histogram
FAILURES: Final = "failures"  # task, reason
LATENESS: Final = "lateness"  # waited; a histogram
RECLAIMS: Final = "reclaims"
UNKNOWN: Final = "unknown"
ERRORS: Final = "errors"  # action
PROCESS: Final = "process"  # pid, held, running, workers, unsettled, leads: as they are now
RUNNING: Final = "running"  # task; how many run now, and since when the longest does, in unix s

NOW: Final = (PROCESS, RUNNING)
"""Figures of the present; what a process that has ended left behind says nothing."""

_HISTOGRAM: Final = len(BOUNDS) + 2

_BY_KIND: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (TaskTimeoutError, "timeout"),
    (MaxRetryExceededError, "lost"),
    (TaskNotFoundError, "unknown_task"),
    (InvalidTaskPayloadError, "undecodable"),
)
REASONS: Final = ("raised", "rejected", *(reason for _, reason in _BY_KIND))
"""Why a message can fail for good."""


class Cells:
    """Floats by key, in a memory of `SIZE` bytes: a file that is shared, or one of one's own."""

    def __init__(self, file: int | None = None) -> None:
        made = (
            mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a fork has its own, too
            if file is None
            else mmap.mmap(file, SIZE)
        )
        memory = memoryview(made)
        self._bytes = memory
        self._words = memory.cast("Q")
        self.view = memory.cast("d")
        """All cells; `add` says where those of a key begin."""
        if self._words[0] == 0:
            self._words[0] = 1
        self._index = {key: at for key, at, _ in self._records()}

    def _records(self) -> list[tuple[Key, int, int]]:
        """Key, index of the first cell and number of cells of each record."""
        found: list[tuple[Key, int, int]] = []
        at, end = 1, self._words[0]
        while at < end:
            length, cells = self._words[at], self._words[at + 1]
            key: Key = tuple(json.loads(bytes(self._bytes[8 * at + 16 : 8 * at + 16 + length])))
            first = at + 2 + (length + 7) // 8
            found.append((key, first, cells))
            at = first + cells
        return found

    def add(self, key: Key, cells: int = 1) -> int:
        """Where the cells of a key begin: they are made where there are none; not for two threads
        at once. OverflowError where there is no room."""
        at = self._index.get(key)
        if at is not None:
            return at
        start = self._words[0]
        text = json.dumps(key).encode()
        first = start + 2 + (len(text) + 7) // 8
        if first + cells > SIZE // 8:
            raise OverflowError("no room for more series")
        self._words[start], self._words[start + 1] = len(text), cells
        self._bytes[8 * start + 16 : 8 * start + 16 + len(text)] = text
        self._words[0] = first + cells
        self._index[key] = first
        return first

    def read(self) -> dict[Key, list[float]]:
        """All cells, now."""
        return {key: list(self.view[at : at + cells]) for key, at, cells in self._records()}


@attrs.frozen(eq=False)
class _Task:
    """Where the cells of one task are."""

    outcomes: dict[Outcome, int]
    timeouts: int
    failures: dict[str, int]
    duration: int
    queue_wait: int
    running: int


class _Mine(threading.local):
    started = 0.0


class Tally(Observer):
    """Counts what happens in a runner, which must not have started yet, and on `sample` what is
    there at the moment."""

    def __init__(self, runner: TaskRunner, cells: Cells) -> None:
        self.cells = cells
        self._runner = runner
        self._registry = runner.registry
        self._lock = threading.Lock()  # of the cells: two threads' additions must not become one
        self._mine = _Mine()
        self._tasks: dict[str, _Task] = {}
        self._process = cells.add((PROCESS,), 6)
        self._reclaims = cells.add((RECLAIMS,))
        self._unknown = cells.add((UNKNOWN,))
        self._lateness = {
            waited: cells.add((LATENESS, waited), _HISTOGRAM) for waited in get_args(Waited)
        }
        self._other = self._new(OTHER)
        for name in self._registry.names():  # from the start at 0: a rate sees the first one, too
            self._task(name)
        for key, (first, *_) in cells.read().items():  # of the process before this one
            if key[0] == RUNNING and first:
                self._set(cells.add(key), 0.0, 0.0)
        self._set(self._process, os.getpid(), *[0.0] * 5)
        runner.observe(self)
        renew = weakref.WeakMethod(self._renew_lock)
        os.register_at_fork(after_in_child=lambda: (method := renew()) and method())

    def _renew_lock(self) -> None:
        """In a forked child: the parent's threads, one of which may have held it, are not there."""
        self._lock = threading.Lock()

    # --- told by the runner ---

    def started(self, context: TaskContext) -> None:
        self._mine.started = monotonic()
        if context.attempt == 1:
            added = int(context.entry_id.partition("-")[0]) / 1000
            task = self._tasks.get(context.name) or self._task(context.name)
            self._observe(task.queue_wait, max(0.0, self._runner.server_time() - added))

    def ended(self, context: TaskContext, error: BaseException | None) -> None:
        seconds = monotonic() - self._mine.started
        task = self._tasks.get(context.name) or self._task(context.name)
        end: Outcome = "succeeded"
        if error is not None:
            end = "lost" if context.lost else outcome(error, context.attempt, context.max_retry)
        bucket = task.duration + bisect_left(BOUNDS, seconds)
        view = self.cells.view
        with self._lock:
            view[task.outcomes[end]] += 1.0
            view[bucket] += 1.0
            view[task.duration + _HISTOGRAM - 1] += seconds
            if error is not None and issubclass(type(error), TaskTimeoutError):
                view[task.timeouts] += 1.0

    def late(self, waited: Waited, seconds: float) -> None:
        self._observe(self._lateness[waited], max(0.0, seconds))

    def unknown(self, task_name: str) -> None:
        with self._lock:
            self.cells.view[self._unknown] += 1.0

    def reclaimed(self) -> None:
        with self._lock:
            self.cells.view[self._reclaims] += 1.0

    def reported(self, report: ErrorReport) -> None:
        cells = self.cells
        task = self._task(report.task_name or OTHER)
        with self._lock:
            cells.view[cells.add((ERRORS, report.action))] += 1.0
            if report.action == "task_failed":
                cells.view[task.failures[_reason(report.error)]] += 1.0

    # --- asked for ---

    def sample(self) -> None:
        """Write down what this instance holds and does now."""
        load, now = self._runner.load(), clock.now()
        running = dict.fromkeys(self._tasks.values(), (0.0, 0.0))
        running[self._other] = (0.0, 0.0)
        for name, seconds in load.running:
            task = self._task(name)
            count, since = running.get(task, (0.0, 0.0))
            running[task] = (count + 1, min(since or now, now - seconds))
        self._set(
            self._process + 1,
            *(load.held, len(load.running), load.workers, load.unsettled, load.leads),
        )
        for task, (count, since) in running.items():
            self._set(task.running, count, since)

    # --- cells ---

    def _task(self, name: str) -> _Task:
        task = self._tasks.get(name)
        if task is not None:
            return task
        if name not in self._registry or len(self._tasks) >= MOST_TASKS:
            return self._other
        with self._lock:
            try:
                task = self._tasks[name] = self._new(name)
            except OverflowError:
                task = self._tasks[name] = self._other
        return task

    def _new(self, name: str) -> _Task:
        add = self.cells.add
        return _Task(
            {end: add((ATTEMPTS, name, end)) for end in get_args(Outcome)},
            add((TIMEOUTS, name)),
            {reason: add((FAILURES, name, reason)) for reason in REASONS},
            add((DURATION, name), _HISTOGRAM),
            add((QUEUE_WAIT, name), _HISTOGRAM),
            add((RUNNING, name), 2),
        )

    def _observe(self, histogram: int, seconds: float) -> None:
        bucket = histogram + bisect_left(BOUNDS, seconds)
        view = self.cells.view
        with self._lock:
            view[bucket] += 1.0
            view[histogram + _HISTOGRAM - 1] += seconds

    def _set(self, at: int, *values: float) -> None:
        for i, value in enumerate(values):
            self.cells.view[at + i] = value


def _reason(error: BaseException) -> str:
    """Why a message failed for good."""
    for kind, reason in _BY_KIND:
        if isinstance(error, kind):
            return reason
    cause = error.__cause__
    return "rejected" if cause is not None and issubclass(type(cause), Reject) else "raised"
