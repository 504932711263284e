"""Floor 4: one delivery, from decode to settlement, as named steps.

Owns: the order of the steps, what counts as a failed attempt, and which settlement each end gets.
Runs in worker threads and never raises: whatever the task, its payload or a hook does ends as one
settlement (BL-09, BL-14).
"""

import logging
import traceback
from collections.abc import Callable
from contextvars import Context
from typing import Any, Final, Protocol, cast

from taskrunner import clock, retry
from taskrunner.clock import monotonic
from taskrunner.config import TaskRunnerConfig
from taskrunner.context import TaskContext, current, task_message
from taskrunner.delivery import Delivery
from taskrunner.errors import (
    InvalidTaskPayloadError,
    MaxRetryExceededError,
    TaskExecutionError,
    TaskNotFoundError,
    TaskRunnerError,
    TaskTimeoutError,
    describe,
)
from taskrunner.in_flight import InFlight
from taskrunner.message import Message, decode, salvage
from taskrunner.observer import Observers
from taskrunner.reports import Health, Reports
from taskrunner.settler import UNSEEN, Bury, Park, Postpone, Settler, lock_of
from taskrunner.store import connection
from taskrunner.store.group import MOVED, NOT_PENDING, ConsumerGroup
from taskrunner.task import Registry, Task

_PUT_OFF: Final = 1.0
"""Seconds a unique delivery waits when another message holds its lock."""

_UNKNOWN_CAP: Final = 60.0
_LONGEST_TRACEBACK: Final = 20_000

log = logging.getLogger("taskrunner.executor")


class Limits(Protocol):
    """What raises TaskTimeoutError in a task's thread."""

    def run(self, seconds: float, call: Callable[[], object]) -> None:
        """Call, and raise TaskTimeoutError if that took longer than `seconds`."""


class Timings(Protocol):
    """Where run times are summed."""

    def add(self, task_name: str, seconds: float) -> None:
        """One run took so long."""


class Executor:
    """Executes deliveries in the calling thread."""

    def __init__(
        self,
        *,
        registry: Registry,
        config: TaskRunnerConfig,
        group: str,
        reclaim_delay: float,
        in_flight: InFlight,
        settler: Settler,
        deliveries: ConsumerGroup,
        limits: Limits,
        timings: Timings,
        reports: Reports,
        health: Health,
        confirm: Callable[[], None],
        renew_early: Callable[[], None],
        stopping: Callable[[], bool],
        observers: Observers | None = None,
    ) -> None:
        self._registry = registry
        self._config = config
        self._group = group
        self._reclaim_delay = reclaim_delay
        self._in_flight = in_flight
        self._settle = settler.put
        self._deliveries = deliveries
        self._limits = limits
        self._timings = timings
        self._reports = reports
        self._health = health
        self._confirm = confirm
        self._renew_early = renew_early
        self._stopping = stopping
        self._third_ns = int(reclaim_delay / 3 * 1e9)
        self._observers = observers or Observers()
        self._before, self._after = self._observers.around(config.before_task, config.after_task)

    def __call__(self, delivery: Delivery) -> None:
        """Execute one delivery and hand it to the settler. Never raises."""
        try:
            self._execute(delivery)
        except BaseException as error:
            # Our own fault, or no memory: the message comes back, its neighbours go on.
            log.error(
                "entry %s could not be handled and will be tried again: %s",
                delivery.entry_id.decode(),
                describe(error),
                extra={"action": "service_error"},
                exc_info=error,
            )
            self._reports.add("service_error", error)
            delivery.settlement = Park(due=monotonic() + self._reclaim_delay)
            self._settle(delivery)

    # --- the steps ---

    def _execute(self, delivery: Delivery) -> None:
        now = monotonic()
        if delivery.lost:
            return
        if now - delivery.confirmed > self._reclaim_delay:
            self._set_aside(delivery)  # a paused process, a long outage: it may be another's by now
            return
        delivery.started = now
        message = delivery.message
        if message is None:
            try:
                if delivery.body is None:
                    names = ", ".join(repr(name)[1:60] for name in delivery.fields[::2][:5])
                    raise InvalidTaskPayloadError(f"the entry has no field 'payload', only {names}")
                message = delivery.message = decode(delivery.body)
            except InvalidTaskPayloadError as error:
                delivery.message = message = salvage(delivery.body or b"")
                self._fail_for_good(
                    delivery, message, error, attempts=delivery.count, spent=delivery.count
                )
                return
        head = message.head
        if head.only_group is not None and head.only_group != self._group:
            delivery.settlement = UNSEEN
            self._settle(delivery)  # a retry or a requeued letter of another group: not ours to run
            return
        task = self._registry.get(head.task_name)
        if task is None:
            self._unknown(delivery, message)
            return
        attempt = head.attempt + delivery.count
        if not retry.may_run(attempt, task.max_retry, task.max_lost):
            most = task.max_retry + task.max_lost
            exceeded = MaxRetryExceededError(
                f"task {task.name!r}: delivery {attempt} is beyond max_retry={task.max_retry} + "
                f"max_lost={task.max_lost}. Earlier ones were lost with its process, so it may "
                "never have started; or the failed-task handler raised, and is called again"
            )
            self._fail_for_good(delivery, message, exceeded, attempts=attempt - 1, spent=most)
            return
        if head.unique and not self._may_start(delivery, message):
            return
        if 0 < head.reservation_timeout < self._third_ns:
            self._renew_early()
        self._run(delivery, message, task, attempt)

    def _set_aside(self, delivery: Delivery) -> None:
        """The heartbeat asks who owns it, and submits it again if it is ours."""
        delivery.started = 0.0
        delivery.waiting = True
        self._confirm()

    def _may_start(self, delivery: Delivery, message: Message) -> bool:
        """Hold the unique lock, or put the delivery off, uncounted."""
        lock = lock_of(message, max(1, message.unique_for) * 1000)
        try:
            status = MOVED if lock is None else self._deliveries.hold_lock(delivery, lock)
        except Exception as error:  # what is no outage goes on as a fault of ours
            if not connection.outage(error):
                raise
            self._health.failed("unique locks", error)
            if connection.lost(error):
                self._set_aside(delivery)  # the next renewal that comes through starts it again
                return False
        else:
            self._health.succeeded("unique locks")
            if status == MOVED:
                return True
            if (
                status == NOT_PENDING
            ):  # deleted, finished elsewhere, or taken over while it waited here
                self._in_flight.remove(delivery)
                return False
        delivery.settlement = Park(due=monotonic() + _PUT_OFF, count=max(0, delivery.count - 1))
        self._settle(delivery)
        return False

    def _run(self, delivery: Delivery, message: Message, task: Task[Any], attempt: int) -> None:
        context = TaskContext(delivery, message, task.name, attempt, task.max_retry, self._stopping)
        debug = log.isEnabledFor(logging.DEBUG)
        if debug:
            log.debug(
                "task %s started, attempt %d, message %s", task.name, attempt, context.id,
                extra={"action": "task_started"},
            )  # fmt: skip
        error = Context().run(self._call, task, context, message.payload)
        if error is not None:
            self._failed(delivery, message, task, attempt, error)
            error = (
                None  # its traceback holds this frame: as a cycle it would keep the payload (BL-17)
            )
            return
        if not message.head.unique:  # all that is left to do is an XACK: free the payload now
            delivery.message = None
        self._settle(delivery)
        if debug:
            log.debug(
                "task %s succeeded, message %s", task.name, context.id,
                extra={"action": "task_succeeded"},
            )  # fmt: skip

    def _call(self, task: Task[Any], context: TaskContext, payload: Any) -> BaseException | None:
        """Run the task between its hooks, in a context of its own; return what it raised."""
        current.set(context)
        if self._before is not None:
            try:
                self._before(context)
            except BaseException as raised:  # a hook is the application's: not the task's fault
                self._hook_raised("before_task", raised)
        error: BaseException | None = None
        started = monotonic()
        try:
            if task.time_limit is None:
                task.call(payload)
            else:
                self._limits.run(task.time_limit, lambda: task.call(payload))
        except BaseException as raised:  # whatever a task raises is one failed attempt
            error = raised
        self._timings.add(task.name, monotonic() - started)
        if self._after is not None:
            try:
                self._after(context, error)
            except BaseException as raised:  # a hook is the application's: not the task's fault
                self._hook_raised("after_task", raised)
        try:
            return error
        finally:
            error = None  # its traceback holds this frame

    def _hook_raised(self, name: str, error: BaseException) -> None:
        log.error(
            "%s raised: %s",
            name,
            describe(error),
            extra={"action": "service_error"},
            exc_info=error,
        )
        self._reports.add("service_error", error)

    # --- the ends ---

    def _failed(
        self,
        delivery: Delivery,
        message: Message,
        task: Task[Any],
        attempt: int,
        error: BaseException,
    ) -> None:
        if delivery.lost:
            self._in_flight.remove(delivery)
            return
        if retry.is_final(error, attempt, task.max_retry):
            failure: TaskRunnerError = (
                cast(TaskTimeoutError, error)
                if issubclass(type(error), TaskTimeoutError)
                else TaskExecutionError(task.name, error)
            )
            self._fail_for_good(
                delivery, message, failure, attempts=attempt, spent=task.max_retry + task.max_lost
            )
            return
        delay, problem = retry.delay_for(task.retry_delay, attempt, error)
        message_id = message.id or delivery.entry_id.decode()
        if problem is not None:
            log.error(
                "task %s: its retry_delay gave no duration, the default backoff holds: %s",
                task.name, describe(problem), extra={"action": "service_error"},
            )  # fmt: skip
            self._reports.add("service_error", problem, task_name=task.name, message_id=message_id)
        log.warning(
            "task %s failed on attempt %d of %d, again in %.3g s, message %s: %s",
            task.name, attempt, task.max_retry, delay, message_id, describe(error),
            extra={"action": "task_retry"},
        )  # fmt: skip
        self._reports.add(
            "task_retry",
            TaskExecutionError(task.name, error),
            task_name=task.name,
            message_id=message_id,
        )
        due = monotonic() + delay
        keep = float(message.unique_for)
        if delay <= self._reclaim_delay:
            delivery.settlement = Park(due=due, keep_lock=keep)
        else:
            delivery.settlement = Postpone(due=due, attempt=attempt, keep_lock=keep)
        self._settle(delivery)

    def _unknown(self, delivery: Delivery, message: Message) -> None:
        """A newer instance may know the task: it goes around, its attempts unspent, for a bounded
        number of times."""
        moves = message.unknown + 1
        if moves >= self._config.unknown_task_deliveries:
            error = TaskNotFoundError(
                f"no instance of group {self._group!r} registered a task {message.task_name!r} in {message.unknown} "
                "tries: check the name, and that the worker imports the module that defines it"
            )
            self._fail_for_good(delivery, message, error, attempts=message.attempt, spent=10**6)
            return
        delay = min(_UNKNOWN_CAP, 2.0 ** min(message.unknown, 10))
        log.warning(
            "task %r is not registered here; message %s is put back for %d s (%d of %d)",
            message.task_name, message.id or delivery.entry_id.decode(), delay, moves,
            self._config.unknown_task_deliveries, extra={"action": "task_unknown"},
        )  # fmt: skip
        self._observers.unknown(message.task_name)
        delivery.settlement = Postpone(
            due=monotonic() + delay,
            attempt=message.attempt + delivery.count - 1,
            unknown=moves,
            keep_lock=float(message.unique_for),
        )
        self._settle(delivery)

    def _fail_for_good(
        self,
        delivery: Delivery,
        message: Message,
        error: TaskRunnerError,
        *,
        attempts: int,
        spent: int,
    ) -> None:
        """Hand it to the failed-task handler, or to the dead letters.

        `spent` is the attempt after which only the handler is called.
        """
        if delivery.lost:
            self._in_flight.remove(delivery)
            return
        delivery.failed = True
        name = message.task_name
        message_id = message.id or delivery.entry_id.decode()
        log.error(
            "task %s failed for good after %d attempts, message %s: %s",
            name or "(undecodable)", attempts, message_id, describe(error), extra={"action": "task_failed"},
        )  # fmt: skip
        self._reports.add("task_failed", error, task_name=name or None, message_id=message_id)
        handler = self._config.failed_task_handler
        if handler is None:
            delivery.settlement = Bury(_letter(delivery, error, name, message_id, attempts))
        else:
            try:
                argument = task_message(delivery, message, attempts)
                Context().run(handler, argument, error)
            except (
                BaseException
            ) as raised:  # the handler is the application's; the message waits for its next try
                log.error(
                    "failed_task_handler raised for task %s, called again in %.3g s, message %s: %s",
                    name, self._reclaim_delay, message_id, describe(raised),
                    extra={"action": "service_error"}, exc_info=raised,
                )  # fmt: skip
                self._reports.add(
                    "service_error", raised, task_name=name or None, message_id=message_id
                )
                delivery.settlement = Park(
                    due=monotonic() + self._reclaim_delay,
                    count=max(delivery.count, spent - message.attempt),
                    keep_lock=float(message.unique_for),
                )
        self._settle(delivery)


def _letter(
    delivery: Delivery, error: TaskRunnerError, name: str, message_id: str, attempts: int
) -> tuple[tuple[str, str], ...]:
    """The fields of a dead letter; the message's own text is copied beside them by the server."""
    cause = error.__cause__ if isinstance(error, TaskExecutionError) and error.__cause__ else error
    try:
        trace = "".join(traceback.format_exception(cause))[-_LONGEST_TRACEBACK:]
    except BaseException:  # formatting runs the exception's own code
        trace = ""
    fields = [
        ("task_name", name),
        ("message_id", message_id),
        ("error_type", type(cause).__name__),
        ("error", describe(error)),
        ("traceback", trace.encode("utf-8", "replace").decode()),
        ("attempts", str(attempts)),
        ("failed_at", f"{clock.now():.6f}"),
    ]
    if delivery.body is None:
        fields.append(("fields", repr(delivery.fields)[:10_000]))
    return tuple(fields)
