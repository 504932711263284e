"""Floor 2: the delayed set of a group: messages that wait for their due time, scored by it."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import attrs

from taskrunner import keys, scripts
from taskrunner.errors import InvalidTaskPayloadError
from taskrunner.message import DelayedMessage, decode_delayed
from taskrunner.store.connection import Arg, Connections
from taskrunner.store.group import Lock

SCHEDULE: Final = scripts.load("schedule")
_DUE: Final = scripts.load("due")
_PROMOTE: Final = scripts.load("promote")
_CANCEL: Final = scripts.load("cancel")
_PAGE: Final = 100
_MOST_BYTES: Final = 16 * 1024 * 1024


@attrs.frozen(kw_only=True)
class DelayedTask:
    """One delayed message; `run_at` in unix seconds, `attempt` the deliveries it has spent."""

    id: str
    task_name: str
    payload: Any = attrs.field(repr=False)
    run_at: float
    attempt: int


class Promotion(NamedTuple):
    """What is to become of a due member: `kind` as in promote.lua."""

    member: bytes
    kind: str
    body: str
    lock: Lock | None = None
    most_letters: int = 0
    put_off_to: float = 0.0


_Tasks: TypeAlias = list[DelayedTask]  # in the class below `list` is a method
_Statuses: TypeAlias = list[int]


class DelayedSet:
    """The delayed messages of one group; earliest first."""

    def __init__(self, connections: Connections, stream: str, group: str) -> None:
        self._connections = connections
        self._stream = stream
        self._group = group
        self.key = keys.delayed(group)

    # --- for operators ---

    def list(self, limit: int = 100) -> _Tasks:
        """At most `limit` messages, the next due first."""
        if limit < 1:
            return []
        rows = self._connections.call("ZRANGE", self.key, 0, limit - 1, "WITHSCORES")
        return [
            _task(member, float(score)) for member, score in zip(rows[::2], rows[1::2], strict=True)
        ]

    def get(self, id: str) -> DelayedTask | None:
        """One message by its id, or None. Pages through the set: there is no index."""
        for member, score in self._walk() if id else ():
            found = _task(member, score)
            if found.id == id:
                return found
        return None

    def cancel(self, id: str) -> bool:
        """Take a message out of the set, and release its unique lock; whether it was there."""
        for member, score in self._walk() if id else ():
            if _task(member, score).id != id:
                continue
            names, token = [self.key], ""
            message = _decoded(member)
            if message is not None and message.lock_name is not None:
                names.append(keys.unique(message.lock_name))
                token = message.unique_lock_value
            return bool(self._connections.run(_CANCEL, names, [member, token]))
        return False

    def __len__(self) -> int:
        return int(self._connections.call("ZCARD", self.key))

    def __bool__(self) -> bool:
        return True

    # --- for the leader ---

    def due(self, most: int) -> tuple[float, float | None, Sequence[tuple[bytes, float]]]:
        """(server's now, score of the next member that stays or None, due members with scores)."""
        reply = self._connections.run(_DUE, [self.key], [most, _MOST_BYTES])
        following = float(reply[1]) if reply[1] else None
        members = [(reply[i], float(reply[i + 1])) for i in range(2, len(reply), 2)]
        return float(reply[0]), following, members

    def promote(
        self, lease: str, instance_id: str, promotions: Sequence[Promotion]
    ) -> _Statuses | None:
        """Move due members in one step: a status for each; None when the lease is not ours."""
        names = [lease, self.key, self._stream, keys.dead_letters(self._group)]
        args: list[Arg] = [instance_id]
        for promotion in promotions:
            lock = promotion.lock
            if lock is not None:
                names.append(lock.key)
            args += (
                promotion.member,
                promotion.kind,
                promotion.body,
                len(names) if lock is not None else 0,
                lock.token if lock is not None else promotion.most_letters,
                lock.ms if lock is not None else 0,
                f"{promotion.put_off_to:.6f}",
            )
        reply = self._connections.run(_PROMOTE, names, args)
        return [int(status) for status in reply[1]] if reply[0] == 1 else None

    def _walk(self) -> Iterator[tuple[bytes, float]]:
        """Every member that is there all the while, in no order, though others come and go."""
        cursor = 0
        while True:
            cursor, rows = self._connections.call("ZSCAN", self.key, cursor, "COUNT", _PAGE)
            for member, score in zip(rows[::2], rows[1::2], strict=True):
                yield member, float(score)
            if int(cursor) == 0:
                return


def _decoded(member: bytes) -> DelayedMessage | None:
    try:
        return decode_delayed(member)
    except InvalidTaskPayloadError:
        return None


def _task(member: bytes, score: float) -> DelayedTask:
    message = _decoded(member)
    if message is None:
        return DelayedTask(id="", task_name="", payload=None, run_at=score, attempt=0)
    return DelayedTask(
        id=message.id or "",
        task_name=message.task_name,
        payload=message.payload,
        run_at=score,
        attempt=message.attempt,
    )
