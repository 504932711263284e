"""Floor 2: the queue: one stream, as producers and operators see it.

`RedisStreamQueue` is public. What a consumer group does with the stream is in `group.py`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import redis
from redis.exceptions import ResponseError

from taskrunner import clock, keys, scripts
from taskrunner.clock import Duration
from taskrunner.errors import ConfigurationError, InvalidTaskPayloadError
from taskrunner.message import decode
from taskrunner.store.connection import Arg, Connections
from taskrunner.store.group import HAND_BACK_IDLE_MS, ConsumerGroup, is_entry_id

_DELETE: Final = scripts.load("delete")
_PAGE: Final = 16  # bodies of up to 10 MiB are read
_FEW_SAMPLES: Final = 10
_RING: Final = 1000
_SHORTEST_RECLAIM: Final = 0.1
_LONGEST_RECLAIM: Final = HAND_BACK_IDLE_MS // 1000


@attrs.frozen(kw_only=True)
class ConsumerMetrics:
    """One consumer of a group; `idle` in seconds."""

    name: str
    pending: int
    idle: float


@attrs.frozen(kw_only=True)
class GroupMetrics:
    """One group on the stream; `lag` is the server's, None where it does not know (wrong after
    deletions)."""

    name: str
    pending: int
    lag: int | None
    consumers: list[ConsumerMetrics]


@attrs.frozen(kw_only=True)
class QueueMetrics:
    """The queue now; claim delays in nanoseconds over the last 1000 samples, -1 with ten samples or
    fewer."""

    queue_size: int
    groups: list[GroupMetrics]
    message_claim_delay_avg: float
    message_claim_delay_std: float
    message_claim_delay_max: float
    message_claim_delay_last: float


class RedisStreamQueue:
    """A queue on the Redis stream `prefix:queue`.

    `reclaim_delay` (seconds) is how long a delivery may go without renewal before others take it
    over; all instances of a group use one value. With `delete_on_ack=False` finished entries stay
    in the stream, which then grows without bound. `redis_version` (e.g. "6.0.16") forces the
    commands of that version; None finds out.

    `client` is a `redis.Redis`, made in any way but for a cluster, or a URL. Making a queue sends
    nothing.
    """

    def __init__(
        self,
        client: "redis.Redis | str",
        *,
        prefix: str = "default",
        queue: str = "queue",
        reclaim_delay: Duration = 300,
        delete_on_ack: bool = True,
        redis_version: str | None = None,
    ) -> None:
        self.connections = Connections(client)
        self.prefix = _name("prefix", prefix)
        self.queue = _name("queue", queue)
        try:
            self.reclaim_delay = clock.seconds(reclaim_delay, "reclaim_delay")
        except (TypeError, ValueError) as error:
            raise ConfigurationError(str(error)) from None
        if self.reclaim_delay < _SHORTEST_RECLAIM:
            raise ConfigurationError(
                f"reclaim_delay={reclaim_delay!r} is below {_SHORTEST_RECLAIM} seconds: "
                "nothing could be renewed in time"
            )
        if self.reclaim_delay > _LONGEST_RECLAIM:
            raise ConfigurationError(
                f"reclaim_delay={reclaim_delay!r} is above {_LONGEST_RECLAIM} seconds: "
                "what is handed back could not be told from what is held"
            )
        if not isinstance(delete_on_ack, bool):
            raise ConfigurationError(f"delete_on_ack={delete_on_ack!r} is not a bool")
        self.delete_on_ack = delete_on_ack
        self._idle_filter = _has_idle_filter(redis_version)

    def __repr__(self) -> str:
        return f"<RedisStreamQueue {self.stream} at {self.connections.address}>"

    @property
    def stream(self) -> str:
        """The stream's key."""
        return keys.stream(self.prefix, self.queue)

    @property
    def ring(self) -> str:
        """The key of the last claim delays."""
        return keys.ring(self.prefix, self.queue)

    def add(self, payload: str) -> str:
        """Add an entry with this text as its `payload` field, as it is; returns its stream id.

        `Task.delay` is the usual way in: a worker sets aside what is not a message.
        """
        return _text(self.connections.call("XADD", self.stream, "*", "payload", payload))

    def __len__(self) -> int:
        """Entries in the stream: waiting and being run."""
        return int(self.connections.call("XLEN", self.stream))

    def __bool__(self) -> bool:
        return True

    def delete(self, id: str) -> bool:
        """Delete one entry, from the pending lists too, and release its unique lock; whether it was
        there."""
        if not is_entry_id(id):
            return False
        rows = self.connections.call("XRANGE", self.stream, id, id)
        return self._delete(rows) == 1

    def purge(self) -> int:
        """Delete every entry that is in the stream now, and release unique locks; returns how
        many."""
        newest = self.connections.call("XREVRANGE", self.stream, "+", "-", "COUNT", 1)
        if not newest:
            return 0
        total = 0
        while rows := self.connections.call(
            "XRANGE", self.stream, "-", newest[0][0], "COUNT", _PAGE
        ):
            total += self._delete(rows)
        return total

    def get_metrics(self, group: str | None = None) -> QueueMetrics:
        """Length, groups, consumers and claim delays; `group` leaves out the others."""
        size, ring = self.connections.calls(
            [("XLEN", self.stream), ("LRANGE", self.ring, 0, _RING - 1)]
        )
        for reply in (size, ring):
            if isinstance(reply, Exception):
                raise reply
        samples = [int(value) for value in ring]
        enough = len(samples) > _FEW_SAMPLES
        return QueueMetrics(
            queue_size=int(size),
            groups=list(self._groups(group)),
            message_claim_delay_avg=_mean(samples) if enough else -1,
            message_claim_delay_std=_deviation(samples) if enough else -1,
            message_claim_delay_max=max(samples) if enough else -1,
            message_claim_delay_last=samples[0] if enough else -1,
        )

    def for_group(self, group: str) -> ConsumerGroup:
        """The deliveries of one consumer group."""
        return ConsumerGroup(
            self.connections,
            self.stream,
            group,
            reclaim_ms=math.ceil(self.reclaim_delay * 1000),
            delete_on_ack=self.delete_on_ack,
            idle_filter=self._idle_filter,
        )

    def _groups(self, only: str | None) -> Iterator[GroupMetrics]:
        try:
            rows = self.connections.call("XINFO", "GROUPS", self.stream)
        except ResponseError as error:
            if "no such key" in str(error):
                return
            raise
        for row in rows:
            info = dict(zip(row[::2], row[1::2], strict=True))
            name = _text(info[b"name"])
            if only is not None and name != only:
                continue
            lag = info.get(b"lag")
            yield GroupMetrics(
                name=name,
                pending=int(info[b"pending"]),
                lag=None if lag is None else int(lag),
                consumers=[
                    ConsumerMetrics(name=consumer, pending=pending, idle=idle / 1000)
                    for consumer, pending, idle in self.for_group(name).consumers()
                ],
            )

    def _delete(self, rows: list[Any]) -> int:
        names, args = [self.stream], list[Arg]()
        for entry_id, fields in rows:
            lock_name, token = _lock(fields)
            if lock_name is not None:
                names.append(keys.unique(lock_name))
            args += (entry_id, len(names) if lock_name is not None else 0, token)
        return int(self.connections.run(_DELETE, names, args)) if rows else 0


def _lock(fields: list[bytes]) -> tuple[str | None, str]:
    body = dict(zip(fields[::2], fields[1::2], strict=True)).get(b"payload", b"")
    try:
        message = decode(body)
    except InvalidTaskPayloadError:
        return None, ""
    return message.lock_name, message.unique_lock_value


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _name(field: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{field}={value!r} is not a text of at least one character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{field}={value!r} can't be encoded as UTF-8") from None
    return value


def _has_idle_filter(version: str | None) -> bool | None:
    """XPENDING … IDLE came with 6.2."""
    if version is None:
        return None
    found = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if found is None:
        raise ConfigurationError(f"redis_version={version!r} is not a version like '7.0.15'")
    return (int(found[1]), int(found[2])) >= (6, 2)


# By hand, for importing `statistics` takes longer than all of this module.


def _mean(samples: Sequence[float]) -> float:
    return math.fsum(samples) / len(samples)


def _deviation(samples: Sequence[float]) -> float:
    mean = _mean(samples)
    return math.sqrt(_mean([(sample - mean) ** 2 for sample in samples]))
