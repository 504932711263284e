"""dramatiq: threads of one `Worker`, `RedisBroker`, default middleware.

Prefetch raised to 100, which doubles its drain; the default is two per thread. It has no way to
send many at once. For the kill test the heartbeat timeout is `reclaim` instead of 60 s, and one
command in ten looks for dead workers instead of one in a thousand: an idle worker sends few.
"""

# The library is in an environment of its own, so it is unknown to a check of this one.
# mypy: disable-error-code="import-not-found,import-untyped,no-any-return,untyped-decorator"

import os
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("dramatiq_queue_prefetch", "100")

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.bodies import KINDS, Marks
from benchmarks.systems import Spec, System


class Dramatiq(System):
    """dramatiq."""

    def __init__(self, spec: Spec, marks: Marks) -> None:
        super().__init__(spec)
        options: dict[str, Any] = {}
        if spec.reclaim:
            options |= {
                "heartbeat_timeout": int(spec.reclaim * 1000),
                "maintenance_chance": 100_000,
            }
        self._broker = RedisBroker(url=spec.url, **options)
        dramatiq.set_broker(self._broker)
        self._actors = {
            kind: dramatiq.actor(marks.body(kind), actor_name=kind, broker=self._broker)
            for kind in KINDS
        }

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        send = self._actors[kind].send
        for payload in payloads:
            send(payload)

    def send_later(self, kind: str, dues: Iterable[tuple[float, float]]) -> None:
        actor = self._actors[kind]
        for delay, payload in dues:
            actor.send_with_options(args=(payload,), delay=int(delay * 1000))

    def work(self, workers: int) -> None:
        dramatiq.Worker(self._broker, worker_threads=workers).start()


def make(spec: Spec, marks: Marks) -> System:
    """The adapter."""
    return Dramatiq(spec, marks)
