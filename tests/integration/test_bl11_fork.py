"""BL-11: a connection, a lock or a flag that says "running" is shared by a parent and its forks."""

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from taskrunner import RedisStreamQueue, Registry, TaskAlreadyDispatchedError, TaskRunner, task
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import (
    Desk,
    Ledger,
    Names,
    WorkerProcess,
    assert_recovered,
    eventually,
    service_threads,
)

CHILDREN = 8
EACH = 200
PATIENCE = 30.0  # seconds a child may take


PARSERS = importlib.import_module("redis._parsers")


@pytest.fixture(params=["_HiredisParser", "_RESP2Parser"])
def parent(request: pytest.FixtureRequest, server: EmbeddedServer, names: Names) -> TaskRunner:
    """A producer in this process that has sent one task, so that it has an open connection; with
    and without hiredis."""
    registry = Registry()
    client = redis.Redis.from_url(server.tcp_url, parser_class=getattr(PARSERS, request.param))
    runner = TaskRunner(
        consumer_group=names.group,
        host=names.host,
        queue=RedisStreamQueue(client, prefix=names.prefix, reclaim_delay=2),
        registry=registry,
    )

    def stand_in(payload: Any) -> None:
        raise AssertionError("nothing runs here")

    task(name="note", registry=registry)(stand_in)
    task(name=f"one-{names.group}", registry=registry, unique_for=60)(stand_in)
    runner.make_default()
    runner.dispatch_many("note", ["first"])
    return runner


def fork(child: Callable[[], object]) -> int:
    """Run `child` in a fork that ends with 0 if it raised nothing; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(round(PATIENCE))  # nothing of pytest's is left to end a child that hangs
        child()
        code = 0
    except BaseException as error:
        os.write(2, f"child: {error!r}\n".encode())
    finally:
        os._exit(code)


def wait(pids: list[int]) -> None:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * len(pids), codes


@pytest.mark.chaos
def test_bl11_children_and_parent_dispatch_side_by_side_after_a_fork(
    server: EmbeddedServer,
    names: Names,
    parent: TaskRunner,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """Eight children and the parent send 200 each: 1,800 tasks and one, each run once, no reply
    meets another's call, and each call gets an id of its own."""

    def send(who: str) -> None:
        sent = [parent.dispatch("note", f"{who}-{n}") for n in range(EACH)]
        assert len({one.entry_id for one in sent}) == EACH

    pids = [fork(lambda number=number: send(f"child{number}")) for number in range(CHILDREN)]
    send("parent")
    wait(pids)
    desk = make_desk(server.url)
    assert desk.length() == 1 + EACH * (CHILDREN + 1)
    worker = make_worker()
    wanted = [f"child{c}-{n}" for c in range(CHILDREN) for n in range(EACH)]
    wanted += ["first", *(f"parent-{n}" for n in range(EACH))]
    ledger.wait_finished(wanted, 30)
    ledger.assert_once(wanted)
    assert_recovered(worker, desk, ledger, service_threads(worker))


def test_bl11_child_shares_no_connection_with_its_parent(
    server: EmbeddedServer, parent: TaskRunner, names: Names
) -> None:
    """The child's end closes nothing of the parent's; both use sockets of their own."""
    connections = parent.queue.connections

    def child() -> None:
        parent.dispatch("note", "child")
        connections.close()

    mine = connections.call("CLIENT", "ID")
    report, send = os.pipe()

    def tell() -> None:
        os.write(send, str(connections.call("CLIENT", "ID")).encode())

    wait([fork(child), fork(tell)])
    assert int(os.read(report, 64)) != mine
    assert connections.call("CLIENT", "ID") == mine
    os.close(report)
    os.close(send)


def test_bl11_unique_token_and_ids_are_not_repeated_in_children(
    server: EmbeddedServer, parent: TaskRunner, names: Names, make_desk: Callable[..., Desk]
) -> None:
    """Random state is not inherited: ids differ, and of eight children that send the same unique
    task exactly one is told that it has."""
    report, send = os.pipe()

    def child() -> None:
        try:
            sent = parent.dispatch(f"one-{names.group}", "same")
            os.write(send, b"sent\n")
        except TaskAlreadyDispatchedError:
            sent = parent.dispatch("note", "other")
        os.write(send, f"{sent.id}\n".encode())

    wait([fork(child) for _ in range(CHILDREN)])
    os.close(send)
    with os.fdopen(report) as lines:
        said = lines.read().split()
    assert said.count("sent") == 1
    assert len(set(said)) == CHILDREN + 1, said


def test_bl11_lock_that_another_thread_holds_during_the_fork_does_not_hang_the_child(
    server: EmbeddedServer, parent: TaskRunner, make_desk: Callable[..., Desk]
) -> None:
    """Threads dispatch without a pause while the process forks; each child can dispatch."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            parent.dispatch("note", "busy")

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait([fork(lambda: parent.dispatch("note", "child")) for _ in range(20)])
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.chaos
def test_bl11_runner_that_is_inherited_is_new_and_the_parents_goes_on(
    server: EmbeddedServer, names: Names, make_desk: Callable[..., Desk]
) -> None:
    """A started, leading runner is in state `init` in the child: it leads nothing, holds no name,
    can dispatch, and can be started there beside its parent's."""
    registry = Registry()
    ran: list[Any] = []
    runner = TaskRunner(
        consumer_group=names.group,
        host=names.host,
        queue=RedisStreamQueue(server.tcp_url, prefix=names.prefix, reclaim_delay=2),
        registry=registry,
        block_duration=1,
        shutdown_timeout=3,
    )
    task(name="note", registry=registry)(ran.append)
    runner.start()
    try:
        eventually(lambda: runner.is_leader)
        parents_id = runner.instance_id

        def child() -> None:
            assert str(runner.state) == "init"
            assert not runner.is_leader
            assert runner.instance_id != parents_id
            runner.dispatch("note", "from the child")
            runner.start()
            eventually(lambda: runner.host == f"{names.host}-2", 15)
            assert not runner.is_leader
            assert runner.stop()

        wait([fork(child)])
        assert str(runner.state) == "started"
        assert runner.is_leader
        runner.dispatch("note", "from the parent")
        # The first may have been run by the child's own runner.
        eventually(lambda: "from the parent" in ran)
        eventually(make_desk(server.url).is_empty)
    finally:
        assert runner.stop()


@pytest.mark.chaos
def test_bl11_task_may_fork_and_its_child_may_exit_at_once(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """By os.fork and by multiprocessing: the worker goes on with the same process and threads, and
    a child that dispatches does so over a connection of its own."""
    tasks = tasks_file(
        """
        import multiprocessing

        @task(name="note")
        def note(payload):
            with record(payload):
                pass

        @task(name="forks")
        def forks(payload):
            with record(payload):
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0

        def send(payload):
            note.delay(payload)

        @task(name="dispatches")
        def dispatches(payload):
            with record(payload):
                child = multiprocessing.get_context("fork").Process(
                    target=send, args=(payload + "-child",)
                )
                child.start()
                child.join(20)
                assert child.exitcode == 0
        """
    )
    worker = make_worker(tasks_file=tasks)
    desk = make_desk(server.url)
    threads = service_threads(worker)
    desk.send("forks", [f"f{n}" for n in range(10)])
    desk.send("dispatches", [f"d{n}" for n in range(5)])
    wanted = [f"f{n}" for n in range(10)] + [f"d{n}" for n in range(5)]
    wanted += [f"d{n}-child" for n in range(5)]
    ledger.wait_finished(wanted, 20)
    ledger.assert_once(wanted)
    assert_recovered(worker, desk, ledger, threads)


def test_bl11_spawned_child_dispatches_too(
    server: EmbeddedServer, names: Names, make_desk: Callable[..., Desk]
) -> None:
    """The other way to make children: nothing is inherited, everything is made anew."""
    child = multiprocessing.get_context("spawn").Process(
        target=_send_once, args=(server.tcp_url, names.prefix, names.group)
    )
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert make_desk(server.url).length() == 1


def _send_once(url: str, prefix: str, group: str) -> None:
    registry = Registry()
    task(name="note", registry=registry)(print)
    runner = TaskRunner(
        consumer_group=group, queue=RedisStreamQueue(url, prefix=prefix), registry=registry
    )
    runner.dispatch("note", 1)
