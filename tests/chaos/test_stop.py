"""An orderly stop: what was not started goes on elsewhere at once, and nothing is left behind."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support import (
    Desk,
    Ledger,
    Names,
    OwnServer,
    Proxy,
    WorkerProcess,
    busy,
    eventually,
    faults,
)
from tests.support.binaries import servers_at_hand
from tests.support.server import process_is_alive
from tests.support.worker import DEFAULTS

pytestmark = pytest.mark.chaos

TASKS = """
    @task(name="noop")
    def noop(payload):
        pass

    @task(name="step")
    def step(payload):
        with record(payload["id"]):
            context = current_task()
            with open(payload["log"], "a") as file:
                file.write(f"{payload['id']} {context.attempt}\\n")
            time.sleep(payload["seconds"])
"""


def test_unstarted_tasks_start_elsewhere_within_two_seconds_of_sigterm(
    desk: Desk,
    ledger: Ledger,
    tmp_path: Path,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """They are handed back, claimable at once, with the attempt given back that they never used;
    what runs ends here."""
    config: dict[str, Any] = {**DEFAULTS["config"], "batch_size": 300}
    timings = {**DEFAULTS["timings"], "hand_back_after": 60}
    options = {"tasks_file": tasks_file(TASKS), "queue": DEFAULTS["queue"], "timings": timings}
    first = make_worker(config=config, **options)
    reader = f"{desk.names.group}_{first.status()['host']}_1"
    log = str(tmp_path / "attempts")
    slow = [f"slow-{number}" for number in range(8)]
    behind = [f"behind-{number}" for number in range(200)]
    # The many that go before let the pool expect more of the kind, so that it buffers.
    desk.send("noop", range(4000))
    desk.send("step", [{"id": id_, "seconds": 3, "log": log} for id_ in slow])
    desk.send("step", [{"id": id_, "seconds": 0, "log": log} for id_ in behind])
    eventually(lambda: [held.consumer for held in desk.held()] == [reader] * 208, 20)
    for id_ in slow:
        ledger.wait_started(id_)
    assert len(ledger.runs()) == 8
    second = make_worker(config=config, **options)
    assert len(ledger.runs()) == 8, "the test was too slow"

    told = time.monotonic()
    first.terminate()
    ledger.wait_finished(behind, 10)
    late = [run.start - told for run in ledger.runs() if run.id in behind]
    print(f"unstarted ones started elsewhere {min(late):.3f} to {max(late):.3f} s after SIGTERM")
    assert max(late) <= 2
    assert first.running, "it waits for what runs"
    assert first.wait() == 0
    desk.wait_done()
    ledger.assert_once([*slow, *behind])
    assert {run.pid for run in ledger.runs() if run.id in behind} == {second.pid}
    attempts = dict(line.split() for line in Path(log).read_text().splitlines())
    assert set(attempts.values()) == {"1"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_worker_stops_within_half_a_second_and_leaves_nothing(
    number: signal.Signals,
    desk: Desk,
    ledger: Ledger,
    names: Names,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """Blocked reads end at once; presence and lease are given up, and our readers removed.

    The best of a few counts: a busy machine takes its time to end any process.
    """
    took: list[float] = []
    for turn in range(5):
        worker = make_worker(**DEFAULTS)
        desk.send("note", [turn])
        ledger.wait_finished([turn])
        desk.wait_done()
        eventually(lambda worker=worker: worker.status()["is_leader"], 5)
        host = worker.status()["host"]
        told = time.monotonic()
        worker.signal(number)
        assert worker.wait() == 0
        took.append(time.monotonic() - told)
        assert {key.decode() for key in desk.client.scan_iter(f"*{host}*")} == set()
        consumers: Any = desk.client.xinfo_consumers(names.stream, names.group)
        assert [one["name"] for one in consumers if not one["name"].endswith(b"_0")] == []
        if took[-1] <= 0.5:
            break
    print(f"stopped {min(took) * 1000:.0f} ms after {number.name}")
    assert min(took) <= 0.5


def test_busy_worker_stops_with_nothing_pending(
    desk: Desk, ledger: Ledger, make_worker: Callable[..., WorkerProcess]
) -> None:
    """What ran is acknowledged, what was waiting is there for others, uncounted."""
    worker = make_worker()
    desk.send("sleep", [{"id": number, "seconds": 0.05} for number in range(400)])
    eventually(lambda: len(ledger.finished()) > 50, 10)
    assert worker.stop() == 0
    ran = ledger.finished()
    assert set(ledger.counts().values()) == {1}
    assert all(run.end for run in ledger.runs())
    held = desk.held()
    assert all(one.consumer.endswith("_0") and one.count == 0 for one in held)
    assert desk.length() == 400 - len(ran)
    make_worker()
    ledger.wait_finished(range(400), 30)
    desk.wait_done()
    ledger.assert_once(range(400))


@pytest.mark.parametrize("fault", ["gone", "frozen", "swallowing"])
@pytest.mark.parametrize("working", [False, True])
def test_worker_ends_in_time_whatever_redis_does(
    fault: str,
    working: bool,
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    make_proxy: Callable[[str], Proxy],
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """Within shutdown_timeout + 2 s, with 0 (semantics §4, Stop)."""
    server = own_server()
    proxy = make_proxy(server.tcp_url)
    desk = make_desk(server.url)
    worker = make_worker(url=proxy.url, config={"shutdown_timeout": 2})
    desk.send("sleep", [{"id": number, "seconds": 60 if working else 0} for number in range(4)])
    for number in range(4):
        ledger.wait_started(number)
    if not working:
        desk.wait_done()
    if fault == "gone":
        server.kill()
    elif fault == "frozen":
        server.pause()
    else:
        proxy.swallow()
    faults.down_for(0.2)
    told = time.monotonic()
    worker.terminate()
    assert worker.wait() == 0
    took = time.monotonic() - told
    print(f"{fault}, {'working' if working else 'idle'}: ended after {took:.2f} s")
    assert took <= 2 + busy(2)
    if fault == "frozen":
        server.resume()


def test_second_signal_ends_at_once(
    desk: Desk, ledger: Ledger, make_worker: Callable[..., WorkerProcess]
) -> None:
    """With 128 + its number; what ran stays pending and is reclaimed."""
    worker = make_worker(config={"shutdown_timeout": 60})
    desk.send("sleep", [{"id": "long", "seconds": 2}])
    ledger.wait_started("long")
    worker.terminate()
    eventually(lambda: worker.log_lines("stopping in order"), 5)
    worker.interrupt()
    assert worker.wait() == 128 + signal.SIGINT
    make_worker()
    ledger.wait_finished(["long"], 20)
    desk.wait_done()
    assert ledger.counts() == {"long": 2}


def test_task_cut_off_by_the_end_of_shutdown_timeout_runs_again_uncounted(
    desk: Desk,
    ledger: Ledger,
    tmp_path: Path,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """It is due three seconds after the process ended, and has its first attempt still."""
    tasks = tasks_file(TASKS)
    worker = make_worker(tasks_file=tasks, config={"shutdown_timeout": 1}, queue=DEFAULTS["queue"])
    log = tmp_path / "attempts"
    desk.send("step", [{"id": "long", "seconds": 10, "log": str(log)}])
    ledger.wait_started("long")
    assert worker.stop() == 0
    ended = time.monotonic()
    make_worker(tasks_file=tasks, queue=DEFAULTS["queue"])
    again = ledger.wait_started("long", 15, times=2)
    print(f"again {again.start - ended:.2f} s after the end")
    assert 1.5 <= again.start - ended <= 6
    eventually(lambda: log.read_text().split() == ["long", "1", "long", "1"], 5)


@pytest.mark.parametrize("command", servers_at_hand().values(), ids=servers_at_hand())
def test_a_server_that_holds_writes_back_outlives_the_stop_of_a_worker(
    command: Path, own_server: Callable[..., OwnServer], make_worker: Callable[..., WorkerProcess]
) -> None:
    """CLIENT PAUSE, and FAILOVER, hold the blocking read back. Redis 7.0 and 8.2 abort when a client
    held back so is given CLIENT UNBLOCK: a deploy must not take the server down."""
    server = own_server(command=command)
    worker = make_worker(url=server.url, config={"block_duration": 0.5})
    pid, client = server.pid, server.client()
    with faults.paused(client, "WRITE"):
        eventually(lambda: _held_back(client), 10)
        worker.terminate()
        assert worker.wait(10) == 0
        assert client.ping()
    assert process_is_alive(pid)


def _held_back(client: redis.Redis) -> bool:
    """Whether a read of ours is among the commands that wait for the end of the pause."""
    rows: Any = client.client_list()
    return any(row["cmd"] == "xreadgroup" and int(row["idle"]) >= 1 for row in rows)
