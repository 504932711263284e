"""Floor 4: looks after the other threads: a runner without its heartbeat is worse than none
(BL-08).

A service's loop outlives every Exception; if its thread ends all the same it is started again, and
if it keeps ending the runner gives up, so that whoever runs the process starts a new one.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from taskrunner.clock import monotonic
from taskrunner.delivery import Delivery
from taskrunner.errors import TaskRunnerError
from taskrunner.reports import Health, Reports
from taskrunner.service import Service
from taskrunner.worker_pool import WorkerPool

_LOOK: Final = 0.5
_MOST_DEATHS: Final = 5
_WITHIN: Final = 60.0

log = logging.getLogger("taskrunner.watchdog")


class Watchdog(Service):
    """Restarts threads that died."""

    def __init__(
        self,
        health: Health,
        *,
        services: Callable[[], Sequence[Service]],
        pool: WorkerPool,
        reports: Reports,
        give_up: Callable[[Exception], None],
        ownerless: Callable[[], list[Delivery]],
        abandoned: Callable[[Delivery], None],
        after: Callable[[], None],
    ) -> None:
        super().__init__("watchdog", health)
        self._services = services
        self._pool = pool
        self._reports = reports
        self._give_up = give_up
        self._ownerless = ownerless
        self._abandoned = abandoned
        self._after = after
        self._audited = 0  # deaths whose leavings were looked for
        self._died = 0
        self._suspects: list[Delivery] | None = None
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)

    def tick(self) -> float:
        for service in self._services():
            if service.died:
                self._restart(service)
        self._pool.ensure()
        self._look_for_leavings()
        self._after()
        return _LOOK

    def _look_for_leavings(self) -> None:
        """After a thread ended, find what it held: ownerless at two looks in a row, half a second
        apart."""
        if self._suspects is not None:
            still = {id(delivery) for delivery in self._ownerless()}
            found = [delivery for delivery in self._suspects if id(delivery) in still]
            self._suspects = None
            for delivery in found:
                log.warning("entry %s was left by a thread that ended", delivery.entry_id.decode())
                self._abandoned(delivery)
        deaths = self._died + self._pool.deaths
        if deaths != self._audited:
            self._audited = deaths
            self._suspects = self._ownerless()

    def _restart(self, service: Service) -> None:
        error = TaskRunnerError(f"thread {service.name} ended unexpectedly")
        now = monotonic()
        if len(self._deaths) == _MOST_DEATHS and now - self._deaths[0] < _WITHIN:
            self._give_up(
                TaskRunnerError(f"threads keep ending, the last one was {service.name}: giving up")
            )
            return
        self._deaths.append(now)
        self._died += 1
        log.error("%s: started again", error, extra={"action": "service_error"})
        self._reports.add("service_error", error)
        service.start()
