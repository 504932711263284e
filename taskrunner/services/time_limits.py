"""Floor 4: raises TaskTimeoutError in the thread of a task that runs past its time_limit.

Python can raise into another thread only at that thread's next instruction, so a call blocked in C
ends first. Whoever takes a watch out of the table decides it: this thread fires it once, or the
worker ends it; after the worker's turn nothing is raised any more.
"""

import ctypes
import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Final

from taskrunner.clock import monotonic
from taskrunner.errors import TaskTimeoutError
from taskrunner.reports import Health
from taskrunner.service import Service

_FOREVER: Final = 3600.0
_STALE: Final = 1000


class _Watch:
    __slots__ = ("sent", "thread_id")

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self.sent = threading.Event()


class TimeLimits(Service):
    """Watches the clock for running tasks."""

    jitter = 0.0

    def __init__(self, health: Health) -> None:
        super().__init__("time-limits", health)
        self._watches: dict[int, _Watch] = {}
        self._deadlines: list[
            tuple[float, int]
        ] = []  # a heap; ended watches stay until they come up
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def run(self, seconds: float, call: Callable[[], object]) -> None:
        """Call, and raise TaskTimeoutError if that takes longer than `seconds`, whatever the call
        makes of it."""
        watch, key = _Watch(), next(self._numbers)
        started = monotonic()
        self._arm(key, watch, started + seconds)
        try:
            try:
                call()
            finally:
                if (
                    self._watches.pop(key, None) is None
                ):  # fired: what is not raised yet must not come later
                    watch.sent.wait(1.0)
                    _raise_in(watch.thread_id, None)
        finally:
            if monotonic() - started > seconds:
                raise TaskTimeoutError(f"ran longer than time_limit={seconds:g} s")

    def tick(self) -> float:
        while True:
            now = monotonic()
            with self._lock:
                if not self._deadlines:
                    return _FOREVER
                deadline, key = self._deadlines[0]
                if deadline > now:
                    return deadline - now
                heapq.heappop(self._deadlines)
            watch = self._watches.pop(key, None)
            if watch is not None:
                _raise_in(watch.thread_id, TaskTimeoutError)
                watch.sent.set()

    def _arm(self, key: int, watch: _Watch, deadline: float) -> None:
        self._watches[key] = watch
        with self._lock:
            heap = self._deadlines
            heapq.heappush(heap, (deadline, key))
            first = heap[0][1] == key
            if len(heap) > 2 * len(self._watches) + _STALE:
                self._deadlines = [entry for entry in heap if entry[1] in self._watches]
                heapq.heapify(self._deadlines)
        if first:
            self.wake()


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Raise into a thread, or (None) take back what was not raised yet."""
    argument = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), argument)
