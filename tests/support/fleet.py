"""Runners of one group in this process, with short times, and the runs of their tasks.

For tests that need no process to die: each runner has its own connections, name and threads, all
share one registry. What the stock task ran is in `fleet.runs`, with the instant by the wall clock,
which is the server's here.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import attrs
import redis

from taskrunner import (
    RedisStreamQueue,
    Registry,
    Task,
    TaskRunner,
    Timings,
    current_task,
    keys,
    task,
)
from taskrunner.observer import Observers
from taskrunner.reports import Health, Reports
from taskrunner.services.delayed_poller import DelayedPoller
from taskrunner.services.elector import Elector
from taskrunner.store import connection
from taskrunner.store.connection import Connections
from taskrunner.store.delayed_set import DelayedSet
from taskrunner.store.instances import OwnedKey
from taskrunner.timings import Timings as Sums
from tests.support.names import Names
from tests.support.waiting import eventually

TIMINGS: dict[str, float] = {"lease": 2, "presence": 3, "poll": 1, "janitor": 2}


@attrs.frozen
class Ran:
    """One run of a task, as its body saw it; `at` in unix seconds."""

    payload: Any
    at: float
    id: str
    attempt: int
    thread: str


class _Believer(Elector):
    """An elector that never doubts; it has no thread."""

    def __init__(self, lease: OwnedKey) -> None:
        self.lease = lease

    def is_leader(self) -> bool:
        return True

    def lose(self) -> None:
        """Believe on."""


class Fleet:
    """Makes runners, and stops them at the end of its block."""

    def __init__(self, url: str, names: Names, **queue: Any) -> None:
        self.url = url
        self.names = names
        self.client: Any = redis.Redis.from_url(url)
        self.registry = Registry()
        self.runs: list[Ran] = []
        self._queue = {"reclaim_delay": 2, **queue}
        self._runners: list[TaskRunner] = []
        self._connections: list[Connections] = []
        self._numbers = iter(range(1, 1000))
        self.producer = self.make()
        """Serves `.delay()` of the tasks and looks; it is never started."""
        self.note = self.task(self.record, name="note")

    def record(self, payload: Any = None) -> None:
        """The body of the task `note`, for other tasks to call too."""
        context = current_task()
        self.runs.append(
            Ran(payload, time.time(), context.id, context.attempt, threading.current_thread().name)
        )

    def task(self, function: Callable[..., object] | None = None, **options: Any) -> Task[Any]:
        """Make a task of all the runners; without a function it records its runs."""
        made: Task[Any] = task(registry=self.registry, **options)(function or self.record_of())
        return made

    def record_of(self) -> Callable[[Any], None]:
        """A new function that records."""

        def body(payload: Any) -> None:
            self.record(payload)

        return body

    def make(
        self,
        *,
        url: str | redis.Redis | None = None,
        timings: dict[str, Any] | None = None,
        queue: dict[str, Any] | None = None,
        registry: Registry | None = None,
        **config: Any,
    ) -> TaskRunner:
        """A runner that is not started."""
        number = next(self._numbers)
        runner = TaskRunner(
            queue=RedisStreamQueue(
                self.url if url is None else url,
                **{"prefix": self.names.prefix, **self._queue, **(queue or {})},
            ),
            registry=self.registry if registry is None else registry,
            **{
                "consumer_group": self.names.group,
                "host": f"{self.names.host}-{number}",
                "num_workers": 4,
                "block_duration": 1,
                "shutdown_timeout": 5,
                "timings": Timings(**{**TIMINGS, **(timings or {})}),
                **config,
            },
        )
        self._runners.append(runner)
        return runner

    def start(self, **options: Any) -> TaskRunner:
        """A runner that works."""
        runner = self.make(**options)
        runner.start()
        return runner

    def start_leader(self, **options: Any) -> TaskRunner:
        """A runner that leads; there must be no other yet."""
        runner = self.start(**options)
        eventually(lambda: runner.is_leader)
        return runner

    def believer(self, *, poll: float = 1.0, registry: Registry | None = None) -> DelayedPoller:
        """A poller, not started, that takes itself for the leader; the first one holds the lease.

        All of them share the lease's value: only the step in Redis stands between two of them.
        """
        connections = RedisStreamQueue(self.url, prefix=self.names.prefix).connections
        self._connections.append(connections)
        lease = OwnedKey(connections, self.lease, "believer")
        lease.take(600)
        return DelayedPoller(
            Health(Reports(), connection.lost),
            delayed=DelayedSet(connections, self.names.stream, self.names.group),
            elector=_Believer(lease),
            registry=self.registry if registry is None else registry,
            reports=Reports(),
            timings=Sums(),
            reclaim_delay=self._queue["reclaim_delay"],
            poll=poll,
            dead_letter_limit=1000,
            observers=Observers(),
        )

    # --- looking ---

    @property
    def lease(self) -> str:
        return keys.leader(self.names.group)

    def payloads(self) -> list[Any]:
        """What ran so far, in order of the starts."""
        return [run.payload for run in list(self.runs)]

    def wait_ran(self, *payloads: Any, timeout: float = 15.0) -> list[Ran]:
        """Wait until each of the payloads has run; return their first runs in that order."""

        def found() -> list[Ran]:
            firsts: dict[str, Ran] = {}
            for run in list(self.runs):
                firsts.setdefault(repr(run.payload), run)
            missing = [payload for payload in payloads if repr(payload) not in firsts]
            assert not missing, f"{len(missing)} not run: {missing[:5]}"
            return [firsts[repr(payload)] for payload in payloads]

        return eventually(found, timeout)

    def members(self) -> list[tuple[bytes, float]]:
        """The delayed set, the next due first."""
        found: Any = self.client.zrange(self.names.delayed, 0, -1, withscores=True)
        return [(member, float(score)) for member, score in found]

    def bodies(self) -> list[bytes]:
        """The payload field of each entry in the stream."""
        rows: Any = self.client.xrange(self.names.stream)
        return [fields[b"payload"] for _, fields in rows]

    def locks(self, task_name: str) -> dict[str, int]:
        """PTTL by name of the task's unique locks; looks through the whole server."""
        found: Any = self.client.scan_iter(match=f"taskrunner:unique:{task_name}*", count=1000)
        return {key.decode(): int(self.client.pttl(key)) for key in found}

    def settled(self) -> bool:
        """Whether nothing waits anywhere: stream, pending list and delayed set are empty."""
        if self.client.xlen(self.names.stream) or self.client.zcard(self.names.delayed):
            return False
        try:
            pending: Any = self.client.xpending(self.names.stream, self.names.group)
        except redis.ResponseError as error:
            return "NOGROUP" in str(error)
        return int(pending["pending"]) == 0

    # --- life ---

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for runner in self._runners:
            runner.stop(3)
        for runner in self._runners:
            runner.queue.connections.close()
        for connections in self._connections:
            connections.close()
        self.client.close()
