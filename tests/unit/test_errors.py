"""The error tree, and the words an error is described with."""

import pickle

import pytest

from taskrunner import errors
from taskrunner.errors import (
    Reject,
    Retry,
    TaskExecutionError,
    TaskNotFoundError,
    TaskRunnerError,
    TaskTimeoutError,
    describe,
)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class NotText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # noqa: PLE0307


def _tree() -> list[type[Exception]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]


def test_every_error_derives_from_the_one_root() -> None:
    """`except TaskRunnerError` catches whatever this library raises itself."""
    assert len(_tree()) == 16
    assert all(issubclass(error, TaskRunnerError) for error in _tree())


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigurationError", ValueError),
        ("DuplicateTaskNameError", ValueError),
        ("UnboundTaskError", RuntimeError),
        ("UniqueForRequiredError", ValueError),
        ("AlreadyStartedError", RuntimeError),
        ("InvalidTaskPayloadError", ValueError),
        ("PayloadTooLargeError", ValueError),
        ("TaskNotFoundError", LookupError),
        ("TaskTimeoutError", TimeoutError),
    ],
)
def test_an_error_is_also_the_builtin_a_caller_expects(name: str, builtin: type[Exception]) -> None:
    """Callers who don't know the tree catch the builtin."""
    with pytest.raises(builtin, match=r"^some text$"):
        raise getattr(errors, name)("some text")


def test_an_error_says_its_docstring_when_raised_without_a_text() -> None:
    """The interpreter raises TaskTimeoutError by class: it still says what happened."""
    assert str(TaskTimeoutError()) == "The task ran past its time_limit."
    assert str(TaskNotFoundError()) == "No instance that saw this message knows its task."


def test_an_error_says_nothing_when_a_subclass_has_neither_text_nor_docstring() -> None:
    """A missing docstring (python -OO strips them) is no error in the error."""

    class Silent(TaskRunnerError):
        pass

    assert str(Silent()) == ""


def test_task_execution_error_carries_task_and_cause() -> None:
    """The handler learns which task failed and what it raised, SystemExit included."""
    cause = SystemExit(3)

    error = TaskExecutionError("send-email", cause)

    assert error.task_name == "send-email"
    assert error.__cause__ is cause
    assert str(error) == "task 'send-email' failed: SystemExit: 3"


def test_task_execution_error_has_a_text_when_the_cause_has_none() -> None:
    """A cause whose __str__ raises must not break the code that reports it."""
    error = TaskExecutionError("t", Unprintable())

    assert str(error) == "task 't' failed: Unprintable: (its text can't be shown)"


@pytest.mark.parametrize(
    "error",
    [TaskExecutionError("t", ValueError("no")), Retry(), Retry(2.5), Reject("bad address")],
    ids=str,
)
def test_an_error_survives_pickling(error: TaskRunnerError) -> None:
    """Errors cross process borders, in test runners and pools."""
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert repr(copy.__cause__) == repr(error.__cause__)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError("half \ud83d"), "ValueError: half ?"),
        (ExceptionGroup("two", [ValueError(), KeyError()]), None),
        (NotText(), "NotText: (its text can't be shown)"),
    ],
)
def test_describe_says_type_and_text(error: BaseException, text: str | None) -> None:
    """Whatever the exception, one line for logs and dead letters that UTF-8 can hold."""
    assert describe(error) == (text or f"ExceptionGroup: {error}")


def test_describe_cuts_a_long_text() -> None:
    """An exception that quotes a large payload doesn't fill the logs."""
    described = describe(ValueError("x" * 10_000_000))

    assert described == "ValueError: " + "x" * 988
