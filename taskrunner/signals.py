"""Floor 5: SIGTERM and SIGINT in a worker process: the first stops in order, the second at once.

A signal may be delivered to any thread, while Python's handlers run in the main one only: the
wake-up pipe gets it out of its sleep. Stopping happens in a thread of its own, so that a second
signal is heard at any moment.
"""

import logging
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Self

from taskrunner.services.once import Once

log = logging.getLogger("taskrunner.runner")


class Signals:
    """The main thread's handlers, put back at the end, and its wait."""

    _NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, stop: Callable[[], object]) -> None:
        self._stop = stop
        self._pid = os.getpid()
        self._first: str | None = None
        self._stopper: Once | None = None

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._former_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._handle) for number in self._NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            # None: a handler that was not set from Python can't be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._former_fd)
        write, self._write = self._write, -1
        os.close(self._read)
        os.close(write)

    def wake(self) -> None:
        """Have `wait` look again; from any thread."""
        with suppress(OSError):
            os.write(self._write, b"\0")

    def wait(self, ended: Callable[[], bool]) -> None:
        """Until `ended`, stopping in order when a signal asks for it."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while not ended():
            if self._first is not None and self._stopper is None:
                log.info(
                    "%s: stopping in order; a second signal ends at once",
                    self._first,
                    extra={"action": "runner_stopping"},
                )
                self._stopper = Once("stop", self._stop)
                self._stopper.start()
            poll.poll(500)
            with suppress(OSError):
                os.read(self._read, 4096)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child has the handler, and nothing to stop
            former = self._former[signal.Signals(number)]
            signal.signal(number, signal.SIG_DFL if former is None else former)
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        if self._first is None:
            self._first = name
            return
        # No lock may be taken here, for the main thread may be anywhere. What ran stays pending and
        # is reclaimed.
        with suppress(OSError):
            os.write(2, f"taskrunner: second signal ({name}), ending at once\n".encode())
        os._exit(128 + number)
