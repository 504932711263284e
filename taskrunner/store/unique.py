"""Floor 2: unique locks, as a worker and an operator touch them; dispatch takes them in its own
step."""

from typing import Final

from taskrunner import scripts
from taskrunner.store.connection import Connections
from taskrunner.store.group import Lock

_START_UNIQUE: Final = scripts.load("start_unique")


class UniqueLocks:
    """Locks that belong to messages; each is a key whose value is the message's token."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def hold(self, lock: Lock) -> bool:
        """Renew the message's lock, or take it again if it lapsed; False where another message
        holds it."""
        return bool(self._connections.run(_START_UNIQUE, [lock.key], [lock.token, lock.ms]))

    def holder(self, key: str) -> str | None:
        """The token that holds a lock."""
        value = self._connections.call("GET", key)
        return None if value is None else str(value, "utf-8", "replace")

    def free(self, key: str) -> bool:
        """Free a lock whoever holds it: an operator's word."""
        return bool(self._connections.call("DEL", key))
