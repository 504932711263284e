"""Floor 5. `taskrunner worker --reload`, for development: a worker that is started anew when a
Python file changes.

The application is imported by the worker alone, a program of its own: nothing that was imported
before is in the way of what was written since, and an application that can't be imported is a
worker that ended; the next change starts another. Told to stop, and told of our end, as a
supervisor's children are: see `Lifeline`.
"""

import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from taskrunner.cli.locate import WrongArgument
from taskrunner.cli.supervisor import ended

_ROUND: Final = 0.1
_SETTLE: Final = 0.3
"""Seconds that changes may go on until the first of them counts: an editor, or git, writes many."""
_LONGEST_STOP: Final = 60.0
_AT_ONCE: Final = 1.0
_POLL: Final = 0.02
_IGNORED: Final = frozenset(
    (
        *("__pycache__", "site-packages", "node_modules", "venv", "env"),
        *(".git", ".hg", ".svn", ".venv", ".tox", ".nox", ".idea", ".eggs"),
        *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"),
    )
)
_MOST_NAMED: Final = 3

log = logging.getLogger("taskrunner.reload")

Command = Callable[[int], Sequence[str]]
"""lifeline -> the command line of a worker."""


class Reloader:
    """Keeps one worker (or the supervisor of several) that runs what is written now."""

    def __init__(self, command: Command, application: str) -> None:
        self._watchfiles = _watchfiles()
        self._command = command
        self._roots = _roots(application)
        self._signals: list[int] = []
        self._stop = threading.Event()
        self._worker: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    def run(self) -> int:
        """Run until a signal; the exit code."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        former = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            self._start()
            self._watch()
            return self._end()
        finally:
            self._kill()
            for number, handler in former.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _watch(self) -> None:
        log.warning(
            "--reload is for development: watching the Python files in %s",
            ", ".join(str(root) for root in self._roots),
        )
        for changes in self._watchfiles.watch(
            *self._roots,
            watch_filter=lambda _, path: is_watched(Path(path), self._roots),
            debounce=round(_SETTLE * 1000),
            rust_timeout=round(_ROUND * 1000),
            yield_on_timeout=True,
            stop_event=self._stop,
            ignore_permission_denied=True,
        ):
            if self._stop.is_set():
                return
            if changes:
                log.info(
                    "%s changed: starting anew",
                    _named({path for _, path in changes}),
                    extra={"action": "worker_reloaded"},
                )
                self._end()
                if self._stop.is_set():
                    return
                self._start()
            elif self._worker is not None and (code := self._worker.poll()) is not None:
                self._forget()
                log.warning("the worker %s: waiting for a change", ended(code))

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)
        self._stop.set()

    def _start(self) -> None:
        read_end, self._lifeline = os.pipe()
        try:
            # In a session of its own, so that Ctrl-C reaches it through us alone.
            self._worker = subprocess.Popen(
                self._command(read_end), start_new_session=True, pass_fds=[read_end]
            )
        finally:
            os.close(read_end)

    def _end(self) -> int:
        """Have the worker stop in order, at most for a minute; its exit code."""
        worker = self._worker
        if worker is None or self._lifeline is None:
            return 0
        lifeline, self._lifeline = self._lifeline, None
        os.close(lifeline)
        deadline = time.monotonic() + _LONGEST_STOP
        while (code := worker.poll()) is None:
            if len(self._signals) > 1:
                log.warning("second signal: ending at once")
                self._kill()
                return 128 + self._signals[1]
            if time.monotonic() > deadline:
                log.error("the worker does not end: killed")
                self._kill()
                return 1
            time.sleep(_POLL)
        self._forget()
        return code if code >= 0 else 1

    def _kill(self) -> None:
        """A second signal for a supervisor, which kills its own; then the end for all that is
        left."""
        if self._worker is not None:
            self._worker.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._worker.wait(_AT_ONCE)
            self._worker.kill()
            self._worker.wait()
            self._forget()

    def _forget(self) -> None:
        self._worker = None
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def is_watched(path: Path, roots: Iterable[Path]) -> bool:
    """Whether a change of the file matters: Python source, below a root and not below what is
    installed or generated there."""
    if path.suffix != ".py":
        return False
    return any(
        path.is_relative_to(root) and _IGNORED.isdisjoint(path.relative_to(root).parts)
        for root in roots
    )


def _watchfiles() -> Any:
    try:
        found = importlib.import_module("watchfiles")
    except ImportError:
        raise WrongArgument(
            "--reload needs watchfiles: pip install 'redis-taskrunner[reload]'"
        ) from None
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # we say what changed
    return found


def _roots(application: str) -> list[Path]:
    """The current directory, and the application's where that is elsewhere; imports nothing."""
    here = Path.cwd().resolve()
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    name = application.partition(":")[0].partition(".")[0]
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    places = list(found.submodule_search_locations or ()) if found is not None else []
    if found is not None and not places and found.has_location and found.origin is not None:
        places = [str(Path(found.origin).parent)]
    roots = [here]
    for place in places:
        root = Path(place).resolve()
        if root.is_dir() and not root.is_relative_to(here):
            roots.append(root)
    return roots


def _named(paths: set[str]) -> str:
    here = Path.cwd().resolve()
    names = sorted(
        str(path.relative_to(here) if path.is_relative_to(here) else path)
        for path in map(Path, paths)
    )
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"
