"""Floor 3: figures summed in this process until they are written: run times and claim delays.

Workers and fetchers only add here; nothing they do waits for Redis (D40).
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from taskrunner.clock import ServerClock
from taskrunner.delivery import Delivery

MOST_SAMPLES: Final = 1000


class _Totals(threading.local):
    """One thread's sums, which only grow: name -> [seconds, runs]."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[float]] | None = None


class Timings:
    """Sums run times by task name; what is below a millisecond is carried, so that short tasks add
    up (D39).

    Each thread adds to sums of its own, which are never reset: what is taken is what came since the
    last time. So no lock stands between workers, and no sample is lost between reading and
    resetting.
    """

    def __init__(self) -> None:
        self._mine = _Totals()
        self._lock = threading.Lock()  # of what follows; workers take it once, for their first run
        self._threads: list[tuple[threading.Thread, dict[str, list[float]]]] = []
        self._ended: dict[str, list[float]] = {}  # of threads that are gone
        self._taken: dict[str, list[int]] = {}  # milliseconds, runs

    def add(self, task_name: str, seconds: float) -> None:
        """One run took so long."""
        totals = self._mine.by_name
        if totals is None:
            totals = self._mine.by_name = {}
            with self._lock:
                self._threads.append((threading.current_thread(), totals))
        entry = totals.get(task_name)
        if entry is None:
            totals[task_name] = [seconds, 1]
        else:
            entry[0] += seconds
            entry[1] += 1

    def take(self) -> dict[str, tuple[int, int]]:
        """Whole milliseconds and runs by task name; what is below a millisecond stays for the next
        time."""
        result: dict[str, tuple[int, int]] = {}
        with self._lock:
            for name, (seconds, runs) in self._sums().items():
                taken = self._taken.setdefault(name, [0, 0])
                milliseconds, count = int(seconds * 1000) - taken[0], int(runs) - taken[1]
                if milliseconds or count:
                    result[name] = (milliseconds, count)
                    taken[0] += milliseconds
                    taken[1] += count
        return result

    def give_back(self, result: dict[str, tuple[int, int]]) -> None:
        """They could not be written: they count with the next ones."""
        with self._lock:
            for name, (milliseconds, count) in result.items():
                taken = self._taken.setdefault(name, [0, 0])
                taken[0] -= milliseconds
                taken[1] -= count

    def _sums(self) -> dict[str, list[float]]:
        for thread, totals in list(self._threads):
            if not thread.is_alive():
                _merge(self._ended, totals)
                self._threads.remove((thread, totals))
        sums: dict[str, list[float]] = {}
        for totals in (self._ended, *(totals for _, totals in self._threads)):
            _merge(sums, totals)
        return sums


def _merge(into: dict[str, list[float]], totals: dict[str, list[float]]) -> None:
    for name, (seconds, runs) in totals.copy().items():
        entry = into.setdefault(name, [0.0, 0])
        entry[0] += seconds
        entry[1] += runs


class ClaimDelays:
    """How long messages lay in the stream before they were read: the newest samples only."""

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._batches: deque[tuple[float, Sequence[bytes]]] = deque(maxlen=MOST_SAMPLES)

    def saw(self, batch: Sequence[Delivery]) -> None:
        """A batch was read now."""
        # Ids only: a delivery kept here would live on with its body, long after it was settled.
        self._batches.append((self._clock.now(), [delivery.entry_id for delivery in batch]))

    def take(self) -> list[int]:
        """Delays in ns of the newest 1000 since the last time, newest last; never negative."""
        newest: list[int] = []
        batches, self._batches = self._batches, deque(maxlen=MOST_SAMPLES)
        try:
            while len(newest) < MOST_SAMPLES:
                at, batch = batches.pop()
                now = int(at * 1e9)
                delays = [now - int(id.partition(b"-")[0]) * 1_000_000 for id in reversed(batch)]
                newest += (
                    delays if min(delays, default=0) >= 0 else [max(0, delay) for delay in delays]
                )
        except IndexError:
            pass
        return newest[MOST_SAMPLES - 1 :: -1] if len(newest) > MOST_SAMPLES else newest[::-1]
