"""Floor 4: takes over what nobody looks after: retries that are due, hand-backs, and deliveries
whose holder went silent.

Owns a consumer of its own and the heap of retries this instance parked, which it claims by id when
they are due. The scan for overdue entries is the net for everything else.
"""

import heapq
import logging
import threading
from contextlib import suppress
from typing import Final

from taskrunner import keys
from taskrunner.clock import jittered, monotonic
from taskrunner.delivery import Delivery
from taskrunner.in_flight import ByteBudget, InFlight
from taskrunner.observer import Observers
from taskrunner.reports import Health
from taskrunner.service import Service
from taskrunner.services.delivery_heartbeat import DeliveryHeartbeat
from taskrunner.services.fetcher import Fetcher
from taskrunner.services.instance_heartbeat import InstanceHeartbeat
from taskrunner.settler import Settler
from taskrunner.store import connection
from taskrunner.store.group import Claimed, ConsumerGroup, Pending
from taskrunner.store.instances import Instances, is_ours
from taskrunner.unseen import park_unseen
from taskrunner.worker_pool import WorkerPool

_SCAN: Final = 1.0
_PAGE: Final = 100
_LOOK: Final = 0.25
"""Seconds: so often it is judged anew whether this instance has nothing else to do."""

_NO_ROOM: Final = 0.002
"""Seconds between two looks for room. Longer ones would leave all of it to the fetchers, whom the
workers wake."""

log = logging.getLogger("taskrunner.reclaimer")


class Reclaimer(Service):
    """XPENDING and XCLAIM, by one thread."""

    jitter = 0.0

    def __init__(
        self,
        health: Health,
        *,
        number: int,
        deliveries: ConsumerGroup,
        instance: InstanceHeartbeat,
        instances: Instances,
        in_flight: InFlight,
        pool: WorkerPool,
        settler: Settler,
        heartbeat: DeliveryHeartbeat,
        fetchers: list[Fetcher],
        budget: ByteBudget,
        reclaim_delay: float,
        observers: Observers,
    ) -> None:
        super().__init__("reclaimer", health)
        self._number = number
        self._deliveries = deliveries
        self._instance = instance
        self._instances = instances
        self._in_flight = in_flight
        self._pool = pool
        self._settler = settler
        self._heartbeat = heartbeat
        self._fetchers = fetchers
        self._budget = budget
        self._reclaim_delay = reclaim_delay
        self._observers = observers
        self._retries: list[tuple[float, bytes]] = []  # (due, entry id), a heap
        self._lock = threading.Lock()
        self._next_scan = 0.0
        self._scanned = 0.0
        self._cursor = b"-"
        self._more = False  # overdue entries wait for room
        self._gated = False  # orphans wait for the one that runs alone
        self._alone: Delivery | None = None
        self._missed: set[tuple[str, str]] = set()
        self._was_away = False
        self.reclaimed = 0

    # --- for others ---

    def schedule(self, entry_id: bytes, due: float) -> None:
        """A retry was parked: claim it by id when it is due."""
        with self._lock:
            heapq.heappush(self._retries, (due, entry_id))
            first = self._retries[0][1] == entry_id
        if first:
            self.wake()

    def settled_alone(self) -> None:
        """The orphan that ran alone is settled: the next one may come."""
        self.wake()

    # --- the round ---

    def tick(self) -> float:
        host = self._instance.host
        if host is None:
            return 0.02
        if self._backoff.waiting:
            # After an outage everything looks overdue: the holders renew first.
            self._was_away = True
        now = monotonic()
        if self._was_away:
            self._instances.server_time()
            self._was_away = False
            self._scanned = self._next_scan = now + min(self._reclaim_delay / 3, 3.0)
            self._more, self._gated, self._cursor = False, False, b"-"
        if now - self._in_flight.oldest_confirmation() > self._reclaim_delay / 2:
            self._heartbeat.wake()
            return 0.05
        if self._settler.congested():
            return 0.1
        self._park_missed()
        full = self._claim_due_retries(host, now)
        if (
            now >= min(self._next_scan, self._scanned + self._interval())
            or self._more
            or (self._gated and self._may_run_alone(now))
        ):
            full = self._scan(host, now) or full
        return self._pause(full)

    def close(self) -> None:
        host = self._instance.host
        if host is not None:
            self._missed.add((host, self._consumer(host)))

    def park_unseen(self) -> None:
        """After the end of the thread: what was claimed and never arrived is for others to take."""
        with suppress(Exception):  # what can't be parked now is reclaimed when it is overdue
            self._park_missed()

    def _park_missed(self) -> None:
        for host, consumer in list(self._missed):
            if park_unseen(
                self._deliveries,
                self._in_flight,
                consumer=consumer,
                host=host,
                instance_id=self._instance.instance_id,
            ):
                self._missed.discard((host, consumer))

    def _consumer(self, host: str) -> str:
        return keys.consumer(self._deliveries.name, host, self._number)

    def _pause(self, full: bool) -> float:
        if full:
            return _NO_ROOM
        now = monotonic()
        with self._lock:
            due = self._retries[0][0] if self._retries else now + _SCAN
        return max(0.0, min(due, self._next_scan, now + _LOOK) - now)

    def _claim_due_retries(self, host: str, now: float) -> bool:
        """Claim our own parked retries by id; whether some had to wait for room."""
        with self._lock:
            if not self._retries or self._retries[0][0] > now:
                return False  # without asking for room: a share that is asked for counts as taken
        room = self._pool.room_for_old()
        dues: dict[bytes, float] = {}
        with self._lock:
            while self._retries and self._retries[0][0] <= now:
                if len(dues) >= room:
                    break
                due, entry_id = heapq.heappop(self._retries)
                dues[entry_id] = due
            waiting = bool(self._retries) and self._retries[0][0] <= now
        if dues:
            try:
                results = self._claim(list(dues), host)
            except Exception:
                with self._lock:
                    for entry_id in dues:
                        heapq.heappush(self._retries, (now, entry_id))
                raise
            taken = {result.entry_id for result in results}
            for result in results:
                if result.delivery is not None:
                    self._observers.late("retry", monotonic() - dues[result.entry_id])
                parked = keys.parse_consumer(self._deliveries.name, result.former)
                if result.early_ms is not None and parked and parked[1] == keys.PARKING:
                    self.schedule(result.entry_id, monotonic() + (result.early_ms + 1) / 1000)
            with self._lock:
                for entry_id in dues.keys() - taken:
                    heapq.heappush(self._retries, (dues[entry_id], entry_id))
                    waiting = True
        return waiting

    def _scan(self, host: str, now: float) -> bool:
        """Look at one page of overdue entries and claim what may be claimed; whether room ran
        out."""
        room = self._pool.room_for_old()
        if room == 0:
            if now >= self._next_scan:
                self._next_scan = now + jittered(self._interval())
                self._more = self._more or bool(self._deliveries.overdue(b"-", _PAGE)[0])
                self._pool.overdue(self._more)
            return self._more
        if not self._more:
            self._cursor, self._gated = b"-", False
        rows, following = self._deliveries.overdue(self._cursor, max(room, _PAGE))
        chosen: list[Pending] = []
        alone = self._orphans(rows)
        gate_taken = not self._may_run_alone(now)
        rest: bytes | None = following
        for row in rows:
            if row.entry_id in self._in_flight:
                continue
            if len(chosen) == room:
                rest = row.entry_id
                break
            if row.entry_id in alone:
                if gate_taken:
                    self._gated = True
                    continue
                gate_taken = True
            chosen.append(row)
        if chosen:
            results = self._claim([row.entry_id for row in chosen], host, alone)
            if len(results) < len(chosen):
                rest = chosen[len(results)].entry_id
            for result in results:
                if result.delivery is not None:
                    self._log(result)
        self._more = rest is not None
        self._cursor = rest if rest is not None else b"-"
        self._pool.overdue(self._more)
        if not self._more:
            self._scanned = monotonic()
            self._next_scan = monotonic() + jittered(self._interval())
        return self._more

    def _interval(self) -> float:
        """Every second with nothing else to do, else the group's pace: one scan a second over all
        instances."""
        idle = self._pool.free > 0 and all(fetcher.finds_nothing for fetcher in self._fetchers)
        return _SCAN if idle else _SCAN * max(1, self._instance.replications)

    def _orphans(self, rows: list[Pending]) -> set[bytes]:
        """Ids among the rows that may have killed their process: delivered twice or more, their
        reader's host dead.

        Also those of a living instance of this library: it renews all it holds, so it does not hold
        these. A Go host leaves failed tasks pending on purpose.
        """
        hosts: dict[bytes, str] = {}
        for row in rows:
            parsed = keys.parse_consumer(self._deliveries.name, row.consumer)
            if row.count >= 2 and parsed is not None and parsed[1] != keys.PARKING:
                hosts[row.entry_id] = parsed[0]
        living = self._instances.living(hosts.values())
        return {
            entry_id
            for entry_id, host in hosts.items()
            if host not in living or is_ours(living[host])
        }

    def _may_run_alone(self, now: float) -> bool:
        alone = self._alone
        if alone is None or alone.entry_id not in self._in_flight:
            self._alone = None
            return True
        return alone.started > 0 and now - alone.started > self._reclaim_delay

    def _claim(self, ids: list[bytes], host: str, alone: set[bytes] | None = None) -> list[Claimed]:
        """Take over the first of these, all of them unless they are more than a budget of bytes:
        then there is to be room for the others first."""
        consumer = self._consumer(host)
        results: list[Claimed] = []
        while ids:
            count = self._budget.allow(len(ids))
            page, ids = ids[:count], ids[count:]
            try:
                claimed = self._deliveries.claim(page, consumer, self._budget.LIMIT)
            except Exception as error:
                if not connection.answered(error):
                    self._missed.add((host, consumer))
                raise
            fresh: list[Delivery] = []
            for result in claimed:
                delivery = result.delivery
                if result.body_gone:
                    log.warning(
                        "entry %s was pending without a body (deleted by hand or trimmed): acknowledged",
                        result.entry_id.decode(),
                    )
                if delivery is None:
                    continue
                if alone and delivery.entry_id in alone:
                    delivery.alone = True
                    self._alone = delivery
                if self._in_flight.add(delivery):
                    fresh.append(delivery)
            self._budget.saw(fresh)
            self._pool.submit([delivery for delivery in fresh if not delivery.alone])
            for delivery in fresh:
                if delivery.alone:
                    self._pool.submit_first(delivery)
            results += claimed
            if len(claimed) < len(page) or (ids and self._in_flight.bytes() >= self._budget.LIMIT):
                break
        return results

    def _log(self, result: Claimed) -> None:
        parsed = keys.parse_consumer(self._deliveries.name, result.former)
        if parsed is not None and parsed[1] == keys.PARKING:
            return  # an orderly retry or hand-back
        self.reclaimed += 1
        self._observers.reclaimed()
        log.info(
            "entry %s taken over from silent consumer %s",
            result.entry_id.decode(),
            result.former,
            extra={"action": "delivery_reclaimed"},
        )
