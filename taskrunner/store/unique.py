"""Floor 2: unique locks, as a worker and an operator touch them; dispatch takes them in its own
step."""

from taskrunner.store.connection import Connections


class UniqueLocks:
    """Locks that belong to messages; each is a key whose value is the message's token."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def holder(self, key: str) -> str | None:
        """The token that holds a lock."""
        value = self._connections.call("GET", key)
        return None if value is None else str(value, "utf-8", "replace")

    def free(self, key: str) -> bool:
        """Free a lock whoever holds it: an operator's word."""
        return bool(self._connections.call("DEL", key))
