"""saq: its Redis queue, coroutine tasks, default settings.

It has no way to send many at once. For the kill test a job's heartbeat and the sweep are `reclaim`
and 1 s instead of none and a minute, and a job may be tried three times.
"""

# The library is in an environment of its own, so it is unknown to a check of this one.
# mypy: disable-error-code="import-not-found,import-untyped,no-any-return,untyped-decorator"

import asyncio
from collections.abc import Iterable
from typing import Any

from saq import Queue, Worker

from benchmarks.bodies import KINDS, Marks
from benchmarks.systems import Spec, System


class Saq(System):
    """saq."""

    def __init__(self, spec: Spec, marks: Marks) -> None:
        super().__init__(spec)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._queue = Queue.from_url(f"redis://127.0.0.1:{spec.port}/0")
        self._functions = [(kind, _plain(marks.coroutine(kind))) for kind in KINDS]
        self._options: dict[str, Any] = (
            {"heartbeat": int(spec.reclaim), "timeout": int(spec.reclaim), "retries": 3}
            if spec.reclaim
            else {}
        )

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        async def send() -> None:
            enqueue = self._queue.enqueue
            for payload in payloads:
                await enqueue(kind, payload=payload, **self._options)

        self._loop.run_until_complete(send())

    def send_later(self, kind: str, dues: Iterable[tuple[float, float]]) -> None:
        async def send() -> None:
            for _, payload in dues:
                await self._queue.enqueue(kind, payload=payload, scheduled=payload)

        self._loop.run_until_complete(send())

    def send_unique(self, kind: str, payloads: Iterable[str]) -> None:
        async def send() -> None:
            for payload in payloads:
                await self._queue.enqueue(kind, payload=payload, key=payload)

        self._loop.run_until_complete(send())

    def work(self, workers: int) -> None:
        async def run() -> None:
            timers: Any = {"sweep": 1} if self.spec.reclaim else None
            await Worker(
                self._queue, functions=self._functions, concurrency=workers, timers=timers
            ).start()

        self._loop.run_until_complete(run())


def _plain(body: Any) -> Any:
    async def run(context: Any, *, payload: Any) -> None:
        await body(payload)

    return run


def make(spec: Spec, marks: Marks) -> System:
    """The adapter."""
    return Saq(spec, marks)
