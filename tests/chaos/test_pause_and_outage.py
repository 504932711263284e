"""Processes that stand still, servers that are silent, and messages that come late: nobody takes
back what is another's, and nothing is done twice because of it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from taskrunner import scripts
from tests.support import (
    Desk,
    Ledger,
    OwnServer,
    Proxy,
    WorkerProcess,
    eventually,
    faults,
)

pytestmark = pytest.mark.chaos

LATE = 1  # reclaim_delay of these tests
TASKS = """
    @task(name="gated")
    def gated(payload):
        # Waits for word to this very process, so that the test can end one of two runs.
        word = payload["path"] + "." + str(os.getpid())
        with record(payload["id"]):
            while not os.path.exists(word):
                time.sleep(0.01)
            if payload["fails"]:
                raise ValueError("late")

    @task(name="noop")
    def noop(payload):
        pass

    @task(name="note")
    def note(payload):
        with record(payload):
            pass
"""


@pytest.mark.parametrize("when", ["at once", "later"])
def test_paused_worker_takes_nothing_back_and_adds_nothing(
    when: str,
    desk: Desk,
    ledger: Ledger,
    tmp_path: Path,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """SIGSTOP past reclaim_delay, SIGCONT: what it held is another's now.

    What it had buffered it does not start; a run that ends well may finish the message, one that
    fails changes nothing, whether it ends before or after the worker has heard of its loss.
    """
    options = {
        "tasks_file": tasks_file(TASKS),
        "queue": {"reclaim_delay": LATE},
        "timings": {"hand_back_after": 60},
    }
    paused = make_worker(config={"num_workers": 2}, **options)
    gates = {fails: str(tmp_path / f"gate-{fails}") for fails in (True, False)}
    notes = list(range(10))
    # The many that go before let the pool expect more of the kind, so that it buffers.
    desk.send("noop", range(3000))
    desk.send("gated", [{"id": f"gated-{f}", "path": gates[f], "fails": f} for f in gates])
    desk.send("note", notes)
    mine = f"{desk.names.group}_{paused.status()['host']}_1"
    eventually(lambda: [held.consumer for held in desk.held()] == [mine] * 12, 20)
    for fails in gates:
        ledger.wait_started(f"gated-{fails}")
    assert len(ledger.runs()) == 2
    first = paused.pid

    paused.pause()
    other = make_worker(**options)
    ledger.wait_finished(notes, 15)
    for fails in gates:
        ledger.wait_started(f"gated-{fails}", times=2)
    theirs = {(held.consumer, held.count) for held in desk.held()}
    assert len(theirs) == 1 and mine not in {consumer for consumer, _ in theirs}
    if when == "at once":
        _let_go(gates.values(), first)
    paused.resume()
    if when == "later":
        lost = ("delivery_lost", "gated")
        eventually(
            lambda: (
                [(e["action"], e["task_name"]) for e in paused.status()["errors"]].count(lost) == 2
            ),
            10,
            message=paused.log,
        )
        _let_go(gates.values(), first)
    eventually(lambda: all(run.end for run in ledger.runs() if run.pid == first), 5)
    eventually(lambda: len(desk.held()) == 1, 5)  # the late success has finished its message
    _wait_until_it_runs_something(paused, desk, ledger)
    eventually(lambda: {(held.consumer, held.count) for held in desk.held()} == theirs, 5)
    assert desk.letters() == []

    _let_go(gates.values(), other.pid)
    eventually(lambda: all(run.end for run in ledger.runs()), 5)
    eventually(lambda: len(desk.letters()) == 1, 5)  # the other's own failure, of its second run
    assert desk.letters()[0].attempts == 2
    desk.wait_done()
    for note in notes:
        assert [run.pid for run in ledger.runs(note)] == [other.pid]
    for fails in gates:
        assert [run.pid for run in ledger.runs(f"gated-{fails}")] == [first, other.pid]
    fresh = [run for run in ledger.runs() if str(run.id).startswith("fresh")]
    assert desk.added() == 3000 + 12 + len(fresh)


def _let_go(gates: Iterable[str], pid: int) -> None:
    for gate in gates:
        Path(f"{gate}.{pid}").touch()


def _wait_until_it_runs_something(worker: WorkerProcess, desk: Desk, ledger: Ledger) -> None:
    """Send new tasks until the worker has taken one, so that all its threads are up again."""
    sent: list[str] = []

    def it_ran_one() -> bool:
        sent.append(f"fresh-{worker.pid}-{len(sent)}")
        desk.send("note", sent[-1:])
        return any(run.pid == worker.pid for id_ in sent for run in ledger.runs(id_))

    eventually(it_ran_one, 20, interval=0.05)
    ledger.wait_finished(sent)


def test_paused_worker_whose_name_was_taken_goes_on_under_another(
    desk: Desk, ledger: Ledger, make_worker: Callable[..., WorkerProcess]
) -> None:
    """Two live processes never share consumers and presence key (semantics §4)."""
    config = {"host": desk.names.host}
    timings = {"presence": 1}
    paused = make_worker(config=config, timings=timings)
    eventually(lambda: paused.status()["host"] == desk.names.host, 5)
    key = f"taskrunner:replication:{desk.names.host}"
    eventually(lambda: desk.client.exists(key))  # a starved process may let it lapse for a moment
    paused.pause()
    eventually(lambda: not desk.client.exists(key), 10)
    successor = make_worker(config=config, timings=timings)
    assert successor.status()["host"] == desk.names.host
    paused.resume()
    eventually(lambda: paused.status()["host"] == f"{desk.names.host}-2", 10)
    for worker in (paused, successor):
        _wait_until_it_runs_something(worker, desk, ledger)
    assert successor.status()["host"] == desk.names.host
    desk.wait_done()
    assert set(ledger.counts().values()) == {1}


def test_silent_server_costs_no_attempt_and_starts_nothing_twice(
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """After an outage longer than reclaim_delay everything looks overdue: holders renew first."""
    server = own_server()
    desk = make_desk(server.url)
    workers = [make_worker(url=server.url, queue={"reclaim_delay": LATE}) for _ in range(2)]
    ids = [f"long-{number}" for number in range(8)]
    desk.send("sleep", [{"id": id_, "seconds": 6} for id_ in ids])
    for id_ in ids:
        ledger.wait_started(id_)
    with faults.frozen(server):
        faults.down_for(2.5 * LATE)
    desk.send("note", range(50))
    ledger.wait_finished([*ids, *range(50)], 20)
    desk.wait_done()
    ledger.assert_once([*ids, *range(50)])
    for worker in workers:
        assert [e for e in worker.status()["errors"] if e["action"] == "delivery_lost"] == []


def test_late_renewal_does_not_delay_a_retry(
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    make_proxy: Callable[[str], Proxy],
    ledger: Ledger,
    tmp_path: Path,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """A renewal that is held on its way until the retry is parked no longer owns the delivery."""
    server = own_server()
    desk = make_desk(server.url)
    proxy = make_proxy(server.tcp_url)
    delay, reclaim = 1.0, 30
    tasks = tasks_file(
        f"""
        @task(name="fail-when-told", max_retry=2, retry_delay={delay}, reservation_timeout=0.1)
        def fail_when_told(payload):
            with record("told"):
                if current_task().attempt == 1:
                    while not os.path.exists(payload):
                        time.sleep(0.01)
                    raise ValueError("first")
        """
    )
    worker = make_worker(url=proxy.url, tasks_file=tasks, queue={"reclaim_delay": reclaim})
    desk.define("fail-when-told", reservation_timeout=0.1)
    desk.send("fail-when-told", [str(tmp_path / "told")])
    ledger.wait_started("told")
    parking = f"{desk.names.group}_{worker.status()['host']}_0"
    seen = proxy.on("*", "delay_request", containing=scripts.load("renew").sha, times=2)
    eventually(lambda: seen.hits == 2, 10)  # renewals flow, and the server knows the script
    held = proxy.on("EVALSHA", "hold_request", containing=scripts.load("renew").sha)
    assert held.hit.wait(10)
    (tmp_path / "told").touch()
    eventually(lambda: [entry.consumer for entry in desk.held()] == [parking], 10)
    held.release()
    ledger.wait_finished(["told"], reclaim / 2)
    first, again = ledger.runs("told")
    late = again.start - first.end - delay
    print(f"{late * 1000:.1f} ms late")
    assert -0.05 < late < 3
    desk.wait_done()
    assert [e for e in worker.status()["errors"] if e["action"] == "delivery_lost"] == []


def test_paused_worker_does_not_start_what_it_reads_too_late(
    desk: Desk,
    ledger: Ledger,
    tmp_path: Path,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """SIGSTOP while it waits for a message, which is delivered to it all the same and then taken over:
    when it wakes and reads the reply, that is old news, and it asks before it starts. Also where it
    waits longer than reclaim_delay: it can't know when in this time the reply was made."""
    options = {"tasks_file": tasks_file(TASKS), "queue": {"reclaim_delay": LATE}}
    gate = str(tmp_path / "gate")
    paused = make_worker(config={"block_duration": 60}, **options)
    reader = f"{desk.names.group}_{paused.status()['host']}_1"
    _deliver_while_paused(paused, desk, ledger, gate)
    assert [held.consumer for held in desk.held()] == [reader]
    other = make_worker(**options)
    run = ledger.wait_started("gated", 20)
    assert run.pid == other.pid
    paused.resume()
    desk.send("note", ["after"] * 20)
    ledger.wait_finished(["after"], 20)

    assert len([run for run in ledger.runs() if run.id == "gated"]) == 1
    Path(f"{gate}.{other.pid}").touch()
    eventually(desk.is_empty, 20)
    assert len([run for run in ledger.runs() if run.id == "gated"]) == 1


def test_paused_worker_renews_at_once_what_it_reads_late(
    desk: Desk,
    ledger: Ledger,
    tmp_path: Path,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """A pause shorter than reclaim_delay costs nothing: what was delivered in it is renewed before it
    is overdue, not a third of reclaim_delay after it was read, and so runs once."""
    reclaim = 9.0
    options = {"tasks_file": tasks_file(TASKS), "queue": {"reclaim_delay": reclaim}}
    gate = str(tmp_path / "gate")
    paused = make_worker(config={"block_duration": 60}, **options)
    reader = f"{desk.names.group}_{paused.status()['host']}_1"
    _deliver_while_paused(paused, desk, ledger, gate)
    make_worker(**options)
    eventually(lambda: desk.held()[0].idle > reclaim * 0.75, 20)
    paused.resume()

    ledger.wait_started("gated", 5)
    eventually(lambda: desk.held()[0].idle < reclaim / 3, 5)
    assert [(held.consumer, held.count) for held in desk.held()] == [(reader, 1)]
    Path(f"{gate}.{paused.pid}").touch()
    eventually(desk.is_empty, 20)
    assert [run.pid for run in ledger.runs() if run.id == "gated"] == [paused.pid]


def _deliver_while_paused(worker: WorkerProcess, desk: Desk, ledger: Ledger, gate: str) -> None:
    """SIGSTOP the worker while it waits for a message, and send one."""
    desk.send("note", ["before"])
    ledger.wait_finished(["before"])
    desk.wait_done()
    eventually(lambda: _is_reading(desk), 10)
    worker.pause()
    desk.send("gated", [{"id": "gated", "path": gate, "fails": False}])


def _is_reading(desk: Desk) -> bool:
    """Whether a reader waits in the server for a message."""
    rows: Any = desk.client.client_list()
    return any(row["cmd"] == "xreadgroup" and "b" in row["flags"] for row in rows)
