"""The settings of a runner: defaults, normalisation and rules."""

import re
import socket
import uuid
import warnings
from datetime import timedelta
from typing import Any

import attrs
import pytest

from taskrunner.clock import Duration
from taskrunner.config import Settings, TaskRunnerConfig, Timings
from taskrunner.errors import ConfigurationError

TUNING: dict[str, Any] = {
    "min_workers": 1,
    "max_workers": 10,
    "desired_wait_time": 2,
    "desired_wait_time_tolerance": timedelta(milliseconds=500),
}


def _config(**settings: Any) -> TaskRunnerConfig:
    return TaskRunnerConfig.from_settings(None, {"consumer_group": "g", **settings})


def test_config_has_the_documented_defaults() -> None:
    """Each default is a promise of the docs; none is a surprise of the code."""
    config = attrs.asdict(TaskRunnerConfig(consumer_group="g", host="h"))

    assert config == {
        "consumer_group": "g",
        "host": "h",
        "consumers_prefix": "",
        "batch_size": 100,
        "num_fetchers": 1,
        "num_workers": 8,
        "block_duration": 5.0,
        "min_workers": None,
        "max_workers": None,
        "desired_wait_time": None,
        "desired_wait_time_tolerance": None,
        "tuning_cooldown_seconds": 10.0,
        "failed_task_handler": None,
        "long_queue_hook": None,
        "long_queue_threshold": 0.0,
        "metrics_reset_interval": 86_400.0,
        "replication_factor": None,
        "shutdown_timeout": 30.0,
        "on_error": None,
        "before_task": None,
        "after_task": None,
        "max_payload_bytes": 10_485_760,
        "dead_letter_limit": 10_000,
        "unknown_task_deliveries": 10,
        "timings": {
            "lease": 5.0,
            "presence": 15.0,
            "poll": 5.0,
            "janitor": 60.0,
            "consumer_idle": 600.0,
            "hand_back_after": 1.0,
        },
    }


def test_host_is_the_name_of_the_machine() -> None:
    """Instances of one machine are told apart later, when their names are taken in Redis."""
    assert TaskRunnerConfig(consumer_group="g").host == socket.gethostname()


def test_host_is_a_uuid_when_the_machine_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without a hostname still gets a name of its own."""
    monkeypatch.setattr(socket, "gethostname", lambda: "")

    host = TaskRunnerConfig(consumer_group="g").host

    assert str(uuid.UUID(host)) == host


@pytest.mark.parametrize("value", [2, 2.0, timedelta(seconds=2)], ids=str)
def test_a_duration_is_read_as_float_seconds(value: Any) -> None:
    """However a duration is given, the code sees one type."""
    config = _config(block_duration=value, timings=Timings(poll=value))

    assert (config.block_duration, type(config.block_duration)) == (2.0, float)
    assert (config.timings.poll, type(config.timings.poll)) == (2.0, float)


@pytest.mark.parametrize("value", [0, -3, timedelta(0)], ids=str)
def test_cooldown_is_the_default_when_not_positive(value: Any) -> None:
    """As in the Go library, 0 means "as usual", not "at every tick"."""
    assert _config(tuning_cooldown_seconds=value).tuning_cooldown_seconds == 10


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"consumer_group": ""}, "consumer_group='' is empty"),
        ({"consumer_group": 5}, "consumer_group=5 is not a str"),
        ({"host": ""}, "host='' is empty"),
        ({"host": "\ud83d"}, r"host='\ud83d' can't be encoded as UTF-8"),
        ({"consumers_prefix": None}, "consumers_prefix=None is not a str"),
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"batch_size": True}, "batch_size=True is not a whole number"),
        ({"num_workers": 2.0}, "num_workers=2.0 is not a whole number"),
        ({"num_fetchers": "1"}, "num_fetchers='1' is not a whole number"),
        ({"max_payload_bytes": 0}, "max_payload_bytes=0 is below 1"),
        ({"dead_letter_limit": -1}, "dead_letter_limit=-1 is below 0"),
        ({"unknown_task_deliveries": 0}, "unknown_task_deliveries=0 is below 1"),
        ({"block_duration": 0}, "block_duration=0.0 is below 0.001 seconds"),
        ({"block_duration": None}, "block_duration=None is not a duration"),
        ({"block_duration": True}, "block_duration=True is not a duration"),
        ({"shutdown_timeout": timedelta(-1)}, "shutdown_timeout=-86400.0 is below 0 seconds"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout=inf is not a number of seconds"),
        ({"shutdown_timeout": 10**400}, "shutdown_timeout=1000"),
        ({"long_queue_threshold": float("nan")}, "long_queue_threshold=nan is not a number"),
        ({"tuning_cooldown_seconds": "x"}, "tuning_cooldown_seconds='x' is not a duration"),
        ({"tuning_cooldown_seconds": float("nan")}, "tuning_cooldown_seconds=nan is not a number"),
        ({"on_error": "print"}, "on_error='print' can't be called"),
        ({"failed_task_handler": 1}, "failed_task_handler=1 can't be called"),
        ({"timings": {"lease": 5}}, "timings={'lease': 5} is not a Timings"),
        (TUNING | {"max_workers": 2, "min_workers": 10}, "max_workers=2 is below min_workers=10"),
        (TUNING | {"min_workers": 0}, "min_workers=0 is below 1"),
        (TUNING | {"desired_wait_time": 0}, "desired_wait_time=0.0 is below 0.001 seconds"),
        (
            {"max_workers": 2},
            "max_workers=2 is set without min_workers, desired_wait_time, "
            "desired_wait_time_tolerance: tuning takes all four",
        ),
        (
            TUNING | {"desired_wait_time": None},
            "min_workers=1 is set without desired_wait_time: tuning takes all four",
        ),
    ],
)
def test_a_bad_setting_is_refused_with_field_value_and_rule(
    settings: dict[str, Any], text: str
) -> None:
    """The text alone says what to change."""
    with pytest.raises(ConfigurationError, match=r"^" + re.escape(text)):
        _config(**settings)


def test_a_bad_timing_is_refused_with_field_value_and_rule() -> None:
    """A lease of no time would make every instance the leader in turn."""
    with pytest.raises(ConfigurationError, match=r"^lease=0\.0 is below 0\.001 seconds"):
        Timings(lease=0)


def test_config_is_frozen() -> None:
    """A running instance can't be changed behind its back."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        _config().batch_size = 5  # type: ignore[misc]


def test_tuning_is_on_when_all_four_are_set() -> None:
    """One question for the rest of the code, instead of four."""
    assert _config(**TUNING).tuning
    assert not _config().tuning


def test_tick_is_half_the_threshold() -> None:
    """A queue that grows too long is seen before it is twice too long."""
    assert _config(long_queue_threshold=10).tick == 5
    assert _config().tick == 60


def test_a_tolerance_of_zero_warns() -> None:
    """It is allowed, but the pool would be resized for ever."""
    with pytest.warns(UserWarning, match=r"^desired_wait_time_tolerance=0 never"):
        _config(**TUNING | {"desired_wait_time_tolerance": 0})


def test_replication_factor_warns_where_it_is_set() -> None:
    """Settings taken over from Go still work, and the warning points at them."""
    with pytest.warns(DeprecationWarning, match=r"^replication_factor is ignored") as caught:
        TaskRunnerConfig(consumer_group="g", replication_factor=3)

    assert caught[0].filename == __file__


def test_an_ordinary_config_warns_of_nothing() -> None:
    """A warning is only worth reading where warnings are rare."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _config(**TUNING)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_worker", "; did you mean num_workers?"),
        ("reclaim_delay", ": give it to the queue, queue=RedisStreamQueue(url, reclaim_delay=...)"),
        ("zzz", ""),
    ],
)
def test_from_settings_names_the_nearest_field_when_one_is_unknown(name: str, hint: str) -> None:
    """A typing error is found at once, and not ignored."""
    text = f"{name} is not a field of TaskRunnerConfig{hint}"
    with pytest.raises(ConfigurationError, match=r"^" + re.escape(text) + "$"):
        _config(**{name: 3})


def test_from_settings_puts_settings_on_top_of_a_config() -> None:
    """The short form changes single fields, by the same rules."""
    config = _config(batch_size=7, host="h")

    changed = TaskRunnerConfig.from_settings(config, {"num_workers": 3})

    assert (changed.batch_size, changed.num_workers, changed.host) == (7, 3, "h")
    assert TaskRunnerConfig.from_settings(config, {}) is config
    with pytest.raises(ConfigurationError, match=r"^num_workers=0 is below 1"):
        TaskRunnerConfig.from_settings(config, {"num_workers": 0})


def test_from_settings_asks_for_the_group_when_there_is_none() -> None:
    """There is no default group: two applications would share it unawares."""
    with pytest.raises(ConfigurationError, match=r"^consumer_group is missing"):
        TaskRunnerConfig.from_settings(None, {})


def test_from_settings_refuses_a_config_of_another_kind() -> None:
    """The group's name alone in the config's place is an easy mistake."""
    with pytest.raises(ConfigurationError, match=r"^config='myapp' is not a TaskRunnerConfig"):
        TaskRunnerConfig.from_settings("myapp", {})  # type: ignore[arg-type]


def test_settings_by_keyword_are_the_fields_of_the_config() -> None:
    """Two lists of one thing, for checkers can't derive the one from the other: same names, same
    types, and a duration where the field converts one."""
    fields = attrs.fields(TaskRunnerConfig)

    assert list(Settings.__annotations__) == [field.name for field in fields]
    for field in fields:
        given = Settings.__annotations__[field.name]
        if field.converter is None:
            assert given == field.type, field.name
        else:
            optional = field.default is None
            assert given == (Duration | None if optional else Duration), field.name
