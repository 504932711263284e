"""Floor 5. Several worker processes, or one that is renewed: started, watched, stopped together.

Children are programs of their own, never forks of this process. One that ends unasked is started
again, at once and then with growing pauses; when none can live, the supervisor gives up. They are
in sessions of their own, so that Ctrl-C reaches them through us alone, and they end with us
whatever ends us: each holds the read end of a pipe that only we can write to (see `Lifeline`).
"""

import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

import attrs

from taskrunner.errors import describe

RECYCLED: Final = 75
"""Exit code of a child that stopped in order to be renewed (EX_TEMPFAIL)."""

_ROUND: Final = 0.1
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 30.0
_LIVES: Final = 10.0
"""Seconds after which a child is taken to be able to live."""
_MOST_SHORT_LIVES: Final = 5
BEYOND: Final = 10.0
"""Seconds beyond shutdown_timeout until a child that does not end is killed."""
_FRESH: Final = 2.0

log = logging.getLogger("taskrunner.supervisor")

Command = Callable[[int, int, int | None], Sequence[str]]
"""(number, lifeline, status pipe or None) -> the command line of a child."""


@attrs.define(eq=False)
class _Slot:
    number: int
    process: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    short_lives: int = 0
    start_at: float = 0.0
    done: bool = False
    status: int | None = None  # what the child reports through
    ready: bool = False
    heard: float = 0.0

    @property
    def name(self) -> str:
        return f"p{self.number}"

    def dies(self, now: float) -> bool:
        """Whether it has shown that its children can't live."""
        lives = self.process is not None and now - self.started > _LIVES
        return self.short_lives >= _MOST_SHORT_LIVES and not lives


class Supervisor:
    """`processes` children; `reports`: they tell whether they are ready; `shared`: open files that
    each may use."""

    def __init__(
        self,
        command: Command,
        *,
        processes: int,
        burst: bool,
        reports: bool,
        shared: Sequence[int] = (),
        shutdown_timeout: float,
        block: float,
    ) -> None:
        self._command = command
        self._burst = burst
        self._reports = reports
        self._shared = shared
        self._shutdown_timeout = shutdown_timeout
        self._fresh = min(_FRESH, max(1.0, 2 * block))
        self._slots = [_Slot(number) for number in range(1, processes + 1)]
        self._signals: list[int] = []
        self._lifeline: int | None = None
        self._kill_at = 0.0
        self._failed = False

    def run(self) -> int:
        """Run until a signal, or until nothing is left to do; the exit code."""
        self._read_end, self._lifeline = os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        for pipe in (self._wake_read, self._wake_write):
            os.set_blocking(pipe, False)
        former_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT)
        former = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            return self._run()
        finally:
            self._stop()
            self._kill()
            signal.set_wakeup_fd(former_fd)
            for number, handler in former.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            for pipe in (self._read_end, self._wake_read, self._wake_write):
                os.close(pipe)

    def stop_soon(self) -> None:
        """Begin to stop, as a first signal does; from any thread."""
        if not self._signals:
            self._signals.append(signal.SIGTERM)

    def why_not_ready(self) -> str | None:
        """What keeps the whole from being ready, or None; from any thread."""
        if self._lifeline is None:
            return "stopping"
        now = time.monotonic()
        for slot in self._slots:
            if slot.process is None:
                return f"process {slot.name} does not run"
            if now - slot.heard > self._fresh:
                return f"process {slot.name} is silent"
            if not slot.ready:
                return f"process {slot.name} is not ready"
        return None

    def pids(self) -> list[int | None]:
        """The process in each place, None where none runs; from any thread."""
        processes = [slot.process for slot in self._slots]
        return [process.pid if process is not None else None for process in processes]

    def _run(self) -> int:
        while True:
            now = time.monotonic()
            self._listen(now)
            for slot in self._slots:
                self._reap(slot, now)
            if len(self._signals) > 1:
                log.warning("second signal: ending at once")
                return 128 + self._signals[1]
            if self._signals and self._lifeline is not None:
                log.info(
                    "%s: stopping in order; a second signal ends at once",
                    signal.Signals(self._signals[0]).name,
                    extra={"action": "supervisor_stopping"},
                )
                self._stop()
            if self._lifeline is None:
                if not self._living():
                    return 1 if self._failed else 0
                if now > self._kill_at:
                    log.error("%s do not end: killed", ", ".join(s.name for s in self._living()))
                    return 1
            elif all(slot.done for slot in self._slots):
                return 0
            elif all(slot.dies(now) for slot in self._slots if not slot.done):
                log.critical(
                    "no process can live: giving up", extra={"action": "supervisor_gave_up"}
                )
                self._failed = True
                self._stop()
            else:
                self._start_due(now)
            self._wait()

    def _living(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.process is not None]

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def _wait(self) -> None:
        pipes = [slot.status for slot in self._slots if slot.status is not None]
        poll = select.poll()
        for pipe in (self._wake_read, *pipes):
            poll.register(pipe, select.POLLIN)
        poll.poll(_ROUND * 1000)
        with suppress(OSError):
            os.read(self._wake_read, 4096)

    def _listen(self, now: float) -> None:
        for slot in self._slots:
            if slot.status is None:
                continue
            with suppress(OSError):
                said = os.read(slot.status, 4096)
                if said:
                    slot.heard, slot.ready = now, said.endswith(b"+")
                else:
                    self._deafen(slot)

    def _deafen(self, slot: _Slot) -> None:
        if slot.status is not None:
            os.close(slot.status)
        slot.status, slot.ready = None, False

    def _start_due(self, now: float) -> None:
        for slot in self._slots:
            if slot.process is None and not slot.done and now >= slot.start_at:
                self._start(slot, now)

    def _start(self, slot: _Slot, now: float) -> None:
        status: int | None = None
        if self._reports:
            slot.status, status = os.pipe()
            os.set_blocking(slot.status, False)
        slot.started, slot.heard = now, 0.0
        try:
            slot.process = subprocess.Popen(
                self._command(slot.number, self._read_end, status),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[self._read_end, *self._shared, *([] if status is None else [status])],
            )
        except OSError as error:  # no memory, too many processes: as if it had died
            log.error("process %s could not be started: %s", slot.name, describe(error))
            self._deafen(slot)
            self._put_off(slot, now)
            return
        finally:
            if status is not None:
                os.close(status)
        log.info("process %s started, pid %d", slot.name, slot.process.pid)

    def _reap(self, slot: _Slot, now: float) -> None:
        if slot.process is None:
            return
        code = slot.process.poll()
        if code is None:
            return
        pid, slot.process = slot.process.pid, None
        self._deafen(slot)
        if self._lifeline is None:
            # One that was still starting up ends by the signal itself.
            if code not in (0, RECYCLED, -signal.SIGTERM, -signal.SIGINT):
                log.error("process %s, pid %d, %s", slot.name, pid, ended(code))
                self._failed = True
        elif code == RECYCLED:
            log.info("process %s, pid %d, is renewed", slot.name, pid)
            slot.short_lives = 0
            slot.start_at = now
        elif code == 0 and self._burst:
            slot.done = True
        else:
            self._put_off(slot, now)
            log.warning(
                "process %s, pid %d, %s; the next starts in %.1f s",
                slot.name, pid, ended(code), slot.start_at - now,
                extra={"action": "process_died"},
            )  # fmt: skip

    def _put_off(self, slot: _Slot, now: float) -> None:
        slot.short_lives = slot.short_lives + 1 if now - slot.started < _LIVES else 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (slot.short_lives - 1))
        slot.start_at = now + pause

    def _stop(self) -> None:
        """Ask every child to stop in order: their pipe ends."""
        if self._lifeline is not None:
            lifeline, self._lifeline = self._lifeline, None
            os.close(lifeline)
            self._kill_at = time.monotonic() + self._shutdown_timeout + BEYOND

    def _kill(self) -> None:
        for slot in self._living():
            assert slot.process is not None
            slot.process.kill()
            slot.process.wait()
            slot.process = None
            self._deafen(slot)


def ended(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
