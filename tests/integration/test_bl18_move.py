"""BL-18: removal and enqueueing are one step, so no fault in the midst of a move loses a task."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from taskrunner import keys
from taskrunner.store import delayed_set
from tests.support import Names, OwnServer, Proxy, eventually, faults
from tests.support.fleet import Fleet

TOTAL = 2000


@pytest.fixture
def fleet(own_server: Callable[..., OwnServer], names: Names) -> Iterator[Fleet]:
    own = own_server()
    with Fleet(own.url, names) as made:
        yield made


def schedule(fleet: Fleet, numbers: range, due: float) -> None:
    fleet.client.zadd(
        fleet.names.delayed,
        {
            f'{{"id":"{number}","task":"note","time":{int(due) + 1},"payload":{number}}}': due
            for number in numbers
        },
    )


def assert_each_ran_once(fleet: Fleet) -> None:
    fleet.wait_ran(*range(TOTAL), timeout=60)
    eventually(fleet.settled, 30)
    info: Any = fleet.client.xinfo_stream(fleet.names.stream)
    assert info["entries-added"] == TOTAL
    assert set(fleet.payloads()) == set(range(TOTAL))


def test_bl18_dropped_connections_lose_and_double_nothing(fleet: Fleet) -> None:
    """R-drop, every few milliseconds of the move: a step was executed or it was not."""
    client: Any = fleet.client
    schedule(fleet, range(TOTAL), time.time() - 1)
    fleet.start(num_workers=4, queue={"reclaim_delay": 1})
    for _ in range(40):
        try:
            faults.drop_connections(client)
        except redis.RedisError:  # ours was among them
            pass
        faults.down_for(0.02)
    assert_each_ran_once(fleet)


@pytest.mark.parametrize("action", ["cut_after", "cut_before"])
def test_bl18_a_move_cut_off_is_made_once(
    own_server: Callable[..., OwnServer], names: Names, action: Any
) -> None:
    """The answer lost or the request lost, five times in a row: the next round finds out."""
    own = own_server()
    with Fleet(own.url, names) as fleet, Proxy(own.tcp_url) as proxy:
        schedule(fleet, range(TOTAL), time.time() - 1)
        promote = delayed_set._PROMOTE.sha
        rule = proxy.on("EVALSHA", action, containing=promote, times=5)
        fleet.start(url=proxy.url, num_workers=4, queue={"reclaim_delay": 1})
        assert_each_ran_once(fleet)
        assert rule.hits == 5


def test_bl18_a_move_that_redis_refuses_for_want_of_memory_leaves_everything(
    fleet: Fleet,
) -> None:
    """R-oom, on and off during the move: a step that begins with XADD is refused whole."""
    client: Any = fleet.client
    schedule(fleet, range(TOTAL), time.time() - 1)
    stop = threading.Event()

    def starve() -> None:
        while not stop.is_set():
            with faults.out_of_memory(client):
                stop.wait(0.05)
            stop.wait(0.02)

    starving = threading.Thread(target=starve)
    starving.start()
    try:
        fleet.start(num_workers=4)
        faults.down_for(1.5)
    finally:
        stop.set()
        starving.join()
    assert_each_ran_once(fleet)


def test_bl18_a_move_that_redis_refuses_for_a_failed_snapshot_leaves_everything(
    own_server: Callable[..., OwnServer], names: Names, tmp_path: Path
) -> None:
    """R-misconf: every write is refused, nothing changes, and it all goes on afterwards."""
    broken = faults.MisconfServer(own_server, tmp_path)
    with Fleet(broken.server.url, names) as fleet:
        leader = fleet.start_leader()
        fleet.note.delay("warm-up", run_in=0.05)
        fleet.wait_ran("warm-up")
        schedule(fleet, range(TOTAL), time.time() + 1)
        before = len(leader.errors)
        with broken.refusing():
            faults.down_for(2.5)
            assert fleet.client.zcard(names.delayed) == TOTAL
            assert fleet.client.xlen(names.stream) == 0
            assert len(leader.errors) - before < 20  # said once per part and outage, not per try
        fleet.wait_ran(*range(TOTAL), timeout=60)
        eventually(fleet.settled, 30)
        info: Any = fleet.client.xinfo_stream(names.stream)
        assert info["entries-added"] == TOTAL + 1


def test_bl18_a_stream_of_the_wrong_type_keeps_the_members(fleet: Fleet) -> None:
    """An XADD that can't be done removes nothing; once the key is repaired, all run."""
    client: Any = fleet.client
    client.set(fleet.names.stream, "not a stream")
    schedule(fleet, range(TOTAL), time.time() - 1)
    fleet.start(num_workers=4)
    faults.down_for(1.5)
    assert client.zcard(fleet.names.delayed) == TOTAL
    assert client.get(fleet.names.stream) == b"not a stream"
    client.delete(fleet.names.stream)
    assert_each_ran_once(fleet)


def test_bl18_the_step_adds_before_it_removes() -> None:
    """A script whose first write is ZREM would go on to a refused XADD: read, so that it stays."""
    text = delayed_set._PROMOTE.text
    body = text[text.index("for i = 2") :]
    adding = body[body.index("else\n    redis.call('XADD'") :]
    assert adding.index("XADD") < adding.index("ZREM") < adding.index("SET")
    assert keys.delayed("g") == "taskrunner:g:delayed_tasks"


def test_bl18_a_server_killed_in_the_move_keeps_each_task_in_one_place(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """R-kill with an append-only file, each write synced: a step is on disk whole or not at all."""
    own = own_server(appendonly=True, arguments=["--appendfsync", "always"])
    with Fleet(own.tcp_url, names) as fleet:
        schedule(fleet, range(TOTAL), time.time() - 1)
        fleet.start(num_workers=4, queue={"reclaim_delay": 1})
        for _ in range(3):
            faults.down_for(0.1)
            with faults.killed(own):
                pass
        fleet.wait_ran(*range(TOTAL), timeout=60)
        eventually(fleet.settled, 30)
        info: Any = fleet.client.xinfo_stream(names.stream)
        assert info["entries-added"] == TOTAL
