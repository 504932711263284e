"""BL-25: a managed, restricted or clustered Redis: everything works with the rights that the docs
name, and what is optional is done without, said once."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from taskrunner import (
    ConfigurationError,
    RedisStreamQueue,
    Retry,
    TaskAlreadyDispatchedError,
    TaskRunner,
    current_task,
)
from tests.support import Desk, Names, OwnServer, WorkerProcess, eventually, faults, stays
from tests.support.binaries import servers_at_hand
from tests.support.fleet import Fleet

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
USER, PASSWORD = "worker", "geheim"
OPTIONAL = ("resetchannels", "-publish", "-subscribe", "-client", "-cluster", "-script")
"""Taken away: channels, CLIENT (also the name that redis-py gives itself), CLUSTER, SCRIPT."""


def documented_rules(prefix: str, version: str) -> list[str]:
    """The rules of the ACL line as the docs print it, with this prefix."""
    block = re.search(r"```acl\nuser taskrunner on >PASSWORD (.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None, "the docs have no ACL line"
    rules = block[1].replace("<prefix>", prefix).split()
    if re.match(r"redis-7\.0\.", version):
        rules.remove("+client|setinfo")  # as the docs say: 7.0 does not know it
    return rules


class Place:
    """A server with a user of few rights."""

    def __init__(self, server: OwnServer, names: Names, version: str) -> None:
        self.server = server
        self.names = names
        self.version = version
        self.admin = server.client()

    def restrict(self, *rules: str) -> None:
        """Make the user with the documented rules, and these after them."""
        self.admin.execute_command(
            *("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}"),
            *documented_rules(self.names.prefix, self.version),
            *rules,
        )
        self.admin.execute_command("ACL", "LOG", "RESET")

    def client(self) -> redis.Redis:
        return self.server.client(username=USER, password=PASSWORD)

    def refused(self) -> list[str]:
        """What the server noted as refused."""
        rows: Any = self.admin.execute_command("ACL", "LOG")
        return [str(row) for row in rows]


@pytest.fixture(params=servers_at_hand().items(), ids=lambda item: item[0])
def place(
    request: pytest.FixtureRequest, own_server: Callable[..., OwnServer], names: Names
) -> Place:
    version, command = request.param
    return Place(own_server(command=command), names, version)


@pytest.fixture
def fleet(place: Place) -> Iterator[Fleet]:
    with Fleet(place.server.url, place.names, reclaim_delay=1) as made:
        yield made


def whole_life(place: Place, fleet: Fleet) -> list[TaskRunner]:
    """Whatever the library can ask of Redis, once: as producer, worker, leader and operator."""
    group = place.names.group

    def retry(payload: Any) -> None:
        fleet.record(payload)
        if current_task().attempt == 1:
            raise Retry(payload)

    def fail(payload: Any) -> None:
        fleet.record(payload)
        raise ValueError("no")

    def long(payload: Any) -> None:
        fleet.record(payload)
        threading.Event().wait(1.5)

    retried = fleet.task(retry, name="retried", max_retry=2)
    failing = fleet.task(fail, name="failing")
    slow = fleet.task(long, name="slow")
    unique = fleet.task(name=f"one-{group}", unique_for=60, unique_key=str)
    known: dict[str, Any] = {
        "timings": {"presence": 1.5, "poll": 0.5, "janitor": 0.5, "consumer_idle": 0.5},
        "min_workers": 1,
        "max_workers": 4,
        "desired_wait_time": 1,
        "desired_wait_time_tolerance": 0.5,
        "long_queue_threshold": 0.6,
        "metrics_reset_interval": 1,
    }
    leader = fleet.start_leader(url=place.client(), **known)
    leader.make_default()
    follower = fleet.start(url=place.client(), **known)
    fleet.note.delay("direct")
    fleet.note.delay_many(["many-1", "many-2"])
    fleet.note.delay("later", run_in=0.5)
    unique.delay("unique")
    unique.delay("unique later", run_in=0.8)
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay("unique later")
    retried.delay(0.2)  # parked
    retried.delay(1.3)  # through the delayed set
    failing.delay("fails")
    slow.delay("slow")
    desk = Desk(place.server.url, place.names)
    desk.strand("note", ["orphan"], idle=5)
    far = fleet.note.delay("far", run_in=1000)
    assert leader.delayed.get(far.id) is not None
    assert len(leader.delayed.list()) >= 1
    assert leader.delayed.cancel(far.id)
    fleet.wait_ran(
        *("direct", "many-1", "many-2", "later", "unique", "unique later", 0.2, 1.3),
        *("fails", "slow", "orphan"),
    )
    eventually(lambda: [run.payload for run in list(fleet.runs)].count(1.3) == 2)
    eventually(lambda: len(leader.dead_letters) == 1)
    eventually(desk.is_empty)
    (letter,) = leader.dead_letters.list()
    leader.dead_letters.requeue(letter.id)
    eventually(lambda: len(leader.dead_letters) == 1)
    assert leader.dead_letters.requeue_all() == (1, 0)
    eventually(lambda: len(leader.dead_letters) == 1)
    assert leader.dead_letters.delete(leader.dead_letters.list()[0].id)
    assert leader.dead_letters.purge() == 0
    assert leader.stats() is not None
    assert leader.queue.get_metrics().groups
    assert unique.unlock("nobody's") is False
    place.admin.xgroup_createconsumer(place.names.stream, group, f"{group}_dead_1")

    def dead_is_removed() -> bool:
        rows: Any = place.admin.xinfo_consumers(place.names.stream, group)
        return not [row for row in rows if row["name"].endswith(b"_dead_1")]

    eventually(dead_is_removed, 15)
    # A second group on the stream, and history that the leader trims.
    place.admin.xgroup_create(place.names.stream, "another", "$")
    fleet.note.delay("for two")
    fleet.wait_ran("for two")
    place.admin.xgroup_destroy(place.names.stream, "another")
    eventually(lambda: place.admin.xlen(place.names.stream) == 0, 15)
    # The group is lost, and made again.
    place.admin.xgroup_destroy(place.names.stream, group)
    fleet.note.delay("after the group was lost")
    fleet.wait_ran("after the group was lost")
    # Scripts are forgotten.
    place.admin.script_flush()
    unique.delay("unique again")
    fleet.wait_ran("unique again")
    eventually(desk.is_empty)
    assert leader.stop()
    eventually(lambda: follower.is_leader, 15)
    fleet.note.delay("for the follower", run_in=0.1)
    fleet.wait_ran("for the follower")
    eventually(desk.is_empty)
    assert follower.stop()
    sent = fleet.note.delay("deleted by hand")
    assert sent.entry_id is not None
    assert leader.queue.delete(sent.entry_id)
    fleet.note.delay("purged")
    assert leader.queue.purge() == 1
    desk.close()
    return [leader, follower]


def test_bl25_everything_works_with_the_documented_rights_and_nothing_is_refused(
    place: Place, fleet: Fleet
) -> None:
    """The line in the docs is enough, to the last call, on each server at hand."""
    place.restrict()
    runners = whole_life(place, fleet)
    assert place.refused() == []
    for runner in runners:
        wrong = [r for r in runner.errors if r.action not in ("task_failed", "task_retry")]
        assert [r for r in wrong if "NOGROUP" not in str(r.error)] == []


def test_bl25_no_right_of_the_documented_line_is_superfluous(place: Place, fleet: Fleet) -> None:
    """Each command of the line was called, but for two: PING is asked only when a large settlement
    is refused again and again, SELECT for a database that is not 0."""
    place.restrict()
    place.admin.config_resetstat()
    whole_life(place, fleet)
    stats: Any = place.admin.info("commandstats")
    called = {name.removeprefix("cmdstat_") for name in stats}
    called |= {name.partition("|")[0] for name in called}
    rules = documented_rules(place.names.prefix, place.version)
    wanted = {rule[1:] for rule in rules if rule[0] == "+"}
    if place.version.startswith("redis-6."):
        wanted = {name.partition("|")[0] for name in wanted}
    assert wanted - called <= {"ping", "select"}, wanted - called


def test_bl25_optional_rights_are_done_without_and_said_once(
    place: Place, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Without channels, CLIENT, CLUSTER and SCRIPT: the same results, one line of log each runner,
    no error."""
    place.restrict(*OPTIONAL)
    with caplog.at_level(logging.WARNING, "taskrunner"):
        runners = whole_life(place, fleet)
    said = [r.getMessage() for r in caplog.records if "not allowed" in r.getMessage()]
    assert len(said) == len(runners), said
    assert all("polling instead" in line for line in said)
    for runner in runners:
        wrong = [r for r in runner.errors if r.action not in ("task_failed", "task_retry")]
        assert [r for r in wrong if "NOGROUP" not in str(r.error)] == []


def test_bl25_stop_is_at_once_without_optional_rights(place: Place, fleet: Fleet) -> None:
    """CLIENT is refused: the blocked read needs none of it to end."""
    place.restrict(*OPTIONAL)
    runner = fleet.start_leader(url=place.client(), block_duration=5)
    eventually(lambda: runner.replications() == 1)
    stopper = threading.Thread(target=runner.stop)
    stopper.start()
    stopper.join(2)
    assert not stopper.is_alive()
    assert fleet.settled()


def test_bl25_keys_of_others_are_out_of_reach(place: Place) -> None:
    """The line gives away nothing else: no foreign key, no KEYS, CONFIG, FLUSHALL, SCAN."""
    place.restrict()
    client = place.client()
    assert client.set(f"{place.names.prefix}:probe", 1)
    commands: list[tuple[str, ...]] = [
        *(("SET", "foreign", "1"), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("FLUSHALL",)),
        *(("SCAN", "0"), ("INFO",), ("PUBLISH", "foreign", "x")),
        *(("CLIENT", "KILL", "TYPE", "normal"), ("ACL", "LIST")),
    ]
    for command in commands:
        with pytest.raises(redis.ResponseError, match=r"(?i)permission"):
            client.execute_command(*command)


def test_bl25_missing_right_is_an_outage_and_work_goes_on_when_it_is_given(
    place: Place, fleet: Fleet
) -> None:
    """XREADGROUP is forbidden for a while: said once, no attempt spent, nothing lost."""
    place.restrict("-xreadgroup")
    runner = fleet.start(url=place.client())
    eventually(lambda: [r for r in runner.errors if "ermission" in str(r.error)])
    runner.make_default()
    fleet.note.delay("waits")
    stays(lambda: not fleet.runs, 0.5)
    place.admin.execute_command("ACL", "SETUSER", USER, "+xreadgroup")
    (run,) = fleet.wait_ran("waits")
    assert run.attempt == 1
    assert len([r for r in runner.errors if "ermission" in str(r.error)]) == 1


# --- a cluster ---


@pytest.fixture
def cluster(own_server: Callable[..., OwnServer]) -> OwnServer:
    return faults.cluster_server(own_server)


@pytest.mark.chaos
def test_bl25_worker_on_a_cluster_ends_with_an_error_that_says_what_is_supported(
    cluster: OwnServer, make_worker: Callable[..., WorkerProcess]
) -> None:
    """With the ordinary client; it doesn't run on half broken."""
    worker = make_worker(url=cluster.tcp_url, wait=False)
    assert worker.wait(20) == 1
    lines = worker.log_lines("is a Redis Cluster, which is not supported")
    assert lines, worker.log()
    assert any("single primary" in line and "Sentinel" in line for line in lines)


def test_bl25_runner_on_a_cluster_gives_up(cluster: OwnServer, names: Names) -> None:
    """In a process of the application: it stops by itself and reports why."""
    with Fleet(cluster.tcp_url, names) as fleet:
        runner = fleet.start()
        eventually(lambda: str(runner.state) == "stopped", 15)
        assert any("Redis Cluster" in str(report.error) for report in runner.errors)


def test_bl25_cluster_client_is_refused_when_the_queue_is_made() -> None:
    """Before anything is sent: the class is named, and what to use instead."""
    client = redis.RedisCluster.__new__(redis.RedisCluster)
    with pytest.raises(ConfigurationError, match=r"RedisCluster is not a redis\.Redis.*Cluster"):
        RedisStreamQueue(client)  # type: ignore[arg-type]
