"""Floor 3: deliveries that Redis counts as ours though their reply never came.

After a broken read or claim, and at a stop, the thread that reads into a consumer compares what is
pending for it with what this process holds; the rest is parked, uncounted, for anyone to take at
once. The consumer's own history is never read (XREADGROUP … 0), for that would raise the counts.
"""

from typing import Final

from taskrunner import keys
from taskrunner.clock import monotonic
from taskrunner.delivery import Delivery
from taskrunner.in_flight import InFlight
from taskrunner.store.group import (
    HAND_BACK_IDLE_MS,
    NOT_PRESENT,
    ConsumerGroup,
    Park,
    next_id,
)

_PAGE: Final = 500


def park_unseen(
    deliveries: ConsumerGroup, in_flight: InFlight, *, consumer: str, host: str, instance_id: str
) -> bool:
    """Park what is pending for `consumer` and not in the table; whether that is done with.

    Only while the host's presence key holds our id: a namesake's deliveries are not ours to judge.
    False where the key is gone for now: it will be taken again.
    """
    after = b"-"
    while True:
        rows = deliveries.pending_of(consumer, after, _PAGE)
        now = monotonic()
        parks = [
            Park(
                Delivery(row.entry_id, None, consumer, row.count, now),
                HAND_BACK_IDLE_MS,
                max(0, row.count - 1),
            )
            for row in rows
            if row.entry_id not in in_flight
        ]
        if parks:
            statuses = deliveries.park(parks, host, guard=instance_id, presence=keys.presence(host))
            if NOT_PRESENT in statuses:
                return False
        if len(rows) < _PAGE:
            return True
        after = next_id(rows[-1].entry_id)
