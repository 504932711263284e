"""BL-19: a due backlog larger than the leader's lease, and larger than anybody's memory."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import Ledger, Names, OwnServer, WorkerProcess, busy, eventually, stays
from tests.support.fleet import Fleet


@pytest.fixture
def fleet(own_server: Callable[..., OwnServer], names: Names) -> Iterator[Fleet]:
    own = own_server(arguments=["--slowlog-log-slower-than", "50000"])
    with Fleet(own.url, names) as made:
        yield made


def schedule(fleet: Fleet, numbers: range, payload: str = "1") -> None:
    for start in range(numbers.start, numbers.stop, 5000):
        fleet.client.zadd(
            fleet.names.delayed,
            {
                f'{{"id":"{n}","task":"quick","time":1,"payload":{payload}}}': n
                for n in range(start, min(numbers.stop, start + 5000))
            },
        )


@pytest.mark.slow
def test_bl19_the_lease_is_renewed_while_the_move_lasts(fleet: Fleet) -> None:
    """A lease of 0.3 s, a move of seconds: one leader from its beginning to its end."""
    total = 30_000
    fleet.task(lambda payload: None, name="quick")
    schedule(fleet, range(total))
    fleet.client.slowlog_reset()
    first = fleet.start_leader(timings={"lease": 0.3})
    second = fleet.start(timings={"lease": 0.3})
    holders: set[bytes | None] = set()

    def watched() -> bool:
        holders.add(fleet.client.get(fleet.lease))
        return bool(fleet.client.zcard(fleet.names.delayed) == 0)

    started = time.monotonic()
    eventually(watched, 60, interval=0.002)
    taken = time.monotonic() - started
    print(f"{total} members in {taken:.1f} s under a lease of 0.3 s")
    assert holders <= {first.instance_id.encode(), second.instance_id.encode(), None}
    info: Any = fleet.client.xinfo_stream(fleet.names.stream)
    assert info["entries-added"] == total
    assert fleet.client.slowlog_get(100) == []
    eventually(fleet.settled, 60)


def test_bl19_a_step_moves_a_few_hundred_at_most(fleet: Fleet) -> None:
    """So that nobody else waits for the server: seen in how many steps it took."""
    total = 5000
    schedule(fleet, range(total))
    poller = fleet.believer()
    fleet.client.config_resetstat()
    steps, most = 0, 0
    left = total
    while left:
        poller.tick()
        steps += 1
        now = fleet.client.zcard(fleet.names.delayed)
        most, left = max(most, left - now), now
    print(f"{steps} steps of up to {most}")
    assert 50 <= most <= 500
    stats: Any = fleet.client.info("commandstats")
    assert stats["cmdstat_xadd"]["calls"] == total


def test_bl19_direct_tasks_start_while_a_backlog_is_moved(fleet: Fleet) -> None:
    """The move takes no worker, and holds up no fetcher."""
    fleet.task(lambda payload: None, name="quick")
    fleet.start_leader(num_workers=4)
    schedule(fleet, range(20_000))
    for number in range(5):
        before = time.time()
        fleet.note.delay(number)
        (run,) = fleet.wait_ran(number, timeout=20)
        assert run.at - before < 2 + busy()
    eventually(fleet.settled, 60)


@pytest.mark.slow
def test_bl19_a_backlog_of_large_payloads_does_not_fill_the_leader(
    own_server: Callable[..., OwnServer],
    names: Names,
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """400 MiB are due at once: the leader holds a batch of them at a time."""
    own = own_server()
    client: Any = own.client()
    worker = make_worker(url=own.url)
    eventually(lambda: worker.status()["is_leader"])
    resident = worker.rss_bytes()
    text = '{{"id":"{0}","task":"noop","time":1,"payload":"{1}"}}'
    for number in range(400):
        client.zadd(names.delayed, {text.format(number, "x" * (1 << 20)): number}, nx=True)
    top = [resident]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            top.append(worker.rss_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        eventually(lambda: client.zcard(names.delayed) == 0, 60)
        eventually(lambda: client.xlen(names.stream) == 0, 60)
    finally:
        stop.set()
        watching.join()
    grown = max(top) - resident
    print(f"grew by {grown / 2**20:.0f} MiB at most while 400 MiB were moved and run")
    # A batch as members, as messages and as a request, beside 64 MiB that may be held to be run; the
    # Python parser, if that is what the application wants, has a copy of each reply.
    assert grown < 300 * 2**20
    assert client.zcard(names.delayed) == 0


def test_bl19_a_follower_moves_nothing(fleet: Fleet) -> None:
    """However much is due, who does not lead stays out of it."""
    fleet.client.set(fleet.lease, "another", px=60_000)
    fleet.start()
    schedule(fleet, range(500))
    stays(lambda: fleet.client.zcard(fleet.names.delayed) == 500, 2.0)
    assert fleet.client.xlen(fleet.names.stream) == 0
