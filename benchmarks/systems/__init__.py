"""Child side: one module per system, each with `make(spec) -> System`.

A module's docstring names the settings it uses and why they are the fair ones. It is imported in
its library's own environment, where TaskRunner and redis-py may be absent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a child process is to do; travels as JSON."""

    system: str
    role: str  # work, or what to produce: warm, each, numbered, bulk, later, unique
    url: str  # of the Unix socket
    port: int  # on 127.0.0.1, for libraries that speak TCP only
    kind: str = "noop"
    count: int = 1
    workers: int = 8
    interval: float = 0.0  # between two messages of a paced producer
    delay: float = 0.0  # of the first delayed task; the others follow evenly for `spread`
    spread: float = 0.0
    warm: bool = False  # one message before the clock starts: connected, imported, compiled
    loops: int = 0  # of `spin`
    body: str = ""  # a message of the size that TaskRunner's have, for the raw limit
    ledger: str = ""  # file that the `mark` tasks write to
    reclaim: float = 0.0  # seconds after which a dead worker's tasks are another's; 0: the default
    spawned_at: float = 0.0  # monotonic


class Unsupported(Exception):
    """The library has no such thing."""


class System:
    """One library. A producer calls one of the `send_` methods, a worker process calls `work`."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def send_each(self, kind: str, payloads: Iterable[Any]) -> None:
        """Dispatch one by one; the iterable may take its time between two."""
        raise Unsupported

    def send_bulk(self, kind: str, payloads: Sequence[Any]) -> None:
        """Dispatch by the library's own way for many, where it has one."""
        raise Unsupported

    def send_later(self, kind: str, dues: Iterable[tuple[float, float]]) -> None:
        """Dispatch each with its delay in seconds: (delay, payload)."""
        raise Unsupported

    def send_unique(self, kind: str, payloads: Iterable[str]) -> None:
        """Dispatch one by one, each under a lock named by its payload."""
        raise Unsupported

    def work(self, workers: int) -> None:
        """Run tasks until the process ends; may return early while its threads go on."""
        raise Unsupported
