"""Floor 4: renews everything this process holds, and hands back what waits here while others could
run it.

One call renews all that is held: running, buffered, and finished but not yet accepted by Redis. It
also answers for the deliveries that were set aside until somebody asks whose they are.
"""

from typing import Final

from taskrunner.clock import monotonic
from taskrunner.delivery import Delivery
from taskrunner.errors import InvalidTaskPayloadError
from taskrunner.in_flight import InFlight
from taskrunner.message import decode
from taskrunner.reports import Health, Reports
from taskrunner.service import LONGEST_BACKOFF, Backoff, Service
from taskrunner.services.instance_heartbeat import InstanceHeartbeat
from taskrunner.settler import Settler, hand_back, lock_of, report_lost
from taskrunner.store.group import HELD_BY_ANOTHER, MOVED, NOT_PENDING, ConsumerGroup
from taskrunner.worker_pool import WorkerPool

_LOOK: Final = 0.5
_CALL: Final = 500


class DeliveryHeartbeat(Service):
    """Keeps deliveries ours."""

    jitter = 0.0

    def __init__(
        self,
        health: Health,
        *,
        deliveries: ConsumerGroup,
        instance: InstanceHeartbeat,
        in_flight: InFlight,
        pool: WorkerPool,
        settler: Settler,
        reports: Reports,
        reclaim_delay: float,
        hand_back_after: float,
    ) -> None:
        super().__init__("delivery-heartbeat", health)
        self._deliveries = deliveries
        self._instance = instance
        self._in_flight = in_flight
        self._pool = pool
        self._settler = settler
        self._reports = reports
        self._third = reclaim_delay / 3
        self._hand_back_after = hand_back_after
        self._backoff = Backoff(min(LONGEST_BACKOFF, self._third))

    def tick(self) -> float:
        now = monotonic()
        held = self._in_flight.snapshot()
        for delivery in held:
            _read_unique(delivery)
        if any(delivery.waiting or self._due(delivery) <= now for delivery in held):
            for start in range(0, len(held), _CALL):
                self._renew(held[start : start + _CALL])
        self._hand_back(held, now)
        following = min((self._due(delivery) for delivery in held), default=now + _LOOK)
        return min(
            _LOOK, self._third / 2, self._hand_back_after / 2, max(0.01, following - monotonic())
        )

    def _due(self, delivery: Delivery) -> float:
        """When it must be renewed: after its task's reservation_timeout, never later than a third
        of reclaim_delay."""
        interval = self._third
        message = delivery.message
        if message is not None:
            if message.reservation_timeout > 0:
                interval = min(interval, max(0.001, message.reservation_timeout / 1e9))
            if message.unique:
                interval = min(interval, max(0.05, message.unique_for / 3))
        return delivery.confirmed + interval

    def _renew(self, held: list[Delivery]) -> None:
        sent = monotonic()
        requests = []
        for delivery in held:
            message = delivery.message
            requests.append(
                (delivery, lock_of(message, message.unique_for * 1000 if message else 0))
            )
        statuses = self._deliveries.renew(requests)
        for delivery, status in zip(held, statuses, strict=True):
            if status == MOVED:
                delivery.confirmed = sent
                if delivery.waiting:
                    delivery.waiting = False
                    self._pool.submit([delivery])
            elif delivery.settlement is not None:
                continue  # on its way out: the settler knows better
            elif status == HELD_BY_ANOTHER:
                report_lost(self._reports, delivery)
                self._in_flight.remove(delivery)
            elif status == NOT_PENDING and delivery.waiting:
                # Finished elsewhere, or the group was lost: then it is delivered anew. What runs
                # stays in the table, so that it is not started a second time beside itself.
                self._in_flight.remove(delivery)

    def _hand_back(self, held: list[Delivery], now: float) -> None:
        """Where other instances live, what has waited unstarted for a second is theirs to take."""
        if self._instance.replications < 2:
            return
        limit = now - self._hand_back_after
        stale = sum(
            1
            for delivery in held
            if not delivery.started and not delivery.waiting and delivery.received < limit
        )
        for delivery in self._pool.take_back(min(stale, self._pool.buffered)):
            delivery.settlement = hand_back(delivery)
            self._settler.put(delivery)


def _read_unique(delivery: Delivery) -> None:
    """Decode a buffered unique message early: its lock is renewed from the moment we hold it."""
    if delivery.message is None and delivery.body and b'"unique":true' in delivery.body:
        try:
            delivery.message = decode(delivery.body)
        except InvalidTaskPayloadError:  # the worker that takes it says so
            return
