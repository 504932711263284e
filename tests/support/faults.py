"""The fault recipes, one helper for each; every context manager undoes its fault at the end.

`server` is an `OwnServer`, `client` a `redis.Redis` that talks to it. Durations in seconds.
"""

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import redis

from tests.support.proxy import Proxy, Rule
from tests.support.server import OwnServer
from tests.support.waiting import eventually


class Pausable(Protocol):
    """A server or a worker process."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


@contextmanager
def killed(server: OwnServer) -> Iterator[None]:
    """R-kill: the server is dead within the block and back after it, on the same port.

    The data is kept if the server has an append-only file, and lost if not.
    """
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def frozen(target: Pausable) -> Iterator[None]:
    """R-stop: the server or worker stands still (SIGSTOP) within the block."""
    target.pause()
    try:
        yield
    finally:
        target.resume()


def drop_connections(client: redis.Redis) -> int:
    """R-drop: the server closes all connections of ordinary clients; returns how many."""
    return int(cast(int, client.execute_command("CLIENT", "KILL", "TYPE", "normal")))


@contextmanager
def paused(
    client: redis.Redis, mode: Literal["ALL", "WRITE"] = "ALL", *, longest: float = 60.0
) -> Iterator[None]:
    """R-pause: the server takes commands (or only writes) without answering, within the block."""
    client.execute_command("CLIENT", "PAUSE", int(longest * 1000), mode)
    try:
        yield
    finally:
        client.execute_command("CLIENT", "UNPAUSE")


def flush(
    client: redis.Redis,
    what: Literal["all", "stream", "group"],
    *,
    stream: str = "",
    group: str = "",
) -> None:
    """R-flush: all keys, the stream, or the consumer group are gone."""
    if what == "all":
        client.flushall()
    elif what == "stream":
        client.delete(stream)
    else:
        client.xgroup_destroy(stream, group)


@contextmanager
def out_of_memory(client: redis.Redis) -> Iterator[None]:
    """R-oom: every command that may use memory is refused within the block."""
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


class MisconfServer:
    """R-misconf: a server whose snapshots can be made to fail; it then refuses every write.

    Even PING is refused, as in the field.
    """

    def __init__(self, make: Callable[..., OwnServer], directory: Path) -> None:
        self._data = directory / "data"
        self._data.mkdir(parents=True)
        self.server = make(arguments=["--dir", str(self._data), "--save", "3600 1"])

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Writes are refused with MISCONF within the block."""
        client = self.server.client()
        client.set("misconf:probe", 1)
        shutil.rmtree(self._data)
        with suppress(redis.ResponseError):  # a snapshot may be under way
            client.bgsave()
        eventually(lambda: cast(Any, client.info())["rdb_last_bgsave_status"] == "err", 10)
        try:
            yield
        finally:
            client.config_set("stop-writes-on-bgsave-error", "no")


def restart_loading(
    server: OwnServer, *, keys: int = 3000, key_delay_microseconds: int = 1000
) -> None:
    """R-loading: restart with a snapshot that takes about `keys * delay` to load; doesn't wait.

    The keys `loading:0` … stay in the server. `server.start()` again without the delay needs
    `server.arguments` put back, which the next `restart_loading` does by itself.
    """
    client = server.client()
    with client.pipeline(transaction=False) as pipe:
        for number in range(keys):
            pipe.set(f"loading:{number}", "x")
        pipe.execute()
    client.save()
    slow = ["--key-load-delay", str(key_delay_microseconds)]
    slow += ["--loading-process-events-interval-bytes", "1024"]
    ordinary = list(server.arguments)
    server.kill()
    server.arguments = [*ordinary, *slow]
    try:
        server.start(wait=False)
    finally:
        server.arguments = ordinary


def is_loading(server: OwnServer) -> bool:
    """Whether the server answers, and refuses with LOADING."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        try:
            connection.connect(str(server.socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"-LOADING")
        except OSError:
            return False


@contextmanager
def scripts_forgotten(client: redis.Redis, every: float = 0.2) -> Iterator[None]:
    """R-script: the server forgets all scripts again and again within the block."""
    stop = threading.Event()

    def forget() -> None:
        while not stop.wait(every):
            client.script_flush()

    client.script_flush()
    thread = threading.Thread(target=forget, name="script-flush")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def restricted_user(
    client: redis.Redis,
    prefix: str,
    *rules: str,
    user: str = "restricted",
    password: str = "secret",
) -> dict[str, str]:
    """R-acl: make a user with our keys and channels only; returns its `redis.Redis` arguments.

    `rules` are added at the end, such as `-xautoclaim`. See `client.acl_log()` for what it refused.
    """
    client.execute_command(
        "ACL",
        "SETUSER",
        user,
        "reset",
        "on",
        f">{password}",
        f"~{prefix}:*",
        "~taskrunner:*",
        "~ring:*",
        "resetchannels",  # 6.2 begins with all of them
        "&taskrunner:*",
        "+@all",
        "-@admin",
        "-@dangerous",
        *rules,
    )
    client.execute_command("ACL", "LOG", "RESET")
    return {"username": user, "password": password}


def cluster_server(make: Callable[..., OwnServer]) -> OwnServer:
    """R-cluster: one server that is a whole cluster; shows CROSSSLOT for keys of several slots."""
    server = make(port=_port_below(55_000), arguments=["--cluster-enabled", "yes"])
    client = server.client()
    client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))  # 6.2 knows no ADDSLOTSRANGE

    def is_ok() -> bool:
        return "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO"))

    eventually(is_ok, 15)
    return server


def _port_below(limit: int) -> int:
    # The cluster bus takes the port 10,000 above, so both must be free and below 65,536.
    start = 20_000 + os.getpid() % 20_000
    for port in range(start, limit):
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 10_000))
            return port
    raise AssertionError("no free pair of ports")


def lose_reply(proxy: Proxy, command: str, *, containing: str | bytes = b"") -> Rule:
    """R-proxy: the next such command is executed, and the connection cut before its reply."""
    return proxy.on(command, "cut_after", containing=containing)


def lose_request(proxy: Proxy, command: str, *, containing: str | bytes = b"") -> Rule:
    """R-proxy: the connection is cut before the next such command arrives."""
    return proxy.on(command, "cut_before", containing=containing)


def hold_request(proxy: Proxy, command: str, *, containing: str | bytes = b"") -> Rule:
    """R-proxy: the next such command waits on its way until `rule.release()`."""
    return proxy.on(command, "hold_request", containing=containing)


@contextmanager
def half_open(proxy: Proxy) -> Iterator[None]:
    """R-proxy: connections stay open and nothing passes, within the block; cut at its end."""
    proxy.swallow()
    try:
        yield
    finally:
        # What was swallowed is missing: these connections can't be used again.
        proxy.cut()
        proxy.pass_through()


def down_for(seconds: float) -> None:
    """Let a fault last: the one place where a test waits for time itself to pass."""
    time.sleep(seconds)
