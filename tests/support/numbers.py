"""What the tests of the figures share: runners in this process, MONITOR, and a count of round trips.

`Crew` makes runners of one group, `Monitor` records what a server executes, `RoundTrips` is a relay
that counts how often a client had to wait for an answer. Each is a context manager.
"""

import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlparse

import attrs
import redis

from taskrunner import RedisStreamQueue, Registry, Task, TaskRunner, Timings, keys, task
from tests.support.names import Names
from tests.support.waiting import eventually

QUICK: dict[str, Any] = {"lease": 2, "presence": 6, "poll": 0.5, "janitor": 60}


class Crew:
    """Runners of one group with one registry; those that were started are stopped at the end."""

    def __init__(self, url: str, names: Names) -> None:
        self.url = url
        self.names = names
        self.registry = Registry()
        self.client = redis.Redis.from_url(url)
        self._made: list[TaskRunner] = []

    def task(self, function: Callable[..., object] | None = None, **options: Any) -> Task[Any]:
        """Register a task; without a function one that does nothing."""
        made: Task[Any] = task(registry=self.registry, **options)(function or _nothing)
        return made

    def make(
        self,
        *,
        url: str | None = None,
        timings: dict[str, Any] | None = None,
        queue: dict[str, Any] | None = None,
        **settings: Any,
    ) -> TaskRunner:
        """A runner that was not started, with a host name of its own."""
        runner = TaskRunner(
            queue=RedisStreamQueue(url or self.url, prefix=self.names.prefix, **(queue or {})),
            registry=self.registry,
            **{
                "consumer_group": self.names.group,
                "host": f"{self.names.host}-{len(self._made) + 1}",
                "num_workers": 4,
                "block_duration": 1,
                "shutdown_timeout": 5,
                "timings": Timings(**{**QUICK, **(timings or {})}),
                **settings,
            },
        )
        self._made.append(runner)
        return runner

    def start(self, *, leads: bool | None = None, **options: Any) -> TaskRunner:
        """A runner that works; with `leads`, one that is counted, and leads (or doesn't)."""
        runner = self.make(**options)
        runner.start()
        if leads is not None:
            eventually(
                lambda: (
                    runner.is_leader is leads
                    and self.is_present(runner)
                    and keys.consumer(self.names.group, runner.host, 1) in self.consumers()
                )
            )
        return runner

    def is_present(self, runner: TaskRunner) -> bool:
        """Whether the runner's presence key lives."""
        return bool(self.client.exists(presence(runner.host)))

    def consumers(self) -> set[str]:
        """The names of the group's consumers; none where there is no group."""
        try:
            rows: Any = self.client.xinfo_consumers(self.names.stream, self.names.group)
        except redis.ResponseError:
            return set()
        return {row["name"].decode() for row in rows}

    def figures(self) -> dict[str, int]:
        """The group's hash of timings."""
        found: Any = self.client.hgetall(self.names.metrics)
        return {field.decode(): int(value) for field, value in found.items()}

    def ring(self) -> list[int]:
        """The claim delays in ns, as they lie in the list."""
        found: Any = self.client.lrange(self.names.ring, 0, -1)
        return [int(value) for value in found]

    def add_go_instance(self, host: str, *, group: str | None = None, ttl: float = 60) -> None:
        """Leave what an instance of the Go library leaves once it had a message."""
        group = group or self.names.group
        with suppress(redis.ResponseError):  # it is there
            self.client.xgroup_create(self.names.stream, group, "0-0", mkstream=True)
        self.client.xgroup_createconsumer(self.names.stream, group, f"{group}_{host}_1")
        self.client.set(presence(host), str(uuid.uuid4()), px=round(ttl * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for runner in self._made:
            runner.stop(3)
        for runner in self._made:
            runner.queue.connections.close()
        self.client.close()


def presence(host: str) -> str:
    """The key that shows an instance to be alive."""
    return f"taskrunner:replication:{host}"


def _nothing(payload: Any = None) -> None:
    return None


@attrs.frozen
class Command:
    """One command as the server executed it; `by_script`: inside a Lua script."""

    at: float
    words: list[str]
    by_script: bool

    @property
    def name(self) -> str:
        return self.words[0].upper()


class Monitor:
    """Records every command of a server of the test's own, from the block's start to its end."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._marks = redis.Redis.from_url(url)
        self._commands: list[Command] = []
        self._thread = threading.Thread(target=self._listen, name="monitor", daemon=True)
        self._ready = threading.Event()
        self._caught_up: dict[str, threading.Event] = {}

    def sent(self, *names: str) -> list[Command]:
        """What clients sent so far, of these names or any; the commands of scripts left out."""
        return [c for c in self.all(*names) if not c.by_script]

    def all(self, *names: str) -> list[Command]:
        """The same with the commands that scripts called."""
        self._catch_up()
        wanted = {name.upper() for name in names}
        return [c for c in list(self._commands) if not wanted or c.name in wanted]

    def _catch_up(self) -> None:
        mark = uuid.uuid4().hex
        event = self._caught_up[mark] = threading.Event()
        self._marks.echo(mark)
        assert event.wait(20), "MONITOR fell silent"

    def _listen(self) -> None:
        with self._client.monitor() as monitor, suppress(redis.RedisError, OSError, ValueError):
            self._ready.set()
            for entry in monitor.listen():
                words = entry["command"].split()  # redis-py has taken the quotes away
                if words and words[0].upper() == "ECHO" and words[-1] in self._caught_up:
                    self._caught_up[words[-1]].set()
                    if words[-1] == "end":
                        return
                elif words:
                    by_script = entry["client_type"] == "lua"
                    self._commands.append(Command(float(entry["time"]), words, by_script))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        self._catch_up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._caught_up["end"] = threading.Event()
        with suppress(redis.RedisError):
            self._marks.echo("end")
        self._thread.join(10)
        self._marks.close()
        self._client.close()


class RoundTrips:
    """A relay that counts turns: a request that leaves after the last answer has come is a new one.

    So commands that travel together count once, whatever their number. `received` counts the bytes
    of the answers.
    """

    def __init__(self, url: str) -> None:
        self._target = urlparse(url)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.turns = 0
        self.received = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = self._connect()
                self._sockets += [client, server]
                state = {"answered": True}
                for pump in (self._requests, self._replies):
                    threading.Thread(target=pump, args=(client, server, state), daemon=True).start()

    def _connect(self) -> socket.socket:
        if self._target.scheme == "unix":
            made = socket.socket(socket.AF_UNIX)
            made.connect(self._target.path)
            return made
        return socket.create_connection((self._target.hostname, self._target.port or 6379))

    def _requests(
        self, client: socket.socket, server: socket.socket, state: dict[str, bool]
    ) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 20):
                with self._lock:
                    if state["answered"]:
                        self.turns += 1
                        state["answered"] = False
                server.sendall(data)
        _end(server)

    def _replies(
        self, client: socket.socket, server: socket.socket, state: dict[str, bool]
    ) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 20):
                with self._lock:
                    self.received += len(data)
                    state["answered"] = True
                client.sendall(data)
        _end(client)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="round-trips", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            _end(one)
            one.close()


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def wait_until_idle(client: redis.Redis, names: Names, timeout: float = 30.0) -> None:
    """Wait until nothing is in the stream."""
    eventually(lambda: client.xlen(names.stream) == 0, timeout, interval=0.05)


def server_now(client: redis.Redis) -> float:
    """The server's clock, unix seconds."""
    seconds, micros = client.time()  # type: ignore[misc]
    return float(seconds) + float(micros) / 1e6


def measure(seconds: float) -> float:
    """Let a window of measurement pass; returns how long it really was."""
    started = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - started
