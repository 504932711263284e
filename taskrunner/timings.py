"""Floor 3: figures summed in this process until they are written: run times and claim delays.

Workers and fetchers only add here; nothing they do waits for Redis (D40).
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from taskrunner.clock import ServerClock
from taskrunner.delivery import Delivery

_RING: Final = 1000


class Timings:
    """Sums run times by task name; nanoseconds inside, so tasks far below a millisecond add up
    (D39)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, list[int]] = {}  # name -> [nanoseconds, runs]

    def add(self, task_name: str, seconds: float) -> None:
        """One run took so long."""
        nanoseconds = int(seconds * 1e9)
        with self._lock:
            entry = self._sums.get(task_name)
            if entry is None:
                self._sums[task_name] = [nanoseconds, 1]
            else:
                entry[0] += nanoseconds
                entry[1] += 1

    def take(self) -> dict[str, tuple[int, int]]:
        """Whole milliseconds and runs by task name; what is below a millisecond stays for the next
        time."""
        taken: dict[str, tuple[int, int]] = {}
        with self._lock:
            for name, entry in list(self._sums.items()):
                milliseconds, rest = divmod(entry[0], 1_000_000)
                if entry[1] or milliseconds:
                    taken[name] = (milliseconds, entry[1])
                self._sums[name] = [rest, 0]
        return taken

    def give_back(self, taken: dict[str, tuple[int, int]]) -> None:
        """They could not be written: they count with the next ones."""
        with self._lock:
            for name, (milliseconds, count) in taken.items():
                entry = self._sums.setdefault(name, [0, 0])
                entry[0] += milliseconds * 1_000_000
                entry[1] += count


class ClaimDelays:
    """How long messages lay in the stream before they were read: the newest samples only."""

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._batches: deque[tuple[float, Sequence[Delivery]]] = deque(maxlen=16)

    def saw(self, batch: Sequence[Delivery]) -> None:
        """A batch was read now."""
        self._batches.append((self._clock.now(), batch))

    def take(self) -> list[int]:
        """Delays in ns of the newest 1000 since the last time, newest last; never negative."""
        newest: list[int] = []
        try:
            while len(newest) < _RING:
                at, batch = self._batches.pop()
                for delivery in reversed(batch):
                    added_ms = int(delivery.entry_id.partition(b"-")[0])
                    newest.append(max(0, int((at * 1000 - added_ms) * 1e6)))
        except IndexError:
            pass
        self._batches.clear()
        return newest[_RING - 1 :: -1] if len(newest) > _RING else newest[::-1]
