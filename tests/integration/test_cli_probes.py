"""`/live` and `/ready` of a worker: green while it works, red when it can't, and why."""

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.cli.probes import pages
from taskrunner.cli.web import WebServer
from tests.support import busy, eventually, stays
from tests.support.desk import Desk
from tests.support.names import Names
from tests.support.proxy import Proxy
from tests.support.server import pause_process
from tests.support.shop import Shop


@pytest.fixture
def shop(tmp_path: Path, server: EmbeddedServer, names: Names) -> Iterator[Shop]:
    """The application of this test."""
    made = Shop(tmp_path, server.url, names)
    yield made
    made.close()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_probes_turn_red_when_redis_falls_silent(
    shop: Shop, server: EmbeddedServer, make_proxy: Callable[[str], Proxy], processes: str
) -> None:
    """Within three times block_duration, though every connection stays open; and green again."""
    proxy = make_proxy(server.url)
    block = 1.0
    shop.env |= {"SHOP_URL": proxy.url, "SHOP_BLOCK": str(block)}
    worker = shop.worker("--health-port", "0", "--processes", processes)
    eventually(lambda: worker.get("/ready") == (200, "ready"), 20, message=lambda: worker.log)
    stays(lambda: worker.get("/ready")[0] == 200, 3 * block)
    assert worker.get("/live") == (200, "alive")
    assert worker.get("/other")[0] == 404

    proxy.swallow()
    began = time.monotonic()
    eventually(lambda: worker.get("/ready")[0] == 503, 3 * block)
    assert time.monotonic() - began <= 3 * block + busy(0)
    assert worker.get("/live") == (200, "alive")

    proxy.pass_through()
    eventually(lambda: worker.get("/ready")[0] == 200, 20, message=lambda: worker.log)


def test_a_frozen_child_is_not_ready(shop: Shop) -> None:
    """Nothing comes from it: the supervisor says which one."""
    worker = shop.worker("--processes", "2", "--health-port", "0")
    eventually(lambda: worker.get("/ready")[0] == 200, 20, message=lambda: worker.log)
    first = worker.living[0]

    pause_process(first)
    eventually(lambda: worker.get("/ready") == (503, "process p1 is silent"), 5)
    os.kill(first, signal.SIGCONT)
    eventually(lambda: worker.get("/ready")[0] == 200, 5)


def test_a_full_pool_is_ready(shop: Shop, desk: Desk) -> None:
    """Long tasks leave no room to read into: that is no stall."""
    shop.env["SHOP_BLOCK"] = "0.2"
    worker = shop.worker("--workers", "1", "--batch-size", "1", "--health-port", "0")
    desk.send("nap", [4] * 6)
    eventually(lambda: worker.get("/ready")[0] == 200, 20, message=lambda: worker.log)

    stays(lambda: worker.get("/ready")[0] == 200, 3)


def test_nobody_holds_the_server_s_threads_for_good() -> None:
    """A client that sends a byte now and then is hung up on, and so is the oldest of many."""
    server = WebServer(0, "--health-port", pages(lambda: None))
    server.start()
    try:

        def client() -> socket.socket:
            made = socket.create_connection(("127.0.0.1", server.port), 20)
            made.sendall(b"G")
            made.setblocking(False)
            return made

        def left(slow: socket.socket) -> bool:
            try:
                slow.sendall(b"E")
                return slow.recv(1) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True

        slow = client()
        began = time.monotonic()
        eventually(lambda: left(slow), 20)
        assert time.monotonic() - began >= 3  # not by the silence of two seconds

        many = [client() for _ in range(80)]
        eventually(lambda: left(many[0]), 20)
        url = f"http://127.0.0.1:{server.port}/live"
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert answer.status == 200
        for one in (slow, *many):
            one.close()
    finally:
        server.stop()
