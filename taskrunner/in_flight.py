"""Floor 3: what this process holds, from fetch to settlement; the heartbeat renews this table.

Every step is one operation on a dict, so no lock stands between fetchers, workers, settler and
heartbeat.
"""

from operator import attrgetter

from taskrunner.clock import monotonic
from taskrunner.delivery import Delivery

_size = attrgetter("size")


class InFlight:
    """The deliveries of one stream that this process answers for."""

    def __init__(self) -> None:
        self._table: dict[bytes, Delivery] = {}

    def add(self, delivery: Delivery) -> bool:
        """Take a delivery in; False where its entry is held already: then that one goes on under
        the new delivery.

        An entry comes twice when the group was lost and made again while we worked on it.
        """
        held = self._table.setdefault(delivery.entry_id, delivery)
        if held is delivery:
            return True
        held.consumer, held.count = delivery.consumer, delivery.count
        held.confirmed, held.lost = delivery.confirmed, False
        return False

    def remove(self, delivery: Delivery) -> None:
        """It is settled, or known to be another's."""
        table = self._table
        if table.get(delivery.entry_id) is delivery:
            table.pop(delivery.entry_id, None)

    def remove_all(self, deliveries: list[Delivery]) -> None:
        """These are settled; a newer delivery of one of their entries stays."""
        table = self._table
        for delivery in deliveries:
            if table.get(delivery.entry_id) is delivery:
                table.pop(delivery.entry_id, None)

    def holds(self, delivery: Delivery) -> bool:
        """Whether this very delivery is in the table."""
        return self._table.get(delivery.entry_id) is delivery

    def __contains__(self, entry_id: bytes) -> bool:
        return entry_id in self._table

    def __len__(self) -> int:
        return len(self._table)

    def __bool__(self) -> bool:
        return True

    def snapshot(self) -> list[Delivery]:
        """All of them, at one instant."""
        return list(self._table.values())

    def bytes(self) -> int:
        """Size of the entries held."""
        return sum(delivery.size for delivery in self.snapshot())

    def oldest_confirmation(self) -> float:
        """When the longest unconfirmed one was last known to be ours; now where nothing is held."""
        return min((delivery.confirmed for delivery in self.snapshot()), default=monotonic())


class ByteBudget:
    """How many entries a read may ask for: Redis bounds a reply by entries, never by bytes.

    The largest entry seen lately stands for the next ones; each read that brings smaller ones
    halves it. Where the next ones are larger after all, a read of several is cut off at MOST, and
    goes on one by one.
    """

    LIMIT = 64 * 1024 * 1024
    MOST = 2 * LIMIT
    _LEAST = 256  # bytes: what a delivery costs here besides its body

    def __init__(self, in_flight: InFlight, largest: int) -> None:
        self._in_flight = in_flight
        self._largest = max(largest, self._LEAST)

    def allow(self, wanted: int) -> int:
        """At most `wanted`, at least 1."""
        largest = self._largest
        if (len(self._in_flight) + wanted) * largest <= self.LIMIT:
            return wanted
        return max(1, min(wanted, (self.LIMIT - self._in_flight.bytes()) // largest))

    def saw(self, batch: list[Delivery]) -> None:
        """Learn from a batch."""
        if batch:
            largest = max(map(_size, batch))
            self._largest = max(largest, self._largest // 2, self._LEAST)

    def overran(self) -> None:
        """A read of several was cut off: the next one is of one."""
        self._largest = self.LIMIT
