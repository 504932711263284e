"""Floor 1: the knobs of a runner, with their defaults and rules.

This is the one home of defaults. A value is checked when it is set: the error names the field, the
value and the rule. Options of a single task are in `task`.
"""

import socket
import uuid
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, cast

import attrs
from attrs import field
from attrs.validators import optional

from taskrunner import clock
from taskrunner.clock import Duration
from taskrunner.errors import ConfigurationError, TaskRunnerError, quoted

if TYPE_CHECKING:  # what the hooks are handed is made on higher floors
    from taskrunner.context import TaskContext, TaskMessage
    from taskrunner.reports import ErrorReport
    from taskrunner.stats import Stats

FailedTaskHandler: TypeAlias = Callable[["TaskMessage", TaskRunnerError], object]
LongQueueHook: TypeAlias = Callable[["Stats"], object]
ErrorHook: TypeAlias = Callable[["ErrorReport"], object]
BeforeTask: TypeAlias = Callable[["TaskContext"], object]
AfterTask: TypeAlias = Callable[["TaskContext", BaseException | None], object]

_Attribute: TypeAlias = "attrs.Attribute[Any]"
_Validator: TypeAlias = Callable[[Any, _Attribute, Any], None]

_TUNING = ("min_workers", "max_workers", "desired_wait_time", "desired_wait_time_tolerance")
_OF_THE_QUEUE = ("prefix", "reclaim_delay", "delete_on_ack", "redis_version")
_COOLDOWN = 10.0
_TICK = 60.0
_MILLISECOND = 0.001  # the unit of Redis's timers: less would be sent as 0, which means for ever


def _to_seconds(value: Duration) -> float:
    """Convert a duration; what is none stays as it is, for the validator knows the field."""
    try:
        return clock.seconds(value, "")
    except (TypeError, ValueError):
        return cast(float, value)


def _to_seconds_or_none(value: Duration | None) -> float | None:
    return None if value is None else _to_seconds(value)


def _to_cooldown(value: Duration) -> float:
    converted: Any = _to_seconds(value)
    return _COOLDOWN if isinstance(converted, float) and converted <= 0 else cast(float, converted)


def _duration(at_least: float) -> _Validator:
    def check(_: Any, attribute: _Attribute, value: Any) -> None:
        try:
            clock.seconds(value, attribute.name)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(str(error)) from None
        if value < at_least:
            raise ConfigurationError(f"{attribute.name}={value!r} is below {at_least} seconds")

    return check


def _whole_number(at_least: int) -> _Validator:
    def check(_: Any, attribute: _Attribute, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigurationError(f"{attribute.name}={value!r} is not a whole number")
        if value < at_least:
            raise ConfigurationError(f"{attribute.name}={value!r} is below {at_least}")

    return check


def _text(_: Any, attribute: _Attribute, value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigurationError(f"{attribute.name}={value!r} is not a str")
    if not value.isascii() and value.encode("utf-8", "ignore").decode("utf-8") != value:
        raise ConfigurationError(f"{attribute.name}={value!r} can't be encoded as UTF-8")


def _name(instance: Any, attribute: _Attribute, value: Any) -> None:
    _text(instance, attribute, value)
    if not value:
        raise ConfigurationError(f"{attribute.name}={value!r} is empty")


def _hook(_: Any, attribute: _Attribute, value: Any) -> None:
    if value is not None and not callable(value):
        raise ConfigurationError(f"{attribute.name}={value!r} can't be called")


def _host() -> str:
    return socket.gethostname() or str(uuid.uuid4())


def _timings(_: Any, attribute: _Attribute, value: Any) -> None:
    if not isinstance(value, Timings):
        raise ConfigurationError(f"{attribute.name}={value!r} is not a Timings")


_positive = _duration(_MILLISECOND)
_not_negative = _duration(0)


@attrs.frozen(kw_only=True)
class Timings:
    """Periods of the machinery, for tests and special needs; one value per group.

    `lease` and `presence` are the lives of the keys of that name; the Go library has the same ones.
    `poll` is the longest wait for a due task or a free lease, `janitor` the time between two
    cleanings. A consumer of a dead host is removed when idle for `consumer_idle`. What waited
    unstarted for `hand_back_after` is handed back, where other instances live.
    """

    lease: float = field(default=5.0, converter=_to_seconds, validator=_positive)
    presence: float = field(default=15.0, converter=_to_seconds, validator=_positive)
    poll: float = field(default=5.0, converter=_to_seconds, validator=_positive)
    janitor: float = field(default=60.0, converter=_to_seconds, validator=_positive)
    consumer_idle: float = field(default=600.0, converter=_to_seconds, validator=_positive)
    hand_back_after: float = field(default=1.0, converter=_to_seconds, validator=_positive)


@attrs.frozen(kw_only=True)
class TaskRunnerConfig:
    """Settings of a runner; all but `consumer_group` have defaults.

    Durations are given as seconds or timedelta and read as float seconds. Raises
    ConfigurationError.
    """

    # Who we are
    consumer_group: str = field(validator=_name)
    host: str = field(factory=_host, validator=_name)
    consumers_prefix: str = field(default="", validator=_text)  # advisory, nothing is named by it

    # Fetching and running
    batch_size: int = field(default=100, validator=_whole_number(1))
    num_fetchers: int = field(default=1, validator=_whole_number(1))
    num_workers: int = field(default=8, validator=_whole_number(1))
    block_duration: float = field(default=5.0, converter=_to_seconds, validator=_positive)
    shutdown_timeout: float = field(default=30.0, converter=_to_seconds, validator=_not_negative)

    # Tuning of the pool: the four, or none of them
    min_workers: int | None = field(default=None, validator=optional(_whole_number(1)))
    max_workers: int | None = field(default=None, validator=optional(_whole_number(1)))
    desired_wait_time: float | None = field(
        default=None, converter=_to_seconds_or_none, validator=optional(_positive)
    )
    desired_wait_time_tolerance: float | None = field(
        default=None, converter=_to_seconds_or_none, validator=optional(_not_negative)
    )
    tuning_cooldown_seconds: float = field(
        default=_COOLDOWN, converter=_to_cooldown, validator=_positive
    )

    # Measuring
    long_queue_hook: LongQueueHook | None = field(default=None, validator=_hook)
    long_queue_threshold: float = field(default=0.0, converter=_to_seconds, validator=_not_negative)
    metrics_reset_interval: float = field(
        default=86_400.0, converter=_to_seconds, validator=_not_negative
    )

    # Failures and bounds
    failed_task_handler: FailedTaskHandler | None = field(default=None, validator=_hook)
    on_error: ErrorHook | None = field(default=None, validator=_hook)
    dead_letter_limit: int = field(default=10_000, validator=_whole_number(0))
    unknown_task_deliveries: int = field(default=10, validator=_whole_number(1))
    max_payload_bytes: int = field(default=10 * 1024 * 1024, validator=_whole_number(1))

    # Around each run
    before_task: BeforeTask | None = field(default=None, validator=_hook)
    after_task: AfterTask | None = field(default=None, validator=_hook)

    timings: Timings = field(factory=Timings, validator=_timings)
    replication_factor: int | None = None  # deprecated: instances are counted

    def __attrs_post_init__(self) -> None:
        given = [name for name in _TUNING if getattr(self, name) is not None]
        if given and len(given) < len(_TUNING):
            missing = ", ".join(name for name in _TUNING if name not in given)
            raise ConfigurationError(
                f"{given[0]}={getattr(self, given[0])!r} is set without {missing}: "
                "tuning takes all four"
            )
        if (
            self.min_workers is not None
            and self.max_workers is not None
            and self.max_workers < self.min_workers
        ):
            raise ConfigurationError(
                f"max_workers={self.max_workers} is below min_workers={self.min_workers}"
            )
        if self.desired_wait_time_tolerance == 0:
            _warn(
                "desired_wait_time_tolerance=0 never lets the pool settle; "
                "20 to 50 % of desired_wait_time is usual",
                UserWarning,
            )
        if self.replication_factor is not None:
            _warn(
                "replication_factor is ignored: the instances alive are counted",
                DeprecationWarning,
            )

    @classmethod
    def from_settings(cls, config: Self | None, settings: Mapping[str, Any]) -> Self:
        """Return `config` with the settings on top, or a new one of the settings alone."""
        known = attrs.fields_dict(cls)
        for name in settings:
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                if name in _OF_THE_QUEUE:
                    hint = f": give it to the queue, queue=RedisStreamQueue(url, {name}=...)"
                raise ConfigurationError(f"{name} is not a field of TaskRunnerConfig{hint}")
        if config is None:
            if "consumer_group" not in settings:
                raise ConfigurationError(
                    "consumer_group is missing: instances that share work use one name"
                )
            return cls(**settings)
        if not isinstance(config, cls):
            raise ConfigurationError(
                f"config={quoted(config)} is not a TaskRunnerConfig: single settings go by keyword, as "
                "in consumer_group='myapp'"
            )
        return attrs.evolve(config, **settings) if settings else config

    @property
    def tuning(self) -> bool:
        """Whether the size of the pool follows the queue."""
        return self.min_workers is not None

    @property
    def tick(self) -> float:
        """Seconds between two aggregations."""
        return self.long_queue_threshold / 2 or _TICK


class Settings(TypedDict, total=False):
    """The fields of `TaskRunnerConfig` as keywords, for those who take them in its place."""

    consumer_group: str
    host: str
    consumers_prefix: str
    batch_size: int
    num_fetchers: int
    num_workers: int
    block_duration: Duration
    shutdown_timeout: Duration
    min_workers: int | None
    max_workers: int | None
    desired_wait_time: Duration | None
    desired_wait_time_tolerance: Duration | None
    tuning_cooldown_seconds: Duration
    long_queue_hook: LongQueueHook | None
    long_queue_threshold: Duration
    metrics_reset_interval: Duration
    failed_task_handler: FailedTaskHandler | None
    on_error: ErrorHook | None
    dead_letter_limit: int
    unknown_task_deliveries: int
    max_payload_bytes: int
    before_task: BeforeTask | None
    after_task: AfterTask | None
    timings: Timings
    replication_factor: int | None


def _warn(text: str, category: type[Warning]) -> None:
    warnings.warn(text, category, stacklevel=4)  # past this, __attrs_post_init__ and __init__
