"""A server of a test's own, that the test may kill, freeze, restart and starve."""

import os
import signal
from pathlib import Path
from typing import Any

import redis

from taskrunner.cli.embedded import EmbeddedServer
from tests.support.waiting import eventually


class OwnServer(EmbeddedServer):
    """An embedded server with the handles that fault tests need."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._clients: list[redis.Redis] = []

    def client(self, **options: Any) -> redis.Redis:
        """Return a client of this server (closed with it); `options` as for `redis.Redis`."""
        client = redis.Redis.from_url(self.url, **options)
        self._clients.append(client)
        return client

    def kill(self) -> None:
        """End it at once, as a power cut would; `start()` brings it back on the same port."""
        self.halt(signal.SIGKILL)

    def restart(self, *, wait: bool = True) -> None:
        """Kill it and start it again: with an append-only file the data is kept, else lost."""
        self.kill()
        self.start(wait=wait)

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing answers."""
        pause_process(self.pid)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        while self._clients:
            self._clients.pop().close()
        super().stop()


def pause_process(pid: int) -> None:
    """Send SIGSTOP and wait until the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: process_state(pid) in ("T", "t", "Z"), 5)


def process_state(pid: int) -> str | None:
    """Return the state letter of a process (R, S, T, Z, …), None if there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return status.rpartition(")")[2].split()[0]


def process_is_alive(pid: int) -> bool:
    """Whether the process runs or is stopped; a zombie counts as dead."""
    return process_state(pid) not in (None, "Z", "X")
