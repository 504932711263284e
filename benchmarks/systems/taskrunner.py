"""TaskRunner with its default settings, 8 workers, and every optional part switched on.

Hooks before and after each task, `on_error` and `long_queue_hook` are set, to functions that do
nothing. At-least-once, as always.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import taskrunner
from benchmarks.bodies import KINDS, RETRY_SECONDS, Marks
from benchmarks.systems import Spec, System


class TaskRunnerSystem(System):
    """TaskRunner."""

    def __init__(self, spec: Spec, marks: Marks) -> None:
        super().__init__(spec)
        options: Any = {"reclaim_delay": spec.reclaim} if spec.reclaim else {}
        self._runner = taskrunner.TaskRunner(
            queue=taskrunner.RedisStreamQueue(spec.url, **options),
            consumer_group="bench",
            num_workers=spec.workers,
            before_task=lambda context: None,
            after_task=lambda context, error: None,
            on_error=lambda report: None,
            long_queue_hook=lambda stats: None,
        )
        self._tasks = {
            kind: taskrunner.task(
                name=f"bench.{kind}",
                max_retry=5 if kind == "fail" else 1,
                retry_delay=RETRY_SECONDS if kind == "fail" else None,
            )(marks.body(kind))
            for kind in KINDS
        }
        self._unique = taskrunner.task(name="bench.unique", unique_for=60, unique_key=str)(
            marks.body("noop")
        )

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        delay = self._tasks[kind].delay
        for payload in payloads:
            delay(payload)

    def send_bulk(self, kind: str, payloads: Sequence[Any]) -> None:
        self._tasks[kind].delay_many(payloads)

    def send_later(self, kind: str, dues: Iterable[tuple[float, float]]) -> None:
        delay = self._tasks[kind].delay
        for seconds, payload in dues:
            delay(payload, run_in=seconds)

    def send_unique(self, kind: str, payloads: Iterable[str]) -> None:
        delay = self._unique.delay
        for payload in payloads:
            delay(payload)

    def work(self, workers: int) -> None:
        self._runner.run_forever()


def make(spec: Spec, marks: Marks) -> System:
    """The adapter."""
    return TaskRunnerSystem(spec, marks)
