"""Parent side: how the cost of TaskRunner grows with what waits, with what is in flight, and with
the number of processes.

Backlogs are made by the server itself, from a script, so that a million entries take seconds.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

from benchmarks.child import PAYLOAD
from benchmarks.harness import Bench, ChildError
from taskrunner import RedisStreamQueue, Registry, TaskRunner, keys, task
from taskrunner.message import encode, encode_payload

WAITING: Final = (20_000, 200_000, 1_000_000)
MEASURED: Final = 100_000
"""A drain is measured over that many tasks of the backlog, or over all of a smaller one."""

PROCESSES: Final = (1, 2, 4)
SPINS: Final = 40_000
IN_FLIGHT: Final = (10, 10_000)
WORKERS: Final = 10
RECLAIM: Final = 3.0
DELAYED: Final = (10, 1_000_000)

_ADD: Final = """
for i = 1, ARGV[2] do redis.call('XADD', KEYS[1], '*', 'payload', ARGV[1]) end
"""
_DELAY: Final = """
local due = redis.call('TIME')[1] + 86400
for i = 1, ARGV[2] do
  redis.call('ZADD', KEYS[1], due + i, ARGV[1] .. string.format('%012d', ARGV[3] + i))
end
"""
_CHUNK: Final = 20_000


def fill(bench: Bench, kind: str, count: int, stream: str | None = None) -> None:
    """Add that many messages to TaskRunner's stream, or copies of one of its size to another."""
    body = encode(
        f"bench.{kind}",
        encode_payload(PAYLOAD, 1000),
        id="0" * 36,
        enqueued_at=time.time(),
        reservation_timeout_ns=100_000_000_000,
    )
    key = stream or RedisStreamQueue(bench.url).stream
    for start in range(0, count, _CHUNK):
        bench.client.eval(_ADD, 1, key, body, min(_CHUNK, count - start))


def drain(bench: Bench, system: str, scale: float) -> dict[str, float]:
    """The rate with so many waiting."""
    figures: dict[str, float] = {}
    for waiting in WAITING:
        bench.clear()
        fill(bench, "noop", waiting, stream="raw:queue" if system == "raw" else None)
        count = min(waiting, MEASURED)
        with bench.child(system, "work", count=count) as worker:
            done = worker.event("done")
        figures[f"at_{waiting}"] = count / done["seconds"]
        figures[f"cpu_{waiting}"] = done["cpu"] / count * 1000
    return figures


def processes(bench: Bench, system: str, scale: float) -> dict[str, float]:
    """Tasks of pure Python on some processes, from the first one waiting to none left; the gain is
    over one process."""
    count = round(SPINS * scale)
    stream = RedisStreamQueue(bench.url).stream
    figures: dict[str, float] = {}
    for number in PROCESSES:
        bench.clear()
        with ExitStack() as stack:
            for _ in range(number):
                # Counts to more than there is: it ends when it is told.
                stack.enter_context(bench.child(system, "work", kind="spin", count=10**9))
            time.sleep(1.5 + number)  # until all are up
            fill(bench, "spin", count)
            start = time.monotonic()
            while bench.client.xlen(stream):
                time.sleep(0.005)
                if time.monotonic() - start > 120:
                    return figures
            figures[f"processes_{number}"] = count / (time.monotonic() - start)
    for number in PROCESSES[1:]:
        figures[f"gain_{number}"] = figures[f"processes_{number}"] / figures["processes_1"]
    return figures


def in_flight(bench: Bench, system: str, scale: float) -> dict[str, float]:
    """What `stats()` and a round of the heartbeat that renews everything take, in ms."""
    figures: dict[str, float] = {}
    for number in IN_FLIGHT:
        bench.clear()
        gate = threading.Event()
        registry = Registry()
        task(name="bench.noop", registry=registry)(
            _waiting_for(gate, after=0 if number <= WORKERS else 6 * number)
        )
        runner = TaskRunner(
            queue=RedisStreamQueue(bench.url, reclaim_delay=RECLAIM),
            consumer_group="bench",
            registry=registry,
            num_workers=WORKERS,
            batch_size=max(100, number),
        )
        fill(bench, "noop", number if number <= WORKERS else 8 * number)
        with runner:
            parts = runner._parts
            assert parts is not None
            rounds = _timed(parts)
            try:
                _eventually(_full(parts.in_flight, number))
                figures[f"stats_{number}"] = _each(runner.stats, 100)
                rounds.clear()
                _eventually(_enough(rounds))
                figures[f"heartbeat_{number}"] = median(rounds) * 1000
            finally:
                gate.set()
    return figures


def _waiting_for(gate: threading.Event, *, after: int) -> Callable[[Any], object]:
    """A task whose first runs end at once: as much is buffered as the pool has been seen to need."""
    run = itertools.count(1).__next__
    return lambda payload: run() > after and gate.wait()


def _full(table: Any, number: int) -> Callable[[], bool]:
    return lambda: len(table.snapshot()) >= number


def _enough(rounds: Sequence[float]) -> Callable[[], bool]:
    return lambda: len(rounds) >= 5


def _timed(parts: Any) -> list[float]:
    """Seconds of each round of the heartbeat that renews, from now on."""
    rounds: list[float] = []
    renewed: list[int] = []
    tick, renew = parts.heartbeat.tick, parts.deliveries.renew

    def timed_tick() -> Any:
        renewed.clear()
        start = time.perf_counter()
        try:
            return tick()
        finally:
            if renewed:
                rounds.append(time.perf_counter() - start)

    def noted_renew(requests: Any) -> Any:
        renewed.append(len(requests))
        return renew(requests)

    parts.heartbeat.tick, parts.deliveries.renew = timed_tick, noted_renew
    return rounds


def _each(call: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken) * 1000


def _eventually(condition: Callable[[], bool], patience: float = 30.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise ChildError("growth: what was waited for did not come")
        time.sleep(0.02)


def delayed(
    bench: Bench, lateness: Callable[[Bench, str, float], dict[str, float]], system: str
) -> dict[str, float]:
    """Lateness with so many others in the set, all due tomorrow."""
    body = encode(
        "bench.due",
        "0",
        id="0" * 24,
        enqueued_at=time.time(),
        reservation_timeout_ns=100_000_000_000,
    )
    figures: dict[str, float] = {}
    for number in DELAYED:
        bench.clear()
        for start in range(0, number, _CHUNK):
            bench.client.eval(
                _DELAY, 1, keys.delayed("bench"), body, min(_CHUNK, number - start), start
            )
        for name, value in lateness(bench, system, 1.0).items():
            figures[f"{name}_{number}"] = value
    return figures
