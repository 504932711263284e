"""rq: `SimpleWorker`, which doesn't fork, one task at a time; no results kept.

A process runs one task at a time, so `workers` means nothing here. In bulk with `enqueue_many`,
1000 at a time. For the kill test a job has `reclaim` seconds and three tries, and maintenance runs
each second instead of every ten minutes.
"""

# The library is in an environment of its own, so it is unknown to a check of this one.
# mypy: disable-error-code="import-not-found,import-untyped,no-any-return,untyped-decorator"

from collections.abc import Iterable, Sequence
from typing import Any

import redis
from rq import Queue, Retry, SimpleWorker

from benchmarks.bodies import Marks
from benchmarks.systems import Spec, System

_marks: list[Marks] = []


def run(kind: str, payload: Any) -> None:
    """The task: rq finds it by its name."""
    _marks[0].body(kind)(payload)


class Rq(System):
    """rq."""

    def __init__(self, spec: Spec, marks: Marks) -> None:
        super().__init__(spec)
        _marks.append(marks)
        self._connection = redis.Redis.from_url(spec.url)
        self._queue = Queue("bench", connection=self._connection)

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        options: Any = {"job_timeout": int(self.spec.reclaim)} if self.spec.reclaim else {}
        if options:
            options["retry"] = Retry(max=3)
        for payload in payloads:
            self._queue.enqueue(run, kind, payload, result_ttl=0, **options)

    def send_bulk(self, kind: str, payloads: Sequence[Any]) -> None:
        for start in range(0, len(payloads), 1000):
            chunk = payloads[start : start + 1000]
            self._queue.enqueue_many(
                [Queue.prepare_data(run, args=(kind, each), result_ttl=0) for each in chunk]
            )

    def work(self, workers: int) -> None:
        options: Any = {"maintenance_interval": 1} if self.spec.reclaim else {}
        worker = SimpleWorker([self._queue], connection=self._connection, **options)
        worker.work(logging_level="ERROR")


def make(spec: Spec, marks: Marks) -> System:
    """The adapter."""
    return Rq(spec, marks)
