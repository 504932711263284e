"""Floor 0: the name of every Redis key, consumer and channel; no other module spells one.

The Go library uses the same names, so none can change without splitting a mixed fleet.
"""

import base64
import hashlib
import re

PARKING = 0
"""Number of the consumer that holds what waits for a retry; readers count from 1."""

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


def stream(prefix: str, queue: str) -> str:
    """Return the key of the queue's stream."""
    return f"{prefix}:{queue}"


def ring(prefix: str, queue: str) -> str:
    """Return the key of the list of the queue's last claim delays, in nanoseconds."""
    return f"ring:{prefix}:metrics:{queue}"


def delayed(group: str) -> str:
    """Return the key of the sorted set of delayed tasks, scored by unix seconds."""
    return f"taskrunner:{group}:delayed_tasks"


def channel(group: str) -> str:
    """Return the pub/sub channel of the group, named like its delayed set."""
    return delayed(group)


def leader(group: str) -> str:
    """Return the key of the leadership lease; Go hashes the group, so we do too."""
    digest = hashlib.sha1(group.encode("utf-8"), usedforsecurity=False).digest()
    return f"taskrunner:leader:{base64.b32encode(digest).decode('ascii')}"


def capacity(group: str) -> str:
    """Return the key of the pool capacity that the leader publishes."""
    return f"taskrunner:{group}:worker_tuning_capacity"


def metrics(group: str) -> str:
    """Return the key of the hash of timings per task."""
    return f"taskrunner:{group}:metrics"


def dead_letters(group: str) -> str:
    """Return the key of the stream of dead letters."""
    return f"taskrunner:{group}:dead_tasks"


def presence(host: str) -> str:
    """Return the key that shows the instance `host` to be alive."""
    return f"taskrunner:replication:{host}"


def unique(lock_name: str) -> str:
    """Return the key of a unique lock; its name is "<task>:<key>", or "<task>" without a key."""
    return f"taskrunner:unique:{lock_name}"


def consumer(group: str, host: str, number: int) -> str:
    """Return the name of a consumer: `PARKING`, or a reader of the host, from 1."""
    return f"{group}_{host}_{number}"


def parse_consumer(group: str, name: str) -> tuple[str, int] | None:
    """Return (host, number) of a consumer of the group; None if `consumer` did not make the name.

    The host may hold underscores: it is what lies between the group and the last one.
    """
    if not name.startswith(f"{group}_"):
        return None
    host, _, number = name.removeprefix(f"{group}_").rpartition("_")
    return (host, int(number)) if host and _NUMBER.fullmatch(number) else None
