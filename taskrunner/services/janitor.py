"""Floor 4: the leader's housekeeping, once a minute: consumers nobody is behind any more, and
streams of several groups."""

import logging
from typing import Final

from taskrunner import keys, scripts
from taskrunner.reports import Health
from taskrunner.service import Service
from taskrunner.services.elector import Elector
from taskrunner.store.group import ConsumerGroup

_TRIM: Final = scripts.load("trim")
_MOST_TRIMMED: Final = 10_000

log = logging.getLogger("taskrunner.janitor")


class Janitor(Service):
    """Removes what is left over."""

    def __init__(
        self,
        health: Health,
        *,
        deliveries: ConsumerGroup,
        elector: Elector,
        interval: float,
        consumer_idle: float,
        trims: bool,
    ) -> None:
        super().__init__("janitor", health)
        self._deliveries = deliveries
        self._elector = elector
        self._interval = interval
        self._consumer_idle_ms = round(consumer_idle * 1000)
        self._trims = trims

    def tick(self) -> float:
        if self._elector.is_leader():
            self._remove_consumers()
            while self._trims and not self._stopping and self._elector.is_leader():
                if self._trim() <= 0:
                    break
        return self._interval

    def _remove_consumers(self) -> None:
        for name, pending, idle in self._deliveries.consumers():
            parsed = keys.parse_consumer(self._deliveries.name, name)
            if parsed is None or pending or idle < self._consumer_idle_ms:
                continue
            if self._deliveries.remove_consumer(name, parsed[0], idle_ms=self._consumer_idle_ms):
                log.info("consumer %s removed: nothing pending, idle for %d s", name, idle / 1000)

    def _trim(self) -> int:
        lease = self._elector.lease
        return int(
            self._deliveries.connections.run(
                _TRIM, [lease.key, self._deliveries.stream], [lease.value, _MOST_TRIMMED]
            )
        )
