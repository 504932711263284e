"""Floor 3: the producer's side: from `.delay(payload)` to one step in Redis.

Nothing here is sent a second time once it may have been sent: a lost reply raises to the caller,
who alone knows whether to repeat. The exceptions are safe: a step the server did not know
(NOSCRIPT), and the question whether a unique dispatch whose reply was lost holds its own lock.
"""

import math
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import Any, Final

from taskrunner import clock, keys, scripts
from taskrunner.clock import Duration
from taskrunner.errors import TaskAlreadyDispatchedError
from taskrunner.message import encode, encode_payload, to_delayed
from taskrunner.store import connection
from taskrunner.store.connection import Arg, Connections
from taskrunner.store.delayed_set import SCHEDULE
from taskrunner.store.group import Lock
from taskrunner.store.unique import UniqueLocks
from taskrunner.task import Dispatched, Task
from taskrunner.unique_key import lock_name

_ADD_UNIQUE: Final = scripts.load("add_unique")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_YEAR_1: Final = -62_135_596_800.0
_YEAR_10000: Final = 253_402_300_800.0
_CHUNK: Final = 1000
_CHUNK_BYTES: Final = 8 * 1024 * 1024

When = tuple[str, float]  # ("at", unix seconds) or ("in", seconds)


class Prepared:
    """One message, ready to be sent."""

    __slots__ = ("command", "id", "lock", "script", "size", "task")

    def __init__(
        self, id: str, task: Task[Any], lock: Lock | None, script: scripts.Script | None,
        command: list[Arg], size: int,
    ) -> None:  # fmt: skip
        self.id = id
        self.task = task
        self.lock = lock
        self.script = (
            script  # None: `command` is the whole command, else what follows the script's hash
        )
        self.command = command
        self.size = size


class StreamDispatcher:
    """Dispatches to one queue, for one group's delayed set."""

    def __init__(
        self,
        connections: Connections,
        stream: str,
        group: str,
        *,
        reclaim_delay: float,
        max_payload_bytes: int,
    ) -> None:
        self._connections = connections
        self._locks = UniqueLocks(connections)
        self._stream = stream
        self._delayed = keys.delayed(group)
        self._channel = keys.channel(group)
        self._renewal_ns = max(1, round(reclaim_delay / 3 * 1e9))
        self._max_payload_bytes = max_payload_bytes

    def dispatch(
        self,
        task: Task[Any],
        payload: Any,
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> Dispatched:
        """Send one message, with further keys beside its fields."""
        prepared = self._prepare(task, payload, _when(run_at, run_in), extra)
        if prepared.script is None:
            reply = self._connections.call(*prepared.command)
        else:
            reply = self._send(prepared)
        dispatched = _result(prepared, reply)
        if dispatched is None:
            raise TaskAlreadyDispatchedError(
                f"task {task.name!r} is unique and was dispatched before: lock "
                f"{prepared.lock.key if prepared.lock else ''} is held"
            )
        return dispatched

    def dispatch_many(
        self,
        task: Task[Any],
        payloads: Iterable[Any],
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> list[Dispatched | None]:
        """Send many messages; every payload is checked before the first is sent."""
        when = _when(run_at, run_in)
        prepared = [self._prepare(task, payload, when, extra) for payload in payloads]
        results: list[Dispatched | None] = []
        for chunk in _chunks(prepared):
            results += self._send_chunk(chunk)
        return results

    def unlock(self, task: Task[Any], payload: Any) -> bool:
        """Free the unique lock of a payload."""
        if task.unique_for is None:
            return False
        text = encode_payload(payload, self._max_payload_bytes)
        return self._locks.free(keys.unique(lock_name(task, payload, text)))

    def _prepare(
        self, task: Task[Any], payload: Any, when: When | None, extra: Mapping[str, str] | None
    ) -> Prepared:
        text = encode_payload(payload, self._max_payload_bytes)
        id = _new_id()
        fields: dict[str, Any] = {
            "id": id,
            "enqueued_at": clock.now(),
            "reservation_timeout_ns": (
                self._renewal_ns
                if task.reservation_timeout is None
                else max(1, round(task.reservation_timeout * 1e9))
            ),
        }
        lock: Lock | None = None
        if task.unique_for is not None:
            name = lock_name(task, payload, text)
            token = b64encode(os.urandom(16)).decode()
            fields |= {
                "unique_for": math.ceil(task.unique_for),
                "lock_name": name,
                "token": token,
            }
            lock = Lock(keys.unique(name), token, math.ceil(task.unique_for) * 1000)
        body = encode(task.name, text, extra=extra, **fields)
        if when is not None:
            head, tail = to_delayed(body, id=id)
            names = [self._stream, self._delayed, *([lock.key] if lock else [])]
            args: list[Arg] = [
                when[0], f"{when[1]:.6f}", body, head, tail, lock.token if lock else "", lock.ms if lock else 0,
                self._channel,
            ]  # fmt: skip
            return Prepared(id, task, lock, SCHEDULE, [len(names), *names, *args], 2 * len(body))
        if lock is not None:
            command: list[Arg] = [2, self._stream, lock.key, body, lock.token, lock.ms]
            return Prepared(id, task, lock, _ADD_UNIQUE, command, len(body))
        return Prepared(
            id, task, None, None, ["XADD", self._stream, "*", "payload", body], len(body)
        )

    def _send(self, prepared: Prepared) -> Any:
        script, command = prepared.script, prepared.command
        assert script is not None
        count = int(command[0])
        names = [str(name) for name in command[1 : count + 1]]
        try:
            return self._connections.run(script, names, command[count + 1 :])
        except Exception as error:
            if connection.lost(error) and self._was_sent(prepared):
                return self._unanswered(prepared)
            raise

    def _was_sent(self, prepared: Prepared) -> bool:
        """Whether a unique message whose reply was lost holds its own lock: then it is there."""
        lock = prepared.lock
        try:
            return lock is not None and self._locks.holder(lock.key) == lock.token
        except Exception:  # still away: the caller gets the first error
            return False

    def _unanswered(self, prepared: Prepared) -> Any:
        """The reply that was lost, as far as it can be known: no entry id, and the due time by our
        clock."""
        if prepared.script is _ADD_UNIQUE:
            return b""
        count = int(prepared.command[0])
        kind, value = prepared.command[count + 1], float(prepared.command[count + 2])
        return [2, value if kind == "at" else clock.now() + value]

    def _send_chunk(self, chunk: list[Prepared]) -> list[Dispatched | None]:
        script = chunk[0].script
        if script is None:
            replies = self._connections.calls([prepared.command for prepared in chunk])
        else:
            # The first brings the text along, so that the others' hash is known on this
            # connection's server.
            commands = [("EVALSHA", script.sha, *prepared.command) for prepared in chunk]
            commands[0] = ("EVAL", script.text, *chunk[0].command)
            try:
                replies = self._connections.calls(commands)
            except (
                Exception
            ) as error:  # whatever it is goes on to the caller, unless it is cleared up
                if not connection.lost(error) or not all(self._was_sent(one) for one in chunk):
                    raise
                replies = [self._unanswered(one) for one in chunk]
            for i, reply in enumerate(replies):
                if (
                    isinstance(reply, Exception) and connection.code(reply) == "NOSCRIPT"
                ):  # emptied in between: nothing ran
                    replies[i] = self._send(chunk[i])
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return [_result(prepared, reply) for prepared, reply in zip(chunk, replies, strict=True)]


def _result(prepared: Prepared, reply: Any) -> Dispatched | None:
    name = prepared.task.name
    if isinstance(reply, bytes):
        return Dispatched(prepared.id, reply.decode() or None, task_name=name)
    if isinstance(reply, list) and reply[0] == 1:
        return Dispatched(prepared.id, reply[1].decode(), task_name=name)
    if isinstance(reply, list) and reply[0] == 2:
        return Dispatched(prepared.id, None, task_name=name, run_at=float(reply[1]))
    return None


def _chunks(prepared: Iterable[Prepared]) -> Iterator[list[Prepared]]:
    waiting = iter(prepared)
    while chunk := list(islice(waiting, _CHUNK)):
        part: list[Prepared] = []
        size = 0
        for one in chunk:
            if part and size + one.size > _CHUNK_BYTES:
                yield part
                part, size = [], 0
            part.append(one)
            size += one.size
        yield part


def _new_id() -> str:
    """A random UUID (version 4); uuid.uuid4 takes several times as long."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def _when(run_at: datetime | float | None, run_in: Duration | None) -> When | None:
    """The time asked for; the server's clock judges whether it is past."""
    if run_at is not None and run_in is not None:
        raise ValueError("run_at and run_in are both given: an instant or a duration, not both")
    if run_in is not None:
        seconds = clock.seconds(run_in, "run_in")
        if clock.now() + seconds >= _YEAR_10000:
            raise ValueError(f"run_in={run_in!r} ends after the year 9999")
        return ("in", seconds)
    return None if run_at is None else ("at", _instant(run_at))


def _instant(run_at: datetime | float) -> float:
    if isinstance(run_at, datetime):
        if run_at.utcoffset() is None:
            raise ValueError(
                f"run_at={run_at!r} has no time zone, so it names no instant: use an aware datetime, e.g. "
                "datetime.now(timezone.utc) + timedelta(minutes=5)"
            )
        since = run_at - _EPOCH
        # A float can't hold the last microseconds of the year 9999, which are inside all the same.
        inside = since < timedelta(seconds=_YEAR_10000)
        value = min(since.total_seconds(), math.nextafter(_YEAR_10000, 0)) if inside else math.inf
    elif isinstance(run_at, date):
        raise TypeError(f"run_at={run_at!r} is a date without a time")
    elif isinstance(run_at, bool) or not isinstance(run_at, int | float):
        raise TypeError(f"run_at={run_at!r} is neither an aware datetime nor unix seconds")
    else:
        try:
            value = float(run_at)
        except OverflowError:
            value = math.inf
    if not _YEAR_1 <= value < _YEAR_10000:  # also NaN
        raise ValueError(f"run_at={run_at!r} is outside the years 1 to 9999")
    return value
