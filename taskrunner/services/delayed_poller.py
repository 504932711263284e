"""Floor 4: the leader's clock: moves what is due from the delayed set to the stream.

Reads from the front until nothing is due, one bounded batch a step, the lease checked inside each
step; then sleeps until the next due time, at most the poll interval, and is woken when something
earlier is added.
"""

import logging
import math
import os
from base64 import b64encode
from hashlib import sha1
from typing import Any, Final

from taskrunner import keys
from taskrunner.clock import monotonic
from taskrunner.errors import InvalidTaskPayloadError, describe
from taskrunner.executor import Timings
from taskrunner.message import DelayedMessage, decode_delayed, from_delayed
from taskrunner.observer import Observers
from taskrunner.reports import Health, Reports
from taskrunner.service import Service
from taskrunner.services.elector import Elector
from taskrunner.store.delayed_set import DelayedSet, Promotion
from taskrunner.store.group import Lock
from taskrunner.task import RESERVED_NAME, Registry, Task
from taskrunner.unique_key import lock_name

_BATCH: Final = 200
_PUT_OFF_CAP: Final = 60.0
_MOST_PUT_OFF: Final = 10_000
_PROMOTED: Final = 1
_PUT_OFF: Final = 2

log = logging.getLogger("taskrunner.delayed")


class DelayedPoller(Service):
    """Promotes due messages, while this instance leads."""

    jitter = 0.0

    def __init__(
        self,
        health: Health,
        *,
        delayed: DelayedSet,
        elector: Elector,
        registry: Registry,
        reports: Reports,
        timings: Timings,
        reclaim_delay: float,
        poll: float,
        dead_letter_limit: int,
        observers: Observers,
    ) -> None:
        super().__init__("delayed-poller", health)
        self._delayed = delayed
        self._elector = elector
        self._registry = registry
        self._reports = reports
        self._timings = timings
        self._renewal_ns = max(1, round(reclaim_delay / 3 * 1e9))
        self._poll = poll
        self._dead_letter_limit = dead_letter_limit
        self._observers = observers
        self._put_off: dict[bytes, int] = {}  # how often a member from Go found its lock taken

    def tick(self) -> float:
        if not self._elector.is_leader():
            self._put_off.clear()
            return self._poll
        started = monotonic()
        now, following, members = self._delayed.due(_BATCH)
        if members:
            promotions = [self._promotion(member, now) for member, _ in members]
            statuses = self._delayed.promote(
                self._elector.lease.key, self._elector.lease.value, promotions
            )
            if statuses is None:
                self._elector.lose()
                return 0.0
            taken = monotonic() - started
            for promotion, status, (_, due) in zip(promotions, statuses, members, strict=True):
                self._note(promotion, status)
                if status == _PROMOTED and promotion.kind != "dead":
                    self._observers.late("delayed", now + taken - due)
            self._timings.add(RESERVED_NAME, taken)
            return 0.0
        return self._poll if following is None else min(self._poll, max(0.0, following - now))

    def _promotion(self, member: bytes, now: float) -> Promotion:
        try:
            message = decode_delayed(member)
            task = self._registry.get(message.task_name)
            renewal = self._renewal_ns
            if task is not None and task.reservation_timeout is not None:
                renewal = max(1, round(task.reservation_timeout * 1e9))
            lock = None
            if not message.unique and task is not None and task.unique_for is not None:
                lock = self._lock_for(task, message)
            if lock is None:
                body = from_delayed(message.text, reservation_timeout_ns=renewal)
                return Promotion(member=member, kind="run", body=body)
            assert task is not None and task.unique_for is not None
            name = lock.key.removeprefix(keys.unique(""))
            body = from_delayed(
                message.text,
                reservation_timeout_ns=renewal,
                unique=(math.ceil(task.unique_for), name, lock.token),
            )
            put_off = min(_PUT_OFF_CAP, 2.0 ** min(self._put_off.get(_digest(member), 0), 10))
            return Promotion(
                member=member, kind="take", body=body, lock=lock, put_off_to=now + put_off
            )
        except InvalidTaskPayloadError as error:
            return Promotion(
                member=member,
                kind="dead",
                body=describe(error),
                most_letters=self._dead_letter_limit,
            )

    def _lock_for(self, task: Task[Any], message: DelayedMessage) -> Lock | None:
        """A new lock for a member that brings none (from Go) of a task that is unique here."""
        try:
            name = lock_name(task, message.payload, message.payload_text)
        except BaseException as error:  # the key function is the application's
            log.error(
                "unique_key of task %s failed for a delayed message, which runs as not unique: %s",
                task.name, describe(error), extra={"action": "service_error"},
            )  # fmt: skip
            self._reports.add("service_error", error, task_name=task.name, message_id=message.id)
            return None
        assert task.unique_for is not None
        token = b64encode(os.urandom(16)).decode()
        return Lock(keys.unique(name), token, math.ceil(task.unique_for) * 1000)

    def _note(self, promotion: Promotion, status: int) -> None:
        if status == _PUT_OFF:
            if len(self._put_off) >= _MOST_PUT_OFF:
                self._put_off.clear()
            key = _digest(promotion.member)
            times = self._put_off[key] = self._put_off.get(key, 0) + 1
            if times == 1:
                log.warning(
                    "a delayed message waits for its unique lock %s, which another message holds",
                    promotion.lock.key if promotion.lock else "",
                )
            return
        if self._put_off:
            self._put_off.pop(_digest(promotion.member), None)
        if promotion.kind == "dead" and status == 1:
            error = InvalidTaskPayloadError(promotion.body)
            log.error(
                "a member of the delayed set was no message and went to the dead letters: %s",
                promotion.body, extra={"action": "task_failed"},
            )  # fmt: skip
            self._reports.add("task_failed", error)


def _digest(member: bytes) -> bytes:
    return sha1(member, usedforsecurity=False).digest()
