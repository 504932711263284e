"""celery: `-P threads`, acks_late, no results, no gossip, mingle or heartbeat; prefetch 16.

It has no way to send many at once. For the kill test the visibility timeout is `reclaim` instead of
an hour; its transport looks for such tasks at the start and then about every 100 s.
"""

# The library is in an environment of its own, so it is unknown to a check of this one.
# mypy: disable-error-code="import-not-found,import-untyped,no-any-return,untyped-decorator"

from collections.abc import Iterable
from typing import Any

from celery import Celery

from benchmarks.bodies import KINDS, Marks
from benchmarks.systems import Spec, System


class CelerySystem(System):
    """celery."""

    def __init__(self, spec: Spec, marks: Marks) -> None:
        super().__init__(spec)
        self._app = Celery("bench", broker=f"redis://127.0.0.1:{spec.port}/0")
        self._app.conf.update(
            task_acks_late=True,
            task_ignore_result=True,
            worker_prefetch_multiplier=16,
            worker_hijack_root_logger=False,
            broker_connection_retry_on_startup=True,
        )
        if spec.reclaim:
            self._app.conf.broker_transport_options = {"visibility_timeout": spec.reclaim}
        self._tasks = {kind: self._app.task(name=kind)(_plain(marks.body(kind))) for kind in KINDS}

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        send = self._tasks[kind].delay
        for payload in payloads:
            send(payload)

    def send_later(self, kind: str, dues: Iterable[tuple[float, float]]) -> None:
        task = self._tasks[kind]
        for delay, payload in dues:
            task.apply_async(args=(payload,), countdown=delay)

    def work(self, workers: int) -> None:
        self._app.worker_main(
            [
                *("worker", "--pool", "threads", "--concurrency", str(workers)),
                *("--loglevel", "ERROR", "--without-gossip", "--without-mingle"),
                "--without-heartbeat",
            ]
        )


def _plain(body: Any) -> Any:
    """A function, as celery reads the attributes of what it is given."""

    def run(payload: Any) -> None:
        body(payload)

    return run


def make(spec: Spec, marks: Marks) -> System:
    """The adapter."""
    return CelerySystem(spec, marks)
