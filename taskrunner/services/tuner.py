"""Floor 4: looks at the queue every tick: tells the hook, and keeps the pool as large as the wanted
wait asks for.

The leader decides and publishes, followers apply, each within its own bounds; a missing key changes
nothing.
"""

import logging
from collections.abc import Callable
from typing import Final

from taskrunner.clock import monotonic
from taskrunner.config import TaskRunnerConfig
from taskrunner.errors import describe
from taskrunner.reports import Health, Reports
from taskrunner.service import Service
from taskrunner.services.elector import Elector
from taskrunner.services.once import Once
from taskrunner.stats import Stats
from taskrunner.store.metrics import Metrics
from taskrunner.tuning import next_capacity
from taskrunner.worker_pool import WorkerPool

_FOLLOW: Final = 5.0
_SHORTEST_TTL: Final = 20.0

log = logging.getLogger("taskrunner.tuner")


class Tuner(Service):
    """One tick of aggregation after the other."""

    def __init__(
        self,
        health: Health,
        *,
        config: TaskRunnerConfig,
        stats: Callable[[], Stats],
        metrics: Metrics,
        pool: WorkerPool,
        elector: Elector,
        reports: Reports,
    ) -> None:
        super().__init__("tuner", health)
        self._config = config
        self._stats = stats
        self._metrics = metrics
        self._pool = pool
        self._elector = elector
        self._reports = reports
        now = monotonic()
        self._next_look = now + config.tick
        self._next_reset = now + (config.metrics_reset_interval or float("inf"))
        self._next_share = now
        self._last_change = 0.0
        self._ttl = max(_SHORTEST_TTL, config.long_queue_threshold)
        self._led = False
        self._hook: Once | None = None

    def tick(self) -> float:
        now = monotonic()
        looked = now >= self._next_look
        if looked:
            self._next_look = now + self._config.tick
            self._look(now)
        if now >= self._next_reset:
            if self._elector.is_leader():
                self._metrics.reset(self._elector.lease.key, self._elector.lease.value)
            self._next_reset = now + self._config.metrics_reset_interval
        following = [self._next_look, self._next_reset]
        if self._config.tuning:
            if looked or now >= self._next_share:
                self._share(now)
            following.append(self._next_share)
        return max(0.0, min(following) - monotonic())

    def _look(self, now: float) -> None:
        hook = self._config.long_queue_hook
        if hook is None and not (self._config.tuning and self._elector.is_leader()):
            return
        stats = self._stats()
        if hook is not None and (self._hook is None or not self._hook.alive):
            self._hook = Once("long-queue-hook", lambda: self._call_hook(stats))
            self._hook.start()  # a hook that hangs holds up nobody; it is not called again meanwhile
        if self._config.tuning and self._elector.is_leader():
            self._tune(stats, now)

    def _call_hook(self, stats: Stats) -> None:
        assert self._config.long_queue_hook is not None
        try:
            self._config.long_queue_hook(stats)
        except BaseException as error:  # the hook is the application's
            log.error(
                "long_queue_hook raised: %s", describe(error), extra={"action": "service_error"}
            )
            self._reports.add("service_error", error)

    def _tune(self, stats: Stats, now: float) -> None:
        config = self._config
        assert config.min_workers is not None and config.max_workers is not None
        assert config.desired_wait_time is not None
        assert config.desired_wait_time_tolerance is not None
        if now - self._last_change < config.tuning_cooldown_seconds:
            return
        decision = next_capacity(
            current=self._pool.size,
            replication=stats.replications,
            least=config.min_workers,
            most=config.max_workers,
            predicted=stats.predicted_wait_time,
            desired=config.desired_wait_time * 1000,
            tolerance=config.desired_wait_time_tolerance * 1000,
        )
        if decision.capacity != self._pool.size:
            self._apply(decision.capacity, decision.reason)

    def _share(self, now: float) -> None:
        leads = self._elector.is_leader()
        if leads and self._led:
            self._metrics.publish_capacity(self._pool.size, self._ttl)
            self._next_share = now + self._ttl / 3
            return
        capacity = self._metrics.capacity()
        if capacity is not None:
            self._apply(capacity, "published by the leader")
        self._led = leads  # a new leader goes on from what the last one published
        self._next_share = now if leads else now + _FOLLOW

    def _apply(self, capacity: int, reason: str) -> None:
        least, most = self._config.min_workers, self._config.max_workers
        assert least is not None and most is not None
        capacity = min(most, max(least, capacity))
        if capacity != self._pool.size:
            log.info(
                "workers: %d, was %d (%s)",
                capacity,
                self._pool.size,
                reason,
                extra={"action": "capacity_changed"},
            )
            self._last_change = monotonic()  # a follower's too: it may lead next
            self._pool.resize(capacity)
