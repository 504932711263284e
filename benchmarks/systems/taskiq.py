"""taskiq with taskiq-redis: `RedisStreamBroker`, coroutine tasks, its own receiver in one process.

100 messages are prefetched. It has no way to send many at once, and delays need a scheduler process
of their own. For the kill test the idle timeout is `reclaim` instead of 10 minutes.
"""

# The library is in an environment of its own, so it is unknown to a check of this one.
# mypy: disable-error-code="import-not-found,import-untyped,no-any-return,untyped-decorator"

import asyncio
from collections.abc import Iterable
from typing import Any

from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from benchmarks.bodies import KINDS, Marks
from benchmarks.systems import Spec, System


class Taskiq(System):
    """taskiq."""

    def __init__(self, spec: Spec, marks: Marks) -> None:
        super().__init__(spec)
        options = {"idle_timeout": int(spec.reclaim * 1000)} if spec.reclaim else {}
        if spec.reclaim:
            options["unacknowledged_lock_timeout"] = int(spec.reclaim)
        self._broker = RedisStreamBroker(spec.url, consumer_id="0", **options)
        self._tasks = {
            kind: self._broker.register_task(_plain(marks.coroutine(kind)), task_name=kind)
            for kind in KINDS
        }

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        async def send() -> None:
            await self._broker.startup()
            kiq = self._tasks[kind].kiq
            for payload in payloads:
                await kiq(payload)

        self.run(send())

    def work(self, workers: int) -> None:
        asyncio.run(
            run_receiver_task(
                self._broker, max_async_tasks=workers, max_prefetch=100, run_startup=True
            )
        )

    _loop: Any = None

    def run(self, work: Any) -> None:
        """In one loop for all calls: the connections belong to it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(work)


def _plain(body: Any) -> Any:
    async def run(payload: Any) -> None:
        await body(payload)

    return run


def make(spec: Spec, marks: Marks) -> System:
    """The adapter."""
    return Taskiq(spec, marks)
