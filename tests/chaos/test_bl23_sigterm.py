"""BL-23: an orderly stop hands back what was read and not started, at no cost, and loses nothing."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Desk, Ledger, Names, OwnServer, WorkerProcess, busy, eventually, faults

pytestmark = pytest.mark.chaos


def test_bl23_unstarted_messages_start_elsewhere_at_once(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """A worker with messages read ahead is told to stop while another one is idle: they start there
    within two seconds, on their first attempt; what runs is finished first; the exit code is 0."""
    queue = {"reclaim_delay": 30}
    stopped = make_worker(queue=queue, config={"num_workers": 1, "batch_size": 20})
    desk = make_desk(server.url, reclaim_delay=30)
    desk.send("noop", range(2000))  # a fast pace, so that it reads ahead
    desk.send("sleep", [{"id": "running", "seconds": 1.5}])
    later = desk.send("note", range(5))
    ledger.wait_started("running")
    buffered = [held for held in desk.held() if held.entry_id in later]
    assert buffered
    other = make_worker(queue=queue, timings={"hand_back_after": 60})
    asked = time.monotonic()
    stopped.terminate()
    ledger.wait_finished(range(5), 10)
    assert max(run.start for run in ledger.runs() if run.id in range(5)) - asked < 2
    assert {run.pid for run in ledger.runs() if run.id in range(5)} == {other.pid}
    assert stopped.wait() == 0
    eventually(desk.is_empty)
    ledger.assert_once(["running", *range(5)])
    assert ledger.runs("running")[0].outcome == "returned"


def test_bl23_handed_back_messages_keep_their_attempts(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """Stopped again and again with messages in the buffer: each still runs on attempt 1, of one."""
    tasks = tasks_file(
        """
        @task(name="noop")
        def noop(payload):
            pass

        @task(name="sleep")
        def sleep(payload):
            with record("sleep"):
                time.sleep(payload)

        @task(name="attempt", max_retry=1, max_lost=0)
        def attempt(payload):
            with record([payload, current_task().attempt]):
                pass
        """
    )
    desk = make_desk(server.url, reclaim_delay=30)
    stops = 4
    desk.send("attempt", [])  # known, so that the order below holds
    for round_ in range(1, stops + 1):
        worker = make_worker(
            tasks_file=tasks,
            queue={"reclaim_delay": 30},
            config={"num_workers": 1, "batch_size": 20, "shutdown_timeout": 2},
        )
        desk.send("noop", range(1000))
        desk.send("sleep", [0.5])
        if round_ == 1:
            desk.send("attempt", range(5))
        ledger.wait_started("sleep", times=round_)
        assert worker.stop() == 0
    make_worker(tasks_file=tasks, queue={"reclaim_delay": 30})
    eventually(desk.is_empty, 15)
    attempts = [run.id for run in ledger.runs() if run.id != "sleep"]
    assert sorted(attempts) == [[number, 1] for number in range(5)]
    assert desk.letters() == []


def test_bl23_nothing_is_lost_when_workers_stop_at_random_under_load(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
) -> None:
    """Under continuous dispatch, stopped at any instant, the first milliseconds included: each id
    runs once, each process ends with 0 in time, and nothing is pending under a stopped one."""
    desk = make_desk(server.url, reclaim_delay=30)
    rounds, sent = 10, 0
    generator = random.Random(23)
    steady = make_worker(queue={"reclaim_delay": 30})
    for round_ in range(rounds):
        wait = generator.random() < 0.7
        worker = make_worker(queue={"reclaim_delay": 30}, wait=wait)
        until = time.monotonic() + generator.uniform(0.0, 0.4)
        while True:
            desk.send("sleep", [{"id": sent + n, "seconds": 0.01} for n in range(5)])
            sent += 5
            time.sleep(0.02)
            if time.monotonic() >= until:
                break
        asked = time.monotonic()
        worker.terminate()
        code = worker.wait(6)
        assert code == 0 or (not wait and code == -15), worker.log()  # before there was a runner
        assert time.monotonic() - asked < 3 + busy()
        reader = f"{names.group}_{names.host}-w{round_ + 2}_"
        left = [held for held in desk.held() if held.consumer.startswith(reader)]
        assert not [held for held in left if not held.consumer.endswith("_0")]
    ledger.wait_finished(range(sent), 20)
    eventually(desk.is_empty)
    ledger.assert_once(range(sent))
    assert steady.running


def test_bl23_task_beyond_the_limit_runs_again_elsewhere_uncounted(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """A task that does not end in time, with a single attempt: the process ends with 0 within the
    limit and a second, and the task is run again by another, on attempt 1."""
    tasks = tasks_file(
        """
        @task(name="long", max_retry=1, max_lost=0)
        def long(payload):
            with record(["long", current_task().attempt]):
                while not os.path.exists(payload):
                    time.sleep(0.02)
        """
    )
    gate = ledger.path.with_name("gate")
    worker = make_worker(
        tasks_file=tasks, queue={"reclaim_delay": 4}, config={"shutdown_timeout": 1}
    )
    desk = make_desk(server.url, reclaim_delay=4)
    desk.send("long", [str(gate)])
    ledger.wait_started(["long", 1])
    other = make_worker(tasks_file=tasks, queue={"reclaim_delay": 4})
    asked = time.monotonic()
    assert worker.stop() == 0
    assert 1 <= time.monotonic() - asked < 1.5 + busy()
    assert ledger.wait_started(["long", 1], times=2).pid == other.pid
    gate.touch()
    eventually(desk.is_empty)
    assert len(ledger.runs()) == 2
    assert desk.letters() == []


def test_bl23_lease_and_name_are_given_up(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
) -> None:
    """The leader stops: another leads at once, long before the lease runs out, and a new process
    can have the name."""
    timings = {"lease": 30, "presence": 30, "poll": 30}
    leader = make_worker(timings=timings)
    eventually(lambda: leader.status()["is_leader"], 5)
    follower = make_worker(timings=timings)
    desk = make_desk(server.url)
    assert leader.stop() == 0
    eventually(lambda: follower.status()["is_leader"], 2)
    desk.send("note", ["delayed"], run_in=0.3)
    ledger.wait_finished(["delayed"], 3)
    again = make_worker(timings=timings, config={"host": f"{names.host}-w1"})
    assert again.status()["host"] == f"{names.host}-w1"


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_bl23_stop_is_in_time_when_redis_is_away(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
    fault: str,
) -> None:
    """Whatever Redis does, the process ends with 0 within shutdown_timeout and two seconds."""
    server = own_server(appendonly=True)
    worker = make_worker(url=server.tcp_url, config={"shutdown_timeout": 1})
    desk = make_desk(server.url)
    desk.send("sleep", [{"id": "running", "seconds": 0.5}])
    ledger.wait_started("running")
    with getattr(faults, fault)(server):
        faults.down_for(0.3)
        asked = time.monotonic()
        assert worker.stop(10) == 0
        assert time.monotonic() - asked < 2 + busy()
