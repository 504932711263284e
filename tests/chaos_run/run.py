"""Starts the installation, lets the schedule break it, heals it, drains it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Self

import attrs
import redis

from tests.chaos_run.schedule import Fault
from tests.support import Desk, Ledger, Names, OwnServer, WorkerProcess
from tests.support.waiting import eventually
from tests.support.worker import ROOT

RECLAIM = 3.0
SHUTDOWN = 3.0
_TASKS = Path(__file__).with_name("tasks.py")
_SKEW = Path(__file__).with_name("skew")
_CRASHED = (77, -signal.SIGKILL)  # what the task "crash" does to its process


class Relay:
    """The proxy's process."""

    def __init__(self, url: str) -> None:
        self._process = _python("tests.chaos_run.relay", url, output=subprocess.PIPE)
        self.url = self._read()

    def tell(self, order: str) -> None:
        """Give an order and wait until it is carried out."""
        assert self._process.stdin is not None
        self._process.stdin.write(order.encode() + b"\n")
        self._process.stdin.flush()
        assert self._read() == "done"

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return str(self._process.stdout.readline().decode().strip())


@attrs.define
class Instance:
    """A worker's place: who is in it now, and what the schedule did to it."""

    number: int
    worker: WorkerProcess
    threads: frozenset[str] = frozenset()
    pid: int = 0
    ended_by_us: str = ""  # "kill" or "terminate"
    ended_at: float = 0.0
    starved: float = 0.0  # seconds without a processor before it was ended
    deaf: bool = False  # SIGTERM came before it had asked for it
    frozen_until: float = 0.0


@attrs.define
class Seen:
    """What the checks need of the past; times are of the monotonic clock."""

    terminated: set[int] = attrs.field(factory=set)
    died: set[int] = attrs.field(factory=set)
    frozen: dict[int, list[tuple[float, float]]] = attrs.field(factory=dict)
    cut_off: list[tuple[float, float]] = attrs.field(factory=list)
    exits: list[str] = attrs.field(factory=list)  # those that should not be
    done: Counter[str] = attrs.field(factory=Counter)
    sizes: list[tuple[float, int]] = attrs.field(factory=list)


class Chaos:
    """One run in `directory`; `instances` workers, of which the odd ones talk through the relay."""

    def __init__(self, directory: Path, *, seed: int, instances: int, rate: float) -> None:
        self.directory = directory
        self.names = Names(prefix="chaos", group="chaos", host="chaos")
        self.seen = Seen()
        self.ledger = Ledger(directory / "ledger.jsonl")
        self.leaders = directory / "leaders.jsonl"
        self.leaders.touch()
        self._seed = seed
        self._rate = rate
        # Its file is rewritten before long: a restart reads it while nobody can work.
        self.server = OwnServer(
            tcp=True,
            appendonly=True,
            ready_timeout=60,
            arguments=["--auto-aof-rewrite-min-size", "4mb"],
        )
        self.server.start()
        self.relay = Relay(self.server.tcp_url)
        self.desk = Desk(self.server.url, self.names, reclaim_delay=RECLAIM)
        self._admin = redis.Redis.from_url(self.server.url, socket_timeout=5)
        self._undo: list[tuple[float, str, int]] = []
        self.instances = [self._instance(number) for number in range(instances)]
        self.producers: list[subprocess.Popen[bytes]] = []
        self.producer_files = [directory / f"producer-{number}.jsonl" for number in range(3)]

    def _instance(self, number: int) -> Instance:
        chance = random.Random(f"instance-{self._seed}-{number}")
        skew = 0.0 if number == 0 else chance.choice([-86_400.0, -90.0, -2.0, 2.0, 45.0, 3600.0])
        env = {
            "CHAOS_LEADERS": str(self.leaders),
            "CHAOS_SKEW": str(skew),
            "PYTHONPATH": os.pathsep.join([str(_SKEW), str(ROOT)]),
            "PYTHONHASHSEED": str(number),
        }
        if number == 0:
            env["CHAOS_STEADY"] = "1"
        worker = WorkerProcess(
            directory=self.directory / f"instance-{number}",
            url=self.relay.url if number % 2 else self.server.tcp_url,
            group=self.names.group,
            prefix=self.names.prefix,
            ledger=self.ledger,
            tasks_file=_TASKS,
            config={
                "host": f"{self.names.host}-{number}",
                "num_workers": 4,
                "batch_size": 20,
                "shutdown_timeout": SHUTDOWN,
            },
            queue={"reclaim_delay": RECLAIM},
            client={"socket_timeout": chance.choice([1, 2, 10])},
            env=env,
        )
        return Instance(number, worker)

    def start(self) -> None:
        """Start instances and producers; the wall clocks of some are wrong."""
        for instance in self.instances:
            instance.worker.start(wait=False)
            instance.pid = instance.worker.pid
        for instance in self.instances:
            eventually(lambda: instance.worker.status()["state"] == "started", 30)  # noqa: B023
        eventually(lambda: self.threads_of(self.instances[0]), 10)
        time.sleep(1)
        for instance in self.instances:
            instance.threads = frozenset(self.threads_of(instance))
        for number, out in enumerate(self.producer_files):
            out.touch()
            spec = self.directory / f"producer-{number}.json"
            settings = {
                "group": self.names.group,
                "prefix": self.names.prefix,
                "url": self.relay.url if number else self.server.tcp_url,
                "reclaim": RECLAIM,
                "seed": self._seed,
                "number": number,
                "rate": self._rate / len(self.producer_files),
                "out": str(out),
            }
            spec.write_text(json.dumps(settings))
            env = {"CHAOS_SKEW": str([0, 7200, -7200][number])}
            env["PYTHONPATH"] = os.pathsep.join([str(_SKEW), str(ROOT)])
            log = self.directory / f"producer-{number}.log"
            self.producers.append(_python("tests.chaos_run.producer", str(spec), env=env, log=log))

    @staticmethod
    def threads_of(instance: Instance) -> set[str]:
        """Names of its threads that belong to the library."""
        names = instance.worker.status()["threads"]
        return {name for name in names if name.startswith("taskrunner-")}

    def play(self, faults: list[Fault], seconds: float) -> None:
        """Let the faults happen at their times."""
        started = time.monotonic()
        waiting = list(faults)
        sampled = 0.0
        while (now := time.monotonic()) < started + seconds:
            while waiting and started + waiting[0].at <= now:
                self._strike(waiting.pop(0))
            self._heal_what_is_due()
            self._look_after_server()
            self._look_after_instances()
            if now > sampled + 1 and self.instances[0].worker.running:
                sampled = now
                self.seen.sizes.append((now - started, self.instances[0].worker.rss_bytes()))
            time.sleep(0.02)

    def drain(self, timeout: float) -> str:
        """Heal everything, end the producers, and wait until nothing is left; what is, in words."""
        for producer in self.producers:
            assert producer.stdin is not None
            producer.stdin.close()
        for _, kind, target in self._undo:
            self._heal(kind, target)
        self._undo.clear()
        self.relay.tell("clear")
        self.relay.tell("heal")
        self.server.start()
        for producer in self.producers:
            try:
                code = producer.wait(60)
            except subprocess.TimeoutExpired:
                producer.kill()
                code = producer.wait()
            if code:
                self.seen.exits.append(f"a producer ended with {code}")
        deadline = time.monotonic() + timeout
        left = ""
        while time.monotonic() < deadline:
            self._look_after_instances()
            with suppress(redis.RedisError, OSError):
                left = "" if self.desk.is_empty() else self._left()
                if not left and self.desk.is_empty():
                    break
            time.sleep(0.1)
        for instance in self.instances:
            eventually(lambda: self._is_up(instance), 30)  # noqa: B023
        return left

    def close(self) -> None:
        """End whatever still runs."""
        for producer in self.producers:
            producer.kill()
            producer.wait()
        for instance in self.instances:
            instance.worker.close()
        self.relay.close()
        self.desk.close()
        self._admin.close()
        self.server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _left(self) -> str:
        return (
            f"{self.desk.length()} entries, {len(self.desk.runner.delayed)} delayed, "
            f"pending: {self.desk.held()[:5]}"
        )

    def _is_up(self, instance: Instance) -> bool:
        self._look_after_instances()
        return bool(instance.worker.status()["state"] == "started")

    # --- faults ---

    def _strike(self, fault: Fault) -> None:
        kind, now = fault.kind, time.monotonic()
        self.seen.done[kind] += 1
        undo = True
        if kind in ("kill", "terminate", "freeze"):
            undo = self._strike_instance(kind, self.instances[fault.target], now + fault.seconds)
        elif kind == "server-kill":
            self.server.kill()
        elif kind.startswith("proxy-"):
            order = {
                "proxy-cut": "cut",
                "proxy-refuse": "refuse",
                "proxy-swallow": f"swallow {fault.detail}",
                "proxy-delay": f"delay {fault.detail} 0.2",
                "proxy-cut-command": f"on {fault.detail}",
            }[kind]
            self.relay.tell(order)
            undo = fault.seconds > 0
        else:
            undo = False
            with suppress(redis.RedisError, OSError):
                if kind == "client-kill":
                    self._admin.execute_command("CLIENT", "KILL", "TYPE", "normal")
                elif kind.startswith("pause"):
                    mode = kind.removeprefix("pause-").upper()
                    self._admin.execute_command(
                        "CLIENT", "PAUSE", round(fault.seconds * 1000), mode
                    )
                else:
                    self._admin.script_flush()
        if kind not in ("kill", "terminate", "freeze", "script-flush"):
            self.seen.cut_off.append((now, now + fault.seconds))
        if undo:
            self._undo.append((now + fault.seconds, kind, fault.target))

    def _strike_instance(self, kind: str, instance: Instance, until: float) -> bool:
        """Whether there is something to undo."""
        worker, now = instance.worker, time.monotonic()
        if not worker.running or instance.ended_by_us or instance.frozen_until > now:
            self.seen.done[kind] -= 1
            return False
        if kind == "freeze":
            instance.frozen_until = until
            self.seen.frozen.setdefault(worker.pid, []).append((now, until))
            worker.pause()
            return True
        instance.ended_by_us, instance.ended_at = kind, now
        if kind == "kill":
            worker.kill()
        else:
            self.seen.terminated.add(worker.pid)
            instance.starved = _starved(worker.pid)
            instance.deaf = not _catches_sigterm(worker.pid)
            worker.terminate()
        return False

    def _heal_what_is_due(self) -> None:
        now = time.monotonic()
        due = [undo for undo in self._undo if undo[0] <= now]
        self._undo = [undo for undo in self._undo if undo[0] > now]
        for _, kind, target in due:
            self._heal(kind, target)

    def _heal(self, kind: str, target: int) -> None:
        if kind == "freeze":
            self.instances[target].worker.resume()
            self.instances[target].frozen_until = 0.0
        elif kind == "server-kill":
            self.server.start()
        else:
            self.relay.tell("heal")

    def _look_after_server(self) -> None:
        """It ends when it is killed, and never because of what we send."""
        if self.server.running or any(kind == "server-kill" for _, kind, _ in self._undo):
            return
        self.seen.exits.append(f"the server ended by itself: {self.server.log()[-8000:]}")
        self.server.start()

    def _look_after_instances(self) -> None:
        """Start again what has ended, and see whether it should have."""
        now = time.monotonic()
        for instance in self.instances:
            worker = instance.worker
            if not worker.running:
                code = worker.returncode
                self.seen.died.add(worker.pid)
                allowed = {*_CRASHED, 0} if instance.ended_by_us == "terminate" else set(_CRASHED)
                if instance.deaf:
                    allowed.add(-signal.SIGTERM)
                if instance.number == 0:
                    allowed = set()
                if code not in allowed:
                    self.seen.exits.append(f"instance {instance.number} ended with {code}")
                worker.close()
                worker.start(wait=False)
                instance.ended_by_us, instance.pid = "", worker.pid
                instance.deaf = False
            elif instance.ended_by_us == "terminate" and now - instance.ended_at > SHUTDOWN + 5:
                if now - instance.ended_at < SHUTDOWN + 5 + _starved(worker.pid) - instance.starved:
                    continue  # it waits for the machine, not for us
                self.seen.exits.append(f"instance {instance.number} did not end after SIGTERM")
                worker.kill()


def _starved(pid: int) -> float:
    """Seconds that one of its threads, the worst off, was ready to run and had no processor."""
    waited = [0.0]
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            waited.append(int(path.read_text().split()[1]) / 1e9)
    return max(waited)


def _catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught & 1 << (signal.SIGTERM - 1))


def _python(
    module: str,
    argument: str,
    *,
    env: dict[str, str] | None = None,
    output: int = subprocess.DEVNULL,
    log: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Run a module with a pipe for its input; it ends when the pipe does."""
    with (log or Path(os.devnull)).open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors if log else None,
            env={**os.environ, **(env or {})},
            cwd=ROOT,
        )
