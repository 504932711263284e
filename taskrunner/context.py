"""Floor 2: what a running task can know about itself.

`TaskMessage` is also what the failed-task handler gets. The executor sets `current` around each
run; nothing else does.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import attrs

from taskrunner.delivery import Delivery
from taskrunner.message import Message


@attrs.frozen(kw_only=True)
class TaskMessage:
    """One call of a task, as a delivery brought it.

    `raw` is the JSON text of the whole message. `entry_id` is its stream id in this delivery, `id`
    stays the same over retries. `enqueued_at` is in unix seconds, None where the producer gave
    none. `unique_key` is the lock's name, None for a message that is not unique. What could not be
    decoded has an empty `task_name` and None as payload.
    """

    id: str
    entry_id: str
    task_name: str
    payload: Any = attrs.field(repr=False)
    attempt: int
    unique_key: str | None
    enqueued_at: float | None
    raw: str = attrs.field(repr=False)


class TaskContext:
    """The present run of a task: its message, its attempt, and whether to go on.

    `attempt` counts from 1; an error on an attempt that is `max_retry` or above is final. Made for
    every run, so what few tasks ask for is worked out when they do.
    """

    __slots__ = ("_delivery", "_message", "_stopping", "attempt", "max_retry", "name")

    def __init__(
        self,
        delivery: Delivery,
        message: Message,
        name: str,
        attempt: int,
        max_retry: int,
        stopping: Callable[[], bool],
    ) -> None:
        self._delivery = delivery
        self._message = message
        self._stopping = stopping
        self.name = name
        self.attempt = attempt
        self.max_retry = max_retry

    def __repr__(self) -> str:
        return f"<TaskContext {self.name!r} attempt={self.attempt} id={self.id}>"

    @property
    def id(self) -> str:
        """The message's id, the same over retries."""
        return self._message.id or self.entry_id

    @property
    def entry_id(self) -> str:
        """The stream id of this delivery's entry."""
        return self._delivery.entry_id.decode()

    @property
    def enqueued_at(self) -> float | None:
        """When it was dispatched, in unix seconds; None where the producer did not say."""
        return self._message.enqueued_at

    @property
    def message(self) -> TaskMessage:
        """The message as the failed-task handler would get it."""
        return task_message(self._delivery, self._message, self.attempt)

    @property
    def lost(self) -> bool:
        """Whether another consumer took this message over: it will run, or runs, elsewhere."""
        return self._delivery.lost

    @property
    def stopping(self) -> bool:
        """Whether the runner was asked to stop: a long task does well to end early."""
        return self._stopping()


def task_message(delivery: Delivery, message: Message, attempt: int) -> TaskMessage:
    """What users see of a message that a delivery brought."""
    entry_id = delivery.entry_id.decode()
    return TaskMessage(
        id=message.id or entry_id,
        entry_id=entry_id,
        task_name=message.task_name,
        payload=message.payload,
        attempt=attempt,
        unique_key=message.lock_name,
        enqueued_at=message.enqueued_at,
        raw=message.text,
    )


current: ContextVar[TaskContext] = ContextVar("taskrunner.current")
"""The context of the task that runs here; unset elsewhere."""


def current_task() -> TaskContext:
    """Return the context of the task that calls this; RuntimeError outside of one."""
    try:
        return current.get()
    except LookupError:
        raise RuntimeError(
            "no task is running here: current_task() works in a task's own thread, "
            "while a runner executes it"
        ) from None
