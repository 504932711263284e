"""What a task can know about its run."""

import threading

import attrs
import pytest

from taskrunner import context
from taskrunner.context import TaskContext, TaskMessage, current_task
from taskrunner.delivery import Delivery
from taskrunner.message import Head, Message

MESSAGE = TaskMessage(
    id="7b0e",
    entry_id="1-0",
    task_name="send-email",
    payload={"to": "secret"},
    attempt=2,
    unique_key=None,
    enqueued_at=None,
    raw='{"payload": "secret"}',
)


def _context(*, lost: bool = False, stopping: bool = False) -> TaskContext:
    message = Message(Head(task_name="send-email"), {"to": "secret"}, "{}", ("7b0e", None))
    delivery = Delivery(b"1-0", b"{}", "g_h_1", 2, 0.0)
    delivery.lost = lost
    return TaskContext(delivery, message, "send-email", 2, 3, lambda: stopping)


def test_current_task_is_the_context_the_executor_set() -> None:
    """Code deep inside a task asks without being handed anything."""
    here = _context()
    token = context.current.set(here)
    try:
        assert current_task() is here
    finally:
        context.current.reset(token)


def test_current_task_raises_when_no_task_is_running() -> None:
    """Calling a task's function by hand is not running the task."""
    with pytest.raises(RuntimeError, match=r"^no task is running here"):
        current_task()


def test_current_task_raises_in_a_thread_the_task_started() -> None:
    """A thread that outlives its task would ask about the wrong one."""
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            current_task()
        except RuntimeError as error:
            raised.append(error)

    token = context.current.set(_context())
    try:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(10)
    finally:
        context.current.reset(token)

    assert len(raised) == 1


@pytest.mark.parametrize("flag", [True, False])
def test_a_context_tells_whether_to_go_on(flag: bool) -> None:
    """Both answers are asked of the executor each time: they change while the task runs."""
    assert _context(lost=flag).lost is flag
    assert _context(stopping=flag).stopping is flag


def test_a_message_is_frozen_and_shows_no_payload() -> None:
    """Payloads never reach the logs, not even by a repr in a traceback."""
    assert "secret" not in repr(MESSAGE) + repr(_context())
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        MESSAGE.attempt = 3  # type: ignore[misc]
