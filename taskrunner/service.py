"""Floor 1: the one contract of every daemon thread.

A service's file holds what one round does (`tick`). This gives the rest: start and stop that may be
called in any order and number, sleeping that a stop or a `wake` ends at once, jitter, backoff after
an error, one report per outage, and the thread itself. A thread that dies all the same is the
watchdog's business.
"""

import threading
from typing import ClassVar, Final

from taskrunner.clock import jittered
from taskrunner.reports import Health

_FIRST_BACKOFF: Final = 0.05
LONGEST_BACKOFF: Final = 0.9
"""Seconds: work goes on within a second of Redis's return (D33)."""


class Backoff:
    """Delays that double from 50 ms up to the longest, jittered; no recursion and no state that
    grows."""

    def __init__(self, longest: float = LONGEST_BACKOFF) -> None:
        self._longest = longest
        self._delay = 0.0

    def next(self) -> float:
        """The delay before the next try."""
        self._delay = min(max(2 * self._delay, _FIRST_BACKOFF), self._longest)
        return min(jittered(self._delay, 0.3), self._longest)

    def reset(self) -> None:
        """A try went well."""
        self._delay = 0.0

    @property
    def waiting(self) -> bool:
        """Whether the last try failed."""
        return self._delay > 0


class Service:
    """One daemon thread that calls `tick` for as long as it runs."""

    jitter: ClassVar[float] = 0.1
    """Share of a pause it may be moved by; 0 where the pause ends at a due time."""

    def __init__(self, name: str, health: Health) -> None:
        self.name = name
        self._health = health
        self._signal = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False
        self._ended = False  # the thread does no further round
        self._thread: threading.Thread | None = None
        self._backoff = Backoff()

    def tick(self) -> float:
        """Do one round; return the seconds until the next."""
        raise NotImplementedError

    def close(self) -> None:
        """Called in the thread when it ends."""

    def start(self) -> None:
        """Start the thread, unless it runs; one that was asked to stop and has not ended goes
        on."""
        with self._lock:
            self._stopping = False
            if self.alive and not self._ended:
                return
            self._ended = False
            self._signal.clear()
            self._thread = threading.Thread(
                target=self._run, name=f"taskrunner-{self.name}", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; `join` waits for it."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """End the present pause: the next round begins at once."""
        self._signal.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end; whether it ended."""
        with self._lock:  # one that is just being started can't be joined yet
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def died(self) -> bool:
        """Whether the thread ended though nobody asked it to."""
        return self._thread is not None and not self._thread.is_alive() and not self._stopping

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stopping

    def pause(self, seconds: float) -> None:
        """Sleep inside a round; a stop or a wake ends it."""
        self._signal.wait(seconds)

    def _run(self) -> None:
        try:
            while not self._ends():
                try:
                    delay = jittered(self.tick(), self.jitter)
                except Exception as error:  # a loop outlives whatever one round meets (BL-08)
                    delay = self._backoff.next()
                    if not self._stopping:
                        self._health.failed(self.name, error)
                else:
                    self._backoff.reset()
                    self._health.succeeded(self.name)
                if delay > 0 and not self._stopping:
                    self._signal.wait(delay)
                self._signal.clear()
        finally:
            self.close()

    def _ends(self) -> bool:
        """Whether this thread ends now; from then on `start` makes a new one."""
        with self._lock:
            self._ended = self._stopping
            return self._ended
