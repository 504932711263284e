"""streaq: coroutine tasks that keep no results and aren't logged; prefetch 100.

In bulk with `enqueue_many`, 1000 at a time. For the kill test the idle timeout is `reclaim` instead
of a minute.
"""

# The library is in an environment of its own, so it is unknown to a check of this one.
# mypy: disable-error-code="import-not-found,import-untyped,no-any-return,untyped-decorator"

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from streaq import Worker

from benchmarks.bodies import KINDS, Marks
from benchmarks.systems import Spec, System


class Streaq(System):
    """streaq."""

    def __init__(self, spec: Spec, marks: Marks) -> None:
        super().__init__(spec)
        options = {"idle_timeout": spec.reclaim} if spec.reclaim else {}
        self._worker: Any = Worker(
            redis_url=f"redis://127.0.0.1:{spec.port}/0",
            concurrency=spec.workers,
            prefetch=100,
            **options,
        )
        self._tasks = {
            kind: self._worker.task(name=kind, silent=True, ttl=0)(_plain(marks.coroutine(kind)))
            for kind in KINDS
        }

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        async def send() -> None:
            async with self._worker:
                enqueue = self._tasks[kind].enqueue
                for payload in payloads:
                    await enqueue(payload)

        asyncio.run(send())

    def send_bulk(self, kind: str, payloads: Sequence[Any]) -> None:
        async def send() -> None:
            async with self._worker:
                enqueue = self._tasks[kind].enqueue
                for start in range(0, len(payloads), 1000):
                    chunk = payloads[start : start + 1000]
                    await self._worker.enqueue_many([enqueue(payload) for payload in chunk])

        asyncio.run(send())

    def send_later(self, kind: str, dues: Iterable[tuple[float, float]]) -> None:
        async def send() -> None:
            async with self._worker:
                for delay, payload in dues:
                    await self._tasks[kind].enqueue(payload).start(delay=delay)

        asyncio.run(send())

    def work(self, workers: int) -> None:
        self._worker.run_sync()


def _plain(body: Any) -> Any:
    async def run(payload: Any) -> None:
        await body(payload)

    return run


def make(spec: Spec, marks: Marks) -> System:
    """The adapter."""
    return Streaq(spec, marks)
