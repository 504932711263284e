"""huey: `RedisHuey` with its blocking queue, a consumer of threads, no results kept.

It has no way to send many at once.
"""

# The library is in an environment of its own, so it is unknown to a check of this one.
# mypy: disable-error-code="import-not-found,import-untyped,no-any-return,untyped-decorator"

from collections.abc import Iterable
from typing import Any

import redis
from huey import RedisHuey

from benchmarks.bodies import KINDS, Marks
from benchmarks.systems import Spec, System


class Huey(System):
    """huey."""

    def __init__(self, spec: Spec, marks: Marks) -> None:
        super().__init__(spec)
        pool = redis.ConnectionPool.from_url(spec.url)
        self._huey = RedisHuey("bench", connection_pool=pool, results=False)
        self._tasks = {kind: self._huey.task(name=kind)(marks.body(kind)) for kind in KINDS}

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        send = self._tasks[kind]
        for payload in payloads:
            send(payload)

    def send_later(self, kind: str, dues: Iterable[tuple[float, float]]) -> None:
        task = self._tasks[kind]
        for delay, payload in dues:
            task.schedule(args=(payload,), delay=delay)

    def work(self, workers: int) -> None:
        self._huey.create_consumer(workers=workers, worker_type="thread").run()


def make(spec: Spec, marks: Marks) -> System:
    """The adapter."""
    return Huey(spec, marks)
