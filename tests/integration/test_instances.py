"""How many share the work: names, presence keys and the count of instances."""

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskrunner import TaskRunner
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Ledger, Names, OwnServer, WorkerProcess, busy, eventually, stays
from tests.support.numbers import Crew, Monitor, measure, presence

SCANS = {"KEYS", "SCAN", "SSCAN", "HSCAN", "ZSCAN"}


@pytest.fixture
def crew(server: EmbeddedServer, names: Names) -> Iterator[Crew]:
    """Runners of one group on the shared server; one that only looks is `crew.make()`."""
    with Crew(server.tcp_url, names) as made:
        yield made


def _count(crew: Crew) -> int:
    """A fresh count, by one that has nothing cached."""
    runner = crew.make()
    try:
        return runner.replications()
    finally:
        runner.queue.connections.close()


def _wait_for(crew: Crew, count: int, timeout: float = 15.0) -> None:
    eventually(lambda: _count(crew) == count, timeout, interval=0.1)


def test_two_processes_on_one_host_count_two(
    crew: Crew, make_worker: Callable[..., WorkerProcess]
) -> None:
    """D37: in Go they shared the key and counted as one."""
    workers = [make_worker(config={"host": crew.names.host}) for _ in range(2)]

    _wait_for(crew, 2)

    hosts = {worker.status()["host"] for worker in workers}
    assert hosts == {crew.names.host, f"{crew.names.host}-2"}
    assert all(crew.client.exists(presence(host)) for host in hosts)


def test_two_processes_on_one_host_share_no_consumer(
    crew: Crew, make_worker: Callable[..., WorkerProcess], ledger: Ledger
) -> None:
    """D43: each has readers of its own, so neither is taken for the other."""
    workers = [make_worker(config={"host": crew.names.host}) for _ in range(2)]
    _wait_for(crew, 2)

    names = crew.consumers()

    for host in (worker.status()["host"] for worker in workers):
        assert {f"{crew.names.group}_{host}_1", f"{crew.names.group}_{host}_2"} <= names
    assert len(names) == 4


@pytest.mark.parametrize("first", [0, 1])
def test_stop_of_one_leaves_the_other(
    crew: Crew, make_worker: Callable[..., WorkerProcess], ledger: Ledger, first: int
) -> None:
    """D37: in Go the first to stop deleted the key of both."""
    workers = [make_worker(config={"host": crew.names.host}) for _ in range(2)]
    _wait_for(crew, 2)
    leaving, staying = workers[first], workers[1 - first]
    gone, left = leaving.status()["host"], staying.status()["host"]

    assert leaving.stop() == 0

    assert not crew.client.exists(presence(gone))
    assert crew.client.exists(presence(left))
    _wait_for(crew, 1)
    crew.task(name="note")
    crew.make().dispatch("note", "after")
    ledger.wait_finished(["after"])
    assert not [name for name in crew.consumers() if name.startswith(f"{crew.names.group}_{gone}_")]


def test_key_of_a_killed_process_runs_out(
    crew: Crew, make_worker: Callable[..., WorkerProcess]
) -> None:
    """Nobody deletes it: it is gone within its time to live, and the count with it."""
    workers = [make_worker(timings={"presence": 4}) for _ in range(2)]
    _wait_for(crew, 2)
    host = workers[0].status()["host"]

    workers[0].kill()
    killed = time.monotonic()

    assert 0 < int(crew.client.pttl(presence(host))) <= 4000  # type: ignore[arg-type]
    eventually(lambda: not crew.client.exists(presence(host)), 10)
    assert time.monotonic() - killed < 4 + busy(0.5)
    _wait_for(crew, 1)


def test_presence_lives_fifteen_seconds_by_default(
    crew: Crew, make_worker: Callable[..., WorkerProcess]
) -> None:
    """A killed process is counted for at most so long."""
    worker = make_worker(timings={"presence": 15})

    eventually(lambda: 5_000 < int(crew.client.pttl(presence(worker.status()["host"]))) <= 15_000)  # type: ignore[arg-type]
    key = presence(worker.status()["host"])
    assert crew.client.get(key) == worker.status()["instance_id"].encode()


def test_presence_is_renewed_in_time(crew: Crew) -> None:
    """A living instance never falls out of the count."""
    runner = crew.start(leads=True, timings={"presence": 1.5})

    stays(lambda: crew.is_present(runner), 5)


def test_instances_of_other_groups_do_not_count(crew: Crew, server: EmbeddedServer) -> None:
    """D37: in Go three instances of an unrelated group made four of one."""
    crew.start(leads=True)
    others = [Names() for _ in range(2)]
    with Crew(server.tcp_url, others[0]) as elsewhere:
        elsewhere.start(leads=True)
        # On the same stream, too, another group's readers are not ours.
        crew.add_go_instance(f"{crew.names.host}-go", group="another")
        crew.add_go_instance(f"{crew.names.host}-x", group=f"{crew.names.group}_longer")

        assert _count(crew) == 1


def test_key_named_like_a_presence_key_does_not_count(crew: Crew) -> None:
    """D37: the group "replication:x" has keys that look like presence keys to a search."""
    crew.start(leads=True)
    crew.client.set(presence(f"x-{crew.names.host}:worker_tuning_capacity"), 5, px=60_000)
    crew.client.set(presence(f"nobody-{crew.names.host}"), str(uuid.uuid4()), px=60_000)

    assert _count(crew) == 1


def test_go_instance_counts(crew: Crew) -> None:
    """Its readers are named alike, and its presence key is the same."""
    crew.start(leads=True)
    crew.add_go_instance(f"{crew.names.host}_with_underscores")

    assert _count(crew) == 2


def test_go_instance_with_many_readers_counts_once(crew: Crew) -> None:
    """Go has a reader for each of its fetchers, a hundred by default."""
    host = f"go-{crew.names.host}"
    crew.add_go_instance(host)
    for number in range(2, 30):
        crew.client.xgroup_createconsumer(
            crew.names.stream, crew.names.group, f"{crew.names.group}_{host}_{number}"
        )

    assert _count(crew) == 1


def test_dead_instance_does_not_count(crew: Crew) -> None:
    """Its readers stay in the group until the janitor comes; its key is gone."""
    crew.start(leads=True)
    host = f"go-{crew.names.host}"
    crew.add_go_instance(host)
    crew.client.delete(presence(host))

    assert _count(crew) == 1


def test_host_that_only_parks_does_not_count(crew: Crew) -> None:
    """Consumer 0 holds what waits for a retry; it reads nothing."""
    crew.start(leads=True)
    host = f"parked-{crew.names.host}"
    crew.client.xgroup_createconsumer(
        crew.names.stream, crew.names.group, f"{crew.names.group}_{host}_0"
    )
    crew.client.set(presence(host), str(uuid.uuid4()), px=60_000)

    assert _count(crew) == 1


def test_idle_instance_counts_before_its_first_message(crew: Crew) -> None:
    """Before Redis 7.2 an empty read makes no consumer: it is made at the start."""
    for _ in range(3):
        crew.start()

    _wait_for(crew, 3)


def test_counting_scans_no_keyspace(own_server: Callable[..., OwnServer], names: Names) -> None:
    """D37: KEYS blocked a Redis of a million keys for 110 ms, every ten seconds, per instance."""
    own = own_server()
    with Crew(own.tcp_url, names) as crew, Monitor(own.tcp_url) as monitor:
        crew.task(name="noop")
        runner = crew.start(
            leads=True,
            timings={"presence": 1, "janitor": 0.5, "consumer_idle": 0.2, "poll": 0.3},
            long_queue_threshold=0.5,
            long_queue_hook=lambda stats: None,
            metrics_reset_interval=0.5,
            min_workers=1,
            max_workers=4,
            desired_wait_time=1,
            desired_wait_time_tolerance=0.5,
        )
        runner.dispatch_many("noop", [None] * 20)
        runner.dispatch("noop", run_in=0.5)
        measure(3)
        runner.stats()
        runner.queue.get_metrics()
        runner.stop(3)

        assert not SCANS & {command.name for command in monitor.all()}


def test_first_start_on_a_new_queue_goes_without_errors(crew: Crew) -> None:
    """A stream and a group that nobody made yet are the ordinary beginning, no error."""
    runner = crew.start(leads=True)
    _wait_for(crew, 1)

    stays(lambda: not runner.errors, 2)


def test_instance_is_counted_at_once_on_a_new_queue(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """It makes stream and group itself where its fetcher has not done so yet."""
    own = own_server()
    with Crew(own.tcp_url, names) as crew:
        runner = crew.make()
        deliveries = runner.queue.for_group(names.group)

        deliveries.create_consumers([f"{names.group}_{names.host}_1"])

        assert crew.consumers() == {f"{names.group}_{names.host}_1"}


def test_count_comes_back_after_a_flush(own_server: Callable[..., OwnServer], names: Names) -> None:
    """FLUSHALL takes keys and consumers; the next renewal makes them again."""
    own = own_server()
    with Crew(own.tcp_url, names) as crew:
        runners = [crew.start(timings={"presence": 1.5}) for _ in range(2)]
        _wait_for(crew, 2)

        crew.client.flushall()

        _wait_for(crew, 2)
        assert all(runner.state == "started" for runner in runners)


def test_replications_are_cached_for_ten_seconds(crew: Crew) -> None:
    """An operator's page that asks every second costs nothing."""
    looker = crew.make()
    assert looker.replications() == 1
    for number in range(3):
        crew.add_go_instance(f"go-{number}-{crew.names.host}")

    assert looker.replications() == 1
    assert _count(crew) == 3


def test_presence_value_is_marked_as_ours(crew: Crew) -> None:
    """A UUID, as Go's, of another version."""
    runner: TaskRunner = crew.start(leads=True)

    value: Any = crew.client.get(presence(runner.host))

    assert uuid.UUID(value.decode()).version == 8
