"""Floor 4: takes new messages from the stream, as many as the pool has room for.

Owns one blocking connection and one consumer. Leaves to the pool how much room there is, and to
`unseen` what was delivered to this consumer without ever arriving.
"""

import logging
import math
from contextlib import suppress
from typing import Final

from taskrunner import keys
from taskrunner.clock import monotonic
from taskrunner.in_flight import ByteBudget, InFlight
from taskrunner.reports import Health
from taskrunner.service import Service
from taskrunner.services.instance_heartbeat import InstanceHeartbeat
from taskrunner.settler import Settler
from taskrunner.store import connection
from taskrunner.store.connection import Link
from taskrunner.store.group import ConsumerGroup
from taskrunner.timings import ClaimDelays
from taskrunner.unseen import park_unseen
from taskrunner.worker_pool import WorkerPool

_BLOCKS: Final = 0.1
"""Seconds after which a read is taken to have found the stream empty."""

log = logging.getLogger("taskrunner.fetcher")


class Fetcher(Service):
    """XREADGROUP for one consumer."""

    jitter = 0.0

    def __init__(
        self,
        health: Health,
        *,
        number: int,
        deliveries: ConsumerGroup,
        instance: InstanceHeartbeat,
        in_flight: InFlight,
        pool: WorkerPool,
        settler: Settler,
        budget: ByteBudget,
        claim_delays: ClaimDelays,
        batch_size: int,
        block: float,
    ) -> None:
        super().__init__(f"fetcher-{number}", health)
        self._number = number
        self._deliveries = deliveries
        self._instance = instance
        self._in_flight = in_flight
        self._pool = pool
        self._settler = settler
        self._budget = budget
        self._claim_delays = claim_delays
        self._batch_size = batch_size
        self._block_ms = max(1, round(block * 1000))
        connections = deliveries.connections
        self._link: Link = connections.open(read_timeout=block + connections.timeout)
        self._read_as: set[tuple[str, str]] = set()  # (host, consumer) that a reply may have missed
        self._last_read_empty = False
        self._asked = 0.0  # monotonic, while a read is under way
        self.heard = -math.inf  # monotonic, when a read was answered or there was no room

    def tick(self) -> float:
        host = self._instance.host
        if host is None:
            return 0.02
        if self._settler.congested():
            return 0.1
        room = self._pool.reserve(self._batch_size)
        if room == 0:
            self._pool.wait_for_room(0.1)
            self.heard = monotonic()
            return 0.0
        try:
            for missed in list(self._read_as):
                self._recover(*missed)
            self._read(host, room)
        finally:
            self._pool.reading(-room)
        return 0.0

    def _read(self, host: str, room: int) -> None:
        consumer = keys.consumer(self._deliveries.name, host, self._number)
        count = self._budget.allow(room)
        if not self._link.connected:
            self.heard = monotonic()
        self._asked = monotonic()
        try:
            batch = self._deliveries.read(
                self._link, consumer, count, self._block_ms, self._budget.MOST
            )
        except Exception as error:
            if self._stopping and connection.lost(error):  # we were told to stop waiting
                self._read_as.add((host, consumer))
                return
            if connection.missing_group(error):
                self._deliveries.create()
                return
            if not connection.answered(error):
                self._read_as.add((host, consumer))
            if isinstance(error, connection.ReplyTooLargeError):
                log.warning(
                    "a read of %d entries was cut off at %d MiB: they are read again, fewer at a time",
                    count,
                    self._budget.MOST >> 20,
                )
                self._budget.overran()
                return
            raise
        finally:
            self._asked = 0.0
        self.heard = monotonic()
        self._last_read_empty = not batch
        if batch:
            self._budget.saw(batch)
            self._claim_delays.saw(batch)
            add = self._in_flight.add
            self._pool.submit([delivery for delivery in batch if add(delivery)])

    @property
    def finds_nothing(self) -> bool:
        """Whether the last read was empty, or the present one blocks."""
        asked = self._asked
        return self._last_read_empty or (asked > 0 and monotonic() - asked > _BLOCKS)

    def _recover(self, host: str, consumer: str) -> None:
        if park_unseen(
            self._deliveries,
            self._in_flight,
            consumer=consumer,
            host=host,
            instance_id=self._instance.instance_id,
        ):
            self._read_as.discard((host, consumer))

    def unblock(self) -> None:
        """End the present blocking read; called again until the thread is gone."""
        self._pool.wake()
        self._link.hang_up()

    def interrupt(self) -> None:
        """End the present read though Redis does not answer."""
        self._link.interrupt()

    def close(self) -> None:
        self._link.close()
        host = self._instance.host
        if host is not None:
            self._read_as.add((host, keys.consumer(self._deliveries.name, host, self._number)))

    def park_unseen(self) -> None:
        """After the end of the thread: what was delivered to it and never arrived is for others to
        take."""
        for missed in list(self._read_as):
            with suppress(Exception):  # what can't be parked now is reclaimed when it is overdue
                self._recover(*missed)
