"""Floor 2: presence keys: which instances live, and who may use which host name."""

import os
import uuid
from collections.abc import Iterable
from typing import Final

from taskrunner import keys, scripts
from taskrunner.store.connection import Connections
from taskrunner.store.group import ConsumerGroup

_TAKE_NAME: Final = scripts.load("take_name")
_KEEP: Final = scripts.load("keep")
_RELEASE: Final = scripts.load("release")

KEPT: Final = 1
GONE: Final = 0
ANOTHERS: Final = -1


class OwnedKey:
    """A key with our value and a TTL, touched only while it holds that value: presence, lease."""

    def __init__(self, connections: Connections, key: str, value: str) -> None:
        self._connections = connections
        self.key = key
        self.value = value

    def take(self, ttl: float) -> bool:
        """Take the key if it is free."""
        return bool(self._connections.call("SET", self.key, self.value, "PX", _ms(ttl), "NX"))

    def keep(self, ttl: float) -> int:
        """Renew it: KEPT, GONE or ANOTHERS. Works when Redis is out of memory."""
        return int(self._connections.run(_KEEP, [self.key], [self.value, _ms(ttl)]))

    def release(self, *, channel: str = "", message: str = "") -> bool:
        """Give it up if it is ours, and say so on the channel."""
        return bool(self._connections.run(_RELEASE, [self.key], [self.value, channel, message]))

    def left(self) -> float | None:
        """Seconds until the key runs out; None where there is none, 0 for one without expiry."""
        ms = int(self._connections.call("PTTL", self.key))
        return None if ms == -2 else max(ms, 0) / 1000


class Instances:
    """Who lives, by presence keys."""

    def __init__(self, connections: Connections, group: ConsumerGroup) -> None:
        self._connections = connections
        self._group = group

    def take_name(self, host: str, instance_id: str, ttl: float) -> bool:
        """Take a host name nobody lives under and no dead predecessor has deliveries under."""
        start = keys.consumer(self._group.name, host, keys.PARKING)[:-1]
        reply = self._connections.run(
            _TAKE_NAME,
            [keys.presence(host), self._group.stream],
            [instance_id, _ms(ttl), self._group.name, start],
        )
        return int(reply) == 1

    def presence(self, host: str, instance_id: str) -> OwnedKey:
        """The presence key of a host name."""
        return OwnedKey(self._connections, keys.presence(host), instance_id)

    def living(self, hosts: Iterable[str]) -> dict[str, str]:
        """Instance id by host, for those hosts whose presence key is there."""
        names = sorted(set(hosts))
        if not names:
            return {}
        values = self._connections.call("MGET", *(keys.presence(host) for host in names))
        return {
            host: value.decode(errors="replace")
            for host, value in zip(names, values, strict=True)
            if value is not None
        }

    def replications(self) -> int:
        """How many instances share the group: hosts among its readers' names that live, at least
        1."""
        parsed = (
            keys.parse_consumer(self._group.name, name) for name, _, _ in self._group.consumers()
        )
        hosts = {found[0] for found in parsed if found and found[1] != keys.PARKING}
        return max(1, len(self.living(hosts)))

    def server_time(self) -> float:
        """The server's clock, unix seconds."""
        seconds, micros = self._connections.call("TIME")
        return int(seconds) + int(micros) / 1e6


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def new_instance_id() -> str:
    """A random UUID, marked as this library's by version 8 (RFC 9562: for private use). Go's are
    version 4."""
    value = uuid.UUID(bytes=os.urandom(16), version=4)
    return f"{str(value)[:14]}8{str(value)[15:]}"


def is_ours(instance_id: str) -> bool:
    """Whether an instance of this library made the id."""
    return len(instance_id) == 36 and instance_id[14] == "8"
