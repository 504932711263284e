"""What people get wrong: each is refused at once, by name, value and rule, and nothing is sent."""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import redis
import redis.asyncio

from taskrunner import (
    AlreadyStartedError,
    ConfigurationError,
    DuplicateTaskNameError,
    InvalidTaskPayloadError,
    PayloadTooLargeError,
    RedisStreamQueue,
    Registry,
    TaskNotFoundError,
    TaskRunner,
    TaskRunnerConfig,
    Timings,
    UnboundTaskError,
    UniqueForRequiredError,
    current_task,
    default_registry,
    task,
)
from taskrunner.cli.embedded import EmbeddedServer, free_port
from tests.support import Names, OwnServer, busy, eventually, stays
from tests.support.fleet import Fleet
from tests.support.label import label
from tests.support.proxy import Proxy

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


def nothing_sent(fleet: Fleet) -> bool:
    names = fleet.names
    return fleet.client.exists(names.stream, names.delayed) == 0


# --- settings ---

TUNING: dict[str, Any] = {
    "min_workers": 1,
    "max_workers": 4,
    "desired_wait_time": 1,
    "desired_wait_time_tolerance": 0.3,
}
COUNTS = [
    ("batch_size", 1),
    ("num_fetchers", 1),
    ("num_workers", 1),
    ("max_payload_bytes", 1),
    ("unknown_task_deliveries", 1),
    ("dead_letter_limit", 0),
]
NO_COUNTS = [-1, 1.0, 1.5, "3", True, NAN, b"1", [1], {}]
DURATIONS = [
    ("block_duration", False),
    ("shutdown_timeout", True),
    ("long_queue_threshold", True),
    ("metrics_reset_interval", True),
]
NO_DURATIONS = [-0.001, timedelta(-1), NAN, INF, -INF, 10**400, "5", True, b"5", [5], 5j]
HOOKS = [
    "failed_task_handler",
    "long_queue_hook",
    "on_error",
    "before_task",
    "after_task",
]
CASES: list[tuple[str, Any]] = [
    *((name, value) for name, least in COUNTS for value in [*NO_COUNTS, least - 1]),
    *((name, None) for name, _ in COUNTS),
    *((name, value) for name, _ in DURATIONS for value in NO_DURATIONS),
    *((name, None) for name, _ in DURATIONS),
    *((name, 0) for name, zero in DURATIONS if not zero),
    *((name, value) for name in HOOKS for value in ("print", 1, [], object())),
    *(("consumer_group", value) for value in ("", None, 5, b"g", "\ud800")),
    *(("host", value) for value in ("", None, 5, b"h", "\ud800")),
    *(("consumers_prefix", value) for value in (None, 5, "\ud800")),
    *(("tuning_cooldown_seconds", value) for value in (NAN, INF, "5", None, True)),
    *(("timings", value) for value in (None, {}, 5, Timings)),
]


@pytest.mark.parametrize(("name", "value"), CASES, ids=label)
def test_a_setting_out_of_range_is_refused_by_name_and_value(name: str, value: Any) -> None:
    """At the construction, whichever way the setting came: nothing half configured ever runs."""
    settings = {"consumer_group": "g", name: value}
    for make in (
        lambda: TaskRunnerConfig(**settings),
        lambda: TaskRunner(client=redis.Redis(port=1), registry=Registry(), **settings),
    ):
        with pytest.raises(ConfigurationError) as caught:
            make()
        text = str(caught.value)
        assert text.startswith(f"{name}=")
        assert len(text) < 1500
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "name", ["lease", "presence", "poll", "janitor", "consumer_idle", "hand_back_after"]
)
@pytest.mark.parametrize("value", [0, -1, NAN, INF, "5", None, True, timedelta(0)], ids=repr)
def test_a_timing_out_of_range_is_refused(name: str, value: Any) -> None:
    """A lease of no time would make every instance the leader in turn."""
    with pytest.raises(ConfigurationError, match=rf"^{name}="):
        Timings(**{name: value})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (TUNING | {"min_workers": 5}, "max_workers=4 is below min_workers=5"),
        ({"min_workers": 1}, "min_workers=1 is set without"),
        ({"desired_wait_time_tolerance": 1}, "desired_wait_time_tolerance=1.0 is set without"),
        *(
            ({key: value for key, value in TUNING.items() if key != left}, f"without {left}")
            for left in TUNING
        ),
        (TUNING | {"min_workers": 0}, "min_workers=0 is below 1"),
        (TUNING | {"max_workers": "4"}, "max_workers='4' is not a whole number"),
        (TUNING | {"desired_wait_time": 0}, "desired_wait_time=0"),
        (TUNING | {"desired_wait_time": -1}, "desired_wait_time=-1"),
        (TUNING | {"desired_wait_time_tolerance": -1}, "desired_wait_time_tolerance=-1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], text: str
) -> None:
    """Both are named, for either may be the wrong one."""
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        TaskRunnerConfig(consumer_group="g", **settings)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_worker", "num_workers"),
        ("batchsize", "batch_size"),
        ("failed_handler", "failed_task_handler"),
        ("shutdown_timout", "shutdown_timeout"),
        ("xyz", None),
    ],
)
def test_a_typo_in_a_setting_is_found_and_the_nearest_one_named(
    name: str, hint: str | None
) -> None:
    """It would be ignored otherwise, and noticed in production."""
    with pytest.raises(ConfigurationError, match=f"^{name} is not a field") as caught:
        TaskRunner(consumer_group="g", client=redis.Redis(port=1), **{name: 3})

    assert (f"did you mean {hint}?" in str(caught.value)) is (hint is not None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "consumer_group is missing"),
        ({"config": "myapp"}, "config='myapp' is not a TaskRunnerConfig"),
        ({"config": {"consumer_group": "g"}}, "is not a TaskRunnerConfig"),
        ({"consumer_group": "g", "queue": "jobs"}, "queue='jobs' is not a RedisStreamQueue"),
        ({"config": "redis://u:secret@h"}, "config='redis://…' is not a TaskRunnerConfig"),
        ({"consumer_group": "g", "queue": "u:secret@h"}, "queue='…' is not a RedisStreamQueue"),
        ({"consumer_group": "g", "client": "localhost:6379"}, "is not a Redis URL"),
        ({"consumer_group": "g", "client": "http://localhost"}, "is not a Redis URL"),
        ({"consumer_group": "g", "client": "redis://u:secret@h:port"}, "is not a Redis URL"),
        ({"consumer_group": "g", "client": 6379}, "client=.*int"),
        ({"consumer_group": "g", "client": redis.asyncio.Redis(port=1)}, "client=.*asyncio"),
        ({"consumer_group": "g", "client": redis.ConnectionPool(port=1)}, "client=.*Pool"),
    ],
    ids=[
        "nothing",
        "text",
        "dict",
        "queue",
        "URL",
        "address",
        "no scheme",
        "http",
        "port",
        "int",
        "asyncio",
        "pool",
    ],
)
def test_what_a_runner_is_made_of_is_checked(settings: dict[str, Any], text: str) -> None:
    """By kind; and no password is ever shown."""
    with pytest.raises(ConfigurationError, match=text) as caught:
        TaskRunner(registry=Registry(), **settings)

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefix": ""}, "prefix=''"),
        ({"prefix": None}, "prefix=None"),
        ({"prefix": "\ud800"}, r"prefix='\\ud800'"),
        ({"queue": ""}, "queue=''"),
        ({"queue": 5}, "queue=5"),
        ({"reclaim_delay": 0}, "reclaim_delay=0 is below 0.1 seconds"),
        ({"reclaim_delay": -5}, "reclaim_delay=-5"),
        ({"reclaim_delay": NAN}, "reclaim_delay=nan"),
        ({"reclaim_delay": INF}, "reclaim_delay=inf"),
        # Redis takes an idle time of 10^9 ms for "at once": a hand-back would never be overdue.
        ({"reclaim_delay": timedelta(days=12)}, "reclaim_delay="),
        ({"reclaim_delay": "5m"}, "reclaim_delay='5m' is not a duration"),
        ({"reclaim_delay": None}, "reclaim_delay=None is not a duration"),
        ({"delete_on_ack": "no"}, "delete_on_ack='no' is not a bool"),
        ({"delete_on_ack": None}, "delete_on_ack=None is not a bool"),
        ({"redis_version": "new"}, "redis_version='new'"),
        ({"redis_version": 7}, "redis_version=7"),
    ],
    ids=repr,
)
def test_an_option_of_the_queue_out_of_range_is_refused(options: dict[str, Any], text: str) -> None:
    """By name, value and rule, as for a runner."""
    with pytest.raises(ConfigurationError, match=text):
        RedisStreamQueue(redis.Redis(port=1), **options)
    with pytest.raises(TypeError):
        RedisStreamQueue(redis.Redis(port=1), prefx="a")  # type: ignore[call-arg]


# --- tasks ---


async def _coroutine(payload: Any) -> None:
    pass


def _generator(payload: Any) -> Any:
    yield payload


async def _async_generator(payload: Any) -> Any:
    yield payload


class _AsyncCall:
    async def __call__(self, payload: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_coroutine, "is async.*asyncio.run"),
        (_async_generator, "is async"),
        (_AsyncCall(), "is async"),
        (_generator, "generator function"),
        (lambda one, two: None, "needs one, two"),
        (lambda *, key: None, "needs key"),
        (5, "can't be called"),
        ("name", "can't be called"),
    ],
    ids=[
        "coroutine",
        "async generator",
        "async call",
        "generator",
        "two",
        "keyword",
        "int",
        "text",
    ],
)
def test_a_function_that_no_worker_can_call_is_refused_at_decoration(
    function: Any, text: str
) -> None:
    """Not hours later, when its first message comes; and nothing is registered."""
    registry = Registry()
    with pytest.raises(TypeError, match=text):
        task(name="t", registry=registry)(function)

    assert registry.names() == []


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"name": ""}, ConfigurationError, "name=''"),
        ({"name": 5}, ConfigurationError, "name=5"),
        ({"name": "a\nb"}, ConfigurationError, "control character"),
        ({"name": "x" * 600}, ConfigurationError, "longer than"),
        ({"name": "delayed_tasks_schedule"}, ConfigurationError, "reserved"),
        ({"max_retry": -1}, ConfigurationError, "max_retry=-1 is below 0"),
        ({"max_retry": 1.5}, ConfigurationError, "max_retry=1.5 is not a whole number"),
        ({"max_retry": None}, ConfigurationError, "max_retry=None"),
        ({"max_lost": -1}, ConfigurationError, "max_lost=-1 is below 0"),
        ({"max_lost": True}, ConfigurationError, "max_lost=True"),
        ({"reservation_timeout": 0}, ConfigurationError, "reservation_timeout=0"),
        ({"reservation_timeout": NAN}, ConfigurationError, "reservation_timeout=nan"),
        ({"unique_for": 0}, ConfigurationError, "unique_for=0"),
        ({"unique_for": -5}, ConfigurationError, "unique_for=-5"),
        ({"unique_for": "60"}, ConfigurationError, "unique_for='60'"),
        ({"unique_key": str}, UniqueForRequiredError, "unique_for"),
        ({"unique_for": 5, "unique_key": "key"}, ConfigurationError, "unique_key='key'"),
        ({"retry_delay": -1}, ConfigurationError, "retry_delay=-1"),
        ({"retry_delay": INF}, ConfigurationError, "retry_delay=inf"),
        ({"retry_delay": "1s"}, ConfigurationError, "retry_delay='1s'"),
        ({"time_limit": 0}, ConfigurationError, "time_limit=0"),
        ({"time_limit": timedelta(-1)}, ConfigurationError, "time_limit="),
    ],
    ids=repr,
)
def test_an_option_of_a_task_out_of_range_is_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    """At decoration, by name, value and rule."""
    registry = Registry()
    with pytest.raises(error, match=text):
        task(registry=registry, **{"name": "t", **options})(lambda payload: None)

    assert registry.names() == []


def test_a_name_may_not_be_taken_twice() -> None:
    """Which of the two would run?"""
    registry = Registry()
    task(name="t", registry=registry)(_stand_in)
    with pytest.raises(DuplicateTaskNameError, match="'t' is taken by .*_stand_in"):
        task(name="t", registry=registry)(_other)


def _stand_in(payload: Any) -> None:
    pass


def _other(payload: Any) -> None:
    pass


# --- dispatch ---


class _Odd:
    def __repr__(self) -> str:
        raise ValueError("no repr")


LOOP: list[Any] = []
LOOP.append(LOOP)


def _deep() -> Any:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        (datetime(2030, 1, 1, tzinfo=UTC), "payload: datetime"),
        ({"user": {"created": datetime(2030, 1, 1)}}, "payload.user.created: datetime"),
        ({"a": [1, {"b": {1, 2}}]}, "payload.a[1].b: set"),
        ({"a": b"bytes"}, "payload.a: bytes"),
        ({"a": [1.5, NAN]}, "payload.a[1]: float"),
        ({"a": INF}, "payload.a: float"),
        ({"a": _Odd()}, "payload.a: _Odd"),
        ({"with space": [object()]}, "payload['with space'][0]: object"),
        ({1: "a"}, "payload: a key of type int"),
        ({"a": {None: 1}}, "payload.a: a key of type NoneType"),
        ({"a": {("b",): 1}}, "payload.a: a key of type tuple"),
        ({"a": "\ud800"}, "payload.a: str"),
        ({"\ud800": 1}, "payload"),
        (LOOP, "payload"),
        (_deep(), "payload"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("unique", [False, True], ids=["plain", "unique"])
def test_a_payload_that_is_no_json_is_refused_with_its_path(
    fleet: Fleet, payload: Any, path: str, unique: bool
) -> None:
    """Where it is in the payload, and what stands there; no lock is taken, nothing is sent."""
    options: dict[str, Any] = {"unique_for": 60, "unique_key": "payload"} if unique else {}
    made = fleet.task(name=f"t-{fleet.names.group}", **options)

    for call in (
        lambda: made.delay(payload),
        lambda: made.delay(payload, run_in=60),
        lambda: made.delay_many([1, payload]),
        lambda: fleet.producer.dispatch(made.name, payload),
    ):
        with pytest.raises(InvalidTaskPayloadError, match=re.escape(path)):
            call()

    assert nothing_sent(fleet)
    assert fleet.locks(made.name) == {}


def test_a_payload_that_is_too_large_is_refused_at_the_call(fleet: Fleet) -> None:
    """With both sizes; one that just fits travels."""
    runner = fleet.make(max_payload_bytes=1000)

    runner.dispatch("note", "x" * 998)
    for payload in ("x" * 999, "ä" * 500, ["x" * 10_000_000]):
        with pytest.raises(PayloadTooLargeError, match=r"\d+ bytes, above max_payload_bytes=1000"):
            runner.dispatch("note", payload)

    assert fleet.client.xlen(fleet.names.stream) == 1


@pytest.mark.parametrize("refusal", ["an error", "a closed connection"])
def test_a_payload_that_can_not_be_stored_again_is_given_up_without_its_body(
    own_server: Callable[..., OwnServer],
    make_proxy: Callable[[str], Proxy],
    names: Names,
    refusal: str,
) -> None:
    """Its server takes no such size any more, or something before it hangs up on it: its retry
    would be tried for ever. Its neighbours go on."""
    own = own_server()
    proxy = make_proxy(own.url)
    with Fleet(proxy.url, names) as fleet:

        def fails(_: Any) -> None:
            raise ValueError("always")

        # Beyond reclaim_delay: the message moves to the delayed ones.
        large = fleet.task(fails, name="large", max_retry=3, retry_delay=60)
        large.delay("x" * 2**21)
        if refusal == "an error":
            own.client().config_set("proto-max-bulk-len", 2**20)
        else:
            proxy.on("*", "cut_before", containing="x" * 1000, times=None)
        began = time.time()
        runner = fleet.start()
        fleet.note.delay("neighbour")
        fleet.wait_ran("neighbour")
        eventually(lambda: len(runner.dead_letters) == 1, 20)
        eventually(fleet.settled, 10)
        (letter,) = runner.dead_letters.list()

    assert (letter.task_name, letter.payload, letter.message) == ("large", None, "")
    assert re.fullmatch(r"its \d+ bytes could not be stored again: .+", letter.error)
    assert letter.attempts == 1
    assert began - 1 <= letter.failed_at <= time.time() + 1
    assert fleet.members() == []


def test_ten_mebibytes_are_the_default_limit(fleet: Fleet) -> None:
    """What is allowed is carried through, too."""
    fleet.start()
    fits = "x" * (10 * 1024 * 1024 - 2)
    fleet.note.delay(fits)
    with pytest.raises(PayloadTooLargeError):
        fleet.note.delay(fits + "x")

    eventually(lambda: len(fleet.runs) == 1)
    assert fleet.runs[0].payload == fits
    eventually(fleet.settled)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (lambda payload: 5, TypeError),
        (lambda payload: None, TypeError),
        (lambda payload: payload["missing"], KeyError),
        (lambda payload: "\ud800", ValueError),
    ],
    ids=["int", "None", "raises", "surrogate"],
)
def test_a_bad_unique_key_raises_at_the_call(
    fleet: Fleet, key: Callable[[Any], Any], error: type[Exception]
) -> None:
    """The caller is who can mend it; nothing was sent, no lock is held."""
    made = fleet.task(name=f"t-{fleet.names.group}", unique_for=60, unique_key=key)

    with pytest.raises(error):
        made.delay({})
    with pytest.raises(error):
        made.delay_many([{}], run_in=5)

    assert nothing_sent(fleet)
    assert fleet.locks(made.name) == {}


def test_delay_before_there_is_a_runner_says_what_to_do() -> None:
    """The usual mistake of a web process: the tasks were imported, a runner was never made."""
    registry = Registry()
    made = task(name="t", registry=registry)(_stand_in)

    for call in (
        made.delay,
        lambda: made.delay_many([1]),
        made.unlock,
    ):
        with pytest.raises(UnboundTaskError, match="make a TaskRunner"):
            call()  # type: ignore[operator]

    TaskRunner(consumer_group="g", client=redis.Redis(port=1), registry=registry)
    assert registry.dispatcher is not None


def test_an_unknown_name_is_refused_with_those_that_are_known(fleet: Fleet) -> None:
    """A typing error in a name must not travel."""
    with pytest.raises(TaskNotFoundError, match="no task 'nope' .*known: note"):
        fleet.producer.dispatch("nope", 1)
    with pytest.raises(LookupError):
        fleet.producer.dispatch_many("nope", [1])

    assert nothing_sent(fleet)


def test_a_task_s_arguments_are_one_payload(fleet: Fleet) -> None:
    """Several values travel as one dict; the call says so as any function does."""
    for call in (
        lambda: fleet.note.delay(1, 2),  # type: ignore[call-overload]
        lambda: fleet.note.delay(to="a"),  # type: ignore[call-overload]
        fleet.note.delay_many,  # type: ignore[call-arg]
        lambda: fleet.note.delay_many(5),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            call()

    assert nothing_sent(fleet)


def test_current_task_outside_of_a_task_says_where_it_works() -> None:
    """Not a None that fails three lines later."""
    with pytest.raises(RuntimeError, match="no task is running here"):
        current_task()


# --- life ---


def test_a_second_start_is_refused_and_leaves_the_first(fleet: Fleet) -> None:
    """By the state it is in."""
    runner = fleet.start()

    with pytest.raises(AlreadyStartedError, match="started"):
        runner.start()
    with pytest.raises(AlreadyStartedError):
        runner.run_forever()

    fleet.note.delay(1)
    fleet.wait_ran(1)


@pytest.mark.parametrize("timeout", ["5", NAN, INF, True, [5]], ids=repr)
def test_a_stop_with_a_bad_timeout_is_refused_and_stops_nothing(fleet: Fleet, timeout: Any) -> None:
    """It can be called again with a good one."""
    runner = fleet.start()

    with pytest.raises((TypeError, ValueError), match="timeout="):
        runner.stop(timeout)

    assert runner.state == "started"
    fleet.note.delay(1)
    fleet.wait_ran(1)
    assert runner.stop(-1) in (True, False)


def test_stopping_what_never_started_is_nothing(fleet: Fleet) -> None:
    """Also twice."""
    runner = fleet.make()

    assert runner.stop()
    assert runner.stop(0)
    assert runner.state == "init"


# --- operators ---


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_limit_is_a_limit(fleet: Fleet, limit: int) -> None:
    """None means none: not all, and no error."""
    fleet.note.delay_many(range(3), run_in=60)
    for _ in range(3):
        fleet.client.xadd(fleet.names.dead, {"message": "x"})

    assert len(fleet.producer.delayed.list(limit=limit)) == limit
    assert len(fleet.producer.dead_letters.list(limit=limit)) == limit


@pytest.mark.parametrize("id", ["", "nope", "1-", "é", "00000000-0000-0000-0000-000000000000"])
def test_an_id_that_is_none_is_not_found(fleet: Fleet, id: str) -> None:
    """Pasted wrongly from a log: there is no such thing, which is an answer and no fault."""
    fleet.client.xadd(fleet.names.dead, {"message": "x"})
    fleet.note.delay(1, run_in=60)
    view, delayed = fleet.producer.dead_letters, fleet.producer.delayed

    assert view.get(id) is None
    assert view.delete(id) is False
    with pytest.raises(KeyError):
        view.requeue(id)
    assert delayed.get(id) is None
    assert delayed.cancel(id) is False
    assert fleet.producer.queue.delete(id) is False
    assert (len(view), len(delayed)) == (1, 1)


# --- Redis ---


def test_a_start_without_a_server_waits_and_says_so_once(
    own_server: Callable[..., OwnServer], names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker may start before Redis; when it comes, the same process works."""
    port = free_port()
    server = own_server(start=False, port=port)
    url = f"redis://127.0.0.1:{port}/0"
    with caplog.at_level(logging.INFO, "taskrunner"), Fleet(url, names) as fleet:
        started = time.monotonic()
        runner = fleet.start(num_fetchers=3)
        assert time.monotonic() - started < busy()
        assert runner.state == "started"

        def lines() -> list[str]:
            return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]

        eventually(lines)
        stays(lambda: len(lines()) == len(runner.errors) == 1, 2.5)
        assert "Redis is away" in lines()[0]

        server.start()

        eventually(lambda: fleet.note.delay(1), 10)
        fleet.wait_ran(1)
        eventually(lambda: [one for one in caplog.records if "recovered" in one.getMessage()], 10)
        assert len([one for one in caplog.records if "recovered" in one.getMessage()]) == 1


def test_a_dispatch_without_a_server_raises_soon() -> None:
    """Whatever the given client's own settings; the error is the Redis client's."""
    registry = Registry()
    made = task(name="t", registry=registry)(_stand_in)
    TaskRunner(consumer_group="g", client=f"redis://127.0.0.1:{free_port()}", registry=registry)

    started = time.monotonic()
    with pytest.raises(redis.ConnectionError):
        made.delay(1)
    assert time.monotonic() - started < 4 + busy()


def test_a_dispatch_to_a_silent_server_raises_in_time() -> None:
    """It accepts the connection and never answers: within 15 s the caller knows."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        registry = Registry()
        made = task(name="t", registry=registry)(_stand_in)
        client = redis.Redis(port=silent.getsockname()[1], socket_timeout=None)
        TaskRunner(consumer_group="g", client=client, registry=registry)

        started = time.monotonic()
        with pytest.raises((redis.TimeoutError, redis.ConnectionError)):
            made.delay(1)
        assert time.monotonic() - started < 15


def test_a_stop_without_a_server_is_in_time() -> None:
    """Nothing is waited for that can't come."""
    runner = TaskRunner(
        consumer_group="g",
        client=f"redis://127.0.0.1:{free_port()}",
        registry=Registry(),
        shutdown_timeout=2,
    )
    runner.start()
    eventually(lambda: runner.errors)  # it has tried

    started = time.monotonic()
    assert runner.stop()

    assert time.monotonic() - started < 3 + busy()
    eventually(
        lambda: not [t.name for t in threading.enumerate() if t.name.startswith("taskrunner-")], 5
    )


def test_something_that_is_no_redis_is_told_and_survived(
    names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong port: a web server answers there."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        runner = TaskRunner(
            consumer_group=names.group,
            client=f"redis://127.0.0.1:{listener.getsockname()[1]}",
            registry=Registry(),
            shutdown_timeout=1,
        )
        runner.start()
        eventually(lambda: len(runner.errors) >= 1)
        stays(lambda: runner.state == "started" and len(runner.errors) <= 15, 1)
        assert runner.stop()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_importing_and_making_things_sends_nothing() -> None:
    """A module that is imported in a test, without a server, must not hang or fail."""
    registry = Registry()
    task(name="t", unique_for=5, registry=registry)(_stand_in)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.settimeout(0.3)
        runner = TaskRunner(
            consumer_group="g",
            client=f"redis://127.0.0.1:{listener.getsockname()[1]}",
            registry=registry,
        )
        assert cast(Any, runner.queue) is not None
        repr(runner), repr(runner.queue), bool(runner.queue), bool(runner.dead_letters)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert default_registry is not registry
