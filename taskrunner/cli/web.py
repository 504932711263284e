"""Floor 5. The pages a worker serves over HTTP: probes and metrics.

The standard library's server in a daemon thread. Each request has a thread of its own, so that a
page that waits for Redis holds up no probe. A client that is silent for two seconds, takes more
than five in all, or is the oldest of more than 64, is hung up on: nobody can hold threads for good.
"""

import http.server
import logging
import socket
import socketserver
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias, cast

import attrs

from taskrunner.clock import monotonic
from taskrunner.errors import ConfigurationError, describe
from taskrunner.reports import Health, Reports
from taskrunner.service import Service
from taskrunner.store import connection

_REQUEST: Final = 2.0
_IN_ALL: Final = 5.0  # a page that waits for Redis takes one of them
_MOST: Final = 64
_ACCEPT: Final = 0.5

log = logging.getLogger("taskrunner.web")


@attrs.frozen
class Answer:
    """What a page says; `kind` is its content type."""

    status: int
    kind: str
    body: bytes


Page: TypeAlias = Callable[[], Answer]


def text(status: int, line: str) -> Answer:
    """A line for people."""
    return Answer(status, "text/plain; charset=utf-8", f"{line}\n".encode())


def own_health() -> Health:
    """For a service of the command line, which the runner does not know."""
    return Health(Reports(), connection.lost)


class WebServer(Service):
    """Serves pages by their paths.

    Listens from the start on, so that a port that is taken is an error at once, which names the
    `option` it came from; 0 takes a free one.
    """

    def __init__(self, port: int, option: str, pages: Mapping[str, Page]) -> None:
        super().__init__(f"web{option}", own_health())
        try:
            self._server = _Server(port, pages)
        except OSError as error:
            raise ConfigurationError(f"{option} {port}: {error.strerror or error}") from None
        self.port: int = self._server.server_address[1]
        self.paths = tuple(pages)

    def tick(self) -> float:
        self._server.handle_request()
        self._server.hang_up()
        return 0.0

    def close(self) -> None:
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 32
    timeout = _ACCEPT

    def __init__(self, port: int, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self._open: dict[Any, float] = {}  # connections, the oldest first, and since when
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open[request] = monotonic()
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().close_request(request)

    def hang_up(self) -> None:
        """On those that take too long, or are too many; their threads end by it."""
        opened = list(self._open.items())
        for i, (request, since) in enumerate(opened):
            if i < len(opened) - _MOST or monotonic() - since > _IN_ALL:
                with suppress(OSError):  # it has just ended by itself
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request was not answered", exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST
    server_version = "taskrunner"
    sys_version = ""

    def do_GET(self) -> None:
        pages = cast(_Server, self.server).pages
        page = pages.get(self.path.partition("?")[0].rstrip("/"))
        try:
            answer = text(404, f"there are {' and '.join(pages)}") if page is None else page()
        except Exception as error:  # a page that fails must say so, not close the connection
            log.warning("%s failed: %s", self.path, describe(error), exc_info=error)
            answer = text(500, describe(error))
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug(format, *args)
