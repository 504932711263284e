"""Floor 5. Probes for Kubernetes and its like: `/live` and `/ready` over HTTP.

Live: the process answers. Ready: Redis answers, and each fetcher was answered lately or had no room
to read into. A silent stall turns it red within three times block_duration (a second at least). One
thread of the standard library's server; each request may take two seconds.
"""

import http.server
import logging
import math
import socket
import socketserver
from collections.abc import Callable
from typing import Any, Final, cast

from taskrunner.clock import monotonic
from taskrunner.errors import ConfigurationError, describe
from taskrunner.reports import Health, Reports
from taskrunner.runner import TaskRunner
from taskrunner.service import Service
from taskrunner.store import connection

Probe = Callable[[], str | None]
"""None: well; else what is wrong."""

_BLOCKS: Final = 2.2
_SHORTEST: Final = 1.0
_REQUEST: Final = 2.0
_ACCEPT: Final = 0.5

log = logging.getLogger("taskrunner.probes")


def own_health() -> Health:
    """For a service of the command line, which the runner does not know."""
    return Health(Reports(), connection.lost)


class Readiness(Service):
    """Asks Redis again and again, on a connection of its own, so that the probe never waits."""

    def __init__(self, runner: TaskRunner) -> None:
        super().__init__("readiness", own_health())
        self._runner = runner
        self._limit = max(_SHORTEST, _BLOCKS * runner.config.block_duration)
        connections = runner.queue.connections
        limit = min(self._limit / 2, connections.timeout)
        self._link = connections.open(read_timeout=limit, connect_timeout=limit)
        self._answered = -math.inf

    def tick(self) -> float:
        try:
            self._link.call("PING")
            self._answered = monotonic()
        except Exception as error:  # what the probe is there to tell; the runner logs it
            if not connection.outage(error):
                self._answered = monotonic()
        return min(1.0, self._limit / 5)

    def close(self) -> None:
        self._link.close()

    def why_not(self) -> str | None:
        """What keeps the runner from being ready, or None."""
        if self._runner.state != "started":
            return f"the runner is {self._runner.state}"
        if monotonic() - self._answered > self._limit:
            return "Redis does not answer"
        if self._runner.silence() > self._limit:
            return "no read was answered lately"
        return None


class ProbeServer(Service):
    """Answers `/live` with 200, and `/ready` with 200, or 503 and the reason.

    Listens from the start on, so that a port that is taken is an error at once; 0 takes a free one.
    """

    def __init__(self, port: int, ready: Probe) -> None:
        super().__init__("probes", own_health())
        try:
            self._server = _Server(port, ready)
        except OSError as error:
            raise ConfigurationError(f"--health-port {port}: {error.strerror or error}") from None
        self.port: int = self._server.server_address[1]

    def tick(self) -> float:
        self._server.handle_request()
        return 0.0

    def close(self) -> None:
        self._server.server_close()


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 32
    timeout = _ACCEPT

    def __init__(self, port: int, ready: Probe) -> None:
        self.ready = ready
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a probe's request was not answered", exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST
    server_version = "taskrunner"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        if path == "/live":
            self._answer(200, "alive")
        elif path == "/ready":
            try:
                wrong = cast(_Server, self.server).ready()
            except Exception as error:  # a probe that can't tell is not ready
                wrong = describe(error)
            self._answer(200 if wrong is None else 503, wrong or "ready")
        else:
            self._answer(404, "there are /live and /ready")

    do_HEAD = do_GET

    def _answer(self, status: int, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug(format, *args)
