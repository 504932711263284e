"""BL-08: no single thread may die or get stuck while the others make the worker look healthy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tests.support import (
    Desk,
    Ledger,
    Names,
    OwnServer,
    WorkerProcess,
    assert_recovered,
    eventually,
    faults,
    service_threads,
)

pytestmark = pytest.mark.chaos


def assert_every_path_works(worker: WorkerProcess, desk: Desk, ledger: Ledger, fault: str) -> None:
    """A direct task, a delayed one and one whose worker was killed are all run."""
    ids = [f"{fault}-{path}" for path in ("direct", "delayed", "retried", "stranded")]
    direct, delayed, retried, stranded = ids
    eventually(lambda: desk.send("note", [direct]), 10)
    ledger.wait_finished([direct], 10)
    desk.strand("note", [stranded], idle=5)
    desk.send("note", [delayed], run_in=0.5)
    desk.send("fail-once-delay-half", [retried])
    ledger.wait_finished(ids, 10)
    eventually(desk.is_empty, 10, message=worker.log)


def test_bl08_every_thread_lives_and_works_when_faults_come_in_turn(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tmp_path: Path,
    names: Names,
    ledger: Ledger,
) -> None:
    """After each fault the same process runs direct, delayed, retried and stranded tasks."""
    misconf = faults.MisconfServer(own_server, tmp_path)
    server = misconf.server
    client = server.client()
    worker = make_worker(
        url=server.tcp_url,
        queue={"reclaim_delay": 1},
        config={"block_duration": 0.5},
        client={"socket_timeout": 1},
    )
    desk = make_desk(server.url, reclaim_delay=1)
    assert_every_path_works(worker, desk, ledger, "none")
    threads = service_threads(worker)

    with faults.out_of_memory(client):
        faults.down_for(1.5)
    assert_every_path_works(worker, desk, ledger, "oom")

    with faults.paused(client, "ALL", longest=3):  # nobody could end it earlier
        faults.down_for(3.1)
    assert_every_path_works(worker, desk, ledger, "pause-all")

    with faults.paused(client, "WRITE"):
        faults.down_for(3)
    assert_every_path_works(worker, desk, ledger, "pause-write")

    client.set(names.delayed, "x")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.send("note", ["refused"], run_in=0.1)
    faults.down_for(1.5)
    client.delete(names.delayed)
    assert_every_path_works(worker, desk, ledger, "wrong-type-delayed")

    client.rename(names.stream, names.stream + ":kept")
    client.set(names.stream, "x")
    faults.down_for(1.5)
    client.rename(names.stream + ":kept", names.stream)
    assert_every_path_works(worker, desk, ledger, "wrong-type-stream")

    faults.flush(client, "all")
    assert_every_path_works(worker, desk, ledger, "flush")

    with misconf.refusing():
        faults.down_for(1.5)
    assert_every_path_works(worker, desk, ledger, "misconf")

    assert_recovered(worker, desk, ledger, threads)
    ledger_of_notes = {id_: n for id_, n in ledger.counts().items() if "retried" not in str(id_)}
    assert set(ledger_of_notes.values()) == {1}, ledger_of_notes


END_THREAD = """
    import ctypes

    @task(name="note")
    def note(payload):
        with record(payload):
            pass

    @task(name="fail-once-delay-half", max_retry=2, retry_delay=0.5)
    def fail(payload):
        with record(payload):
            if current_task().attempt == 1:
                raise ValueError

    @task(name="end-thread")
    def end_thread(start):
        '''End the other threads whose name starts so, as no code of theirs can foresee.'''
        with record(start):
            for thread in threading.enumerate():
                if thread.name.startswith(start) and thread is not threading.current_thread():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
                    )
    """


def test_bl08_thread_is_started_again_when_it_dies(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """A service's thread ends though its loop outlives everything: it comes back, and every path
    works."""
    server = own_server()
    worker = make_worker(
        url=server.tcp_url,
        tasks_file=tasks_file(END_THREAD),
        queue={"reclaim_delay": 1},
        config={"block_duration": 0.3},
        timings={"poll": 0.2},
    )
    desk = make_desk(server.url, reclaim_delay=1)
    threads = service_threads(worker)
    victims = ["fetcher", "reclaimer", "delivery-heartbeat", "elector", "delayed-poller"]
    for victim in victims:
        desk.send("end-thread", [f"taskrunner-{victim}"])
        ledger.wait_finished([f"taskrunner-{victim}"])
        eventually(
            lambda victim=victim: worker.log_lines(f"thread {victim}", "started again"),
            5,
            message=worker.log,
        )
        assert_every_path_works(worker, desk, ledger, victim)
    assert_recovered(worker, desk, ledger, threads)


@pytest.mark.parametrize("thread", ["worker", "settler"])
def test_bl08_delivery_is_ended_when_the_thread_that_had_it_dies(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
    thread: str,
) -> None:
    """Threads end with deliveries in their hands: new ones take their places, and no heartbeat
    keeps alive what nothing executes."""
    server = own_server()
    worker = make_worker(
        url=server.tcp_url, tasks_file=tasks_file(END_THREAD), queue={"reclaim_delay": 1}
    )
    desk = make_desk(server.url, reclaim_delay=1)
    threads = service_threads(worker)
    desk.send("end-thread", [f"taskrunner-{thread}"])
    ledger.wait_finished([f"taskrunner-{thread}"])
    for number in range(8):
        desk.send("note", [number])
    ledger.wait_finished(range(8), 10)
    assert_recovered(worker, desk, ledger, threads)


def test_bl08_worker_ends_with_an_error_when_a_thread_keeps_dying(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    tasks_file: Callable[[str], Path],
) -> None:
    """A thread that can't be kept: the process ends with 1, so that its supervisor starts anew."""
    tasks = tasks_file(
        """
        from taskrunner.services.delivery_heartbeat import DeliveryHeartbeat

        def tick(self):
            raise SystemExit(0)

        DeliveryHeartbeat.tick = tick
        """
    )
    worker = make_worker(url=own_server().tcp_url, tasks_file=tasks, wait=False)
    assert worker.wait(20) == 1, worker.log()
    assert worker.log_lines("giving up"), worker.log()
