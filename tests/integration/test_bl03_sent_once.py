"""BL-03: the client library repeats what it may have sent; a dispatch is never sent twice."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from taskrunner import TaskAlreadyDispatchedError, TaskRunner
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Names, Proxy, busy, eventually, faults
from tests.support.fleet import Fleet

SILENT = 15.0  # seconds: `.delay()` raises within them, whatever the client's settings

EAGER: dict[str, dict[str, Any]] = {
    "default": {},
    "retry": {"retry": Retry(ExponentialBackoff(base=0.01), 5)},
    "on-error": {
        "retry": Retry(ExponentialBackoff(base=0.01), 5),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        "retry_on_timeout": True,
    },
    "resp3-text": {"protocol": 3, "decode_responses": True},
    "checked": {"health_check_interval": 1, "socket_keepalive": True},
}
"""Clients as applications make them, most of which repeat commands on their own."""

WAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "plain": ("note", {}, "XADD"),
    "delayed": ("note", {"run_in": 100}, "EVALSHA"),
    "delayed-at": ("note", {"run_at": 4_000_000_000.5}, "EVALSHA"),
    "delayed-past": ("note", {"run_at": 5}, "EVALSHA"),
    "unique": ("once", {}, "EVALSHA"),
    "unique-delayed": ("once", {"run_in": 100}, "EVALSHA"),
    "unique-past": ("once", {"run_at": 5}, "EVALSHA"),
}


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        key = names.group
        once = made.task(name="once", unique_for=60, unique_key=lambda payload: f"{key}{payload}")
        yield made
        for payload in ("x", "warm-up", "a", "b", "c"):
            once.unlock(payload)


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(server.tcp_url) as made:
        yield made


@pytest.fixture
def producer(fleet: Fleet, proxy: Proxy) -> Callable[[str], TaskRunner]:
    """A producer behind the relay, with one of the clients, whose connection is open."""

    def make(client: str, **options: Any) -> TaskRunner:
        made = redis.Redis.from_url(proxy.url, **{**EAGER[client], **options})
        runner = fleet.make(url=made)
        runner.dispatch("note", "warm-up")
        runner.dispatch("note", "warm-up", run_in=100)
        runner.dispatch("once", "warm-up")
        return runner

    return make


def payloads(fleet: Fleet) -> list[Any]:
    """What is in Redis, wherever, without the warming up."""
    texts = [*fleet.bodies(), *(text for text, _ in fleet.members())]
    return sorted(p for text in texts if (p := json.loads(text)["payload"]) != "warm-up")


@pytest.mark.parametrize("client", EAGER)
@pytest.mark.parametrize("way", WAYS)
def test_bl03_a_dispatch_whose_reply_was_lost_is_there_once(
    fleet: Fleet, proxy: Proxy, producer: Callable[..., TaskRunner], way: str, client: str
) -> None:
    """A plain one raises, for its outcome is unknown; a unique one finds its own lock."""
    name, options, command = WAYS[way]
    runner = producer(client)
    rule = faults.lose_reply(proxy, command)
    if name == "once":
        assert runner.dispatch(name, "x", **options).task_name == "once"
    else:
        with pytest.raises(redis.ConnectionError):
            runner.dispatch(name, "x", **options)
    assert rule.hits == 1
    assert payloads(fleet) == ["x"]
    if name == "once":
        with pytest.raises(TaskAlreadyDispatchedError):
            runner.dispatch(name, "x", **options)


@pytest.mark.parametrize("client", EAGER)
@pytest.mark.parametrize("way", WAYS)
def test_bl03_a_dispatch_that_was_lost_on_its_way_raises_and_is_not_there(
    fleet: Fleet, proxy: Proxy, producer: Callable[..., TaskRunner], way: str, client: str
) -> None:
    """Also the unique one: nobody holds its lock. The caller's own next try is accepted."""
    name, options, command = WAYS[way]
    runner = producer(client)
    rule = faults.lose_request(proxy, command)
    with pytest.raises(redis.ConnectionError):
        runner.dispatch(name, "x", **options)
    assert rule.hits == 1
    assert payloads(fleet) == []
    runner.dispatch(name, "x", **options)
    assert payloads(fleet) == ["x"]


@pytest.mark.parametrize("way", ["plain", "delayed", "unique", "unique-delayed"])
def test_bl03_many_at_once_are_sent_once_when_the_reply_was_lost(
    fleet: Fleet, proxy: Proxy, producer: Callable[..., TaskRunner], way: str
) -> None:
    """What was executed before the cut is there once; nothing is repeated."""
    name, options, command = WAYS[way]
    runner = producer("on-error")
    # In bulk the first step brings its text along.
    rule = faults.lose_reply(proxy, "EVAL" if command == "EVALSHA" else command)
    try:
        runner.dispatch_many(name, ["a", "b", "c"], **options)
    except redis.ConnectionError:
        pass
    else:
        assert name == "once"
    assert rule.hits == 1
    found = payloads(fleet)
    assert found == sorted(set(found))
    assert "a" in found


@pytest.mark.parametrize("way", WAYS)
def test_bl03_a_dispatch_into_silence_raises_in_time_and_is_there_once_at_most(
    fleet: Fleet, proxy: Proxy, producer: Callable[..., TaskRunner], way: str
) -> None:
    """The server took it, and its answer never comes; the client asked for no time limit."""
    name, options, command = WAYS[way]
    runner = producer("on-error", socket_timeout=1.0)
    proxy.on(command, "swallow_reply")
    started = time.monotonic()
    try:
        runner.dispatch(name, "x", **options)
    except (redis.TimeoutError, redis.ConnectionError):
        assert name == "note"
    else:
        assert name == "once"
    assert time.monotonic() - started < 3 + busy()
    eventually(lambda: payloads(fleet) == ["x"])


@pytest.mark.slow
def test_bl03_a_silent_server_is_not_waited_for_longer_than_promised(
    fleet: Fleet, proxy: Proxy, producer: Callable[..., TaskRunner]
) -> None:
    """Whatever the given client's settings: here none at all."""
    runner = producer("default", socket_timeout=None, socket_connect_timeout=None)
    proxy.swallow()
    for name in ("note", "once"):
        started = time.monotonic()
        with pytest.raises((redis.TimeoutError, redis.ConnectionError)):
            runner.dispatch(name, "x")
        assert time.monotonic() - started < SILENT + busy()
    proxy.cut()
    proxy.pass_through()


@pytest.mark.parametrize("way", ["delayed", "unique", "unique-delayed"])
def test_bl03_the_second_try_with_the_text_is_not_repeated_either(
    fleet: Fleet, proxy: Proxy, producer: Callable[..., TaskRunner], way: str
) -> None:
    """NOSCRIPT: nothing ran, the text follows; the answer to that is lost."""
    name, options, _ = WAYS[way]
    runner = producer("on-error")
    fleet.client.script_flush()
    rule = faults.lose_reply(proxy, "EVAL")
    if name == "once":
        runner.dispatch(name, "x", **options)
    else:
        with pytest.raises(redis.ConnectionError):
            runner.dispatch(name, "x", **options)
    assert rule.hits == 1
    assert payloads(fleet) == ["x"]


def test_bl03_a_dispatch_over_a_connection_the_server_had_closed_is_sent(
    fleet: Fleet, proxy: Proxy, producer: Callable[..., TaskRunner]
) -> None:
    """An idle connection that was cut is seen before anything is sent: no error, no double."""
    runner = producer("default")
    for number in range(5):
        proxy.cut()
        faults.down_for(0.05)
        runner.dispatch("note", number)
        runner.dispatch("once", number)
    assert payloads(fleet) == sorted([*range(5), *range(5)])
    for number in range(5):
        task = fleet.registry.get("once")
        assert task is not None
        task.unlock(number)
