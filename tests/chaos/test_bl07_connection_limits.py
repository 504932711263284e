"""BL-07: the given pool or the server has no connection left: a wait, never a lost settlement."""

from collections.abc import Callable

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import (
    Desk,
    Ledger,
    OwnServer,
    WorkerProcess,
    assert_recovered,
    eventually,
    faults,
    service_threads,
)

pytestmark = pytest.mark.chaos


def test_bl07_small_client_pool_holds_up_nobody(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """The application's client may have three connections, the pool has 20 threads: all is done,
    once, without an error."""
    worker = make_worker(client={"max_connections": 3}, config={"num_workers": 20})
    desk = make_desk(server.url)
    desk.send("sleep", [{"id": number, "seconds": 0.02} for number in range(200)])
    ledger.wait_finished(range(200), 20)
    eventually(desk.is_empty)
    ledger.assert_once(range(200))
    assert not worker.log_lines(" ERROR ")


def test_bl07_full_server_is_an_outage(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """The server takes fewer connections than are needed, and drops those that were there: what
    ends meanwhile is settled when there is room again."""
    server = own_server()
    worker = make_worker(url=server.tcp_url, config={"num_workers": 10})
    desk = make_desk(server.url)
    control = server.client()
    control.ping()
    threads = service_threads(worker)
    desk.send("sleep", [{"id": number, "seconds": 0.05} for number in range(200)])
    ledger.wait_started(20)
    for most in (2, 4, 1):  # with the one that sets it
        control.config_set("maxclients", most)
        faults.drop_connections(control)
        faults.down_for(0.7)
    control.config_set("maxclients", 1000)
    ledger.wait_finished(range(200), 20)
    eventually(desk.is_empty, 15, message=lambda: worker.log()[-3000:])
    ledger.assert_once(range(200))
    assert_recovered(worker, desk, ledger, threads)
