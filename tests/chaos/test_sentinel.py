"""A primary with two replicas under three sentinels: the name leads to another server, work goes on.

What the old primary had not replicated is gone with it: that is Redis's promise, and ours ends there.
"""

import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.sentinel import Sentinel

from taskrunner.cli.embedded import find_server, free_port
from taskrunner.cli.watcher import Watcher
from tests.support import (
    Ledger,
    Names,
    OwnServer,
    Proxy,
    WorkerProcess,
    eventually,
    faults,
    service_threads,
)
from tests.support.connect import connect
from tests.support.fleet import Fleet
from tests.support.worker import ROOT

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

    @property
    def url(self) -> str:
        """For processes: `tests.support.connect` makes of it what an application makes."""
        sentinels = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"sentinel://{sentinels}/{SERVICE}"

    def client(self) -> redis.Redis:
        """As an application makes it."""
        return connect(self.url)

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
    """A producer's process that dispatches without a break; what it tells of each message."""

    def __init__(self, url: str, names: Names, directory: Path) -> None:
        self._out = directory / "load.jsonl"
        self._out.touch()
        self._log = directory / "load.log"
        program = [sys.executable, "-m", "tests.support.load_main"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*program, url, names.group, names.prefix, str(self._out)],
                stdin=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
            )

    def read(self) -> None:
        """Look at what it has written so far."""
        told = [
            json.loads(line)
            for line in self._out.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n")
        ]
        self.sent: dict[int, float] = {line[1]: line[2] for line in told if line[0] == "sent"}
        self.replicated = {line[1] for line in told if line[0] == "replicated"}
        self.refused: list[str] = [line[3] for line in told if line[0] == "refused"]

    def wait(self, condition: Callable[[], bool], timeout: float) -> None:
        """Until it has written enough."""

        def enough() -> bool:
            self.read()
            return condition()

        eventually(
            enough,
            timeout,
            interval=0.1,
            message=lambda: f"{self.refused[-3:]} {self._log.read_text()}",
        )

    def stop(self) -> int:
        """End it in order; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(20)
        self.read()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def make_load(names: Names, tmp_path: Path) -> Iterator[Callable[[str], Load]]:
    made: list[Load] = []

    def make(url: str) -> Load:
        made.append(Load(url, names, tmp_path))
        return made[-1]

    yield make
    for load in made:
        load.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "ordered"])
def test_the_same_processes_go_on_when_another_server_becomes_the_primary(
    how: str,
    make_deployment: Callable[..., Deployment],
    make_worker: Callable[..., WorkerProcess],
    make_load: Callable[[str], Load],
    names: Names,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    """Workers and producer are processes whose client is made by `redis.sentinel.Sentinel`. No
    attempt is spent, and only what was not replicated when the primary fell may be missing."""
    deployment = make_deployment()
    old = deployment.primary()
    workers = [make_worker(url=deployment.url) for _ in range(2)]
    eventually(lambda: sum(worker.status()["is_leader"] for worker in workers) == 1, 10)
    pids = [worker.pid for worker in workers]
    threads = [service_threads(worker) for worker in workers]
    with Fleet(old.tcp_url, names) as fleet:
        fleet.client = deployment.client()
        producer = fleet.make(url=fleet.client)
        fleet.task(name="wait-for-file")
        held, let_go = str(uuid.uuid4()), tmp_path / "let-go"
        producer.dispatch("wait-for-file", {"id": held, "path": str(let_go)})
        ledger.wait_started(held)
        load = make_load(deployment.url)
        load.wait(lambda: len(load.replicated) > 200, 40)
        fault = time.monotonic()
        if how == "killed":
            old.kill()
        else:
            deployment.fail_over()
        eventually(lambda: deployment.primary() is not old, 30, interval=0.05)
        let_go.touch()  # begun under the old primary, settled with the new one
        if how == "ordered":
            eventually(lambda: _is_replica(old), 20, interval=0.05)
        settled = time.monotonic()
        goal = len(load.sent) + 100
        load.wait(lambda: len(load.sent) > goal, 40)
        assert load.stop() == 0
        eventually(fleet.settled, 30)
        ran = {run.id for run in ledger.runs() if run.outcome == "returned"}
        missing = load.sent.keys() - ran
        excused = {
            number
            for number, began in load.sent.items()
            if began < settled and (number not in load.replicated or began > fault - 0.2)
        }
        print(
            f"{how}: {settled - fault:.1f} s until the other took over, {len(load.sent)} accepted, "
            f"{len(load.refused)} refused, {len(missing)} of {len(excused)} unsure ones missing"
        )
        assert missing <= excused
        assert held in ran
        assert [worker.pid for worker in workers] == pids
        for worker, before in zip(workers, threads, strict=True):
            status = worker.status()
            assert before <= service_threads(worker)
            assert not [
                report
                for report in status["errors"]
                if report["action"] in ("task_failed", "task_retry")
            ]
        assert len(producer.dead_letters) == 0
        eventually(lambda: sum(worker.status()["is_leader"] for worker in workers) == 1, 10)
        # Delayed tasks and the other server's replicas work as before.
        producer.dispatch("note", "late", run_in=0.5)
        ledger.wait_finished(["late"], 15)
        assert [worker.stop() for worker in workers] == [0, 0]
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


def test_connections_to_a_former_primary_are_given_up_when_its_name_leads_to_another(
    own_server: Callable[..., OwnServer], make_proxy: Callable[[str], Proxy], names: Names
) -> None:
    """Managed services move a name, and the old server, a replica now, keeps its connections: only
    its READONLY tells. Each is met once, and then the name is asked anew."""
    old, new = own_server(arguments=_REPLICA), own_server(arguments=_REPLICA)
    follower = new.client()
    follower.execute_command("REPLICAOF", "127.0.0.1", old.port)
    eventually(lambda: Deployment.followers(old) == 1, 20)
    proxy = make_proxy(old.tcp_url)
    let_go = threading.Event()
    with Fleet(proxy.url, names) as fleet:

        def body(payload: Any) -> None:
            fleet.record(payload)
            let_go.wait(20)

        fleet.task(body, name="held")
        runner = fleet.start()
        fleet.producer.dispatch("held", "begun")
        fleet.wait_ran("begun")
        eventually(lambda: follower.xlen(names.stream) == 1, 10)
        follower.execute_command("REPLICAOF", "NO", "ONE")
        proxy.lead_to(new.tcp_url)
        old.client().execute_command("REPLICAOF", "127.0.0.1", new.port)
        with pytest.raises(redis.RedisError, match="read only replica"):
            fleet.producer.dispatch("note", "refused")
        fleet.producer.dispatch("note", "sent")
        let_go.set()
        fleet.wait_ran("sent")
        fleet.client = follower
        eventually(fleet.settled, 15)
        assert fleet.payloads() == ["begun", "sent"]
        assert not [one for one in runner.errors if one.action in ("task_failed", "task_retry")]


def test_nothing_is_lost_and_dispatch_raises_when_too_few_replicas_would_have_it(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """What `min-replicas-to-write` buys: a primary that nobody follows accepts nothing, so a
    failover loses at most what came within `min-replicas-max-lag`. For workers it is an outage:
    what ends meanwhile is settled afterwards, and no attempt is spent."""
    primary = own_server(
        arguments=[*_REPLICA, "--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"]
    )
    replica = own_server(arguments=["--replicaof", "127.0.0.1", str(primary.port)])
    let_go = threading.Event()
    with Fleet(primary.tcp_url, names) as fleet:

        def body(payload: Any) -> None:
            fleet.record(payload)
            let_go.wait(30)
            if payload == "fails":
                raise ValueError("its own fault")

        fleet.task(body, name="held", max_retry=2, retry_delay=0.1)
        fleet.task(name="unique", unique_for=60)

        def followers() -> int:
            return int(fleet.client.info("replication").get("min_slaves_good_slaves", 0))

        eventually(lambda: followers() == 1, 20)
        runner = fleet.start()
        fleet.producer.dispatch("note", "before")
        fleet.producer.dispatch_many("held", ["returns", "fails"])
        fleet.wait_ran("before", "returns", "fails")
        with faults.frozen(replica):
            eventually(lambda: followers() == 0, 15)
            for name in ("note", "unique"):
                for options in ({}, {"run_in": 1}):
                    with pytest.raises(redis.RedisError, match="NOREPLICAS"):
                        fleet.producer.dispatch(name, "refused", **options)
            let_go.set()
            faults.down_for(3)  # longer than reclaim_delay
            assert fleet.payloads().count("returns") == 1
            assert fleet.client.xlen(names.stream) == 2  # nobody could settle them
        eventually(lambda: followers() == 1, 30)
        eventually(lambda: fleet.payloads().count("fails") == 2, 20)
        fleet.producer.dispatch("note", "after")
        fleet.producer.dispatch("unique", "after")  # a refused call has left no lock
        fleet.wait_ran("after")
        eventually(fleet.settled, 15)
        assert fleet.payloads().count("returns") == 1
        assert "refused" not in fleet.payloads()
        assert [run.attempt for run in fleet.runs if run.payload == "fails"] == [1, 2]
        failed = [report for report in runner.errors if report.action == "task_failed"]
        assert len(failed) == 1  # "fails", by itself
