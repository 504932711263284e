"""Fixtures for all tests; what they hand out is described in `tests/support/`."""

import itertools
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import redis

from taskrunner.cli.embedded import EmbeddedServer
from tests.support.desk import Desk
from tests.support.ledger import Ledger
from tests.support.names import Names
from tests.support.proxy import Proxy
from tests.support.server import OwnServer
from tests.support.worker import STOCK_TASKS, WorkerProcess


def pytest_configure(config: pytest.Config) -> None:
    """Let a run that is terminated end what it started, as one that is interrupted does."""

    def terminate(signum: int, frame: FrameType | None) -> None:
        pytest.exit("terminated", returncode=143)

    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So it is in a script's background; what tests start would inherit it, deaf to Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """One server for all ordinary tests: never flush, pause or configure it."""
    with EmbeddedServer(tcp=True) as embedded:
        yield embedded


@pytest.fixture
def own_server() -> Iterator[Callable[..., OwnServer]]:
    """Make servers of the test's own: `own_server(appendonly=True, arguments=[...])`.

    Each listens on a Unix socket and on a TCP port, and is started unless `start=False`.
    """
    made: list[OwnServer] = []

    def make(*, start: bool = True, tcp: bool = True, **options: Any) -> OwnServer:
        own = OwnServer(tcp=tcp, **options)
        made.append(own)
        if start:
            own.start()
        return own

    yield make
    for own in made:
        own.stop()


@pytest.fixture
def names() -> Names:
    """Random prefix, group and host, new for each test."""
    return Names()


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client of the shared server; answers are bytes."""
    with redis.Redis.from_url(server.url) as made:
        yield made


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """The ledger that this test's workers write to."""
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
def tasks_file(tmp_path: Path) -> Callable[[str], Path]:
    """Write a tasks module from its source: `tasks_file("@task ...")`; imports are put on top."""
    numbers = itertools.count(1)
    head = (
        "import os, signal, threading, time\n"
        "from taskrunner import Reject, Retry, current_task, task\n"
        "from tests.support.ledger import record\n\n"
    )

    def write(source: str) -> Path:
        path = tmp_path / f"tasks_{next(numbers)}.py"
        path.write_text(head + textwrap.dedent(source))
        return path

    return write


@pytest.fixture
def make_worker(
    request: pytest.FixtureRequest, tmp_path: Path, names: Names, ledger: Ledger
) -> Iterator[Callable[..., WorkerProcess]]:
    """Make worker processes: `make_worker(config={"num_workers": 2}, queue={"reclaim_delay": 2})`.

    They serve the stock tasks (`tests/support/tasks.py`) or `tasks_file=`, on the shared server or
    `url=`, and are started unless `start=False`; `wait=False` doesn't wait for the runner. Their
    host is `names.host` with a number, or what `config` says.
    """
    made: list[WorkerProcess] = []

    def make(
        *,
        url: str | None = None,
        tasks_file: Path = STOCK_TASKS,
        start: bool = True,
        wait: bool = True,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> WorkerProcess:
        number = len(made) + 1
        target = url if url is not None else request.getfixturevalue("server").url
        worker = WorkerProcess(
            directory=tmp_path / f"worker-{number}",
            url=target,
            group=names.group,
            prefix=names.prefix,
            ledger=ledger,
            tasks_file=tasks_file,
            config={"host": f"{names.host}-w{number}", **(config or {})},
            **options,
        )
        made.append(worker)
        if start:
            worker.start(wait=wait)
        return worker

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def make_proxy() -> Iterator[Callable[[str], Proxy]]:
    """Put a relay in front of a server: `make_proxy(server.url)`; give its `.url` to clients."""
    made: list[Proxy] = []

    def make(url: str) -> Proxy:
        proxy = Proxy(url)
        made.append(proxy)
        return proxy

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture
def make_desk(request: pytest.FixtureRequest, names: Names) -> Iterator[Callable[..., Desk]]:
    """Make this test's own side of its queue: `make_desk(url)`, or on the shared server."""
    made: list[Desk] = []

    def make(url: str | None = None, **queue: Any) -> Desk:
        target = url if url is not None else request.getfixturevalue("server").url
        desk = Desk(target, names, **queue)
        made.append(desk)
        return desk

    yield make
    for desk in made:
        desk.close()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    """This test's own side of its queue, on the shared server."""
    return make_desk()
