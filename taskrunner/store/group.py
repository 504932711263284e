"""Floor 2: one consumer group on one stream: every move a delivery can make.

Owns: the commands and steps that read, renew, park, claim and end deliveries, and the shape of
their replies. Leaves to its callers: when to make a move, and what to do when Redis refuses.
"""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import attrs
from redis.exceptions import ResponseError

from taskrunner import keys, scripts
from taskrunner.clock import monotonic
from taskrunner.delivery import Delivery
from taskrunner.store import connection
from taskrunner.store.connection import Arg, Connections, Link

_ACK: Final = scripts.load("ack")
_ACK_UNIQUE: Final = scripts.load("ack_unique")
_PARK: Final = scripts.load("park")
_RENEW: Final = scripts.load("renew")
_CLAIM: Final = scripts.load("claim")
_BURY: Final = scripts.load("bury")
_POSTPONE: Final = scripts.load("postpone")
_START_UNIQUE: Final = scripts.load("start_unique")
_REMOVE_CONSUMER: Final = scripts.load("remove_consumer")

HAND_BACK_IDLE_MS: Final = 10**9
"""Idle time given to a delivery handed back: claimable at once, by Go too."""

_ANY_SIZE: Final = 1 << 62

_ENTRY_ID: Final = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)

MOVED: Final = 1
HELD_BY_ANOTHER: Final = 0
NOT_PENDING: Final = -1
BODY_GONE: Final = -2
NOT_PRESENT: Final = -2
"""Of a guarded park: our presence key is gone for now, so nothing was done."""


class Lock(NamedTuple):
    """A message's unique lock: its key, the message's token, and how long it must live in ms."""

    key: str
    token: str
    ms: int


@attrs.frozen
class Park:
    """One delivery to be parked; `count` None keeps the delivery count."""

    delivery: Delivery
    idle_ms: int
    count: int | None = None
    lock: Lock | None = None


@attrs.frozen
class Pending:
    """One row of XPENDING."""

    entry_id: bytes
    consumer: str
    idle_ms: int
    count: int


class Claimed(NamedTuple):
    """What a claim found: `delivery` when taken, `early_ms` when not idle long enough, else
    gone."""

    entry_id: bytes
    former: str = ""
    delivery: Delivery | None = None
    early_ms: int | None = None
    body_gone: bool = False


class ConsumerGroup:
    """The deliveries of one group on one stream."""

    def __init__(
        self,
        connections: Connections,
        stream: str,
        group: str,
        *,
        reclaim_ms: int,
        delete_on_ack: bool,
        idle_filter: bool | None = None,
    ) -> None:
        self.connections = connections
        self.stream = stream
        self.name = group
        self.reclaim_ms = reclaim_ms
        self._delete = "1" if delete_on_ack else "0"
        self._idle_filter = (
            idle_filter  # None: asked for until the server refuses it (older than 6.2)
        )

    def create(self) -> None:
        """Create stream and group, from the very start: what was added before is delivered too."""
        try:
            self.connections.call("XGROUP", "CREATE", self.stream, self.name, "0-0", "MKSTREAM")
        except ResponseError as error:
            if connection.code(error) != "BUSYGROUP":
                raise

    def create_consumers(self, consumers: Sequence[str]) -> None:
        """Make readers known before their first message, so that idle instances are counted."""
        replies = self.connections.calls(
            [("XGROUP", "CREATECONSUMER", self.stream, self.name, name) for name in consumers]
        )
        if any(isinstance(reply, Exception) and _no_group(reply) for reply in replies):
            self.create()
            replies = self.connections.calls(
                [("XGROUP", "CREATECONSUMER", self.stream, self.name, name) for name in consumers]
            )
        for reply in replies:
            if isinstance(reply, Exception) and "subcommand" not in str(
                reply
            ):  # before 6.2 there is none
                raise reply

    def read(
        self,
        link: Link,
        consumer: str,
        count: int,
        block_ms: int | None,
        most_bytes: int | None = None,
    ) -> list[Delivery]:
        """Read new entries; blocks up to `block_ms` when there are none, or not at all (None).

        Several of more than `most_bytes` together raise ReplyTooLargeError: then they are delivered,
        and unseen. A single one is read whatever its size.
        """
        sent = monotonic()
        block = () if block_ms is None else ("BLOCK", block_ms)
        command: list[Arg] = [
            "XREADGROUP", "GROUP", self.name, consumer, "COUNT", count, *block,
            "STREAMS", self.stream, ">",
        ]  # fmt: skip
        if count == 1 or most_bytes is None:
            reply = link.call(*command)
        else:
            reply = link.call_within(most_bytes, *command)
        if not reply:
            return []
        now = monotonic()
        batch = [_delivery(row[0], row[1], consumer, 1, now) for row in reply[0][1]]
        if now - sent > self.reclaim_ms / 3000:
            # It may lie in our socket since then (a paused process): it is renewed at once, or asked
            # about where it may be another's by now.
            for delivery in batch:
                delivery.confirmed = sent
        return batch

    def ack(self, entry_ids: Sequence[bytes]) -> None:
        """End deliveries of messages that are not unique."""
        self.connections.run(_ACK, [self.stream], [self.name, self._delete, *entry_ids])

    def ack_unique(self, ended: Sequence[tuple[bytes, Lock]]) -> None:
        """End deliveries of unique messages; the locks they hold are released."""
        args: list[Arg] = [self.name, self._delete]
        for entry_id, lock in ended:
            args += (entry_id, lock.token)
        self.connections.run(_ACK_UNIQUE, [self.stream, *(lock.key for _, lock in ended)], args)

    def park(
        self, parks: Sequence[Park], host: str, *, guard: str = "", presence: str | None = None
    ) -> list[int]:
        """Give deliveries to the parking consumer of `host`; a status for each.

        With `guard` only while the presence key still holds that instance id.
        """
        names = [self.stream, presence or keys.presence(host)]
        args: list[Arg] = [self.name, keys.consumer(self.name, host, keys.PARKING), guard]
        for park in parks:
            delivery = park.delivery
            args += (
                delivery.entry_id, delivery.consumer, delivery.count, park.idle_ms,
                "" if park.count is None else park.count,
            )  # fmt: skip
            _add_lock(names, args, park.lock)
        return [int(status) for status in self.connections.run(_PARK, names, args)]

    def renew(self, held: Sequence[tuple[Delivery, Lock | None]]) -> list[int]:
        """Renew deliveries that are still ours, and their locks; a status for each."""
        names = [self.stream]
        args: list[Arg] = [self.name]
        for delivery, lock in held:
            args += (delivery.entry_id, delivery.consumer, delivery.count)
            _add_lock(names, args, lock)
        return [int(status) for status in self.connections.run(_RENEW, names, args)]

    def hold_lock(self, delivery: Delivery, lock: Lock) -> int:
        """Renew a delivery's unique lock, or take it again: MOVED, HELD_BY_ANOTHER message,
        NOT_PENDING for us."""
        return int(
            self.connections.run(
                _START_UNIQUE,
                [lock.key, self.stream],
                [
                    lock.token,
                    lock.ms,
                    self.name,
                    delivery.entry_id,
                    delivery.consumer,
                    delivery.count,
                ],
            )
        )

    def claim(
        self, entry_ids: Sequence[bytes], consumer: str, most_bytes: int = _ANY_SIZE
    ) -> list[Claimed]:
        """Take over what has been idle for reclaim_delay; a result for each id, paired by id.

        Results end where they hold `most_bytes`: the other ids were not looked at.
        """
        sent = monotonic()
        rows = self.connections.run(
            _CLAIM, [self.stream], [self.name, consumer, self.reclaim_ms, most_bytes, *entry_ids]
        )
        now = monotonic()
        claimed = [self._claimed(row, consumer, now) for row in rows]
        for result in claimed:
            if result.delivery is not None:
                result.delivery.confirmed = sent
        return claimed

    def _claimed(self, row: list[Any], consumer: str, now: float) -> Claimed:
        entry_id, count = row[0], int(row[1])
        if count == -2:
            return Claimed(entry_id)
        former = row[2].decode(errors="replace")
        if count == -1:
            return Claimed(entry_id, former, early_ms=max(0, self.reclaim_ms - int(row[3])))
        if count == 0:
            return Claimed(entry_id, former, body_gone=True)
        return Claimed(entry_id, former, _delivery(entry_id, row[3], consumer, count, now))

    def overdue(self, after: bytes, count: int) -> tuple[list[Pending], bytes | None]:
        """One page of entries idle for reclaim_delay, from entry id `after` on ("-": the oldest).

        Returns the rows and where the next page starts, None at the end. Servers older than 6.2
        have no IDLE filter: there the page is read whole and filtered here.
        """
        filtered = self._idle_filter is not False
        command: list[Arg] = ["XPENDING", self.stream, self.name]
        if filtered:
            command += ("IDLE", self.reclaim_ms)
        try:
            rows = self.connections.call(*command, after, "+", count)
        except ResponseError as error:
            if self._idle_filter is None and filtered and connection.code(error) == "ERR":
                self._idle_filter = False
                return self.overdue(after, count)
            if _no_group(error):
                return [], None
            raise
        pending = [_pending(row) for row in rows]
        following = next_id(pending[-1].entry_id) if len(pending) == count else None
        return [row for row in pending if row.idle_ms >= self.reclaim_ms], following

    def pending_of(self, consumer: str, after: bytes, count: int) -> list[Pending]:
        """One page of what is pending for a consumer, by id."""
        try:
            rows = self.connections.call(
                "XPENDING", self.stream, self.name, after, "+", count, consumer
            )
        except ResponseError as error:
            if _no_group(error):
                return []
            raise
        return [_pending(row) for row in rows]

    def bury(
        self,
        delivery: Delivery,
        fields: Sequence[tuple[str, Arg]],
        limit: int,
        *,
        lock: Lock | None = None,
        without_body: bool = False,
    ) -> int:
        """Move a delivery to the dead letters; a status."""
        names = [self.stream, keys.dead_letters(self.name)]
        if lock:
            names.append(lock.key)
        args: list[Arg] = [
            self.name, self._delete, delivery.entry_id, delivery.consumer, delivery.count, limit,
            lock.token if lock else "", "1" if without_body else "0",
        ]  # fmt: skip
        for name, value in fields:
            args += (name, value)
        return int(self.connections.run(_BURY, names, args))

    def postpone(
        self, delivery: Delivery, delay: float, member: tuple[str, str], lock: Lock | None
    ) -> int:
        """Move a delivery to the delayed set, due `delay` seconds from the server's now; a
        status."""
        names = [self.stream, keys.delayed(self.name)]
        if lock:
            names.append(lock.key)
        args: list[Arg] = [
            self.name, self._delete, delivery.entry_id, delivery.consumer, delivery.count, f"{delay:.6f}", *member,
            lock.token if lock else "", lock.ms if lock else 0, keys.channel(self.name),
        ]  # fmt: skip
        return int(self.connections.run(_POSTPONE, names, args))

    def consumers(self) -> list[tuple[str, int, int]]:
        """Name, pending and idle ms of each consumer; none where the group is missing."""
        try:
            rows = self.connections.call("XINFO", "CONSUMERS", self.stream, self.name)
        except ResponseError as error:
            if _no_group(error):
                return []
            raise
        found: list[tuple[str, int, int]] = []
        for row in rows:
            info = dict(zip(row[::2], row[1::2], strict=True))
            found.append(
                (info[b"name"].decode(errors="replace"), int(info[b"pending"]), int(info[b"idle"]))
            )
        return found

    def remove_consumer(self, consumer: str, host: str, *, idle_ms: int, owner: str = "") -> bool:
        """Remove a consumer nothing is pending for; `owner`: our instance id, for our own
        readers."""
        return bool(
            self.connections.run(
                _REMOVE_CONSUMER,
                [self.stream, keys.presence(host)],
                [self.name, consumer, idle_ms, owner],
            )
        )


def _add_lock(names: list[str], args: list[Arg], lock: Lock | None) -> None:
    if lock is None:
        args += (0, "", 0)
    else:
        names.append(lock.key)
        args += (len(names), lock.token, lock.ms)


def _delivery(
    entry_id: bytes, fields: list[bytes], consumer: str, count: int, now: float
) -> Delivery:
    if len(fields) == 2 and fields[0] == b"payload":
        return Delivery(entry_id, fields[1], consumer, count, now)
    size = sum(len(field) for field in fields)
    for i in range(0, len(fields), 2):
        if fields[i] == b"payload":
            delivery = Delivery(entry_id, fields[i + 1], consumer, count, now)
            delivery.size = size
            return delivery
    delivery = Delivery(entry_id, None, consumer, count, now)
    delivery.fields, delivery.size = fields, size
    return delivery


def _pending(row: list[Any]) -> Pending:
    return Pending(row[0], row[1].decode(errors="replace"), int(row[2]), int(row[3]))


def _no_group(error: Exception) -> bool:
    """Whether stream or group is missing; servers have several ways to say it."""
    text = str(error)
    return (
        connection.missing_group(error)
        or "no such key" in text
        or "requires the key to exist" in text
    )


def is_entry_id(text: str) -> bool:
    """Whether Redis would take it for the id of an entry."""
    return _ENTRY_ID.fullmatch(text) is not None


def added_at(entry_id: bytes) -> float:
    """When the entry came to the stream, in unix seconds of the server."""
    return int(entry_id.partition(b"-")[0]) / 1000


def next_id(entry_id: bytes) -> bytes:
    ms, _, sequence = entry_id.partition(b"-")
    return ms + b"-" + str(int(sequence) + 1).encode()
