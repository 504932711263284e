"""`taskrunner redis`: a server that lasts as long as its command."""

import os
import signal
import subprocess
import sys

import pytest
import redis
from redis.exceptions import ConnectionError as LostError

from taskrunner.cli.embedded import free_port
from tests.support import eventually


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_lives_until_its_command_is_ended(signum: signal.Signals) -> None:
    """It says where it answers, and leaves nothing behind however it ends."""
    port = free_port()
    words = [sys.executable, "-m", "taskrunner", "redis", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        url = command.stdout.readline().split()[0]
        client = redis.Redis.from_url(url)
        assert url == f"redis://localhost:{port}/0"
        assert client.ping()

        os.kill(command.pid, signum)
        command.wait(10)

    def gone() -> bool:
        try:
            return not client.ping()
        except LostError:
            return True

    eventually(gone, 10)


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    """The exit code is 1, and nothing stays behind."""
    port = free_port()
    words = [sys.executable, "-m", "taskrunner", "redis", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert "answers" in first.stdout.readline()

        second = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)

        first.terminate()
    assert second.returncode == 1
    assert second.stderr.startswith(f"taskrunner: port {port} is in use: ")
    assert second.stderr.count("\n") == 1
