"""Floor 3: the end of a delivery, told to Redis: acknowledged, parked, postponed or buried.

Workers hand over what they finished and go on; one thread here sends it, grouped: what ended within
1.5 ms, or 500, makes one step. What Redis refuses for now is kept and sent again, while the
heartbeat goes on renewing it; what turns out to be another's is let go.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Final

import attrs

from taskrunner import clock, keys
from taskrunner.clock import LONGEST, monotonic
from taskrunner.delivery import Delivery
from taskrunner.errors import (
    DeliveryLostError,
    InvalidTaskPayloadError,
    TaskRunnerError,
    describe,
)
from taskrunner.in_flight import InFlight
from taskrunner.message import Message, to_delayed
from taskrunner.reports import Health, Reports
from taskrunner.service import Backoff, Service
from taskrunner.store import connection, group
from taskrunner.store.group import ConsumerGroup, Lock

_LINGER: Final = 0.0015
_MOST: Final = 500
_WAITING_BYTES: Final = 64 * 1024 * 1024
_STRIKES: Final = 3
_LARGE: Final = 1024 * 1024
_SETTLEMENTS: Final = "settlements"  # what the reports of an outage call it

log = logging.getLogger("taskrunner.settler")


@attrs.frozen
class Park:
    """Give it to the parking consumer: due at a monotonic instant, or at once (None: handed
    back)."""

    due: float | None
    count: int | None = None  # the delivery count it goes on with; None: as it is
    keep_lock: float = 0.0  # seconds beyond `due` that its unique lock must live


@attrs.frozen
class Postpone:
    """Move it to the delayed set; `attempt` deliveries are spent then, `unknown` moves made."""

    due: float
    attempt: int
    unknown: int = 0
    keep_lock: float = 0.0


@attrs.frozen
class Bury:
    """Move it to the dead letters with what is known of its failure."""

    fields: tuple[tuple[str, str], ...]
    without_body: bool = False


_alone = attrgetter("alone")


class _Unseen:
    """Acknowledge what is another group's: its unique lock is not ours to release."""


UNSEEN: Final = _Unseen()


def hand_back(delivery: Delivery) -> Park:
    """Back to the group, unstarted: at once, and it cost no attempt."""
    return Park(due=None, count=max(0, delivery.count - 1))


def lock_of(message: Message | None, ms: int = 0) -> Lock | None:
    """The unique lock of a message."""
    name = message.lock_name if message is not None else None
    if message is None or name is None:
        return None
    return Lock(keys.unique(name), message.unique_lock_value, min(ms, LONGEST * 1000))


class Settler(Service):
    """Sends settlements to Redis."""

    jitter = 0.0

    def __init__(
        self,
        health: Health,
        *,
        in_flight: InFlight,
        deliveries: ConsumerGroup,
        reports: Reports,
        busy: Callable[[], bool],
        host: Callable[[], str],
        parked: Callable[[bytes, float], None],
        settled_alone: Callable[[], None],
        most_waiting: int,
        dead_letter_limit: int,
    ) -> None:
        super().__init__("settler", health)
        self._in_flight = in_flight
        self._deliveries = deliveries
        self._reports = reports
        self._busy = busy
        self._host = host
        self._parked = parked
        self._settled_alone = settled_alone
        self._most_waiting = most_waiting
        self._dead_letter_limit = dead_letter_limit
        self._queue: SimpleQueue[Delivery | None] = SimpleQueue()
        self.put = (
            self._queue.put
        )  # the hot path's way in: a delivery whose `settlement` says what to do
        self._refused: list[Delivery] = []  # kept until Redis takes them
        self._hand: list[Delivery] = []  # what is being sent
        self._refusals = Backoff()
        self._again_at = 0.0
        self._uncertain: set[bytes] = set()  # sent, reply lost: a later "not yours" is no news
        self._strikes: dict[bytes, int] = {}
        self._deadline = 0.0

    # --- for others ---

    def congested(self) -> bool:
        """Whether so much waits for Redis that nothing more should be fetched.

        From the first refusal until all is accepted, also while what was refused is tried again:
        each try would let more in.
        """
        if not self._refused and not self._refusals.waiting:
            return False
        return self.unsettled >= self._most_waiting or self._in_flight.bytes() >= _WAITING_BYTES

    @property
    def unsettled(self) -> int:
        """How many settlements Redis has not accepted yet."""
        return len(self._refused) + len(self._hand) + self._queue.qsize()

    def queued(self) -> list[Delivery]:
        """Everything that waits to be sent: taken out of the queue and put back in order."""
        waiting: list[Delivery] = []
        with suppress(Empty):
            while True:
                delivery = self._queue.get_nowait()
                if delivery is not None:
                    waiting.append(delivery)
        for delivery in waiting:
            self._queue.put(delivery)
        return [*waiting, *self._hand, *self._refused]

    def wake(self) -> None:
        super().wake()
        self._queue.put(None)

    def finish(self, deadline: float) -> bool:
        """Send what is left, until the monotonic deadline, and end; whether all was sent."""
        self._deadline = deadline
        self.stop()
        self.join(max(0.0, deadline - monotonic()) + 1.0)
        return self.unsettled == 0

    # --- the thread ---

    def tick(self) -> float:
        self._collect()
        self._settle()
        return 0.0

    def close(self) -> None:
        while self.unsettled:
            left = self._deadline - monotonic()
            if left <= 0:
                log.warning(
                    "%d settlements were not accepted by Redis before the end; their tasks will run again",
                    self.unsettled,
                )
                return
            self._collect(wait=min(left, 0.05))
            self._settle()

    def _collect(self, wait: float = 0.5) -> None:
        """Take in hand what ended together, with what was refused before where its time has come.

        In an attribute: should this thread end, the next one goes on with it.
        """
        if self._refused:
            wait = min(wait, max(0.0, self._again_at - monotonic()))
        hand = self._hand
        get = self._queue.get_nowait
        try:
            first = self._queue.get(timeout=wait) if wait > 0 and not hand else get()
            if first is not None:
                hand.append(first)
                if not self._stopping and self._busy():
                    self.pause(_LINGER)
            while len(hand) < _MOST:
                delivery = get()
                if delivery is not None:
                    hand.append(delivery)
        except Empty:
            pass
        if self._refused and monotonic() >= self._again_at:
            hand[:0] = self._refused
            self._refused = []
        elif self._refused and self._down:
            self._refused += hand
            hand.clear()

    _down = False  # the connection failed at the last try: nothing is tried before `_again_at`

    def _settle(self) -> None:
        batch = self._hand
        if not batch:
            return
        plain: list[Delivery] = []
        unique: list[Delivery] = []
        parks: list[Delivery] = []
        single: list[Delivery] = []
        for delivery in batch:
            settlement, message = delivery.settlement, delivery.message
            if settlement is None:
                (unique if message is not None and message.head.unique else plain).append(delivery)
            elif settlement is UNSEEN:
                plain.append(delivery)
            else:
                (parks if type(settlement) is Park else single).append(delivery)
        self._down = False
        for start in range(0, len(plain), _MOST):
            self._try(plain[start : start + _MOST], self._ack)
        for start in range(0, len(unique), _MOST):
            self._try(unique[start : start + _MOST], self._ack_unique)
        for start in range(0, len(parks), _MOST):
            self._try(parks[start : start + _MOST], self._park)
        for delivery in single:
            step = self._bury if isinstance(delivery.settlement, Bury) else self._postpone
            self._try([delivery], step)
        self._hand = []
        if self._refused:
            if monotonic() >= self._again_at:  # they were tried just now, or are new
                self._again_at = monotonic() + self._refusals.next()
        else:
            self._refusals.reset()
            self._health.succeeded(_SETTLEMENTS)

    def _try(
        self, batch: list[Delivery], step: Callable[[list[Delivery]], Sequence[int] | None]
    ) -> None:
        if self._down:
            self._refused += batch
            return
        try:
            statuses = step(batch)
        except Exception as error:  # whatever it is, the settlements are kept
            self._failed(batch, step, error)
            return
        if self._uncertain or self._strikes:
            self._check_lost(batch, statuses, uncertain=True)
        elif statuses is not None:
            self._check_lost(batch, statuses, uncertain=False)
        self._in_flight.remove_all(batch)
        if statuses is not None:
            self._schedule(batch, statuses)
        if any(map(_alone, batch)):
            self._settled_alone()

    def _schedule(self, batch: list[Delivery], statuses: Sequence[int]) -> None:
        """Have parked retries claimed when due: only now that they are out of the table."""
        for delivery, status in zip(batch, statuses, strict=True):
            settlement = delivery.settlement
            if status == group.MOVED and type(settlement) is Park and settlement.due is not None:
                self._parked(delivery.entry_id, settlement.due)

    # --- the steps ---

    def _ack(self, batch: list[Delivery]) -> None:
        self._deliveries.ack([delivery.entry_id for delivery in batch])

    def _ack_unique(self, batch: list[Delivery]) -> None:
        self._deliveries.ack_unique(
            [(d.entry_id, lock) for d in batch if (lock := lock_of(d.message)) is not None]
        )

    def _park(self, batch: list[Delivery]) -> list[int]:
        now = monotonic()
        parks: list[group.Park] = []
        for delivery in batch:
            settlement: Park = delivery.settlement
            delay = 0.0 if settlement.due is None else max(0.0, settlement.due - now)
            idle = (
                group.HAND_BACK_IDLE_MS
                if settlement.due is None
                else max(0, self._deliveries.reclaim_ms - round(delay * 1000))
            )
            lock = lock_of(delivery.message, round((delay + settlement.keep_lock) * 1000))
            parks.append(group.Park(delivery, idle, settlement.count, lock))
        return self._deliveries.park(parks, self._host())

    def _postpone(self, batch: list[Delivery]) -> list[int]:
        (delivery,) = batch
        settlement: Postpone = delivery.settlement
        message = delivery.message
        assert message is not None  # only what was decoded can be postponed
        delay = max(0.0, settlement.due - monotonic())
        member = to_delayed(
            message.text,
            id=message.id or delivery.entry_id.decode(),
            attempt=settlement.attempt,
            unknown=settlement.unknown or None,
            only_group=self._deliveries.name,
        )
        lock = lock_of(message, round((delay + settlement.keep_lock) * 1000))
        return [self._deliveries.postpone(delivery, delay, member, lock)]

    def _bury(self, batch: list[Delivery]) -> list[int]:
        (delivery,) = batch
        settlement: Bury = delivery.settlement
        status = self._deliveries.bury(
            delivery,
            settlement.fields,
            self._dead_letter_limit,
            lock=lock_of(delivery.message),
            without_body=settlement.without_body,
        )
        return [status]

    # --- when it does not go well ---

    def _failed(
        self,
        batch: list[Delivery],
        step: Callable[[list[Delivery]], Sequence[int] | None],
        error: Exception,
    ) -> None:
        self._health.failed(_SETTLEMENTS, error)
        if connection.lost(error):
            self._down = True
            self._uncertain.update(delivery.entry_id for delivery in batch)
            if len(batch) == 1 and not connection.timed_out(error):
                self._strike(batch[0], error)
        elif len(batch) > 1 and not connection.outage(error):
            for delivery in batch:  # find the one that isn't accepted; the others are
                self._try([delivery], step)
            return
        elif connection.too_large(error):
            self._impossible(batch[0], error, without_body=True)
        elif isinstance(error, InvalidTaskPayloadError):  # ran here, and yet can't be moved
            self._impossible(batch[0], error, without_body=False)
        self._refused += batch

    def _strike(self, delivery: Delivery, error: Exception) -> None:
        """A server that hangs up on one large message while it answers others will never take
        it."""
        if not isinstance(delivery.settlement, Postpone) or len(delivery.body or b"") < _LARGE:
            return
        try:
            self._deliveries.connections.call("PING")
        except Exception:  # away altogether
            return
        self._down = False
        strikes = self._strikes.get(delivery.entry_id, 0) + 1
        self._strikes[delivery.entry_id] = strikes
        if strikes >= _STRIKES:
            self._impossible(delivery, error, without_body=True)

    def _impossible(self, delivery: Delivery, error: Exception, *, without_body: bool) -> None:
        """It goes to the dead letters; an acknowledgement is never given up."""
        if delivery.settlement is None or delivery.settlement is UNSEEN:
            return
        size = len(delivery.body or b"")
        task = delivery.message.task_name if delivery.message else ""
        text = f"its {size} bytes could not be stored again: {describe(error)}"
        log.error("task %s can't be settled: %s", task, text, extra={"action": "task_failed"})
        if isinstance(delivery.settlement, Bury):
            fields = tuple(
                pair for pair in delivery.settlement.fields if pair[0] not in ("error", "traceback")
            )
        else:
            fields = (
                ("task_name", task),
                (
                    "message_id",
                    (delivery.message and delivery.message.id) or delivery.entry_id.decode(),
                ),
                ("error_type", type(error).__name__),
                ("attempts", str(delivery.count)),
                ("failed_at", f"{clock.now():.6f}"),
            )
        delivery.settlement = Bury(
            (*fields, ("error", text), ("traceback", "")), without_body=without_body
        )

    def _check_lost(
        self, batch: list[Delivery], statuses: Sequence[int] | None, *, uncertain: bool
    ) -> None:
        """Tell of what another consumer took over; what is gone was finished elsewhere, which is no
        news."""
        for i, delivery in enumerate(batch):
            taken = statuses is not None and statuses[i] == group.HELD_BY_ANOTHER
            if taken and not (delivery.lost or delivery.entry_id in self._uncertain):
                report_lost(self._reports, delivery)
            if uncertain:
                self._uncertain.discard(delivery.entry_id)
                self._strikes.pop(delivery.entry_id, None)


def report_lost(reports: Reports, delivery: Delivery) -> None:
    """Report a delivery that another consumer took over."""
    delivery.lost = True
    message = delivery.message
    error: TaskRunnerError = DeliveryLostError(
        f"entry {delivery.entry_id.decode()} (delivery {delivery.count}) was taken over by another consumer: this "
        "process was silent for longer than reclaim_delay"
    )
    log.warning("%s", error, extra={"action": "delivery_lost"})
    reports.add(
        "delivery_lost",
        error,
        task_name=message.task_name if message else None,
        message_id=message.id if message else None,
    )
