"""Floor 3: how long tasks took, summed in this process until they are written."""

import threading


class Timings:
    """Sums run times by task name; nanoseconds inside, so tasks far below a millisecond add up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, list[int]] = {}  # name -> [nanoseconds, count]

    def add(self, task_name: str, seconds: float) -> None:
        """One run took so long."""
        with self._lock:
            entry = self._sums.get(task_name)
            if entry is None:
                entry = self._sums[task_name] = [0, 0]
            entry[0] += int(seconds * 1e9)
            entry[1] += 1
