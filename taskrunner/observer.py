"""Floor 3: the one seam for those who watch: what happened, told to whoever asked to be told.

An `Observer` is added with `TaskRunner.observe` before the start. Metrics and traces are made of
nothing else; the hooks in TaskRunnerConfig belong to the application and stay as they are. With no
observer nothing here is on a task's way.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, Protocol, TypeAlias

from taskrunner.clock import Duration
from taskrunner.config import AfterTask, BeforeTask
from taskrunner.context import TaskContext
from taskrunner.errors import describe
from taskrunner.reports import ErrorReport
from taskrunner.task import Dispatched, Task

Waited: TypeAlias = Literal["delayed", "retry"]

log = logging.getLogger("taskrunner.observer")


class Sender(Protocol):
    """A dispatcher that puts further keys beside a message's own fields."""

    def dispatch(
        self,
        task: Task[Any],
        payload: Any,
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> Dispatched: ...

    def dispatch_many(
        self,
        task: Task[Any],
        payloads: Iterable[Any],
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> list[Dispatched | None]: ...

    def unlock(self, task: Task[Any], payload: Any) -> bool: ...


class Observer:
    """Override what is of interest.

    Each method is called in the thread where it happened, so it must be quick; what it raises is
    logged and harms nobody.
    """

    def sender(self, sender: Sender) -> Sender:
        """Return what dispatches from now on: the given one, or one around it."""
        return sender

    def started(self, context: TaskContext) -> None:
        """An attempt begins, in its thread and its contextvars; `before_task` comes next."""

    def ended(self, context: TaskContext, error: BaseException | None) -> None:
        """It ended, with what it raised; `after_task` has been called. One for each `started`."""

    def late(self, waited: Waited, seconds: float) -> None:
        """A message that waited for its time left the delayed set, or a retry its parking place, so
        long after it was due."""

    def unknown(self, task_name: str) -> None:
        """A message was put back for a while: its task is not registered here."""

    def reclaimed(self) -> None:
        """A delivery was taken over from a consumer that went silent."""

    def reported(self, report: ErrorReport) -> None:
        """Something went wrong: what `on_error` is told, too."""


class Observers:
    """Tells several, each whatever the others do."""

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, observer: Observer) -> None:
        """One more. `around` tells of starts in this order, of ends in the opposite one."""
        self._all.append(observer)

    def late(self, waited: Waited, seconds: float) -> None:
        for observer in self._all:
            _tell(observer.late, waited, seconds)

    def unknown(self, task_name: str) -> None:
        for observer in self._all:
            _tell(observer.unknown, task_name)

    def reclaimed(self) -> None:
        for observer in self._all:
            _tell(observer.reclaimed)

    def reported(self, report: ErrorReport) -> None:
        for observer in self._all:
            _tell(observer.reported, report)

    def around(
        self, before: BeforeTask | None, after: AfterTask | None
    ) -> tuple[BeforeTask | None, AfterTask | None]:
        """The application's hooks with the observers outside of them; as they are, where there is
        none."""
        if not self._all:
            return before, after
        starts = [observer.started for observer in self._all]
        ends = [observer.ended for observer in reversed(self._all)]

        def started(context: TaskContext) -> None:
            for start in starts:
                try:
                    start(context)
                except Exception as error:  # who watches must not disturb what is watched
                    _complain(start, error)
            if before is not None:
                before(context)

        def ended(context: TaskContext, error: BaseException | None) -> None:
            try:
                if after is not None:
                    after(context, error)
            finally:
                for end in ends:
                    try:
                        end(context, error)
                    except Exception as problem:  # who watches must not disturb what is watched
                        _complain(end, problem)

        return started, ended


def _tell(method: Callable[..., None], *what: object) -> None:
    try:
        method(*what)
    except Exception as error:  # who watches must not disturb what is watched
        _complain(method, error)


def _complain(method: Callable[..., None], error: Exception) -> None:
    log.error("%s raised: %s", method, describe(error), extra={"action": "observer_error"})
