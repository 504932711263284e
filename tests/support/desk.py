"""The test's own side of a queue: dispatches to it and looks into it; starts nothing."""

import time
import uuid
from collections.abc import Iterable
from typing import Any

import attrs
import redis

from taskrunner import RedisStreamQueue, Registry, TaskRunner, task
from taskrunner.message import encode, encode_payload
from tests.support.names import Names
from tests.support.waiting import eventually


@attrs.frozen
class Held:
    """One pending entry of the group: who holds it, for how long untouched, delivered how often."""

    entry_id: str
    consumer: str
    idle: float
    count: int


class Desk:
    """Dispatches tasks by name to the queue of `names`, whatever worker serves them.

    The tasks are stand-ins in a registry of its own: what a task does and how often it is tried is
    the workers' business. `client` answers in bytes and is for looking, breaking and forging.
    """

    def __init__(self, url: str, names: Names, **queue: Any) -> None:
        self.names = names
        self.client = redis.Redis.from_url(url)
        self._registry = Registry()
        self.runner = TaskRunner(
            consumer_group=names.group,
            queue=RedisStreamQueue(url, prefix=names.prefix, **queue),
            registry=self._registry,
        )

    def send(self, name: str, payloads: Iterable[Any], **options: Any) -> list[str | None]:
        """Dispatch one message for each payload; returns their stream ids."""
        self.define(name)
        sent = self.runner.dispatch_many(name, payloads, **options)
        return [one.entry_id if one is not None else None for one in sent]

    def define(self, name: str, **options: Any) -> None:
        """Make the task known here, unless it is; `options` as of `@task`, e.g. `unique_for`."""
        if name not in self._registry:
            task(name=name, registry=self._registry, **options)(_stand_in)

    def strand(
        self, name: str, payloads: Iterable[Any], *, idle: float, consumer: str = "stranger"
    ) -> list[str]:
        """Leave messages pending for a consumer behind which nobody is, silent for `idle` seconds.

        Added and read in one step, so no worker gets them first.
        """
        stream, group = self.names.stream, self.names.group
        eventually(self._all_is_read, 5)
        bodies = [
            encode(
                name,
                encode_payload(payload, 10_000_000),
                id=str(uuid.uuid4()),
                enqueued_at=time.time(),
                reservation_timeout_ns=10**9,
            )
            for payload in payloads
        ]
        with self.client.pipeline(transaction=True) as pipe:
            for body in bodies:
                pipe.xadd(stream, {"payload": body})
            pipe.xreadgroup(group, consumer, {stream: ">"}, count=len(bodies))
            *added, read = pipe.execute()
        assert [entry_id for entry_id, _ in read[0][1]] == added, "another message came in between"
        self.client.xclaim(stream, group, consumer, 0, added, idle=round(idle * 1000), justid=True)
        return [entry_id.decode() for entry_id in added]

    def _all_is_read(self) -> bool:
        stream: Any = self.client.xinfo_stream(self.names.stream)
        groups: Any = self.client.xinfo_groups(self.names.stream)
        last = {group["name"].decode(): group["last-delivered-id"] for group in groups}
        return bool(last.get(self.names.group) == stream["last-generated-id"])

    def length(self) -> int:
        """Return how many entries are in the stream: waiting, parked and being run."""
        return len(self.runner.queue)

    def held(self) -> list[Held]:
        """Return what is pending in the group, oldest first; nothing where there is no group."""
        found: list[Held] = []
        after = "-"
        while True:
            try:
                rows: Any = self.client.xpending_range(
                    self.names.stream, self.names.group, after, "+", 1000
                )
            except redis.ResponseError as error:
                if "NOGROUP" in str(error):
                    return found
                raise
            found += [
                Held(
                    row["message_id"].decode(),
                    row["consumer"].decode(),
                    row["time_since_delivered"] / 1000,
                    row["times_delivered"],
                )
                for row in rows
            ]
            if len(rows) < 1000:
                return found
            after = f"({found[-1].entry_id}"

    def is_done(self) -> bool:
        """Whether the stream is empty and nothing is pending."""
        return self.length() == 0 and not self.held()

    def wait_done(self, timeout: float = 20.0) -> None:
        """Wait until the stream is empty and nothing is pending."""
        eventually(
            self.is_done,
            timeout,
            interval=0.05,
            message=lambda: f"{self.length()} entries, pending: {self.held()[:5]}",
        )

    def is_empty(self) -> bool:
        """Whether, besides, nothing waits in the delayed set."""
        return self.is_done() and len(self.runner.delayed) == 0

    def added(self) -> int:
        """Return how many entries were ever added to the stream."""
        info: Any = self.client.xinfo_stream(self.names.stream)
        return int(info["entries-added"])

    def letters(self) -> list[Any]:
        """Return the dead letters, oldest first."""
        return self.runner.dead_letters.list(limit=10_000)

    def close(self) -> None:
        self.client.close()
        self.runner.queue.connections.close()


def _stand_in(payload: Any) -> None:
    raise AssertionError("a desk runs nothing")
