"""Floor 5. Probes for Kubernetes and its like: `/live` and `/ready` over HTTP.

Live: the process answers. Ready: Redis answers, and each fetcher was answered lately or had no room
to read into. A silent stall turns it red within three times block_duration (a second at least).
"""

import math
from collections.abc import Callable
from typing import Final

from taskrunner.cli.web import Answer, Page, own_health, text
from taskrunner.clock import monotonic
from taskrunner.errors import describe
from taskrunner.runner import TaskRunner
from taskrunner.service import Service
from taskrunner.store import connection

Probe = Callable[[], str | None]
"""None: well; else what is wrong."""

_BLOCKS: Final = 2.2
_SHORTEST: Final = 1.0


class Readiness(Service):
    """Asks Redis again and again, on a connection of its own, so that the probe never waits."""

    def __init__(self, runner: TaskRunner) -> None:
        super().__init__("readiness", own_health())
        self._runner = runner
        self._limit = max(_SHORTEST, _BLOCKS * runner.config.block_duration)
        connections = runner.queue.connections
        limit = min(self._limit / 2, connections.timeout)
        self._link = connections.open(read_timeout=limit, connect_timeout=limit)
        self._answered = -math.inf

    def tick(self) -> float:
        try:
            self._link.call("PING")
            self._answered = monotonic()
        except Exception as error:  # what the probe is there to tell; the runner logs it
            if not connection.outage(error):
                self._answered = monotonic()
        return min(1.0, self._limit / 5)

    def close(self) -> None:
        self._link.close()

    def why_not(self) -> str | None:
        """What keeps the runner from being ready, or None."""
        if self._runner.state != "started":
            return f"the runner is {self._runner.state}"
        if monotonic() - self._answered > self._limit:
            return "Redis does not answer"
        if self._runner.silence() > self._limit:
            return "no read was answered lately"
        return None


def pages(ready: Probe) -> dict[str, Page]:
    """`/live` answers 200; `/ready` 200, or 503 and the reason."""

    def readiness() -> Answer:
        try:
            wrong = ready()
        except Exception as error:  # a probe that can't tell is not ready
            wrong = describe(error)
        return text(200, "ready") if wrong is None else text(503, wrong)

    return {"/live": lambda: text(200, "alive"), "/ready": readiness}
