"""Child side: the tasks that every system runs, and the marks they leave.

The same functions run everywhere, so that what differs is the way to them. Times between processes
of one machine are compared on the wall clock where an instant was asked for, else on the monotonic
one, which Linux and macOS share over processes.
"""

import itertools
import os
import resource
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

KINDS: Final = ("noop", "spin", "io", "stamp", "due", "fail", "mark")
IO_SECONDS: Final = 0.01
RETRY_SECONDS: Final = 0.5
MARK_SECONDS: Final = 0.2


class Marks:
    """What the tasks of this process have done; `done` is set by the last one expected."""

    def __init__(self, expected: int, loops: int, ledger: str = "") -> None:
        self.loops = loops
        self._ledger = os.open(ledger, os.O_APPEND | os.O_CREAT | os.O_WRONLY) if ledger else -1
        self.done = threading.Event()
        self.warm = threading.Event()
        self.samples: list[float] = []
        self.first_at = 0.0
        self.last_at = 0.0
        self.cpu_before = 0.0
        self._expected = expected
        self._count = itertools.count(1).__next__
        self._failed_at: dict[int, float] = {}

    def count(self) -> None:
        """One more task has run."""
        number = self._count()
        if number == 1:
            self.cpu_before = cpu_seconds()
            self.first_at = time.monotonic()
        if number >= self._expected:
            self.last_at = time.monotonic()
            self.done.set()

    def noop(self, payload: Any) -> None:
        """Nothing but being counted."""
        self.count()

    def spin(self, payload: Any) -> None:
        """About 50 µs of pure Python, which holds the interpreter's lock."""
        spin(self.loops)
        self.count()

    def io(self, payload: Any) -> None:
        """10 ms of waiting, as for a socket."""
        if self.first_at == 0.0:
            self.cpu_before, self.first_at = cpu_seconds(), time.monotonic()
        time.sleep(IO_SECONDS)
        self.count_later()

    def count_later(self) -> None:
        """As `count`, for tasks whose first mark was set at their start."""
        if self._count() >= self._expected:
            self.last_at = time.monotonic()
            self.done.set()

    def stamp(self, payload: Any) -> None:
        """How long since the call; a payload of None only says that the worker is up."""
        if payload is None:
            self.warm.set()
            return
        self.samples.append(time.monotonic() - payload)
        self.count()

    def due(self, payload: Any) -> None:
        """How long after the instant it was to run at; negative would be too early."""
        if payload is None:
            self.warm.set()
            return
        self.samples.append(time.time() - payload)
        self.count()

    def fail(self, payload: Any) -> None:
        """Fails once; the second run says how late it came."""
        if payload is None:
            self.warm.set()
            return
        failed = self._failed_at.pop(payload, None)
        if failed is None:
            self._failed_at[payload] = time.monotonic()
            raise ValueError("once")
        self.samples.append(time.monotonic() - failed - RETRY_SECONDS)
        self.count()

    def mark(self, payload: Any) -> None:
        """Waits, and leaves a line that outlives the process."""
        time.sleep(MARK_SECONDS)
        os.write(self._ledger, f"{payload}\n".encode())

    def body(self, kind: str) -> Callable[[Any], None]:
        """The task of that kind."""
        found: Callable[[Any], None] = getattr(self, kind)
        return found

    def coroutine(self, kind: str) -> Callable[[Any], Awaitable[None]]:
        """The same task for a library that runs coroutines, where that suits it best."""
        if kind == "io":
            return self._io_later
        if kind == "mark":
            return self._mark_later
        body = self.body(kind)

        async def run(payload: Any) -> None:
            body(payload)

        return run

    async def _io_later(self, payload: Any) -> None:
        if self.first_at == 0.0:
            self.cpu_before, self.first_at = cpu_seconds(), time.monotonic()
        import asyncio

        await asyncio.sleep(IO_SECONDS)
        self.count_later()

    async def _mark_later(self, payload: Any) -> None:
        import asyncio

        await asyncio.sleep(MARK_SECONDS)
        os.write(self._ledger, f"{payload}\n".encode())


def spin(loops: int) -> int:
    """Pure Python, about as long as `loops` says: calls, branches and small sums.

    No tight loop of sums: such a one has two speeds, a fifth apart, in the barest process too, and
    changes between them within milliseconds. Between other code it is mostly the slow one, so it
    would be measured instead of what stands around it.
    """
    value = 0
    for _ in range(loops):
        value += _sum(6)
    return value


def _sum(number: int) -> int:
    return number if number < 2 else _sum(number - 1) + _sum(number - 2)


def calibrate(seconds: float) -> int:
    """How many loops of `spin` take that long on this machine now, in time of the processor."""
    loops, tries = 30, 2000
    middle = sorted(_timed(loops) for _ in range(tries))[tries // 2]
    return max(1, round(loops * seconds / middle))


def _timed(loops: int) -> float:
    start = time.thread_time()
    spin(loops)
    return time.thread_time() - start


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def resident_mib() -> float:
    """Resident memory of this process now; its peak where the system doesn't tell."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS
