"""Floor 4: hears on the group's channel that something earlier is due, or that the lease is free.

A convenience: without the right to subscribe, or with Go on the other side, polling finds the same
within seconds.
"""

import logging
from collections.abc import Callable
from typing import Final

from taskrunner.reports import Health
from taskrunner.service import Service
from taskrunner.services.elector import RELEASED
from taskrunner.store import connection
from taskrunner.store.connection import Connections

_SILENCE: Final = 60.0  # then the connection is made anew, for a dead one looks just like this
_NOT_ALLOWED: Final = 3600.0

log = logging.getLogger("taskrunner.listener")


class Listener(Service):
    """SUBSCRIBE on a connection of its own."""

    jitter = 0.0

    def __init__(
        self,
        health: Health,
        *,
        connections: Connections,
        channel: str,
        due: Callable[[], None],
        released: Callable[[], None],
    ) -> None:
        super().__init__("listener", health)
        self._link = connections.open(read_timeout=_SILENCE)
        self._channel = channel
        self._due = due
        self._released = released

    def tick(self) -> float:
        if not self._link.connected:
            try:
                self._link.call("SUBSCRIBE", self._channel)
            except Exception as error:  # all but one are raised again
                if connection.code(error) != "NOPERM":
                    raise
                log.warning("not allowed to subscribe to %s: polling instead", self._channel)
                return _NOT_ALLOWED
            self._due()  # what was said while we did not listen
            return 0.0
        try:
            message = self._link.listen()
        except Exception as error:
            if self._stopping or connection.timed_out(error):
                return 0.0
            raise
        if message[0] == b"message":
            (self._released if message[2] == RELEASED.encode() else self._due)()
        return 0.0

    def interrupt(self) -> None:
        """End the present read."""
        self._link.interrupt()

    def close(self) -> None:
        self._link.close()
