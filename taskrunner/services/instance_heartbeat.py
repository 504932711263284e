"""Floor 4: this instance's name and sign of life.

Owns: the presence key, the host name that goes with it, the existence of this instance's readers,
the count of instances and the offset to the server's clock. Everything that needs a name waits for
`host`.
"""

import logging
from collections.abc import Callable
from typing import Final

from taskrunner import keys
from taskrunner.clock import ServerClock, monotonic
from taskrunner.errors import ConfigurationError
from taskrunner.reports import Health
from taskrunner.service import Service
from taskrunner.store import connection
from taskrunner.store.group import ConsumerGroup
from taskrunner.store.instances import ANOTHERS, GONE, Instances

_MOST_NAMESAKES: Final = 1000

log = logging.getLogger("taskrunner.instance")


class InstanceHeartbeat(Service):
    """Takes a name, keeps it, and looks around."""

    def __init__(
        self,
        health: Health,
        *,
        instances: Instances,
        deliveries: ConsumerGroup,
        clock: ServerClock,
        wanted_host: str,
        instance_id: str,
        readers: int,
        ttl: float,
        give_up: Callable[[Exception], None],
    ) -> None:
        super().__init__("instance-heartbeat", health)
        self._instances = instances
        self._deliveries = deliveries
        self._clock = clock
        self._wanted = wanted_host
        self.instance_id = instance_id
        self._readers = readers
        self._ttl = ttl
        self._give_up = give_up
        self._checked = False
        self.host: str | None = None  # None until Redis gave us a name
        self.former: set[str] = set()  # names we had to leave; deliveries read under them keep them
        self.replications = 1

    def tick(self) -> float:
        if not self._checked:
            self._check_server()
        sent = monotonic()
        now = self._instances.server_time()
        self._clock.observe(now, sent, monotonic())  # first: once we have a name, fetchers read
        self._keep_name()
        self._deliveries.create_consumers(self.consumers())
        self.replications = self._instances.replications()
        return self._ttl * 2 / 3

    def consumers(self) -> list[str]:
        """The names of this instance's readers: its fetchers, then the reclaimer."""
        host = self.host or self._wanted
        return [
            keys.consumer(self._deliveries.name, host, number)
            for number in range(1, self._readers + 1)
        ]

    def leave(self) -> None:
        """Remove our readers, where nothing is pending for them, and our presence."""
        for host in {*self.former, self.host} - {None}:
            assert host is not None
            for number in range(1, self._readers + 1):
                consumer = keys.consumer(self._deliveries.name, host, number)
                self._deliveries.remove_consumer(consumer, host, idle_ms=0, owner=self.instance_id)
            self._instances.presence(host, self.instance_id).release()
        self.host = None
        self.former.clear()

    def _keep_name(self) -> None:
        if self.host is not None:
            presence = self._instances.presence(self.host, self.instance_id)
            kept = presence.keep(self._ttl)
            if kept == GONE and not presence.take(self._ttl):
                kept = ANOTHERS
            if kept != ANOTHERS:
                return
            log.warning(
                "host name %s was taken by another process while this one was silent", self.host
            )
            self.former.add(self.host)
            self.host = None  # nothing more is read under it, also while no other name can be had
        self.host = self._take_name()
        if self.host != self._wanted:
            log.warning(
                "host name %s is in use, or a dead predecessor's deliveries are not reclaimed yet: going on as %s",
                self._wanted,
                self.host,
            )

    def _take_name(self) -> str:
        for number in range(1, _MOST_NAMESAKES):
            host = self._wanted if number == 1 else f"{self._wanted}-{number}"
            try:
                if self._instances.take_name(host, self.instance_id, self._ttl):
                    return host
            except Exception as error:  # all but one are raised again
                if connection.code(error) != "OOM":
                    raise
                # Nothing can be stored now, but there is work to be drained: a name that nobody
                # else can have.
                return f"{self._wanted}-{self.instance_id[:8]}"
        raise ConfigurationError(
            f"host={self._wanted!r}: {_MOST_NAMESAKES} live instances have this name"
        )

    def _check_server(self) -> None:
        try:
            self._deliveries.connections.call("CLUSTER", "INFO")
        except Exception as error:  # any refusal means that it is no cluster
            if connection.lost(error) or connection.code(error) in ("LOADING", "MASTERDOWN"):
                raise
            self._checked = True  # "cluster support disabled", or not allowed to ask: no cluster
            return
        cluster = ConfigurationError(
            f"{self._deliveries.connections.address} is a Redis Cluster, which is not supported: the keys of one step "
            "live in different slots. Use a single primary, with replicas and Sentinel if it must fail over"
        )
        self._give_up(cluster)
        raise cluster
