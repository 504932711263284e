"""A TCP relay between client and server that delays, cuts, swallows or holds what passes.

Two ways to use it, both switchable at run time:

- for everything, per direction: `proxy.delay(0.5, "reply")`, `proxy.swallow()` (half-open: the
  connection stays, nothing arrives), `proxy.hold()` … `proxy.release()`, `proxy.refuse()`,
  `proxy.cut()`, `proxy.pass_through()`;
- aimed at one command: `rule = proxy.on("XADD", "cut_after")`. The relay reads RESP, so a rule
  matches a command name, and with `containing=` any bytes of the request (a key, a script's SHA).
  `rule.hit` is set when it first struck; `rule.release()` lets go what it holds.

Actions of a rule: `cut_before` (the request never arrives), `cut_after` (the server has executed
it, its reply never arrives), `swallow_request`, `swallow_reply`, `hold_request`, `hold_reply`,
`delay_request`, `delay_reply`. A held request holds what follows it on the same connection too.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Self
from urllib.parse import urlparse

Direction = Literal["request", "reply", "both"]
Action = Literal[
    "cut_before",
    "cut_after",
    "swallow_request",
    "swallow_reply",
    "hold_request",
    "hold_reply",
    "delay_request",
    "delay_reply",
]
_CHUNK: Final = 1 << 20
_SUBSCRIBING: Final = frozenset(
    {b"SUBSCRIBE", b"PSUBSCRIBE", b"SSUBSCRIBE", b"UNSUBSCRIBE", b"PUNSUBSCRIBE", b"MONITOR"}
)


@dataclass(eq=False)
class Rule:
    """What happens to the next `times` requests that match (None: to all of them)."""

    command: bytes
    action: Action
    containing: bytes = b""
    times: int | None = 1
    seconds: float = 0.0
    hits: int = 0
    hit: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let go what this rule holds, now and later."""
        self.released.set()

    def matches(self, name: bytes, frame: bytes) -> bool:
        if self.times is not None and self.hits >= self.times:
            return False
        return self.command in (b"*", name) and self.containing in frame


@dataclass
class _Flow:
    """What is done to all that goes one way."""

    mode: Literal["pass", "delay", "swallow", "hold"] = "pass"
    seconds: float = 0.0
    released: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Relays `url` (redis://, rediss:// not, or unix://) as `proxy.url`, until `close()`."""

    def __init__(self, url: str) -> None:
        self._target = urlparse(url)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._flows = {"request": _Flow(), "reply": _Flow()}
        self._refusing = False
        self._links: set[_Link] = set()
        self._closed = False
        self.accepted = 0
        threading.Thread(target=self._accept, name="proxy-accept", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def lead_to(self, url: str) -> None:
        """As a name that is given to another server: new connections go there, old ones stay."""
        self._target = urlparse(url)

    def on(
        self,
        command: str,
        action: Action,
        *,
        containing: str | bytes = b"",
        times: int | None = 1,
        seconds: float = 0.0,
    ) -> Rule:
        """Aim at the next `times` requests named `command` (`*`: any) that hold `containing`."""
        wanted = containing.encode() if isinstance(containing, str) else containing
        rule = Rule(command.upper().encode(), action, wanted, times, seconds)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Take all rules away and let go what they held."""
        with self._lock:
            rules, self._rules = self._rules, []
        for rule in rules:
            rule.times = 0
            rule.release()

    def pass_through(self) -> None:
        """Let everything pass again, also new connections; what was held goes on."""
        self._refusing = False
        self._set("both", "pass")

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Let each command or reply wait before it goes on."""
        self._set(direction, "delay", seconds)

    def swallow(self, direction: Direction = "both") -> None:
        """Drop what comes, and leave the connections open: a half-open network."""
        self._set(direction, "swallow")

    def hold(self, direction: Direction = "both") -> None:
        """Keep what comes until `release()` or `pass_through()`."""
        self._set(direction, "hold")

    def release(self) -> None:
        """Let what is held go on, in order, and pass what follows."""
        self._set("both", "pass")

    def cut(self) -> int:
        """Cut all present connections; return how many."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()
        return len(links)

    def refuse(self) -> None:
        """Cut all connections and take no new ones, until `pass_through()`."""
        self._refusing = True
        self.cut()

    def close(self) -> None:
        self._closed = True
        # shutdown wakes the accepting thread; close alone does not on Linux.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.clear()
        self.pass_through()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _set(
        self,
        direction: Direction,
        mode: Literal["pass", "delay", "swallow", "hold"],
        seconds: float = 0.0,
    ) -> None:
        with self._lock:
            for name in ("request", "reply") if direction == "both" else (direction,):
                old, self._flows[name] = self._flows[name], _Flow(mode, seconds)
                old.released.set()

    def _rule_for(self, name: bytes, frame: bytes) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if rule.matches(name, frame):
                    rule.hits += 1
                    return rule
        return None

    def _flow(self, direction: Literal["request", "reply"]) -> _Flow:
        return self._flows[direction]

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self._refusing:
                client.close()
                continue
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
            link.start()

    def _connect(self) -> socket.socket:
        if self._target.scheme == "unix":
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target.path)
            return server
        return socket.create_connection(
            (self._target.hostname or "127.0.0.1", self._target.port or 6379), timeout=None
        )

    def _forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Link:
    """One connection: a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._awaited: deque[Rule | None] = deque()  # one for each request that awaits a reply
        self._pumping = 2
        self._unordered = False  # replies no longer match requests (pub/sub)
        for end in (client, server):
            if end.family == socket.AF_INET:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for target in (self._pump_requests, self._pump_replies):
            threading.Thread(target=self._guard, args=(target,), daemon=True).start()

    def close(self) -> None:
        for end in (self._client, self._server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _guard(self, pump: Callable[[], None]) -> None:
        with suppress(OSError):
            pump()
        self.close()  # ends the other direction too
        with self._proxy._lock:
            self._pumping -= 1
            if self._pumping:
                return
        self._proxy._forget(self)
        self._client.close()
        self._server.close()

    def _pump_requests(self) -> None:
        framer = Framer()
        while data := self._client.recv(_CHUNK):
            for frame in framer.feed(data):
                if not self._flow_allows("request"):
                    continue
                name = framer.name_of(frame)
                if name in _SUBSCRIBING:
                    self._unordered = True
                rule = self._proxy._rule_for(name, frame)
                action = rule.action if rule else ""
                if rule and action.endswith(("before", "request")):
                    rule.hit.set()
                    if action == "cut_before":
                        return
                    if action == "swallow_request":
                        continue
                    self._wait(rule)
                self._awaited.append(rule)
                self._server.sendall(frame)

    def _pump_replies(self) -> None:
        framer = Framer()
        while data := self._server.recv(_CHUNK):
            for frame in framer.feed(data):
                rule = None
                if not self._unordered and not frame.startswith(b">") and self._awaited:
                    rule = self._awaited.popleft()
                action = rule.action if rule else ""
                if rule and action.endswith(("after", "reply")):
                    rule.hit.set()
                    if action == "cut_after":
                        return
                    if action == "swallow_reply":
                        continue
                    self._wait(rule)
                if self._flow_allows("reply"):
                    self._client.sendall(frame)

    def _flow_allows(self, direction: Literal["request", "reply"]) -> bool:
        """Wait as the direction's mode says; return False if the frame is swallowed."""
        while True:
            flow = self._proxy._flow(direction)
            if flow.mode == "pass":
                return True
            if flow.mode == "swallow":
                return False
            if flow.mode == "delay":
                time.sleep(flow.seconds)
                return True
            flow.released.wait()

    def _wait(self, rule: Rule) -> None:
        if rule.action.startswith("delay"):
            time.sleep(rule.seconds)
        else:
            rule.released.wait()


class Framer:
    """Splits a RESP stream (2 or 3, either direction) into whole commands or replies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._position = 0  # up to here the present frame has been read
        self._missing = 1  # values the present frame still needs

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take in bytes and yield each frame that is complete."""
        self._buffer += data
        while self._advance():
            if self._missing == 0:
                frame = bytes(self._buffer[: self._position])
                del self._buffer[: self._position]
                self._position, self._missing = 0, 1
                yield frame

    @staticmethod
    def name_of(frame: bytes) -> bytes:
        """Return a request's command name in capitals."""
        if frame.startswith(b"*"):
            parts = frame.split(b"\r\n", 3)
            return parts[2].upper() if len(parts) > 2 else b""
        return frame.split(maxsplit=1)[0].upper() if frame.strip() else b""

    def _advance(self) -> bool:
        """Read one value's head (and a string's body); return False if it isn't all there."""
        end = self._buffer.find(b"\r\n", self._position)
        if end < 0:
            return False
        kind, rest = self._buffer[self._position : self._position + 1], end + 2
        if kind in b"$=!":
            length = int(self._buffer[self._position + 1 : end])
            rest += length + 2 if length >= 0 else 0
            if len(self._buffer) < rest:
                return False
        elif kind in b"*~>%|":
            count = max(0, int(self._buffer[self._position + 1 : end]))
            self._missing += count * 2 if kind in b"%|" else count
            if kind == b"|":  # attributes stand before a value and are none
                self._missing += 1
        self._missing -= 1
        self._position = rest
        return True
