"""Floor 1: tasks, the `@task` decorator, and the registry that finds a task by its wire name.

A task knows how it wants to be run; dispatching is handed to the `Dispatcher` that a TaskRunner
binds to the registry. `default_registry` is the only global state of the library.
"""

import functools
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, overload

import attrs

from taskrunner import clock
from taskrunner.clock import Duration
from taskrunner.errors import (
    ConfigurationError,
    DuplicateTaskNameError,
    UnboundTaskError,
    UniqueForRequiredError,
)
from taskrunner.signature import origin, shape

P = TypeVar("P")
_P_contra = TypeVar("_P_contra", contravariant=True)

UniqueKey: TypeAlias = Callable[[Any], str] | Literal["payload"]
RetryDelay: TypeAlias = Callable[[int, BaseException], Duration]

RESERVED_NAME = "delayed_tasks_schedule"
"""Not a task's name: the timings of the delayed set's own work are kept under it."""

_LONGEST_NAME = 512


@attrs.frozen
class Dispatched:
    """What a dispatch made; `entry_id` is None when delayed, `run_at` when sent to the stream.

    `id` stays with the message over all its retries. `run_at` is in unix seconds.
    """

    id: str
    entry_id: str | None
    task_name: str = attrs.field(kw_only=True)
    run_at: float | None = attrs.field(default=None, kw_only=True)


class Dispatcher(Protocol):
    """The producer's side, as tasks see it."""

    def dispatch(
        self,
        task: "Task[P]",
        payload: P,
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
    ) -> Dispatched: ...

    def dispatch_many(
        self,
        task: "Task[P]",
        payloads: Iterable[P],
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
    ) -> list[Dispatched | None]: ...

    def unlock(self, task: "Task[P]", payload: P) -> bool: ...


@attrs.frozen(slots=False, eq=False, repr=False, kw_only=True)
class Task(Generic[_P_contra]):
    """A registered function with its options; made by `@task`, which checks them.

    Calling a task calls the function, here and now; `delay` has it run by a worker. Durations are
    float seconds. `takes_payload` is False for a function that takes nothing; where its one
    parameter has a default, `payload_optional`, a null payload leaves it to that.
    """

    function: Callable[..., object]
    name: str
    max_retry: int
    max_lost: int
    reservation_timeout: float | None
    unique_for: float | None
    unique_key: UniqueKey | None
    retry_delay: float | RetryDelay | None
    time_limit: float | None
    registry: "Registry"
    takes_payload: bool
    payload_optional: bool

    def __attrs_post_init__(self) -> None:
        # As functools.wraps does, but that would also copy the function's own attributes, of which
        # one called `name` would replace ours.
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(self.function, name):
                vars(self)[name] = getattr(self.function, name)
        vars(self)["__wrapped__"] = self.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Task {self.name!r}>"

    def call(self, payload: Any) -> object:
        """Call the function as a worker does: with the payload, or without where it takes none."""
        if self.takes_payload and not (payload is None and self.payload_optional):
            return self.function(payload)
        return self.function()

    @overload
    def delay(
        self: "Task[None]",
        payload: None = None,
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
    ) -> Dispatched: ...

    @overload
    def delay(
        self,
        payload: _P_contra,
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
    ) -> Dispatched: ...

    def delay(
        self,
        payload: Any = None,
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
    ) -> Dispatched:
        """Have a worker run the task: now, at an instant, or after a duration.

        `run_at` is an aware datetime or unix seconds, `run_in` seconds or a timedelta; what is due
        already is dispatched at once. Nothing is sent again behind your back: a reply that was lost
        raises the Redis client's error, and the message may or may not be there.

        Raises TaskAlreadyDispatchedError, InvalidTaskPayloadError, PayloadTooLargeError,
        UnboundTaskError, and ValueError or TypeError for a time that names no instant.
        """
        return self._dispatcher().dispatch(self, payload, run_at=run_at, run_in=run_in)

    def delay_many(
        self,
        payloads: Iterable[_P_contra],
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
    ) -> list[Dispatched | None]:
        """Do the same for many payloads, in one round trip per thousand.

        The list has a place for each payload, in order; None where a unique task's lock was held.
        """
        return self._dispatcher().dispatch_many(self, payloads, run_at=run_at, run_in=run_in)

    @overload
    def unlock(self: "Task[None]", payload: None = None) -> bool: ...

    @overload
    def unlock(self, payload: _P_contra) -> bool: ...

    def unlock(self, payload: Any = None) -> bool:
        """Free the unique lock that this payload takes; False where none was held."""
        return self._dispatcher().unlock(self, payload)

    def _dispatcher(self) -> Dispatcher:
        if self.registry.dispatcher is None:
            raise UnboundTaskError(
                f"task {self.name!r} has no runner to dispatch it: make a TaskRunner with the "
                "task's registry in this process first (it need not be started), or call its "
                "make_default()"
            )
        return self.registry.dispatcher


class Registry:
    """Tasks by name, and the dispatcher that serves them; any thread may use it."""

    def __init__(self) -> None:
        self.dispatcher: Dispatcher | None = None
        self._tasks: dict[str, Task[Any]] = {}

    def register(self, task: Task[Any]) -> None:
        """Add a task; the same function under the same name (a reload) replaces the old one."""
        present = self._tasks.setdefault(task.name, task)  # atomic, and no lock for a fork to break
        if present is task:
            return
        if origin(present.function) != origin(task.function):
            raise DuplicateTaskNameError(
                f"task name {task.name!r} is taken by {origin(present.function)}: "
                f"{origin(task.function)} needs another"
            )
        self._tasks[task.name] = task

    def get(self, name: str) -> Task[Any] | None:
        """Return the task of that name, or None."""
        return self._tasks.get(name)

    def names(self) -> list[str]:
        """Return the names of all tasks, sorted."""
        return sorted(self._tasks.copy())

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    def __iter__(self) -> Iterator[Task[Any]]:
        return iter(list(self._tasks.values()))


default_registry = Registry()
"""Where `@task` registers, and where a TaskRunner looks, if not told otherwise."""


class _OptionalPayload(Protocol[_P_contra]):
    def __call__(self, payload: _P_contra = ..., /) -> object: ...


class _Decorator(Protocol):
    @overload
    def __call__(self, function: _OptionalPayload[P], /) -> Task[P | None]: ...
    @overload
    def __call__(self, function: Callable[[P], object], /) -> Task[P]: ...
    @overload
    def __call__(self, function: Callable[[], object], /) -> Task[None]: ...


@overload
def task(function: _OptionalPayload[P], /) -> Task[P | None]: ...
@overload
def task(function: Callable[[P], object], /) -> Task[P]: ...
@overload
def task(function: Callable[[], object], /) -> Task[None]: ...
@overload
def task(
    name: str | None = None,
    *,
    max_retry: int = 1,
    max_lost: int = 2,
    reservation_timeout: Duration | None = None,
    unique_for: Duration | None = None,
    unique_key: UniqueKey | None = None,
    retry_delay: Duration | RetryDelay | None = None,
    time_limit: Duration | None = None,
    registry: Registry = default_registry,
) -> _Decorator: ...


def task(
    name: str | Callable[..., object] | None = None,
    *,
    max_retry: int = 1,
    max_lost: int = 2,
    reservation_timeout: Duration | None = None,
    unique_for: Duration | None = None,
    unique_key: UniqueKey | None = None,
    retry_delay: Duration | RetryDelay | None = None,
    time_limit: Duration | None = None,
    registry: Registry = default_registry,
) -> Any:
    """Make a function of one payload, or of nothing, a task: `@task` or `@task(...)`.

    - `name`: registry key and name on the wire; None: module.qualname
    - `max_retry`: how often its code may fail, at least 1
    - `max_lost`: how many deliveries lost with their process are run on top
    - `reservation_timeout`: interval of the heartbeat; None: a third of reclaim_delay
    - `unique_for`: life of the unique lock; None: not unique
    - `unique_key`: payload -> str, or "payload" for a hash of it; None: one lock for the task
    - `retry_delay`: the wait before a retry, or (attempt, error) -> wait; None: exponential backoff
    - `time_limit`: longest run; past it TaskTimeoutError is raised in the task

    Raises ConfigurationError for a bad option, UniqueForRequiredError, DuplicateTaskNameError, and
    TypeError for a function that no worker could call.
    """

    def decorate(function: Callable[..., object]) -> Task[Any]:
        takes_payload, payload_optional = shape(function)
        made: Task[Any] = Task(
            function=function,
            name=_checked_name(_default_name(function) if name is None or callable(name) else name),
            max_retry=max(1, _count("max_retry", max_retry)),
            max_lost=_count("max_lost", max_lost),
            reservation_timeout=_seconds("reservation_timeout", reservation_timeout),
            unique_for=_seconds("unique_for", unique_for),
            unique_key=_checked_key(unique_key, unique_for),
            retry_delay=(
                retry_delay
                if callable(retry_delay)
                else _seconds("retry_delay", retry_delay, at_least=0)
            ),
            time_limit=_seconds("time_limit", time_limit),
            registry=registry,
            takes_payload=takes_payload,
            payload_optional=payload_optional,
        )
        if made.unique_for is not None and ":" in made.name:
            warnings.warn(
                f"unique task {made.name!r}: a name with a colon can share a lock with a task "
                "whose name and key read the same when joined",
                stacklevel=2,
            )
        registry.register(made)
        return made

    return decorate(name) if callable(name) else decorate


def _default_name(function: Callable[..., object]) -> str:
    if not getattr(function, "__qualname__", "<").endswith((">", "<")):
        return origin(function)
    raise ConfigurationError(f"{origin(function)} has no name of its own: give name=")


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"name={name!r} is not a text of at least one character")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        raise ConfigurationError(f"name={name!r} holds a control character or half a character")
    if len(name.encode("utf-8")) > _LONGEST_NAME:
        raise ConfigurationError(f"name={name!r} is longer than {_LONGEST_NAME} bytes")
    if name == RESERVED_NAME:
        raise ConfigurationError(f"name={name!r} is reserved for the timings of the delayed set")
    return name


def _checked_key(unique_key: UniqueKey | None, unique_for: Duration | None) -> UniqueKey | None:
    if unique_key is not None and unique_key != "payload" and not callable(unique_key):
        raise ConfigurationError(f"unique_key={unique_key!r} is not a function, nor 'payload'")
    if unique_key is not None and unique_for is None:
        raise UniqueForRequiredError(
            "unique_key is set without unique_for: say how long the lock lives"
        )
    return unique_key


def _count(field: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{field}={value!r} is not a whole number")
    if value < 0:
        raise ConfigurationError(f"{field}={value!r} is below 0")
    return value


def _seconds(field: str, value: Duration | None, at_least: float = 0.001) -> float | None:
    if value is None:
        return None
    try:
        result = clock.seconds(value, field)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from None
    if result < at_least:
        raise ConfigurationError(f"{field}={value!r} is below {at_least} seconds")
    return result
