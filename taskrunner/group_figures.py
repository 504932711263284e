"""Floor 5: what the whole group has to do, read from Redis for a page of metrics.

Reading is bounded: however many ask, and whatever Redis does, one thread reads at a time, at most
once a second, and nobody waits longer than a second for it.
"""

import threading
from contextlib import suppress
from typing import Any, Final

import attrs

from taskrunner import keys
from taskrunner.clock import monotonic
from taskrunner.reports import Health, Reports
from taskrunner.runner import TaskRunner
from taskrunner.services.once import Once
from taskrunner.stats import Stats
from taskrunner.store import connection

_FRESH: Final = 1.0
_PATIENCE: Final = 1.0
_NAME: Final = "metrics of the group"


@attrs.frozen(kw_only=True)
class GroupFigures:
    """None where Redis does not tell, as under an ACL. Times in seconds; `hands` are the workers
    that the predicted wait was worked out for."""

    waiting: int
    predicted_wait: float
    hands: int
    instances: int
    pending: int | None
    delayed: int | None
    dead: int | None
    oldest_waiting: float | None
    overdue: float | None


class GroupReader:
    """Reads the figures of a runner's group; the runner need not be started."""

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner
        self._health = Health(Reports(), connection.lost)
        self._lock = threading.Lock()
        self._reading: Once | None = None
        self._last: tuple[float, GroupFigures] | None = None

    def figures(self) -> GroupFigures | None:
        """The figures, at most a second old; None where Redis did not answer in time."""
        asked = monotonic()
        with self._lock:
            if self._last is not None and asked - self._last[0] < _FRESH:
                return self._last[1]
            reading = self._reading
            if reading is None or not reading.alive:
                reading = self._reading = Once("group-figures", self._read)
                reading.start()
        reading.join(_PATIENCE)
        last = self._last
        return last[1] if last is not None and asked - last[0] < _FRESH else None

    def _read(self) -> None:
        began = monotonic()
        try:
            self._last = (began, read(self._runner))
        except Exception as error:  # the page is without these figures, and the log says why
            if not connection.lost(error):  # Redis is away: the page says that itself
                self._health.failed(_NAME, error)
        else:
            self._health.succeeded(_NAME)


def read(runner: TaskRunner) -> GroupFigures:
    """Read the figures: three round trips, four where instances are counted anew."""
    group, stream = runner.config.consumer_group, runner.queue.stream
    stats: Stats = runner.stats()
    time, groups, delayed, first, dead = runner.queue.connections.calls(
        [
            ("TIME",),
            ("XINFO", "GROUPS", stream),
            ("ZCARD", keys.delayed(group)),
            ("ZRANGE", keys.delayed(group), 0, 0, "WITHSCORES"),
            ("XLEN", keys.dead_letters(group)),
        ]
    )
    now = int(time[0]) + int(time[1]) / 1e6 if isinstance(time, list) else runner.server_time()
    pending, last = _of_group(groups, group)
    oldest: float | None = None
    if last is not None:
        with suppress(Exception):  # not allowed: without it, then
            oldest = _oldest(runner, last, now) if stats.waiting else 0.0
    return GroupFigures(
        waiting=stats.waiting,
        predicted_wait=stats.predicted_wait_time / 1000,
        hands=max(1, stats.workers),
        instances=stats.replications,
        pending=pending,
        delayed=_count(delayed),
        dead=_count(dead),
        oldest_waiting=oldest,
        overdue=max(0.0, now - float(first[1])) if _rows(first) else _none_due(first),
    )


def _of_group(reply: Any, group: str) -> tuple[int | None, bytes | None]:
    """Entries pending, and the id of the last one delivered."""
    if isinstance(reply, Exception):
        return (0, b"0-0") if "no such key" in str(reply) else (None, None)
    for row in reply:
        info = dict(zip(row[::2], row[1::2], strict=True))
        if info[b"name"] == group.encode():
            return int(info[b"pending"]), info[b"last-delivered-id"]
    return 0, b"0-0"


def _oldest(runner: TaskRunner, last: bytes, now: float) -> float:
    ms, _, sequence = last.partition(b"-")
    rows = runner.queue.connections.call(
        "XRANGE", runner.queue.stream, b"%s-%d" % (ms, int(sequence) + 1), "+", "COUNT", 1
    )
    return max(0.0, now - int(rows[0][0].partition(b"-")[0]) / 1000) if rows else 0.0


def _count(reply: Any) -> int | None:
    return None if isinstance(reply, Exception) else int(reply)


def _rows(reply: Any) -> bool:
    return not isinstance(reply, Exception) and bool(reply)


def _none_due(reply: Any) -> float | None:
    return None if isinstance(reply, Exception) else 0.0
