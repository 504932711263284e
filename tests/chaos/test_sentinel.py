"""A primary with two replicas under three sentinels: the name leads to another server, work goes on.

What the old primary had not replicated is gone with it: that is Redis's promise, and ours ends there.
"""

import itertools
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.sentinel import Sentinel

from taskrunner import TaskRunner
from taskrunner.cli.embedded import find_server, free_port
from taskrunner.cli.watcher import Watcher
from tests.support import Names, OwnServer, eventually, faults
from tests.support.fleet import Fleet

pytestmark = pytest.mark.chaos

SERVICE = "jobs"
_REPLICA = ["--repl-diskless-sync-delay", "0", "--repl-diskless-sync", "yes"]


class Deployment:
    """Three servers and three sentinels on loopback."""

    def __init__(self, make: Callable[..., OwnServer], *arguments: str) -> None:
        self.watcher = Watcher()
        first = make(arguments=[*_REPLICA, *arguments])
        follow = ["--replicaof", "127.0.0.1", str(first.port)]
        self.servers = [first]
        self.servers += [make(arguments=[*_REPLICA, *arguments, *follow]) for _ in range(2)]
        self.sentinels: list[int] = []
        try:
            for number in range(3):
                self._start_sentinel(number, first.port)
            self.manager = Sentinel(
                [("127.0.0.1", port) for port in self.sentinels], socket_timeout=1
            )
            eventually(self._is_complete, 20, interval=0.1)
        except BaseException:
            self.close()
            raise

    def client(self) -> redis.Redis:
        """As an application makes it."""
        return self.manager.master_for(SERVICE, socket_timeout=2)

    def primary(self) -> OwnServer:
        """The server that the sentinels name now."""
        _, port = self.manager.discover_master(SERVICE)
        return next(server for server in self.servers if server.port == port)

    def fail_over(self) -> None:
        """Order another primary."""
        with redis.Redis(port=self.sentinels[0]) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE)

    def close(self) -> None:
        self.watcher.close()

    def _start_sentinel(self, number: int, primary: int) -> None:
        port = free_port()
        directory = self.watcher.directory / str(number)
        directory.mkdir()
        config = directory / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} 1000\n"
            f"sentinel failover-timeout {SERVICE} 6000\n"
            f"sentinel parallel-syncs {SERVICE} 2\n"
        )
        log = directory / "sentinel.log"
        process = self.watcher.launch([str(find_server()), str(config), "--sentinel"], log=log)
        eventually(lambda: _answers_or_skips(port, process, log), 10)
        self.sentinels.append(port)

    def _is_complete(self) -> bool:
        """Each sentinel knows the two others and both replicas, and these follow."""
        for port in self.sentinels:
            with redis.Redis(port=port, decode_responses=True) as sentinel:
                state: Any = sentinel.sentinel_master(SERVICE)
                if (state["num-slaves"], state["num-other-sentinels"]) != (2, 2):
                    return False
        return self.followers(self.servers[0]) == 2

    @staticmethod
    def followers(server: OwnServer) -> int:
        """How many replicas are in step with the server."""
        info: Any = server.client().info("replication")
        return sum(info.get(f"slave{number}", {}).get("state") == "online" for number in range(2))


def _answers_or_skips(port: int, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    if process.poll() is not None:
        pytest.skip(
            f"{find_server()} can't be a sentinel: {log.read_text(errors='replace')[-300:]}"
        )
    with redis.Redis(port=port) as sentinel:
        return bool(sentinel.ping())


@pytest.fixture
def make_deployment(
    own_server: Callable[..., OwnServer],
) -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def make(*arguments: str) -> Deployment:
        made.append(Deployment(own_server, *arguments))
        return made[-1]

    yield make
    for deployment in made:
        deployment.close()


class Load:
    """Dispatches without a break; knows of each message whether every replica had it."""

    def __init__(self, fleet: Fleet, producer: TaskRunner, client: redis.Redis) -> None:
        self._fleet = fleet
        self._producer = producer
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._dispatch, name="load")
        self.sent: dict[int, float] = {}  # accepted: when the call began
        self.replicated: set[int] = set()
        self.errors: list[Exception] = []
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _dispatch(self) -> None:
        for number in itertools.count():
            if self._stop.wait(0.003):
                return
            began = time.monotonic()
            try:
                self._producer.dispatch("work", number)
            except (redis.RedisError, OSError) as error:
                self.errors.append(error)
                self._stop.wait(0.05)
                continue
            self.sent[number] = began
            try:
                # What a later write of another client waits for has the message before it.
                with self._client.pipeline(transaction=False) as pipe:
                    pipe.set(f"taskrunner:test:{self._fleet.names.group}", number)
                    pipe.execute_command("WAIT", 2, 20)
                    if pipe.execute()[1] >= 2:
                        self.replicated.add(number)
            except (redis.RedisError, OSError):
                pass


def _threads() -> set[int]:
    return {
        thread.ident or 0
        for thread in threading.enumerate()
        if thread.name.startswith("taskrunner-") and "worker" not in thread.name
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "ordered"])
def test_work_goes_on_in_the_same_threads_when_another_server_becomes_the_primary(
    how: str, make_deployment: Callable[..., Deployment], names: Names
) -> None:
    """No attempt is spent, and only what was not replicated when the primary fell may be missing."""
    deployment = make_deployment()
    client = deployment.client()
    old = deployment.primary()
    with Fleet(old.tcp_url, names) as fleet:
        ran: set[int] = set()
        fleet.task(ran.add, name="work")
        fleet.client = client
        producer = fleet.make(url=client)
        runners = [fleet.start(url=deployment.client()) for _ in range(2)]
        eventually(lambda: any(runner.is_leader for runner in runners), 10)
        load = Load(fleet, producer, client)
        try:
            eventually(lambda: len(load.replicated) > 200, 30)
            threads = _threads()
            fault = time.monotonic()
            if how == "killed":
                old.kill()
            else:
                deployment.fail_over()
            eventually(lambda: deployment.primary() is not old, 30, interval=0.05)
            if how == "ordered":
                eventually(lambda: _is_replica(old), 20, interval=0.05)
            settled = time.monotonic()
            goal = len(load.sent) + 100
            eventually(lambda: len(load.sent) > goal, 40, message=lambda: repr(load.errors[-3:]))
        finally:
            load.stop()
        eventually(fleet.settled, 30)
        missing = load.sent.keys() - ran
        excused = {
            number
            for number, began in load.sent.items()
            if began < settled and (number not in load.replicated or began > fault - 0.2)
        }
        print(
            f"{how}: {settled - fault:.1f} s until the other took over, {len(load.sent)} accepted, "
            f"{len(load.errors)} refused, {len(missing)} of {len(excused)} unsure ones missing"
        )
        assert missing <= excused
        assert threads <= _threads()
        reports = [report for runner in runners for report in runner.errors]
        assert not [one for one in reports if one.action in ("task_failed", "task_retry")]
        assert len(producer.dead_letters) == 0
        eventually(lambda: sum(runner.is_leader for runner in runners) == 1, 10)
        # Delayed tasks and the other server's replicas work as before.
        producer.dispatch("work", -1, run_in=0.5)
        eventually(lambda: -1 in ran, 15)
        if how == "killed":
            old.start()
            eventually(lambda: _is_replica(old), 30, interval=0.1)
            assert deployment.primary() is not old


def _is_replica(server: OwnServer) -> bool:
    info: Any = server.client().info("replication")
    return bool(info["role"] == "slave")


@pytest.mark.parametrize("stale", ["yes", "no"], ids=["READONLY", "MASTERDOWN"])
def test_no_attempt_is_spent_when_the_primary_becomes_a_replica_and_back(
    stale: str, own_server: Callable[..., OwnServer], names: Names
) -> None:
    """A settlement that is refused so waits, as in every outage, and `.delay()` raises."""
    server = own_server(arguments=["--replica-serve-stale-data", stale])
    nobody = str(free_port())
    let_go = threading.Event()
    with Fleet(server.tcp_url, names) as fleet:

        def body(payload: Any) -> None:
            fleet.record(payload)
            let_go.wait(20)
            if payload == "fails":
                raise ValueError("its own fault")

        fleet.task(body, name="held", max_retry=2, retry_delay=0.1)
        runner = fleet.start()
        for payload in ("returns", "fails"):
            fleet.producer.dispatch("held", payload)
        fleet.wait_ran("returns", "fails")
        admin = server.client()
        admin.execute_command("REPLICAOF", "127.0.0.1", nobody)
        with pytest.raises(redis.RedisError) as refused:
            fleet.producer.dispatch("note", "refused")
        assert "read only replica" in str(refused.value)
        let_go.set()
        faults.down_for(3)  # longer than reclaim_delay
        admin.execute_command("REPLICAOF", "NO", "ONE")
        eventually(lambda: fleet.payloads().count("fails") == 2, 15)
        eventually(fleet.settled, 15)
        fleet.producer.dispatch("note", "fresh")
        fleet.wait_ran("fresh")
        assert fleet.payloads().count("returns") == 1
        assert fleet.payloads().count("fails") == 2
        assert [run.attempt for run in fleet.runs if run.payload == "fails"] == [1, 2]
        failed = [report for report in runner.errors if report.action == "task_failed"]
        assert len(failed) == 1


def test_dispatch_is_refused_when_too_few_replicas_would_have_it(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """What `min-replicas-to-write` buys: a primary that nobody follows accepts nothing, so a
    failover loses at most what came within `min-replicas-max-lag`."""
    primary = own_server(
        arguments=[*_REPLICA, "--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"]
    )
    replica = own_server(arguments=["--replicaof", "127.0.0.1", str(primary.port)])
    with Fleet(primary.tcp_url, names) as fleet:
        eventually(lambda: fleet.client.info("replication").get("min_slaves_good_slaves") == 1, 20)
        runner = fleet.start()
        fleet.producer.dispatch("note", "before")
        fleet.wait_ran("before")
        with faults.frozen(replica):
            eventually(lambda: fleet.client.info("replication")["min_slaves_good_slaves"] == 0, 15)
            with pytest.raises(redis.RedisError, match="NOREPLICAS"):
                fleet.producer.dispatch("note", "refused")
        eventually(lambda: fleet.client.info("replication")["min_slaves_good_slaves"] == 1, 30)
        fleet.producer.dispatch("note", "after")
        fleet.wait_ran("after")
        eventually(fleet.settled, 10)
        assert fleet.payloads() == ["before", "after"]
        assert not [report for report in runner.errors if report.action == "task_failed"]
