"""Floor 1: what went wrong, told once: the runner's `errors`, its `on_error` hook and the log.

Reporting never blocks and never raises: the deque drops its oldest, and the hook runs in a thread
of its own (`services/reporter.py`), so a hook that hangs holds up nobody.
"""

import logging
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import attrs

from taskrunner import clock
from taskrunner.errors import TaskExecutionError, TaskRunnerError, describe

_KEPT = 1000

log = logging.getLogger("taskrunner.service")
# An application that sets up no logging hears nothing of ours, rather than some of it on standard error.
logging.getLogger("taskrunner").addHandler(logging.NullHandler())


@attrs.frozen(kw_only=True)
class ErrorReport:
    """One thing that went wrong; `at` is in unix seconds.

    `action` is the event's name in the log, e.g. `task_failed`, `service_error`. `task_name` and
    `message_id` are None where it concerns no one task.
    """

    action: str
    error: BaseException
    task_name: str | None = None
    message_id: str | None = None
    at: float = attrs.field(factory=clock.now)


class Reports:
    """Takes reports from any thread."""

    def __init__(self, *, hook: bool = False) -> None:
        self.recent: deque[ErrorReport] = deque(maxlen=_KEPT)
        self.for_hook: SimpleQueue[ErrorReport | None] | None = SimpleQueue() if hook else None
        self.dropped = 0  # reports the hook never saw, because it was too slow
        self.listener: Callable[[ErrorReport], object] | None = None  # must not raise

    def add(
        self,
        action: str,
        error: BaseException,
        *,
        task_name: str | None = None,
        message_id: str | None = None,
    ) -> None:
        """Keep a report, and queue it for the hook if that is not too far behind."""
        report = ErrorReport(action=action, error=error, task_name=task_name, message_id=message_id)
        self.recent.append(attrs.evolve(report, error=_light(error)))
        if self.for_hook is not None:
            if self.for_hook.qsize() < _KEPT:
                self.for_hook.put(report)
            else:
                self.dropped += 1
        if self.listener is not None:
            self.listener(report)


def _light(error: BaseException) -> BaseException:
    """The error without what would keep a payload alive: frames, arguments, what the task raised
    (BL-17)."""
    if isinstance(error, TaskExecutionError):
        return TaskExecutionError(error.task_name, TaskRunnerError(describe(error.args[1])))
    if type(error).__module__ == TaskRunnerError.__module__:
        return type(error)(*error.args)
    return TaskRunnerError(describe(error))


class Health:
    """Says each outage once when it begins and once when it is over, however many loops meet it.

    Errors of the connection are one outage for the whole runner; any other error is one per service
    and kind. What Redis refuses for now (`refused`) is told without a traceback, as our code has no
    part in it.
    """

    def __init__(
        self,
        reports: Reports,
        outage: Callable[[BaseException], bool],
        refused: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self._reports = reports
        self._outage = outage
        self._refused = refused
        self._failing: dict[str, set[str]] = {}  # what fails -> the services that met it

    def failed(self, service: str, error: Exception) -> None:
        """A round of the service failed."""
        lost = self._outage(error)
        what = "redis" if lost else f"{service}: {type(error).__name__}"
        met = self._failing.setdefault(what, set())
        first = not met
        met.add(service)
        if not first:
            return
        if lost:
            log.warning(
                "Redis is away, retrying with backoff until it is back: %s",
                describe(error),
                extra={"action": "service_error"},
            )
        else:
            log.error(
                "%s failed, retrying with backoff: %s",
                service,
                describe(error),
                extra={"action": "service_error"},
                exc_info=None if self._refused(error) else error,
            )
        self._reports.add("service_error", error)

    def succeeded(self, service: str) -> None:
        """A round of the service went well. Costs next to nothing while all is well."""
        if not self._failing:
            return
        for what, met in list(self._failing.items()):
            met.discard(service)
            if not met and self._failing.pop(what, None) is not None:
                log.info("%s recovered", what, extra={"action": "service_recovered"})
