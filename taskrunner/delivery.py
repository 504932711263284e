"""Floor 1: one hand-out of a message to a consumer, from fetch to settlement.

A plain mutable record, because there is one for every task that runs. Which thread may write what:
the thread that fetched it fills it, the worker that runs it sets `message`, `started` and
`settlement`, the heartbeat sets `confirmed`, `waiting` and `lost`; an adoption (the same entry read
again) changes `consumer` and `count`.
"""

from collections.abc import Sequence
from typing import Any

from taskrunner.message import Message


class Delivery:
    """An entry as this process holds it; `consumer` and `count` are what proves that it still
    does."""

    __slots__ = (
        "alone",
        "body",
        "confirmed",
        "consumer",
        "count",
        "entry_id",
        "failed",
        "fields",
        "lost",
        "message",
        "received",
        "settlement",
        "size",
        "started",
        "waiting",
    )

    def __init__(
        self, entry_id: bytes, body: bytes | None, consumer: str, count: int, received: float
    ) -> None:
        self.entry_id = entry_id
        self.body = body  # None where the entry has no `payload` field
        self.size = len(body) if body else 0  # bytes of the entry, as it was read
        self.fields: Sequence[bytes] = ()  # what such an entry has instead
        self.consumer = consumer
        self.count = count
        self.received = received  # monotonic
        self.confirmed = received  # monotonic: when a request left that found us the owner
        self.message: Message | None = None  # while it runs; a unique one's until it is settled
        self.started = 0.0  # monotonic; 0: still buffered
        self.settlement: Any = None  # what the settler is to do; None: acknowledge
        self.lost = False  # taken over by another consumer
        self.waiting = False  # set aside until its ownership is confirmed
        self.failed = False  # for good: only the handler or the dead letters are left
        self.alone = False  # an orphan that may have killed its process: no second one beside it

    def __repr__(self) -> str:
        return f"<Delivery {self.entry_id.decode()} count={self.count} of {self.consumer}>"
