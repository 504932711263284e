"""The public names and their signatures: a change here is a change of the product."""

import ast
import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import redis

import taskrunner
from taskrunner import (
    DeadLetter,
    DelayedTask,
    Dispatched,
    ErrorReport,
    QueueMetrics,
    RedisStreamQueue,
    Registry,
    Task,
    TaskContext,
    TaskMessage,
    TaskRunner,
    TaskRunnerConfig,
    TaskRunnerError,
    Timings,
    default_registry,
    task,
    testing,
)

NAMES = {
    *("TaskRunner", "TaskRunnerConfig", "RedisStreamQueue", "Timings"),
    *("task", "Task", "Registry", "default_registry", "Dispatched"),
    *("current_task", "TaskContext", "TaskMessage", "Retry", "Reject"),
    *("DeadLetter", "DelayedTask", "ErrorReport", "QueueMetrics"),
    *("TaskRunnerError", "ConfigurationError", "DuplicateTaskNameError", "UnboundTaskError"),
    *("UniqueForRequiredError", "AlreadyStartedError", "TaskAlreadyDispatchedError"),
    *("InvalidTaskPayloadError", "PayloadTooLargeError", "TaskNotFoundError"),
    *("MaxRetryExceededError", "TaskExecutionError", "TaskTimeoutError", "DeliveryLostError"),
}


def test_all_documented_names_are_exported() -> None:
    """`from taskrunner import ...` is the only import a user needs."""
    assert set(taskrunner.__all__) >= NAMES


def test_what_is_for_tests_is_exported_and_documented() -> None:
    """`from taskrunner.testing import ...`; not from the root, for production needs none of it."""
    assert testing.__all__ == sorted(testing.__all__)
    assert {"eager", "drain", "clean_up", "MovableClock", "TasksFailedError"} <= {*testing.__all__}
    assert all((getattr(testing, name).__doc__ or "").strip() for name in testing.__all__)
    assert not {*testing.__all__} & {*taskrunner.__all__}


def test_all_is_sorted_and_complete() -> None:
    """What is in the namespace and not in `__all__` is there by accident."""
    exported = {
        name
        for name, value in vars(taskrunner).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }

    assert list(taskrunner.__all__) == sorted(set(taskrunner.__all__))
    assert exported == set(taskrunner.__all__)


def test_the_package_root_only_imports() -> None:
    """It gives names; logic in it would run on every import of any part."""
    source = Path(str(taskrunner.__file__)).read_text(encoding="utf-8")
    docstring, *rest = ast.parse(source).body

    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom | ast.Assign) for node in rest)


def test_the_package_says_that_it_is_typed() -> None:
    """Without the marker a type checker takes nothing from us."""
    assert (Path(str(taskrunner.__file__)).parent / "py.typed").is_file()


def test_every_public_thing_has_a_docstring() -> None:
    """Help in an editor is the documentation that is read most."""
    silent = []
    for name in taskrunner.__all__:
        value = getattr(taskrunner, name)
        if isinstance(value, type) or inspect.isfunction(value):
            if not (value.__doc__ or "").strip():
                silent.append(name)
            if isinstance(value, type):
                silent += [
                    f"{name}.{method}"
                    for method, member in vars(value).items()
                    if not method.startswith("_")
                    and (inspect.isfunction(member) or isinstance(member, property))
                    and not (inspect.getdoc(member) or "").strip()
                ]

    assert not silent


# --- signatures ---


def shown(function: Callable[..., Any]) -> str:
    """Names, kinds and defaults of a function's parameters, without their types."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            task,
            "(name=None, *, max_retry=1, max_lost=2, reservation_timeout=None, unique_for=None, "
            "unique_key=None, retry_delay=None, time_limit=None, registry=DEFAULT)",
        ),
        (Task.delay, "(self, payload=None, *, run_at=None, run_in=None)"),
        (Task.delay_many, "(self, payloads, *, run_at=None, run_in=None)"),
        (Task.unlock, "(self, payload=None)"),
        (
            TaskRunner,
            "(config=None, client=None, queue=None, *, registry=DEFAULT, **settings)",
        ),
        (TaskRunner.start, "(self)"),
        (TaskRunner.stop, "(self, timeout=None)"),
        (TaskRunner.run_forever, "(self)"),
        (TaskRunner.dispatch, "(self, name, payload=None, *, run_at=None, run_in=None)"),
        (TaskRunner.dispatch_many, "(self, name, payloads, *, run_at=None, run_in=None)"),
        (TaskRunner.register, "(self, task)"),
        (TaskRunner.replications, "(self)"),
        (TaskRunner.make_default, "(self)"),
        (
            RedisStreamQueue,
            "(client, *, prefix='default', queue='queue', reclaim_delay=300, "
            "delete_on_ack=True, redis_version=None)",
        ),
        (RedisStreamQueue.add, "(self, payload)"),
        (RedisStreamQueue.purge, "(self)"),
        (RedisStreamQueue.delete, "(self, id)"),
        (RedisStreamQueue.get_metrics, "(self, group=None)"),
        (
            testing.eager,
            "(runner=None, *, registry=DEFAULT, clock=None, hold=False, raises=True, **settings)",
        ),
        (testing.Eager.drain, "(self, *, everything=False, raises=False, timeout=10.0)"),
        (
            testing.drain,
            "(runner, *, clock=None, everything=False, raises=True, timeout=10.0)",
        ),
        (testing.clean_up, "(runner)"),
        (testing.MovableClock, "()"),
        (testing.MovableClock.move, "(self, by)"),
        (testing.MovableClock.move_to, "(self, instant)"),
        (taskrunner.current_task, "()"),
        (taskrunner.Retry, "(delay=None)"),
        (taskrunner.Reject, "(reason)"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_a_signature_is_the_documented_one(function: Callable[..., Any], text: str) -> None:
    """Programs are written against these: an argument's name and place are promises."""
    assert shown(function).replace(repr(default_registry), "DEFAULT") == text


@pytest.mark.parametrize(
    ("place", "methods"),
    [
        (
            "dead_letters",
            {
                "list": "(limit=100, after=None)",
                "get": "(id)",
                "requeue": "(id)",
                "requeue_all": "()",
                "delete": "(id)",
                "purge": "()",
            },
        ),
        ("delayed", {"list": "(limit=100)", "get": "(id)", "cancel": "(id)"}),
    ],
    ids=["dead_letters", "delayed"],
)
def test_what_operators_call_has_the_documented_signatures(
    place: str, methods: dict[str, str]
) -> None:
    """Scripts for operations are written once, and run for years."""
    view = getattr(_unconnected(), place)

    assert {name: shown(getattr(view, name)) for name in methods} == methods
    assert bool(view)  # sends nothing: nobody listens there


def _unconnected() -> TaskRunner:
    client = redis.Redis(port=1, socket_connect_timeout=0.1)
    return TaskRunner(consumer_group="g", client=client, registry=Registry())


def test_a_runner_has_the_documented_attributes_before_any_contact() -> None:
    """Making one starts and sends nothing; what it is can be read at once."""
    runner = _unconnected()

    assert runner.state == "init"
    assert runner.is_leader is False
    assert runner.workers == 8
    assert runner.host == runner.config.host
    assert re.fullmatch(r"[0-9a-f-]{36}", runner.instance_id)
    assert isinstance(runner.queue, RedisStreamQueue)
    assert runner.queue.stream == "default:queue"
    assert bool(runner.queue)
    assert isinstance(runner.config, TaskRunnerConfig)
    assert len(runner.errors) == 0
    assert runner.errors.maxlen is not None


def test_a_queue_is_named_by_one_rule() -> None:
    """`<prefix>:<queue>`, whichever is given, whatever they hold (D42)."""
    client = redis.Redis(port=1)

    assert RedisStreamQueue(client).stream == "default:queue"
    assert RedisStreamQueue(client, prefix="myapp").stream == "myapp:queue"
    assert RedisStreamQueue(client, queue="jobs").stream == "default:jobs"
    assert RedisStreamQueue(client, queue="jobs", prefix="myapp").stream == "myapp:jobs"
    assert RedisStreamQueue(client, prefix="a:b", queue="jobs").stream == "a:b:jobs"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Dispatched, ["id", "entry_id", "task_name", "run_at"]),
        (
            TaskMessage,
            [
                *("id", "entry_id", "task_name", "payload", "attempt"),
                *("unique_key", "enqueued_at", "raw"),
            ],
        ),
        (ErrorReport, ["action", "error", "task_name", "message_id", "at"]),
        (DelayedTask, ["id", "task_name", "payload", "run_at", "attempt"]),
        (
            DeadLetter,
            [
                *("id", "task_name", "payload", "error_type", "error", "traceback"),
                *("attempts", "failed_at", "message_id"),
            ],
        ),
        (
            QueueMetrics,
            [
                *("queue_size", "groups", "message_claim_delay_avg", "message_claim_delay_std"),
                *("message_claim_delay_max", "message_claim_delay_last"),
            ],
        ),
        (
            Timings,
            ["lease", "presence", "poll", "janitor", "consumer_idle", "hand_back_after"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_record_is_frozen_and_has_the_documented_fields(kind: type, fields: list[str]) -> None:
    """What travels can't be changed on the way. More fields may follow, none may go."""
    have = [field.name for field in attrs.fields(kind)]

    assert have[: len(fields)] == fields
    made = object.__new__(kind)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(made, fields[0], 1)


def test_a_config_takes_keywords_only() -> None:
    """Twenty settings by position would be read by nobody."""
    with pytest.raises(TypeError):
        TaskRunnerConfig("g")  # type: ignore[misc]
    with pytest.raises(TypeError):
        Timings(5)  # type: ignore[misc]


def test_a_context_has_the_documented_attributes() -> None:
    """What a task may ask about itself."""
    for name in ("id", "entry_id", "name", "attempt", "max_retry", "enqueued_at", "message"):
        assert hasattr(TaskContext, name), name
    assert isinstance(TaskContext.lost, property)
    assert isinstance(TaskContext.stopping, property)


def test_a_task_shows_its_options() -> None:
    """The options can be read where the task is, for tests and for tools."""
    registry = Registry()
    made = task(
        name="n", max_retry=5, max_lost=1, reservation_timeout=2, unique_for=60,
        unique_key=str, retry_delay=3, time_limit=4, registry=registry,
    )(lambda payload: payload)  # fmt: skip

    assert (made.name, made.max_retry, made.max_lost) == ("n", 5, 1)
    assert (made.reservation_timeout, made.unique_for, made.unique_key) == (2, 60, str)
    assert (made.retry_delay, made.time_limit) == (3, 4)
    assert made(7) == 7


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ConfigurationError", ValueError),
        ("DuplicateTaskNameError", ValueError),
        ("UnboundTaskError", RuntimeError),
        ("UniqueForRequiredError", ValueError),
        ("AlreadyStartedError", RuntimeError),
        ("TaskAlreadyDispatchedError", Exception),
        ("InvalidTaskPayloadError", ValueError),
        ("PayloadTooLargeError", ValueError),
        ("TaskNotFoundError", LookupError),
        ("MaxRetryExceededError", Exception),
        ("TaskExecutionError", Exception),
        ("TaskTimeoutError", TimeoutError),
        ("DeliveryLostError", Exception),
        ("Retry", Exception),
        ("Reject", Exception),
    ],
)
def test_an_error_has_the_documented_bases(name: str, base: type) -> None:
    """One root for all of ours, and the builtin that a caller would expect."""
    kind = getattr(taskrunner, name)

    assert issubclass(kind, TaskRunnerError)
    assert issubclass(kind, base)
