"""Pytest fixtures for applications that use taskrunner; active wherever the library is installed.

Lies beside the package and imports nothing of it before a test asks for a fixture: importing
anything below `taskrunner` would load it whole, with its Redis client, into every run of pytest.

To change what a fixture gives, define one of its name in your `conftest.py`: `taskrunner_url` for
a server of your own, `taskrunner_settings` for the runner's settings, `taskrunner_app` to run your
application's own runner in eager mode.
"""

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from taskrunner import RedisStreamQueue, TaskRunner
    from taskrunner.testing import Eager, MovableClock


@pytest.fixture(scope="session")
def taskrunner_url() -> Iterator[str]:
    """URL of an embedded server, one for each pytest process; it ends with the process.

    Takes `redis-server` or `valkey-server` from PATH, else the one that the extra `embedded`
    installs; without any, the tests that ask for it fail and say how to get one.
    """
    from taskrunner.cli.embedded import EmbeddedServer, ServerNotFoundError

    server = EmbeddedServer()
    try:
        server.start()
    except ServerNotFoundError as error:
        pytest.fail(f"no server to test with: {error}", pytrace=False)
    yield server.url
    server.stop()


@pytest.fixture
def taskrunner_queue(taskrunner_url: str) -> "Iterator[RedisStreamQueue]":
    """A queue on the server, under a prefix of its own for each test."""
    from taskrunner import RedisStreamQueue

    queue = RedisStreamQueue(taskrunner_url, prefix=f"test-{secrets.token_hex(8)}")
    yield queue
    queue.connections.close()


@pytest.fixture
def taskrunner_settings() -> dict[str, Any]:
    """Settings for `taskrunner_runner`, fields of TaskRunnerConfig; none, unless overridden."""
    return {}


@pytest.fixture
def taskrunner_runner(
    taskrunner_queue: "RedisStreamQueue", taskrunner_settings: dict[str, Any]
) -> "Iterator[TaskRunner]":
    """A runner on the server, not started, that serves `.delay()` of all tasks during the test.

    Run what waits with `taskrunner.testing.drain(taskrunner_runner)`, or start it. Afterwards it is
    stopped, its messages are deleted and their locks released.
    """
    from taskrunner import TaskRunner, default_registry
    from taskrunner.testing import clean_up

    before = default_registry.dispatcher
    settings = {"consumer_group": f"test-{secrets.token_hex(8)}", **taskrunner_settings}
    runner = TaskRunner(queue=taskrunner_queue, **settings)
    runner.make_default()
    yield runner
    default_registry.dispatcher = before
    runner.stop()
    clean_up(runner)


@pytest.fixture
def taskrunner_app() -> "TaskRunner | None":
    """The application's runner, for `taskrunner_eager`; None, unless overridden."""
    return None


@pytest.fixture
def taskrunner_clock() -> "MovableClock":
    """The clock of `taskrunner_eager`, also for `drain(runner, clock=taskrunner_clock)`."""
    from taskrunner.testing import MovableClock

    return MovableClock()


@pytest.fixture
def taskrunner_eager(
    taskrunner_app: "TaskRunner | None", taskrunner_clock: "MovableClock"
) -> "Iterator[Eager]":
    """Tasks run inside `.delay()`, without a server, for the length of the test.

    What failed for good fails the test at its end; set `.raises = False` where that is expected.
    """
    from taskrunner.testing import eager

    with eager(taskrunner_app, clock=taskrunner_clock) as block:
        yield block
