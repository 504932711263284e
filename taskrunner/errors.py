"""Floor 0: every error a user can meet, in one tree.

Each error also derives from the builtin a caller would expect, so that `except ValueError` around a
bad setting works. An error raised without a text says the first line of its docstring. Errors of
the Redis client are not wrapped: they pass as they are.
"""

from datetime import timedelta

_LONGEST_DESCRIPTION = 1000
_ESCAPES = {
    code: repr(chr(code))[1:-1]
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
    if code != 9
}
"""What would end a line or steer a terminal: one report stays one line in the log."""


class TaskRunnerError(Exception):
    """A TaskRunner operation failed."""

    def __str__(self) -> str:
        return super().__str__() or (type(self).__doc__ or "").partition("\n")[0]


# --- at definition and start ---


class ConfigurationError(TaskRunnerError, ValueError):
    """A setting has a value that its rule excludes."""


class DuplicateTaskNameError(TaskRunnerError, ValueError):
    """Another function is registered under this task name."""


class UniqueForRequiredError(TaskRunnerError, ValueError):
    """A task with unique_key needs unique_for too."""


class AlreadyStartedError(TaskRunnerError, RuntimeError):
    """This runner has been started before and was not stopped."""


# --- at dispatch ---


class UnboundTaskError(TaskRunnerError, RuntimeError):
    """No TaskRunner in this process serves this task."""


class TaskAlreadyDispatchedError(TaskRunnerError):
    """A message of this unique task holds the lock; nothing was dispatched."""


class InvalidTaskPayloadError(TaskRunnerError, ValueError):
    """The payload, or the message around it, is not what the wire format allows."""


class PayloadTooLargeError(TaskRunnerError, ValueError):
    """The encoded payload is larger than max_payload_bytes."""


# --- handed to the failed-task handler, or reported ---


class TaskNotFoundError(TaskRunnerError, LookupError):
    """No instance that saw this message knows its task."""


class MaxRetryExceededError(TaskRunnerError):
    """The last allowed delivery was lost with its process; the task may never have started."""


class TaskTimeoutError(TaskRunnerError, TimeoutError):
    """The task ran past its time_limit."""


class DeliveryLostError(TaskRunnerError):
    """A delivery that this process held was taken over by another consumer."""


class TaskExecutionError(TaskRunnerError):
    """A task raised on its last attempt; `__cause__` is what it raised.

    The cause may be any `BaseException`, `SystemExit` included.
    """

    def __init__(self, task_name: str, cause: BaseException) -> None:
        super().__init__(task_name, cause)  # both stay in args: pickling calls us with them
        self.task_name = task_name
        self.__cause__ = cause

    def __str__(self) -> str:
        return f"task {self.task_name!r} failed: {describe(self.args[1])}"


# --- raised by a task ---


class Retry(TaskRunnerError):
    """The task asks to be run again, which spends an attempt.

    `delay` is in seconds, or a timedelta; None leaves it to the task's retry_delay.
    """

    def __init__(self, delay: float | timedelta | None = None) -> None:
        super().__init__(delay)
        self.delay = delay

    def __str__(self) -> str:
        return "run again" if self.delay is None else f"run again after {self.delay}"


class Reject(TaskRunnerError):
    """The task asks to fail for good now, whatever attempts are left."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def quoted(value: object) -> str:
    """Return a value as an error message quotes it; of what may be a URL, with a password in it,
    the scheme at most."""
    if not isinstance(value, str) or not ("://" in value or "@" in value):
        return repr(value)
    scheme, found, _ = value.partition("://")
    return repr(f"{scheme}://…" if found and scheme.isalpha() else "…")


def describe(error: BaseException) -> str:
    """Return "Type: text" for logs and dead letters, at most 1000 characters; never raises.

    The text can always be encoded as UTF-8: lone surrogates become question marks.
    """
    name = type(error).__name__
    try:
        text = str(error)[:_LONGEST_DESCRIPTION].encode("utf-8", "replace").decode("utf-8")
    except BaseException:  # str() runs code of the task, which may raise anything
        text = "(its text can't be shown)"
    text = f"{name}: {text}"[:_LONGEST_DESCRIPTION] if text else name
    return text.translate(_ESCAPES)
