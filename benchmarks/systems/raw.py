"""The limit: redis-py itself, one thread, nothing else.

XREADGROUP COUNT 100 and one XACK plus one XDEL per batch, from a `redis.Redis` with default
settings and hiredis; the body is called with the undecoded message. XADD one by one, or 1000 in a
pipeline without MULTI. Unique: SET NX PX and XADD in one pipeline. For the `spin` body it is the
plain loop without any queue. Nothing here survives anything.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import Any

import redis

from benchmarks.bodies import Marks
from benchmarks.systems import Spec, System

STREAM = "raw:queue"
GROUP = "raw"


class Raw(System):
    """redis-py."""

    def __init__(self, spec: Spec, marks: Marks) -> None:
        super().__init__(spec)
        self._marks = marks
        self._client = redis.Redis.from_url(spec.url)

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        client, body = self._client, self.spec.body
        if kind == "stamp":
            for payload in payloads:
                client.xadd(STREAM, {"payload": "" if payload is None else repr(payload)})
            return
        for _ in payloads:
            client.xadd(STREAM, {"payload": body})

    def send_bulk(self, kind: str, payloads: Sequence[Any]) -> None:
        bodies = repeat(self.spec.body, len(payloads))
        while chunk := list(islice(bodies, 1000)):
            pipe = self._client.pipeline(transaction=False)
            for body in chunk:
                pipe.xadd(STREAM, {"payload": body})
            pipe.execute()

    def send_unique(self, kind: str, payloads: Iterable[str]) -> None:
        body = self.spec.body
        for payload in payloads:
            pipe = self._client.pipeline(transaction=False)
            pipe.set(f"taskrunner:unique:{payload}", "token", nx=True, px=60_000)
            pipe.xadd(STREAM, {"payload": body})
            pipe.execute()

    def work(self, workers: int) -> None:
        kind = self.spec.kind
        body = self._marks.body(kind)
        if kind == "spin":
            for _ in range(self.spec.count):
                body(None)
            return
        client = self._client
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        while True:
            reply: Any = client.xreadgroup(GROUP, "one", {STREAM: ">"}, count=100, block=4000)
            if not reply:
                continue
            rows = reply[0][1] if isinstance(reply, list) else next(iter(reply.values()))[0]
            ids = []
            for entry_id, fields in rows:
                payload = fields[b"payload"]
                if kind == "stamp":
                    payload = float(payload) if payload else None
                body(payload)
                ids.append(entry_id)
            client.xack(STREAM, GROUP, *ids)
            client.xdel(STREAM, *ids)


def make(spec: Spec, marks: Marks) -> System:
    """The adapter."""
    return Raw(spec, marks)
