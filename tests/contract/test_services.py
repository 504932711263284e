"""Every service keeps the one contract of all threads, whatever its rounds do."""

import importlib
import logging
import pkgutil
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import attrs
import pytest
import redis

import taskrunner.services
from taskrunner import RedisStreamQueue, Registry, TaskRunner, Timings, settler
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.parts import Parts
from taskrunner.service import Service
from taskrunner.services.elector import Elector
from taskrunner.services.fetcher import Fetcher
from taskrunner.services.instance_heartbeat import InstanceHeartbeat
from taskrunner.services.listener import Listener
from taskrunner.services.once import Once
from tests.support.names import Names
from tests.support.waiting import busy, eventually, stays


def _classes() -> list[type[Service]]:
    modules = [
        importlib.import_module(f"taskrunner.services.{found.name}")
        for found in pkgutil.iter_modules(taskrunner.services.__path__)
    ]
    classes = {
        value
        for module in (*modules, settler)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Service) and value is not Service
    }
    return sorted(classes, key=lambda kind: kind.__name__)


LOOPS = [kind for kind in _classes() if kind is not Once]


@attrs.define
class Loop:
    """One service, with what it needs running beside it."""

    service: Service
    runner: TaskRunner
    rounds: int = 0
    failing: list[Exception] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        inner: Callable[[], float] = self.service.tick

        def tick() -> float:
            self.rounds += 1
            if self.failing:
                raise self.failing.pop()
            return inner()

        self.service.tick = tick  # type: ignore[method-assign]

    def start(self) -> None:
        """Start it, and wait until it has begun to sleep or to read."""
        before = -1 if self.service.alive else self.rounds
        self.service.start()
        eventually(lambda: self.rounds > before, 10)
        threading.Event().wait(0.15)

    def stop(self) -> float:
        """Stop it as the runner does; returns how long it took."""
        started = monotonic()
        self.service.stop()
        if isinstance(self.service, Listener):
            self.service.interrupt()
        while not self.service.join(0.05):
            if isinstance(self.service, Fetcher):
                self.service.unblock()
            assert monotonic() - started < 10, "it never ended"
        return monotonic() - started

    def threads(self) -> list[threading.Thread]:
        name = f"taskrunner-{self.service.name}"
        return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.fixture
def parts(
    server: EmbeddedServer, names: Names, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TaskRunner, Parts]]:
    """The parts of a runner, none of them started but the pool."""
    monkeypatch.setattr(Parts, "start", lambda self: self.pool.start())
    runner = TaskRunner(
        consumer_group=names.group,
        host=names.host,
        queue=RedisStreamQueue(server.url, prefix=names.prefix, reclaim_delay=60),
        registry=Registry(),
        on_error=lambda report: None,
        timings=Timings(poll=60, janitor=60),
        block_duration=30,
        shutdown_timeout=2,
    )
    runner.queue.for_group(names.group).create()
    runner.start()
    made = runner._parts
    assert made is not None
    yield runner, made
    for service in (*made.services, made.watchdog):
        service.stop()
    made.listener.interrupt()
    for fetcher in made.fetchers:
        while not fetcher.join(0.05):
            fetcher.unblock()
    made.pool.stop()
    assert all(service.join(10) for service in (*made.services, made.watchdog))
    assert made.pool.join(10)


@pytest.fixture(params=LOOPS, ids=lambda kind: kind.__name__)
def loop(
    request: pytest.FixtureRequest,
    parts: tuple[TaskRunner, Parts],
    monkeypatch: pytest.MonkeyPatch,
) -> Loop:
    runner, made = parts
    monkeypatch.setattr("taskrunner.service._FIRST_BACKOFF", 0.01)
    for needed in (InstanceHeartbeat, Elector):
        if request.param is not needed:
            service = next(one for one in made.services if isinstance(one, needed))
            service.start()
    if request.param is not InstanceHeartbeat:
        eventually(lambda: made.instance.host is not None, 10)
    if request.param is not Elector:
        eventually(made.elector.is_leader, 10)
    services: list[Service] = [*made.services, made.watchdog]
    return Loop(next(one for one in services if type(one) is request.param), runner)


def test_every_service_is_made_by_the_runner(parts: tuple[TaskRunner, Parts]) -> None:
    """What is tested here is what runs; a service that is never made is dead code."""
    _, made = parts
    assert {type(one) for one in (*made.services, made.watchdog)} == set(LOOPS)


class TestEveryService:
    def test_starting_twice_makes_one_thread(self, loop: Loop) -> None:
        """Two threads of one service would do everything twice."""
        loop.service.start()
        loop.service.start()
        loop.start()

        assert len(loop.threads()) == 1
        assert loop.service.alive
        assert not loop.service.died

    def test_stopping_twice_is_as_once(self, loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
        """And a stop with nothing to do says nothing alarming."""
        loop.start()

        with caplog.at_level(logging.WARNING, "taskrunner"):
            caplog.clear()
            loop.stop()
            loop.stop()

        assert loop.threads() == []
        assert not loop.service.died
        assert [record.getMessage() for record in caplog.records] == []

    def test_a_stop_before_the_start_is_nothing(self, loop: Loop) -> None:
        """A half-made runner is taken apart by the same calls as a whole one."""
        loop.service.stop()

        assert loop.service.join(1)
        assert loop.rounds == 0
        assert loop.threads() == []
        loop.start()
        assert loop.service.alive

    def test_it_can_be_started_again(self, loop: Loop) -> None:
        """The watchdog does so with one that died."""
        for _ in range(3):
            loop.start()
            assert len(loop.threads()) == 1
            loop.stop()
            assert loop.threads() == []

        assert loop.rounds >= 3
        assert len(loop.runner.errors) == 0

    def test_a_failing_round_is_told_once_and_followed_by_others(
        self, loop: Loop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A loop outlives whatever one round meets (BL-08); Redis away is one outage, one line."""
        loop.failing += [redis.ConnectionError("away")] * 3

        with caplog.at_level(logging.WARNING, "taskrunner"):
            loop.start()
            eventually(lambda: loop.rounds >= 4, 10)

        assert loop.service.alive
        errors = [report for report in loop.runner.errors if report.action == "service_error"]
        assert len(errors) == 1
        assert len([one for one in caplog.records if "away" in one.getMessage()]) == 1
        stays(lambda: loop.service.alive, 0.05)

    def test_a_stop_in_mid_sleep_ends_it_at_once(self, loop: Loop) -> None:
        """Whether it sleeps or waits in Redis, for however long it was to be."""
        loop.start()

        assert loop.stop() < 0.1 + busy(0.4)

    def test_a_stop_while_it_backs_off_ends_it_at_once(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Redis away is no reason to keep the process."""
        monkeypatch.setattr("taskrunner.service._FIRST_BACKOFF", 30.0)
        monkeypatch.setattr(loop.service._backoff, "_longest", 30.0)
        loop.failing.append(redis.ConnectionError("away"))
        loop.start()

        assert loop.rounds == 1
        assert loop.stop() < 0.1 + busy(0.4)


class TestOnce:
    def test_it_works_once_and_ends(self) -> None:
        """Stopping and leaving happen in a thread of their own, once."""
        done: list[str] = []
        once = Once("leave", lambda: done.append(threading.current_thread().name))

        once.start()

        assert once.join(5)
        assert done == ["taskrunner-leave"]
        assert not once.died
        once.stop()
        once.start()
        assert once.join(5)
        assert len(done) == 2

    def test_it_does_not_try_again_when_it_fails(self, caplog: pytest.LogCaptureFixture) -> None:
        """It says so, and that is that."""
        done: list[Any] = []

        def work() -> None:
            done.append(1)
            raise ValueError("bad")

        once = Once("leave", work)
        once.start()

        assert once.join(5)
        assert done == [1]
