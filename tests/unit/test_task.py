"""The decorator, the tasks it makes, and the registry."""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import attrs
import pytest

from taskrunner.errors import (
    ConfigurationError,
    DuplicateTaskNameError,
    UnboundTaskError,
    UniqueForRequiredError,
)
from taskrunner.task import Dispatched, Registry, Task, default_registry, task


class Recorder:
    """A dispatcher that writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def dispatch(
        self, task: Task[Any], payload: Any, *, run_at: Any = None, run_in: Any = None
    ) -> Dispatched:
        self.calls.append((task, payload, run_at, run_in))
        return Dispatched("id", "1-0", task_name=task.name)

    def dispatch_many(
        self, task: Task[Any], payloads: Iterable[Any], *, run_at: Any = None, run_in: Any = None
    ) -> list[Dispatched | None]:
        return [self.dispatch(task, each, run_at=run_at, run_in=run_in) for each in payloads]

    def unlock(self, task: Task[Any], payload: Any) -> bool:
        self.calls.append((task, payload))
        return True


@pytest.fixture
def registry() -> Registry:
    return Registry()


def _echo(payload: Any) -> Any:
    """Say the same."""
    return payload


# --- the task ---


def test_a_task_has_the_documented_defaults(registry: Registry) -> None:
    """Each default is a promise of the docs."""
    made = task(registry=registry)(_echo)

    assert made.name == f"{__name__}._echo"
    assert (made.max_retry, made.max_lost) == (1, 2)
    assert made.reservation_timeout is None
    assert made.unique_for is None
    assert made.unique_key is None
    assert made.retry_delay is None
    assert made.time_limit is None
    assert made.registry is registry


def test_a_bare_decorator_registers_by_default() -> None:
    """`@task` alone is enough, and its registry is the one a runner looks in."""

    def cleanup() -> None: ...

    made = task(cleanup)

    assert made.registry is default_registry
    assert default_registry.get(f"{__name__}.{cleanup.__qualname__}") is made


def test_calling_a_task_calls_the_function(registry: Registry) -> None:
    """Unit tests of a task need no queue: all arguments pass, the result comes back."""

    @task(registry=registry)
    def scale(payload: int, factor: int = 2) -> int:
        return payload * factor

    assert scale(3) == 6
    assert scale(3, factor=5) == 15


def test_a_task_looks_like_its_function(registry: Registry) -> None:
    """Documentation tools and debuggers see through it; the function's attributes stay its own."""

    def named(payload: Any) -> None:
        """Do it."""

    vars(named)["name"] = "not the task's"
    made = task("send", registry=registry)(named)

    assert made.__doc__ == "Do it."
    assert vars(made)["__name__"] == "named"
    assert inspect.unwrap(made) is named
    assert inspect.signature(made) == inspect.signature(named)
    assert made.name == "send"
    assert repr(made) == "<Task 'send'>"


def test_a_task_is_frozen(registry: Registry) -> None:
    """Its options are read by many threads."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        task(registry=registry)(_echo).max_retry = 3  # type: ignore[misc]


def _nothing() -> Any:
    return "nothing"


def _default(payload: Any = "default") -> Any:
    return payload


def _any_number(*payloads: Any) -> Any:
    return payloads


def _options_only(*, flag: bool = False, **more: Any) -> Any:
    return flag, more


class Callee:
    def __call__(self, payload: Any) -> Any:
        return payload

    def method(self, payload: Any) -> Any:
        return payload


@pytest.mark.parametrize(
    ("function", "payload", "result"),
    [
        (_echo, {"a": 1}, {"a": 1}),
        (_echo, None, None),
        (_nothing, None, "nothing"),
        (_nothing, {"ignored": 1}, "nothing"),
        (_default, 5, 5),
        (_default, None, "default"),
        (_any_number, 5, (5,)),
        (_options_only, None, (False, {})),
        (functools.partial(max, 3), 5, 5),
        (Callee(), 5, 5),
        (Callee().method, 5, 5),
        (str.upper, "a", "A"),
    ],
)
def test_call_hands_over_what_the_function_takes(
    registry: Registry, function: Callable[..., Any], payload: Any, result: Any
) -> None:
    """A function takes the payload, or nothing; a null payload leaves a default to stand."""
    assert task("t", registry=registry)(function).call(payload) == result


async def _coroutine(payload: Any) -> None: ...


async def _async_generator(payload: Any) -> Any:
    yield payload


def _generator(payload: Any) -> Any:
    yield payload


class AsyncCallee:
    async def __call__(self, payload: Any) -> None: ...


def _two(to: str, subject: str) -> None: ...


def _keyword(*, to: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_coroutine, "test_task._coroutine is async, .* calls asyncio.run$"),
        (_async_generator, "test_task._async_generator is async, "),
        (AsyncCallee(), "is async, "),
        (functools.partial(_coroutine), "is async, "),
        (_generator, "test_task._generator is a generator function, "),
        (_two, "test_task._two needs to, subject: a task takes one payload"),
        (_keyword, "test_task._keyword needs to: a task takes one payload, by position"),
        (5, "^5 can't be called"),
    ],
)
def test_a_function_that_no_worker_could_call_is_refused(
    registry: Registry, function: Any, text: str
) -> None:
    """Found at import, by a text that says what to do, and not when the first message comes."""
    with pytest.raises(TypeError, match=text):
        task("t", registry=registry)(function)

    assert "t" not in registry


# --- names ---


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "is not a text of at least one character"),
        (5, "is not a text of at least one character"),
        ("a\nb", "holds a control character"),
        ("a\x00", "holds a control character"),
        ("half \ud83d", "holds a control character or half a character"),
        ("é" * 257, "is longer than 512 bytes"),
        ("delayed_tasks_schedule", "is reserved"),
    ],
)
def test_a_bad_name_is_refused(registry: Registry, name: Any, rule: str) -> None:
    """A name is a part of keys and of log lines, and the same for every instance."""
    with pytest.raises(ConfigurationError, match=rf"^name={re.escape(repr(name))} {rule}"):
        task(name, registry=registry)(_echo)


@pytest.mark.parametrize("name", ["a", "é" * 256, "задача <1>", "🚀", "with space", "a/b.c-d_e"])
def test_a_good_name_is_kept_as_it_is(registry: Registry, name: str) -> None:
    """The name is on the wire as it was written."""
    assert task(name, registry=registry)(_echo).name == name


@pytest.mark.parametrize("function", [lambda payload: payload, functools.partial(max, 3)])
def test_a_function_without_a_name_needs_one(
    registry: Registry, function: Callable[..., Any]
) -> None:
    """All lambdas of a module would share one name, and the last would win."""
    with pytest.raises(ConfigurationError, match=r"has no name of its own: give name=$"):
        task(registry=registry)(function)


# --- options ---


def test_durations_are_read_as_float_seconds(registry: Registry) -> None:
    """However an option is given, the code sees one type."""
    minute = timedelta(minutes=1)
    made = task(
        "t",
        reservation_timeout=minute,
        unique_for=60,
        retry_delay=minute,
        time_limit=minute,
        registry=registry,
    )(_echo)

    options = (made.reservation_timeout, made.unique_for, made.retry_delay, made.time_limit)
    assert [(option, type(option)) for option in options] == [(60.0, float)] * 4


def test_max_retry_zero_is_read_as_one(registry: Registry) -> None:
    """As in the Go library: a task that may not fail even once would never run."""
    assert task("t", max_retry=0, registry=registry)(_echo).max_retry == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_retry": -1}, "max_retry=-1 is below 0"),
        ({"max_retry": True}, "max_retry=True is not a whole number"),
        ({"max_retry": 2.0}, "max_retry=2.0 is not a whole number"),
        ({"max_lost": -1}, "max_lost=-1 is below 0"),
        ({"max_lost": None}, "max_lost=None is not a whole number"),
        ({"reservation_timeout": 0}, "reservation_timeout=0 is below 0.001 seconds"),
        ({"unique_for": 0}, "unique_for=0 is below 0.001 seconds"),
        ({"unique_for": -timedelta(1)}, "unique_for=datetime.timedelta(days=-1) is below"),
        ({"unique_for": float("inf")}, "unique_for=inf is not a number of seconds"),
        ({"unique_for": 5, "unique_key": "to"}, "unique_key='to' is not a function, nor"),
        ({"retry_delay": -1}, "retry_delay=-1 is below 0 seconds"),
        ({"retry_delay": "5"}, "retry_delay='5' is not a duration"),
        ({"time_limit": 0}, "time_limit=0 is below 0.001 seconds"),
        ({"time_limit": True}, "time_limit=True is not a duration"),
    ],
)
def test_a_bad_option_is_refused_with_value_and_rule(
    registry: Registry, options: dict[str, Any], text: str
) -> None:
    """Found at import; the text alone says what to change."""
    with pytest.raises(ConfigurationError, match="^" + re.escape(text)):
        task("t", registry=registry, **options)(_echo)


@pytest.mark.parametrize("key", ["payload", str])
def test_unique_key_needs_unique_for(registry: Registry, key: Any) -> None:
    """Without a life the lock of a lost message would stay for ever."""
    with pytest.raises(UniqueForRequiredError, match="without unique_for"):
        task("t", unique_key=key, registry=registry)(_echo)


def test_a_unique_task_with_a_colon_in_its_name_warns_at_the_decorator(registry: Registry) -> None:
    """Task "a:b" with key "c" and task "a" with key "b:c" have one lock on the wire."""
    with pytest.warns(UserWarning, match=r"^unique task 'a:b'") as caught:
        task("a:b", unique_for=5, registry=registry)(_echo)

    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task("a:c", registry=registry)(_echo)
        task("ab", unique_for=5, registry=registry)(_echo)


# --- dispatching ---


def test_delay_hands_everything_to_the_dispatcher(registry: Registry) -> None:
    """A task knows nothing of Redis; what bad times are, the dispatcher says."""
    registry.dispatcher = recorder = Recorder()
    made = task("t", registry=registry)(_echo)

    dispatched = made.delay({"a": 1}, run_in=timedelta(1))
    many = made.delay_many([1, 2], run_at=5.0)
    unlocked = made.unlock({"a": 1})

    assert (dispatched.id, dispatched.entry_id, dispatched.task_name) == ("id", "1-0", "t")
    assert (dispatched.run_at, unlocked, len(many)) == (None, True, 2)
    assert recorder.calls == [
        (made, {"a": 1}, None, timedelta(1)),
        (made, 1, 5.0, None),
        (made, 2, 5.0, None),
        (made, {"a": 1}),
    ]


@pytest.mark.parametrize(
    "use",
    [lambda made: made.delay(1), lambda made: made.delay_many([1]), lambda made: made.unlock(1)],
)
def test_a_task_that_no_runner_serves_says_how_to_get_one(
    registry: Registry, use: Callable[[Task[Any]], object]
) -> None:
    """The usual cause is a web process in which nothing made a TaskRunner."""
    made = task("t", registry=registry)(_echo)

    with pytest.raises(UnboundTaskError, match=r"^task 't' has no runner .* make a TaskRunner"):
        use(made)


# --- the registry ---


def test_registry_finds_tasks_by_name(registry: Registry) -> None:
    """Workers look a task up by what is on the wire."""
    b, a = (task(name, registry=registry)(_echo) for name in "ba")

    assert registry.get("a") is a
    assert registry.get("c") is None
    assert "b" in registry
    assert "c" not in registry
    assert registry.names() == ["a", "b"]
    assert list(registry) == [b, a]


def test_registry_can_grow_while_it_is_walked(registry: Registry) -> None:
    """A lazy import inside a task registers more tasks at any moment."""
    task("first", registry=registry)(_echo)

    for each in registry:
        task(f"{each.name}-more", registry=registry)(_echo)

    assert registry.names() == ["first", "first-more"]


def test_registering_another_function_under_a_taken_name_raises(registry: Registry) -> None:
    """One of the two would never run; the text names both."""
    first = task("t", registry=registry)(_echo)

    with pytest.raises(
        DuplicateTaskNameError, match=r"'t' is taken by .*_echo: .*_default needs another$"
    ):
        task("t", registry=registry)(_default)

    assert registry.get("t") is first


def test_registering_the_same_function_again_replaces_it(registry: Registry) -> None:
    """A module that is reloaded brings new code, not an error."""

    def load() -> Task[Any]:
        def reloaded(payload: Any) -> None: ...

        return task("t", registry=registry)(reloaded)

    load()
    second = load()

    assert registry.get("t") is second
