"""Floor 2: connections to Redis, and which of its answers are outages.

Owns: our own connections made from the given client's parameters (always RESP2 and bytes, so
replies have one shape whatever the application chose), every time limit on a socket, the rule "may
this be sent again", and the classification of Redis's errors. The application's own pool is never
borrowed from: a full or closed pool over there can't hold up a settlement here.
"""

import copy
import os
import re
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import redis
from hiredis import pack_command
from redis.backoff import NoBackoff
from redis.exceptions import (
    ConnectionError as LostError,
)
from redis.exceptions import (
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    TimeoutError as LateError,
)
from redis.retry import Retry as ConnectRetry
from redis.sentinel import SentinelConnectionPool

from taskrunner.clock import monotonic
from taskrunner.errors import ConfigurationError, quoted
from taskrunner.scripts import Script

Arg = str | bytes | int | float

_pack: Callable[[tuple[Arg, ...]], bytes] = cast(Any, pack_command)
"""Straight from hiredis: redis-py's way round takes twice as long."""

COMMAND_TIMEOUT: Final = 5.0
"""Seconds a plain command may take; a shorter `socket_timeout` of the given client holds."""

_SENTINEL_TIMEOUT: Final = 1.0
"""Seconds for each question to a sentinel; they are asked one after the other."""

_KEPT_IDLE: Final = 32

_SURELY_OPEN: Final = 0.01
"""Seconds for which an idle link is not looked at: one that is used again and again isn't."""

_CODES: Final[dict[str, str]] = {
    "BusyLoadingError": "LOADING",
    "ReadOnlyError": "READONLY",
    "OutOfMemoryError": "OOM",
    "NoScriptError": "NOSCRIPT",
    "NoPermissionError": "NOPERM",
    "AuthenticationError": "NOAUTH",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
}
"""redis-py takes the code off the text of these, and not all of its versions have them all: by
name."""

_IN_SCRIPT: Final = re.compile(
    r"@user_script: ?\d+: -?([A-Z]+) "
)  # how 6.2 tells of a refused call
_ACL_IN_SCRIPT: Final = ("The user executing the script", "ACL failure in script")
_TOO_LARGE: Final = ("too large", "exceeds maximum", "invalid bulk length", "too big")

_OUTAGES: Final = frozenset(
    [
        "LOADING",
        "READONLY",
        "MASTERDOWN",
        "MISCONF",
        "OOM",
        "NOGROUP",
        "UNBLOCKED",
        "NOREPLICAS",
        "TRYAGAIN",
        "CLUSTERDOWN",
        "BUSY",
        "NOPERM",
        "NOAUTH",
        "WRONGPASS",
        "WRONGTYPE",
    ]
)
_OTHER_SERVER: Final = frozenset(["LOADING", "READONLY", "MASTERDOWN", "UNBLOCKED"])


def code(error: BaseException) -> str:
    """The code of Redis's answer ("NOGROUP"), where a step or redis-py hides it too; "" if there is
    none."""
    name = _CODES.get(type(error).__name__)
    if name is not None:
        return name
    text = str(error)
    found = _IN_SCRIPT.search(text)
    if found is not None and found[1] != "ERR":
        return found[1]
    if any(sign in text for sign in _ACL_IN_SCRIPT):
        return "NOPERM"
    word = text.split(" ", 1)[0].rstrip(":")
    return word if word.isupper() else ""


def answered(error: BaseException) -> bool:
    """Whether Redis answered with a refusal: then nothing is on its way to us."""
    return isinstance(error, ResponseError)


def too_large(error: BaseException) -> bool:
    """Whether Redis will never take what it was sent, because of its size."""
    return isinstance(error, ResponseError) and any(sign in str(error) for sign in _TOO_LARGE)


def lost(error: BaseException) -> bool:
    """Whether the connection failed, so that it is unknown if the command was carried out."""
    return isinstance(error, LostError | LateError | OSError)


def refused_login(error: BaseException) -> bool:
    """Whether Redis wants another password, or one at all."""
    return code(error) in ("NOAUTH", "WRONGPASS")


def timed_out(error: BaseException) -> bool:
    """Whether a read ended by its time limit."""
    return isinstance(error, LateError)


def outage(error: BaseException) -> bool:
    """Whether Redis is away or refuses for now: never the fault of a task or a settlement
    (semantics §3)."""
    return lost(error) or (isinstance(error, RedisError) and code(error) in _OUTAGES)


def missing_group(error: BaseException) -> bool:
    """Whether the stream or its group is gone (flush, failover, eviction): it is created again."""
    return code(error) == "NOGROUP"


class ReplyTooLargeError(LostError):
    """A reply had more bytes than its reader allows; the connection is closed, nothing is kept."""


class _Meter:
    """Stands before a socket while one reply is read, and counts it."""

    __slots__ = ("_left", "_sock")

    def __init__(self, sock: Any, most: int) -> None:
        self._sock = sock
        self._left = most

    def recv_into(self, buffer: Any) -> int:
        size: int = self._sock.recv_into(buffer)
        self._count(size)
        return size

    def recv(self, size: int) -> bytes:
        data: bytes = self._sock.recv(size)
        self._count(len(data))
        return data

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ReplyTooLargeError("a reply of more bytes than are allowed at once")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Link:
    """One connection. Not for two threads at once, but `interrupt` may come from any thread."""

    __slots__ = ("_connection", "given_back")

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.given_back = 0.0  # monotonic

    def call(self, *args: Arg) -> Any:
        """Send one command and read its reply; an error reply is raised."""
        connection = self._connection
        try:
            if connection._sock is None:
                connection.connect()  # by its own method: a Sentinel-made one asks for the primary there
            connection.send_packed_command([_pack(args)], check_health=False)
            return connection.read_response()
        except ResponseError as error:
            if code(error) in _OTHER_SERVER:
                connection.disconnect()
            raise
        except (
            BaseException
        ):  # also one raised into this thread half way: the reply would meet the next command
            connection.disconnect()
            raise

    def call_within(self, most: int, *args: Arg) -> Any:
        """As `call`, but a reply of more than `most` bytes raises ReplyTooLargeError: Redis has no
        such limit."""
        connection = self._connection
        if connection._sock is None:
            connection.connect()
        reader = connection._parser
        if hasattr(reader._buffer, "_sock"):  # the parser in Python
            reader = reader._buffer
        sock = reader._sock
        reader._sock = meter = _Meter(sock, most)
        try:
            return self.call(*args)
        finally:
            if reader._sock is meter:
                reader._sock = sock

    def calls(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send several commands in one round trip; an error reply stands in its place in the
        list."""
        connection = self._connection
        replies: list[Any] = []
        try:
            if connection._sock is None:
                connection.connect()
            packed = b"".join([_pack(tuple(command)) for command in commands])
            connection.send_packed_command([packed], check_health=False)
            for _ in commands:
                try:
                    replies.append(connection.read_response())
                except ResponseError as error:
                    replies.append(error)
        except BaseException:
            connection.disconnect()
            raise
        if any(
            isinstance(reply, ResponseError) and code(reply) in _OTHER_SERVER for reply in replies
        ):
            connection.disconnect()
        return replies

    def listen(self) -> Any:
        """Read what the server sends by itself (pub/sub); the read timeout raises."""
        try:
            return self._connection.read_response()
        except BaseException:
            self._connection.disconnect()
            raise

    @property
    def connected(self) -> bool:
        """Whether a socket is open."""
        return self._connection._sock is not None

    def usable(self) -> bool:
        """Whether the idle connection is open and silent: data or an end of file means the server
        hung up."""
        sock = self._connection._sock
        if sock is None:
            return False
        try:
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False

    def hang_up(self) -> None:
        """Have the server end the connection, and with it a read that another thread is blocked in.

        Our half is closed, the server sees it and closes its own: what it had delivered by then is
        read, and it delivers nothing afterwards. Not CLIENT UNBLOCK, which takes down a server that
        holds the read back because of CLIENT PAUSE or FAILOVER (Redis to 8.2, Valkey to 8.1).
        """
        sock = self._connection._sock
        if sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(
                    sock, socket.SHUT_WR
                )  # SSLSocket's own would end reading too

    def interrupt(self) -> None:
        """End a read that another thread is blocked in, at once: it raises `ConnectionError`
        there."""
        sock = self._connection._sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; the next call opens a new one."""
        with suppress(Exception):  # it is gone either way
            self._connection.disconnect()


class Connections:
    """Our connections to one Redis: a last-in first-out store of idle links, and dedicated ones for
    blocking reads.

    Making one sends nothing. A forked child starts with no links: sockets, and replies on their
    way, stay the parent's.
    """

    def __init__(self, client: "redis.Redis | str") -> None:
        if isinstance(client, str):
            client = _from_url(client)
        if not isinstance(client, redis.Redis):
            kind = f"{type(client).__module__}.{type(client).__qualname__}"
            raise ConfigurationError(
                f"client={kind} is not a redis.Redis: pass one (plain, TLS or made by Sentinel) or a URL; "
                "Redis Cluster and asyncio clients are not supported"
            )
        pool = client.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            pool = _own_sentinel_pool(pool)
        self._pool = pool  # kept alive: Sentinel-made connections ask it for the primary's address
        self._kwargs = _own_parameters(pool.connection_kwargs)
        self.timeout: float = self._kwargs["socket_timeout"]
        self._idle: deque[Link] = deque()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Connections to {self.address}>"

    @property
    def address(self) -> str:
        """Where the server is, without credentials."""
        kwargs = self._kwargs
        if "path" in kwargs:
            return f"unix:{kwargs['path']}"
        if "connection_pool" in kwargs:
            return f"sentinel service {getattr(self._pool, 'service_name', '?')}"
        return f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}/{kwargs.get('db', 0) or 0}"

    def cli_options(self) -> list[str]:
        """How redis-cli is told the same server, database and user, but not the password."""
        kwargs = self._kwargs
        host, port = kwargs.get("host", "localhost"), kwargs.get("port", 6379)
        if isinstance(self._pool, SentinelConnectionPool):
            host, port = self._pool.get_master_address()  # type: ignore[no-untyped-call]
        options = ["-s", kwargs["path"]] if "path" in kwargs else ["-h", str(host), "-p", str(port)]
        if kwargs.get("db"):
            options += ("-n", str(kwargs["db"]))
        if kwargs.get("username"):
            options += ("--user", kwargs["username"])
        if issubclass(self._pool.connection_class, redis.SSLConnection):
            options.append("--tls")
            names = {"ssl_ca_certs": "cacert", "ssl_certfile": "cert", "ssl_keyfile": "key"}
            for name, option in names.items():
                if kwargs.get(name):
                    options += (f"--{option}", str(kwargs[name]))
            if kwargs.get("ssl_cert_reqs") in ("none", ssl.CERT_NONE):
                options.append("--insecure")
        return options

    def open(
        self, *, read_timeout: float | None = None, connect_timeout: float | None = None
    ) -> Link:
        """A link of one's own, not connected yet; time limits in seconds where others are
        wanted."""
        kwargs = self._kwargs
        if read_timeout is not None:
            kwargs = {**kwargs, "socket_timeout": read_timeout}
        if connect_timeout is not None:
            kwargs = {**kwargs, "socket_connect_timeout": connect_timeout}
        return Link(self._pool.connection_class(**kwargs))

    def call(self, *args: Arg) -> Any:
        """One command on an idle link. Sent once: a lost reply raises, nothing is sent again."""
        link = self._take()
        try:
            reply = link.call(*args)
        except ResponseError:
            self._give(link)
            raise
        self._give(link)
        return reply

    def calls(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Several commands in one round trip; error replies stand in their places."""
        link = self._take()
        replies = link.calls(commands)
        self._give(link)
        return replies

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """One Lua step, by its hash; NOSCRIPT means that nothing ran, so the text is sent then."""
        link = self._take()
        try:
            reply = run(link, script, keys, args)
        except ResponseError:
            self._give(link)
            raise
        self._give(link)
        return reply

    def close(self) -> None:
        """Close every idle link. Later calls open new ones."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()

    def _take(self) -> Link:
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._idle = deque()
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                return self.open()
            if link.connected and monotonic() - link.given_back < _SURELY_OPEN:
                return link
            if link.usable():
                return link
            link.close()

    def _give(self, link: Link) -> None:
        link.given_back = monotonic()
        if link.connected and len(self._idle) < _KEPT_IDLE and os.getpid() == self._pid:
            self._idle.append(link)
        else:
            link.close()


def run(link: Link, script: Script, keys: Sequence[str], args: Sequence[Arg]) -> Any:
    """One Lua step on a given link."""
    try:
        return link.call("EVALSHA", script.sha, len(keys), *keys, *args)
    except NoScriptError:
        return link.call("EVAL", script.text, len(keys), *keys, *args)


def _own_sentinel_pool(given: SentinelConnectionPool) -> SentinelConnectionPool:
    """The same service found through our own clients of the sentinels, with a limit on each
    question."""
    manager = copy.copy(given.sentinel_manager)
    manager.sentinels = [
        redis.Redis(
            connection_pool=redis.ConnectionPool(
                connection_class=sentinel.connection_pool.connection_class,
                **{
                    **sentinel.connection_pool.connection_kwargs,
                    "socket_timeout": _SENTINEL_TIMEOUT,
                    "socket_connect_timeout": _SENTINEL_TIMEOUT,
                    "retry": ConnectRetry(NoBackoff(), 0),
                },
            )
        )
        for sentinel in given.sentinel_manager.sentinels
    ]
    kwargs = {
        name: value for name, value in given.connection_kwargs.items() if name != "connection_pool"
    }
    kwargs["connection_class"] = given.connection_class
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        given.service_name,
        manager,
        is_master=given.is_master,
        check_connection=given.check_connection,
        **kwargs,
    )


def _from_url(url: str) -> "redis.Redis":
    try:
        return redis.Redis.from_url(url)
    except ValueError:  # its text may quote the password, and so may the URL: neither is shown
        raise ConfigurationError(
            f"client={quoted(url)} is not a Redis URL: redis://[user:password@]host[:port][/db], "
            "rediss://… or unix://path; a password must be percent-encoded. It was given as client, as "
            "--url, or in TASKRUNNER_REDIS_URL"
        ) from None


def _own_parameters(given: dict[str, Any]) -> dict[str, Any]:
    kwargs = {
        name: value
        for name, value in given.items()
        if not name.startswith("maint_notifications")
        and name not in ("himport_registry", "event_dispatcher")
        and not (name == "parser_class" and "RESP3" in value.__name__)  # we speak RESP2
    }
    read, connect = given.get("socket_timeout"), given.get("socket_connect_timeout")
    kwargs.update(
        protocol=2,
        decode_responses=False,
        socket_timeout=min(read or COMMAND_TIMEOUT, COMMAND_TIMEOUT),
        socket_connect_timeout=min(connect or COMMAND_TIMEOUT, COMMAND_TIMEOUT),
        retry=ConnectRetry(NoBackoff(), 0),
        retry_on_timeout=False,
        retry_on_error=[],
        health_check_interval=0,
    )
    return kwargs
