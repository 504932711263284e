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
from taskrunner.store.group import BODY_GONE, HELD_BY_ANOTHER, MOVED, ConsumerGroup
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
        # Half of what a reclaimer waits after an outage: the holders renew first.
        self._backoff = Backoff(min(LONGEST_BACKOFF, self._third / 2))
        self.draining = False  # a stop was asked for: nothing is started any more

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
        asked = [(delivery, delivery.consumer, delivery.count) for delivery in held]
        requests = []
        for delivery in held:
            message = delivery.message
            requests.append(
                (delivery, lock_of(message, message.unique_for * 1000 if message else 0))
            )
        statuses = self._deliveries.renew(requests)
        for (delivery, consumer, count), status in zip(asked, statuses, strict=True):
            if delivery.consumer != consumer or delivery.count != count:
                continue  # read again meanwhile, and adopted: asked next time
            delivery.confirmed = sent  # an answer, whatever it says: nothing waits for this one
            if status == MOVED:
                self._go_on(delivery)
            elif delivery.settlement is not None:
                continue  # on its way out: the settler knows better
            elif status == HELD_BY_ANOTHER:
                report_lost(self._reports, delivery)
                self._in_flight.remove(delivery)
            elif not delivery.started:
                # Finished elsewhere, deleted by hand, or the group was lost, which delivers it
                # anew. What runs stays in the table, so that it isn't started beside itself.
                delivery.lost = True
                self._in_flight.remove(delivery)
                if status == BODY_GONE:
                    self._settler.put(delivery)  # acknowledged

    def _go_on(self, delivery: Delivery) -> None:
        """It was set aside until this: run it, or hand it back when the runner is stopping."""
        if not delivery.waiting:
            return
        delivery.waiting = False
        if self.draining:
            delivery.settlement = hand_back(delivery)
            self._settler.put(delivery)
        else:
            self._pool.submit([delivery])

    def _hand_back(self, held: list[Delivery], now: float) -> None:
        """Where other instances live, what has waited unstarted for a second is theirs to take."""
        if self._instance.replications < 2:
            return
        limit = now - self._hand_back_after
        stale = sum(
            1
            for delivery in held
            if not delivery.started
            and not delivery.waiting
            and delivery.settlement is None
            and delivery.received < limit
        )
        for delivery in self._pool.take_back(min(stale, self._pool.buffered)):
            if delivery.alone:  # on trial: it stays alone
                self._pool.submit_first(delivery)
                continue
            delivery.settlement = hand_back(delivery)
            self._settler.put(delivery)


def _read_unique(delivery: Delivery) -> None:
    """Decode a buffered unique message early: its lock is renewed from the moment we hold it."""
    body = delivery.body
    if delivery.message is None and body and not body.startswith(b'{"unique":false'):
        try:
            delivery.message = decode(body)
        except InvalidTaskPayloadError:  # the worker that takes it says so
            return
