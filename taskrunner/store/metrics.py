"""Floor 2: the group's figures in Redis: summed timings, claim delays, the published capacity."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from redis.exceptions import ResponseError

from taskrunner import keys, scripts
from taskrunner.store.connection import Arg, Connections

_RESET_METRICS: Final = scripts.load("reset_metrics")
_COUNT_AFTER: Final = scripts.load("count_after")
_RING: Final = 1000
_FEW: Final = 1000
"""Up to so many, waiting entries are counted rather than believed."""
_PAGE: Final = 1000
_MOST_COUNTED: Final = 100_000


class Snapshot(NamedTuple):
    """Sums in ms and counts of runs by task, and the state of the queue."""

    sums: dict[str, int]
    counts: dict[str, int]
    queue_length: int
    waiting: int


class Metrics:
    """Figures of one group."""

    def __init__(
        self, connections: Connections, stream: str, ring: str, group: str, *, delete_on_ack: bool
    ) -> None:
        self._connections = connections
        self._stream = stream
        self._ring = ring
        self._group = group
        self._delete_on_ack = delete_on_ack
        self._key = keys.metrics(group)
        self._capacity = keys.capacity(group)

    # --- timings ---

    def add(
        self, timings: Mapping[str, tuple[int, int]]
    ) -> tuple[dict[str, tuple[int, int]], Exception | None]:
        """Add (ms, runs) by task name in one transaction, so that no reset parts a pair.

        Returns what was refused (a field that holds no integer, no memory) and why.
        """
        commands: list[Sequence[Arg]] = [("MULTI",)]
        for name, (ms, count) in timings.items():
            commands.append(("HINCRBY", self._key, f"{name}_sum", ms))
            commands.append(("HINCRBY", self._key, f"{name}_count", count))
        *queued, done = self._connections.calls([*commands, ("EXEC",)])
        if isinstance(done, Exception):  # none was carried out: the reason is with one of them
            reasons = [reply for reply in queued if isinstance(reply, Exception)]
            return dict(timings), (reasons or [done])[0]
        left: dict[str, tuple[int, int]] = {}
        error: Exception | None = None
        for i, (name, (ms, count)) in enumerate(timings.items()):
            for_sum, for_count = done[2 * i], done[2 * i + 1]
            for reply in (for_sum, for_count):
                if isinstance(reply, Exception):
                    error = reply
                    left[name] = (
                        ms if isinstance(for_sum, Exception) else 0,
                        count if isinstance(for_count, Exception) else 0,
                    )
        return left, error

    def reset(self, lease: str, instance_id: str) -> bool:
        """Set all timings to 0, if the lease is ours; samples that arrive later count."""
        return bool(self._connections.run(_RESET_METRICS, [lease, self._key], [instance_id]))

    # --- claim delays ---

    def add_claim_delays(self, delays: Sequence[int]) -> None:
        """Put delays in ns, newest last, in front of the ring, which keeps the newest 1000."""
        for reply in self._connections.calls(
            [("LPUSH", self._ring, *delays), ("LTRIM", self._ring, 0, _RING - 1)]
        ):
            if isinstance(reply, Exception):
                raise reply

    # --- capacity ---

    def publish_capacity(self, capacity: int, ttl: float) -> None:
        """Tell the followers how many workers each should have."""
        self._connections.call("SET", self._capacity, capacity, "PX", round(ttl * 1000))

    def capacity(self) -> int | None:
        """The published capacity, None where there is none that can be read."""
        value = self._connections.call("GET", self._capacity)
        try:
            return None if value is None else int(value)
        except ValueError:
            return None

    # --- reading ---

    def snapshot(self) -> Snapshot:
        """Everything `stats()` needs from Redis, in one round trip where history is deleted and the
        server knows the lag (7.0), else in a few."""
        replies = self._connections.calls(
            [
                ("HGETALL", self._key),
                ("XLEN", self._stream),
                ("XINFO", "GROUPS", self._stream),
            ]
        )
        hash_, length, groups = replies
        for reply in (hash_, length):
            if isinstance(reply, Exception):
                raise reply
        if isinstance(groups, ResponseError) and "no such key" in str(groups):
            groups = []
        elif isinstance(groups, Exception):
            raise groups
        sums, counts = _timings(hash_)
        return Snapshot(sums, counts, int(length), self._waiting(int(length), groups))

    def _waiting(self, length: int, groups: list[Any]) -> int:
        """What nobody runs yet. Where finished entries stay, the length says nothing.

        The server's lag is exact until entries are deleted; then it is missing or, on 7.0, too
        large.
        """
        infos = [dict(zip(row[::2], row[1::2], strict=True)) for row in groups]
        own = next((info for info in infos if info[b"name"] == self._group.encode()), None)
        if own is None:
            return length
        lag = own.get(b"lag")
        if self._delete_on_ack and len(infos) == 1:
            waiting = max(0, length - int(own[b"pending"]))
            if lag is not None:
                return min(waiting, int(lag))
            if not waiting or not self._begins_with_history(own[b"last-delivered-id"]):
                return waiting
        elif lag is not None and int(lag) > _FEW:
            return int(lag)
        return self._count_after(own[b"last-delivered-id"])

    def _begins_with_history(self, delivered: bytes) -> bool:
        """Whether the oldest entry is a finished one: another group is gone, and the leader has not
        trimmed yet what was kept for it. Servers before 7.0 know no lag that would tell."""
        found, oldest = self._connections.run(_COUNT_AFTER, [self._stream], ["0-0", 1])
        if not int(found) or _order(oldest) > _order(delivered):
            return False
        pending = self._connections.call("XPENDING", self._stream, self._group)
        return pending[1] is None or _order(oldest) < _order(pending[1])

    def _count_after(self, entry_id: bytes) -> int:
        total = 0
        while total < _MOST_COUNTED:
            found, entry_id = self._connections.run(_COUNT_AFTER, [self._stream], [entry_id, _PAGE])
            total += int(found)
            if int(found) < _PAGE:
                break
        return total


def _order(entry_id: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split(b"-"))


def _timings(hash_: list[bytes]) -> tuple[dict[str, int], dict[str, int]]:
    """Sums and counts by task name; a field that is neither, or no number, is somebody else's."""
    sums: dict[str, int] = {}
    counts: dict[str, int] = {}
    for field, value in zip(hash_[::2], hash_[1::2], strict=True):
        name, _, kind = field.decode(errors="replace").rpartition("_")
        found = {"sum": sums, "count": counts}.get(kind)
        if found is None or name.endswith(":delayed_tasks_schedule"):  # Go's name of its scheduling
            continue
        try:
            found[name] = int(value)
        except ValueError:
            continue
    return sums, counts
