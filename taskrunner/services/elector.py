"""Floor 4: at most one leader in a group, by a lease in Redis.

A leader trusts its lease only by its own monotonic clock: until 90 % of the TTL after its last
confirmed renewal was sent. So it counts itself out before anyone else can be in, whatever Redis or
the network does (D3, D4).
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from taskrunner.clock import jittered, monotonic
from taskrunner.reports import Health
from taskrunner.service import LONGEST_BACKOFF, Backoff, Service
from taskrunner.store.instances import GONE, KEPT, OwnedKey

_TRUSTED: Final = 0.9
RELEASED: Final = "lease"
"""Message on the group's channel: the lease was given up, try at once."""

log = logging.getLogger("taskrunner.elector")


class Elector(Service):
    """Takes, keeps and gives up the lease."""

    jitter = 0.0

    def __init__(
        self,
        health: Health,
        *,
        lease: OwnedKey,
        ttl: float,
        poll: float,
        channel: str,
        won: Callable[[], None],
    ) -> None:
        super().__init__("elector", health)
        self.lease = lease
        self._ttl = ttl
        self._poll = poll
        self._channel = channel
        self._won = won
        self._deadline = 0.0
        self._led = False
        self._backoff = Backoff(min(LONGEST_BACKOFF, ttl / 4))

    def is_leader(self) -> bool:
        """Whether this instance leads now. Asks nobody."""
        return monotonic() < self._deadline

    def tick(self) -> float:
        sent = monotonic()
        kept = self.lease.keep(self._ttl)  # also finds a lease whose winning reply was lost
        if kept == GONE and self.lease.take(self._ttl):
            kept = KEPT
        if kept == KEPT:
            self._deadline = sent + _TRUSTED * self._ttl
            if not self._led:
                self._led = True
                log.info("this instance leads", extra={"action": "lease_won"})
                self._won()
            return self._ttl / 2
        self._lose()
        left = self.lease.left()
        # Its holder may renew until it runs out: try then, all followers a little apart.
        return (
            min(self._poll, self._ttl) if left is None else jittered(left + 0.02 * self._ttl, 0.02)
        )

    def lose(self) -> None:
        """A step found the lease to be another's."""
        self._lose()
        self.wake()

    def close(self) -> None:
        """Give the lease up, so that a follower takes it at once."""
        self._lose()
        with suppress(Exception):  # Redis is away: it runs out
            self.lease.release(channel=self._channel, message=RELEASED)

    def _lose(self) -> None:
        self._deadline = 0.0
        if self._led:
            self._led = False
            log.info("this instance no longer leads", extra={"action": "lease_lost"})
