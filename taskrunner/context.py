"""Floor 1: what a running task can know about itself.

`TaskMessage` is also what the failed-task handler gets. The executor sets `current` around each
run; nothing else does.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import attrs


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


@attrs.define(kw_only=True)
class TaskContext:
    """The present run of a task: its message, its attempt, and whether to go on.

    `attempt` counts from 1; an error on an attempt that is `max_retry` or above is final.
    """

    id: str
    entry_id: str
    name: str
    attempt: int
    max_retry: int
    enqueued_at: float | None
    message: TaskMessage
    _lost: Callable[[], bool] = attrs.field(alias="lost", repr=False)
    _stopping: Callable[[], bool] = attrs.field(alias="stopping", repr=False)

    @property
    def lost(self) -> bool:
        """Whether another consumer took this message over: it will run, or runs, elsewhere."""
        return self._lost()

    @property
    def stopping(self) -> bool:
        """Whether the runner was asked to stop: a long task does well to end early."""
        return self._stopping()


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
