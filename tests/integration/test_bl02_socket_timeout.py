"""BL-02: a blocking read never meets the client's socket timeout, whatever that is."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Names, Proxy, busy, eventually, stays
from tests.support.fleet import Fleet

CLIENTS: list[dict[str, Any]] = [
    {"socket_timeout": None},
    {"socket_timeout": 1},
    {"socket_timeout": 5},
    {"socket_timeout": 60},
    {"socket_timeout": 1, "retry_on_timeout": True, "health_check_interval": 1},
    {},
]


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_bl02_idle_read_is_no_error_whatever_the_socket_timeout(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Runners idle over several blocks, shorter and longer than their client's timeout, one with
    the default of both (5 s): nothing alarming is logged, and each starts a task at once."""
    caplog.set_level(logging.INFO, "taskrunner")
    with ExitStack() as stack:
        fleets = [stack.enter_context(Fleet(server.url, Names())) for _ in CLIENTS]
        for fleet, options in zip(fleets, CLIENTS, strict=True):
            client = redis.Redis.from_url(server.tcp_url, **options)
            fleet.start(url=client, block_duration=1.3 if options else 5)
        stays(lambda: not alarms(caplog), 5.8)
        for fleet in fleets:
            sent = time.time()
            fleet.note.delay("late")
            (run,) = fleet.wait_ran("late", timeout=5)
            assert run.at - sent < busy()
    assert alarms(caplog) == []


def test_bl02_reader_woken_in_vain_goes_on_waiting_in_peace(
    server: EmbeddedServer, names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    """Two idle runners, each message wakes both and one gets it: the other's wait may begin anew,
    which must not look like a silent server."""
    caplog.set_level(logging.INFO, "taskrunner")
    with Fleet(server.url, names) as fleet:
        for _ in range(2):
            client = redis.Redis.from_url(server.tcp_url, socket_timeout=1)
            fleet.start(url=client, block_duration=1)
        for number in range(10):
            sent = time.time()
            fleet.note.delay(number)
            (run,) = fleet.wait_ran(number, timeout=5)
            assert run.at - sent < busy()
            stays(lambda: not alarms(caplog), 0.4)
    assert alarms(caplog) == []


def test_bl02_silent_server_is_noticed(
    server: EmbeddedServer,
    names: Names,
    make_proxy: Callable[[str], Proxy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other side of it: where the read lasts much longer than asked, the connection is dead."""
    caplog.set_level(logging.INFO, "taskrunner")
    proxy = make_proxy(server.tcp_url)
    with Fleet(server.url, names) as fleet:
        client = redis.Redis.from_url(proxy.url, socket_timeout=1)
        fleet.start(url=client, block_duration=0.5)
        fleet.note.delay("before")
        fleet.wait_ran("before")
        proxy.swallow()
        eventually(lambda: [text for text in alarms(caplog) if "Redis is away" in text])
        proxy.cut()
        proxy.pass_through()
        fleet.note.delay("after")
        fleet.wait_ran("after", timeout=5)
