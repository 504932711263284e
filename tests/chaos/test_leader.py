"""Leaders that die, freeze, stop or wrongly believe, in the midst of a move: each member moves once."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from taskrunner import keys
from tests.support import (
    Ledger,
    Names,
    OwnServer,
    Proxy,
    WorkerProcess,
    busy,
    eventually,
    faults,
    stays,
)
from tests.support.fleet import Fleet

pytestmark = pytest.mark.chaos


TICK = """
    FD = os.open(os.environ["TASKRUNNER_TEST_LEDGER"] + ".ids", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @task(name="tick", max_lost=50)
    def tick(payload):
        os.write(FD, b"%d\\n" % payload)

    @task(name="note")
    def note(payload):
        with record(payload):
            pass
"""


def ticked(ledger: Ledger) -> Counter[int]:
    """How often each number was run."""
    path = Path(f"{ledger.path}.ids")
    return Counter(map(int, path.read_bytes().split())) if path.exists() else Counter()


def schedule(client: Any, names: Names, numbers: Iterable[int], *, due: float) -> None:
    """Put members of the task `tick` into the delayed set, as our dispatcher writes them."""
    batch: dict[str, float] = {}
    for number in numbers:
        text = f'{{"id":"{number}","task":"tick","time":{int(due) + 1},"payload":{number}}}'
        batch[text] = due
        if len(batch) == 5000:
            client.zadd(names.delayed, batch)
            batch = {}
    if batch:
        client.zadd(names.delayed, batch)


def leader_of(workers: list[WorkerProcess]) -> WorkerProcess | None:
    return next((each for each in workers if each.running and each.status()["is_leader"]), None)


def moved(client: Any, names: Names) -> int:
    """How many entries were ever added to the stream."""
    try:
        info: Any = client.xinfo_stream(names.stream)
    except redis.ResponseError:
        return 0
    return int(info["entries-added"])


@pytest.fixture
def fleet(own_server: Callable[..., OwnServer], names: Names) -> Iterator[Fleet]:
    with Fleet(own_server().url, names) as made:
        yield made


# --- a large backlog ---


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_thousand_due_members_outlive_two_leaders(
    own_server: Callable[..., OwnServer],
    names: Names,
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """BL-19: a lease of 1 s, one leader stopped and one frozen in the midst of the move.

    Every member is moved exactly once, no command holds up the server, and a direct task starts
    within two seconds all the while.
    """
    total = 100_000
    own = own_server(arguments=["--slowlog-log-slower-than", "50000", "--slowlog-max-len", "1000"])
    client: Any = own.client()
    schedule(client, names, range(total), due=time.time() - 1)
    client.slowlog_reset()
    file = tasks_file(TICK)
    options: dict[str, Any] = {"timings": {"lease": 1}, "queue": {"reclaim_delay": 5}}
    workers = [make_worker(url=own.url, tasks_file=file, wait=False, **options) for _ in range(3)]
    started = time.monotonic()
    stop = threading.Event()
    waits: list[tuple[float, int]] = []  # seconds until a direct task started, and where
    with Fleet(own.url, names) as fleet:

        def keep_asking() -> None:
            while not stop.wait(0.3):
                sent = time.monotonic()
                fleet.note.delay(f"direct-{len(waits)}")
                run = ledger.wait_started(f"direct-{len(waits)}", 30)
                waits.append((run.start - sent, run.pid))

        asking = threading.Thread(target=keep_asking)
        eventually(lambda: moved(client, names) > 1000, 30, interval=0.002)
        asking.start()
        try:
            eventually(lambda: moved(client, names) > 20_000, 60, interval=0.002)
            first = eventually(lambda: leader_of(workers))
            first.terminate()
            left_by_first = client.zcard(names.delayed)
            eventually(lambda: (second := leader_of(workers)) and second is not first, 10)
            second = eventually(lambda: leader_of(workers))
            eventually(lambda: client.zcard(names.delayed) < 60_000, 60, interval=0.002)
            second.pause()
            left_by_second = client.zcard(names.delayed)
            faults.down_for(3.0)
            second.resume()
            eventually(lambda: client.zcard(names.delayed) == 0, 120, interval=0.05)
            taken = time.monotonic() - started
            eventually(lambda: client.xlen(names.stream) == 0, 120, interval=0.1)
        finally:
            stop.set()
            asking.join()
    assert first.wait(20) == 0, first.log()
    slow: Any = client.slowlog_get(1000)
    # What a process was handed as it froze waits for it: no other can know of it for reclaim_delay.
    elsewhere = [wait for wait, pid in waits if pid != second.pid]
    print(
        f"{total} members moved in {taken:.1f} s; left when the first leader was stopped: "
        f"{left_by_first}, when the second was frozen: {left_by_second}; direct tasks started "
        f"after {max(elsewhere):.2f} s at most ({len(waits)} sent, {len(waits) - len(elsewhere)} "
        f"to the frozen one); slow commands: "
        f"{[(each['duration'] // 1000, each['command'][:40]) for each in slow]}"
    )
    assert left_by_second > 0, "frozen too late to show anything"
    assert moved(client, names) == total + len(waits)
    ran = ticked(ledger)
    assert ran.keys() == set(range(total))
    assert slow == []
    assert elsewhere
    assert max(elsewhere) < 2.0


# --- killed in the midst ---


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_member_is_lost_or_doubled_when_the_leader_is_killed_in_the_midst(
    own_server: Callable[..., OwnServer],
    names: Names,
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """BL-18: SIGKILL at 50 random points of a move of 2,000.

    After each, what ran, what is in the stream and what still waits are the 2,000, and none is in
    Redis twice.
    """
    total, rounds = 2000, 50
    own = own_server()
    client: Any = own.client()
    chance = random.Random(18)
    file = tasks_file(TICK)
    workers = [make_worker(url=own.url, tasks_file=file, start=False) for _ in range(2)]
    workers[0].start(wait=False)
    cut_short, spans = 0, [0.15]
    for turn in range(rounds):
        worker, following = workers[turn % 2], workers[(turn + 1) % 2]
        numbers = range(turn * total, (turn + 1) * total)
        eventually(lambda worker=worker: worker.status()["is_leader"], 20)
        following.close()
        following.start(wait=False)  # comes up while this one is looked at
        schedule(client, names, numbers, due=time.time() - 1)
        client.publish(keys.channel(names.group), "due")
        before = turn * total
        eventually(lambda before=before: client.zcard(names.delayed) < total, 10, interval=0.0005)
        began = time.monotonic()
        faults.down_for(chance.uniform(0, 1.2 * min(spans)))
        worker.kill()
        if client.zcard(names.delayed):
            cut_short += 1
        else:
            spans.append(max(0.01, time.monotonic() - began))

        with client.pipeline(transaction=True) as pipe:
            pipe.zrange(names.delayed, 0, -1)
            pipe.xrange(names.stream)
            members, entries = pipe.execute()
        ran = ticked(ledger)
        waiting = [int(text.split(b'"payload":')[1].rstrip(b"}")) for text in members]
        queued = [number_in(fields[b"payload"]) for _, fields in entries]
        in_redis = Counter([*waiting, *queued])
        assert max(in_redis.values(), default=1) == 1, f"twice in Redis in round {turn}"
        assert {*in_redis, *ran} >= set(numbers), f"lost in round {turn}"
        client.delete(names.stream, names.delayed, keys.leader(names.group))
    print(f"{cut_short} of {rounds} kills fell into the move")
    assert cut_short >= rounds // 5, "most kills came too late to show anything"


def number_in(body: bytes) -> int:
    return int(body.split(b'"payload":')[1].split(b",")[0].rstrip(b"}"))


# --- two leaders ---


def test_two_pollers_that_both_believe_move_each_member_once(fleet: Fleet) -> None:
    """D3: side by side over 5,000 members: exactly 5,000 entries, whoever was first."""
    total = 5000
    schedule(fleet.client, fleet.names, range(total), due=time.time() - 1)
    barrier = threading.Barrier(2)

    def move(poller: Any) -> None:
        barrier.wait()
        while fleet.client.zcard(fleet.names.delayed):
            poller.tick()

    threads = [threading.Thread(target=move, args=(fleet.believer(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moved(fleet.client, fleet.names) == total
    assert sorted(map(number_in, fleet.bodies())) == list(range(total))


@pytest.mark.slow
def test_a_leader_frozen_beyond_its_lease_moves_nothing_twice(
    own_server: Callable[..., OwnServer],
    names: Names,
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """It goes on in the midst of a batch, and the step itself finds the lease to be another's."""
    total = 5000
    own = own_server()
    client: Any = own.client()
    options: dict[str, Any] = {"timings": {"lease": 1}, "queue": {"reclaim_delay": 5}}
    first = make_worker(url=own.url, tasks_file=tasks_file(TICK), **options)
    eventually(lambda: first.status()["is_leader"])
    second = make_worker(url=own.url, tasks_file=tasks_file(TICK), **options)
    for turn in range(5):
        schedule(client, names, range(turn * total, (turn + 1) * total), due=time.time() - 1)
        client.publish(keys.channel(names.group), "due")
        leader = eventually(lambda: leader_of([first, second]), 20)
        other = second if leader is first else first
        faults.down_for(0.02 * turn)
        leader.pause()
        eventually(lambda other=other: other.status()["is_leader"], 1 + 5 * busy())
        leader.resume()
        eventually(lambda: client.zcard(names.delayed) == 0, 30)
        eventually(lambda: client.xlen(names.stream) == 0, 30)
        assert moved(client, names) == (turn + 1) * total
    assert ticked(ledger).keys() == set(range(5 * total))


def test_a_move_that_arrives_after_the_lease_was_lost_changes_nothing(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """Held on its way until the next leader has moved everything: then it moves nothing."""
    own = own_server()
    with Fleet(own.url, names) as fleet, Proxy(own.tcp_url) as proxy:
        first = fleet.start_leader(url=proxy.url, timings={"lease": 1})
        held = faults.hold_request(proxy, "EVALSHA", containing='"payload":77}')
        schedule(fleet.client, names, range(100), due=time.time() - 1)
        assert held.hit.wait(10)
        proxy.hold("request")  # the renewals of the lease too
        fleet.task(name="tick")
        second = fleet.start(timings={"lease": 1})
        eventually(lambda: second.is_leader, 10)
        fleet.wait_ran(*range(100))
        proxy.release()
        held.release()
        eventually(fleet.settled)
        stays(lambda: moved(fleet.client, names) == 100, 1.0)
        assert not (first.is_leader and second.is_leader)
        assert sorted(fleet.payloads()) == list(range(100))


# --- succession ---


def takeover(client: Any, names: Names, end: Callable[[], None]) -> float:
    """Seconds from `end()` until the lease holds another instance's id."""
    key = keys.leader(names.group)
    former = client.get(key)
    end()
    ended = time.monotonic()
    eventually(lambda: client.get(key) not in (None, former), 30, interval=0.002)
    return time.monotonic() - ended


@pytest.mark.parametrize(("lease", "rounds"), [(2, 3), pytest.param(5, 2, marks=pytest.mark.slow)])
def test_a_killed_leader_is_followed_within_its_lease_and_a_second(
    own_server: Callable[..., OwnServer],
    names: Names,
    make_worker: Callable[..., WorkerProcess],
    lease: float,
    rounds: int,
) -> None:
    """Nobody tells the followers; they look when the lease they saw runs out."""
    own = own_server()
    client: Any = own.client()
    chance, times = random.Random(28), []
    timings = {"lease": lease, "poll": 5}
    workers = [make_worker(url=own.url, timings=timings) for _ in range(2)]
    for _ in range(rounds):
        leader = eventually(lambda: leader_of(workers))
        faults.down_for(chance.uniform(0, lease / 2))
        times.append(takeover(client, names, leader.kill))
        workers.remove(leader)
        workers.append(make_worker(url=own.url, timings=timings))
    print(f"takeover after SIGKILL, lease {lease} s: {', '.join(f'{t:.2f} s' for t in times)}")
    assert max(times) < lease + 1


def test_a_leader_that_stops_in_order_is_followed_within_half_a_second(
    own_server: Callable[..., OwnServer],
    names: Names,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """From the signal on: quiet, leave, tell the others."""
    own = own_server()
    client: Any = own.client()
    times = []
    timings = {"lease": 5, "poll": 5}
    workers = [make_worker(url=own.url, timings=timings) for _ in range(2)]
    for _ in range(3):
        leader = eventually(lambda: leader_of(workers))
        times.append(takeover(client, names, leader.terminate))
        assert leader.wait() == 0
        workers.remove(leader)
        workers.append(make_worker(url=own.url, timings=timings))
    print(f"takeover after SIGTERM: {', '.join(f'{t * 1000:.0f} ms' for t in times)}")
    assert min(times) < 0.5
    assert max(times) < 0.5 + busy()


def test_a_leader_is_followed_within_the_lease_where_pub_sub_is_forbidden(
    own_server: Callable[..., OwnServer],
    names: Names,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """SIGTERM without a channel: the follower looks when the lease it saw runs out."""
    own = own_server()
    client: Any = own.client()
    user = faults.restricted_user(client, names.prefix, "resetchannels")
    timings = {"lease": 3, "poll": 3}
    workers = [make_worker(url=own.url, client=user, timings=timings) for _ in range(2)]
    leader = eventually(lambda: leader_of(workers))
    taken = takeover(client, names, leader.terminate)
    print(f"takeover after SIGTERM without pub/sub: {taken:.2f} s of a lease of 3 s")
    assert taken < 3 + busy()
    assert leader.wait() == 0
    other = workers[1] if leader is workers[0] else workers[0]
    assert "Traceback" not in other.log()


def test_a_delayed_task_runs_though_its_leader_was_killed_before_it_was_due(
    own_server: Callable[..., OwnServer],
    names: Names,
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """It waits in Redis, in nobody's memory."""
    own = own_server()
    workers = [make_worker(url=own.url, timings={"lease": 1}) for _ in range(2)]
    leader = eventually(lambda: leader_of(workers))
    with Fleet(own.url, names) as fleet:
        due = time.monotonic() + 0.5
        fleet.note.delay("x", run_in=0.5)
        leader.kill()
        run = ledger.wait_started("x", 10)
        assert due - 0.02 <= run.start < due + 1 + 2 * busy()
        assert os.getpid() != run.pid
