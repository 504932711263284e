"""Floor 5. What watches over a worker process from inside: its supervisor's life, its memory, its
tasks, the emptiness of the queue. Each asks the runner to stop; none kills.
"""

import importlib
import itertools
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from taskrunner.cli.probes import Probe
from taskrunner.cli.web import own_health
from taskrunner.config import AfterTask
from taskrunner.runner import TaskRunner
from taskrunner.service import Service

REPORT_EVERY: Final = 0.25
_GRACE: Final = 0.1
_LATE: Final = 5.0
_LOOK: Final = 0.2
_SAMPLE: Final = 0.5
_MEGABYTE: Final = 1024 * 1024
_PR_SET_PDEATHSIG: Final = 1


class Lifeline(Service):
    """Ends the process in order when its parent (a supervisor, a reloader) asks for it, or is gone,
    however it died.

    The parent holds the write end of a pipe, and closes it to say stop; the kernel does so for one
    that was killed. Signals are no substitute: systemd sends SIGTERM to all processes of a unit,
    and a second one from the parent would cut running tasks off.
    """

    jitter = 0.0

    def __init__(self, pipe: int) -> None:
        super().__init__("lifeline", own_health())
        self._pipe = pipe
        self._stop_soon: Callable[[], object] | None = None  # while the application is imported
        self._within = 0.0
        _continue_with_parent()

    def holds(self, stop_soon: Callable[[], object], within: float) -> None:
        """From now on the end begins with `stop_soon`, and takes so many seconds at most."""
        self._stop_soon, self._within = stop_soon, within + _LATE

    def tick(self) -> float:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if not poll.poll(1000):
            return 0.0
        if self._stop_soon is None:
            os._exit(0)
        self.pause(_GRACE)  # a signal that came to both of us is heard first: one stop is enough
        self._stop_soon()
        self.pause(self._within)
        os._exit(1)


def _continue_with_parent() -> None:
    """Have the kernel continue this process when its parent dies.

    Stopped by SIGSTOP it could not see the end of the lifeline, and would hold what it holds for as
    long as it lies there. SIGCONT means nothing to one that runs; SIGKILL in its place would cut
    off tasks that can end in order. Elsewhere than on Linux there is no such thing.
    """
    if sys.platform == "linux":
        ctypes: Any = importlib.import_module("ctypes")  # by this one alone, and in children only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))


class Burst(Service):
    """Stops the runner once nothing waits, nothing is pending in the group, and nothing delayed is
    due; twice in a row, for a task that ends may have dispatched another."""

    def __init__(self, runner: TaskRunner) -> None:
        super().__init__("burst", own_health())
        self._runner = runner
        self._was_empty = False

    def tick(self) -> float:
        if self._runner.state == "started":
            empty = self._is_empty()
            if empty and self._was_empty:
                self._runner.stop_soon()
            self._was_empty = empty
        return _LOOK

    def _is_empty(self) -> bool:
        runner = self._runner
        group = runner.config.consumer_group
        if runner.stats().waiting or any(
            one.pending for one in runner.queue.get_metrics(group).groups
        ):
            return False
        following = runner.delayed.list(1)
        seconds, _ = runner.queue.connections.call("TIME") if following else (0, 0)
        return not following or following[0].run_at > int(seconds) + 1


class MemoryLimit(Service):
    """Calls `reached` while the process uses more than `most` megabytes, and says how many."""

    def __init__(self, most: int, reached: Callable[[str], None]) -> None:
        super().__init__("memory-limit", own_health())
        self._most = most
        self._reached = reached

    def tick(self) -> float:
        used = used_memory() / _MEGABYTE
        if used > self._most:
            self._reached(f"{used:.0f} MB in use, more than {self._most}")
        return 1.0


class Sampler(Service):
    """Writes down what this process does now, for the supervisor's page of metrics."""

    def __init__(self, sample: Callable[[], object]) -> None:
        super().__init__("sampler", own_health())
        self._sample = sample

    def tick(self) -> float:
        self._sample()
        return _SAMPLE


class Reporter(Service):
    """Tells the supervisor again and again whether this process is ready."""

    def __init__(self, pipe: int, ready: Probe) -> None:
        super().__init__("status", own_health())
        self._pipe = pipe
        self._ready = ready
        os.set_blocking(pipe, False)

    def tick(self) -> float:
        with suppress(OSError):  # full, or nobody reads: the lifeline sees to that
            os.write(self._pipe, b"-" if self._ready() is not None else b"+")
        return REPORT_EVERY


def counted(most: int, reached: Callable[[str], None], former: AfterTask | None) -> AfterTask:
    """Return an `after_task` hook that calls `reached` from the `most`th task on."""
    numbers = itertools.count(1)

    def after(context: Any, error: BaseException | None) -> None:
        try:
            if former is not None:
                former(context, error)
        finally:
            if next(numbers) >= most:
                reached(f"{most} tasks have run")

    return after


def used_memory() -> int:
    """Bytes of this process in memory; where there is no /proc, the most it ever had."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
