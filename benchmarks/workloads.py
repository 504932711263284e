"""Parent side: what is measured, one function per workload.

Each function measures one system once, on an empty server, and returns its figures by name. Which
figures stand in which table, with which units and goals, is said beside them.
"""

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from benchmarks import growth
from benchmarks.bodies import IO_SECONDS, MARK_SECONDS
from benchmarks.harness import Bench, ChildError
from benchmarks.peers import SHARES

Figures = dict[str, float]

KILL_RECLAIM: Final = 5.0
KILL_PATIENCE: Final = 150.0
KILL_PACE: Final = 5.0  # some look for orphans only when something new comes


@dataclass(frozen=True)
class Metric:
    """One column: a figure, its unit, and whether more or less of it is better."""

    name: str
    title: str
    unit: str
    better: Literal["more", "less"]
    digits: int = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One table."""

    name: str
    title: str
    measure: Callable[[Bench, str, float], Figures]
    metrics: Sequence[Metric]
    not_for: Sequence[str] = ()
    only_for: Sequence[str] = ()
    once: bool = False
    together: bool = False  # all systems at one time: they wait more than they work


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which that share of them lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _count(system: str, full: int, scale: float, *, least: int = 300, times: float = 1.0) -> int:
    """How many tasks: fewer for a slower library, so that all take a few seconds at most."""
    share = min(1.0, times * SHARES.get(system, 1.0))
    return max(least, round(full * share * scale))


def _enqueue(bench: Bench, system: str, scale: float) -> Figures:
    count = _count(system, 10_000, scale, least=200, times=3)
    result = bench.produce(system, "each", count=count, warm=True)
    return _producer_figures(result, count)


def _unique(bench: Bench, system: str, scale: float) -> Figures:
    count = max(200, round(10_000 * scale))
    before = bench.counters()
    result = bench.produce(system, "unique", count=count, warm=True)
    if "unsupported" in result:
        return {}
    return {
        **_producer_figures(result, count),
        **bench.counters().since(before, count),
    }


def _producer_figures(result: dict[str, Any], count: int) -> Figures:
    if "unsupported" in result:
        return {}
    return {"rate": count / result["seconds"], "cpu": result["cpu"] / count * 1e6}


def _drain(bench: Bench, system: str, scale: float) -> Figures:
    count = _count(system, 100_000, scale)
    sent = bench.produce(system, "bulk", count=count)
    figures: Figures = {}
    if "unsupported" in sent:
        bench.produce(system, "each", count=count)
    else:
        figures["bulk"] = count / sent["seconds"]
    before = bench.counters()
    with bench.child(system, "work", count=count) as worker:
        done = worker.event("done")
        counted = bench.counters().since(before, count)
    return {
        **figures,
        "rate": count / done["seconds"],
        "cpu": done["cpu"] / count * 1000,
        "resident": done["resident"],
        "first_task": done["first_task"] * 1000,
        **counted,
    }


def _cpu(bench: Bench, system: str, scale: float) -> Figures:
    count = _count(system, 20_000, scale)
    if system != "raw":
        _fill(bench, system, "spin", count)
    with bench.child(system, "work", kind="spin", count=count) as worker:
        done = worker.event("done")
    return {"rate": count / done["seconds"], "cpu": done["cpu"] / count * 1000}


def _io(bench: Bench, system: str, scale: float) -> Figures:
    count, workers = 2000, 32
    if system == "rq":  # one task at a time
        count, workers = 200, 1
    _fill(bench, system, "io", count)
    before = bench.counters()
    with bench.child(system, "work", kind="io", count=count, workers=workers) as worker:
        done = worker.event("done")
        counted = bench.counters().since(before, count)
    ideal = -(-count // workers) * IO_SECONDS
    return {
        "wall": done["seconds"],
        "ideal": done["seconds"] / ideal,
        "cpu": done["cpu"] / count * 1000,
        **counted,
    }


def _fill(bench: Bench, system: str, kind: str, count: int) -> None:
    if "unsupported" in bench.produce(system, "bulk", kind=kind, count=count):
        bench.produce(system, "each", kind=kind, count=count)


def _latency(bench: Bench, system: str, scale: float) -> Figures:
    with bench.child(system, "work", kind="stamp", count=200) as worker:
        bench.produce(system, "warm", kind="stamp")
        idle = worker.event("warm")
        bench.produce(system, "each", kind="stamp", count=200, interval=0.01)
        samples = worker.event("done")["samples"]
    return {**_spread(samples), "resident": idle["resident"]}


def _delayed(bench: Bench, system: str, scale: float) -> Figures:
    with bench.child(system, "work", kind="due", count=200) as worker:
        bench.produce(system, "warm", kind="due")
        worker.event("warm")
        sent = bench.produce(system, "later", kind="due", count=200, delay=1.0, spread=1.0)
        if "unsupported" in sent:
            return {}
        samples = worker.event("done")["samples"]
    return {**_spread(samples), "early": sum(sample < 0 for sample in samples)}


def _retry(bench: Bench, system: str, scale: float) -> Figures:
    with bench.child(system, "work", kind="fail", count=200) as worker:
        bench.produce(system, "warm", kind="fail")
        worker.event("warm")
        bench.produce(system, "numbered", kind="fail", count=200)
        samples = worker.event("done")["samples"]
    return {**_spread(samples), "early": sum(sample < 0 for sample in samples)}


def _spread(samples: Sequence[float]) -> Figures:
    return {
        "p50": percentile(samples, 0.5) * 1000,
        "p99": percentile(samples, 0.99) * 1000,
    }


def _kill(bench: Bench, system: str, scale: float) -> Figures:
    """Kill a worker amid its tasks, start another: how many never run, how long until the last."""
    count = 48
    ledger = bench.new_file()
    options: Any = {"kind": "mark", "reclaim": KILL_RECLAIM, "ledger": str(ledger)}
    bench.produce(system, "numbered", count=count, **options)

    def marked() -> int:
        return len(set(ledger.read_text().split()) - {"None"}) if ledger.exists() else 0

    with bench.child(system, "work", count=count, **options) as worker:
        if not _eventually(lambda: marked() >= 8, 20):
            raise ChildError(f"{system} did not begin in the kill test")
        time.sleep(MARK_SECONDS / 2)
        worker.end()
    killed = time.monotonic()
    with bench.child(system, "work", count=count, **options):
        complete = False
        while not complete and time.monotonic() - killed < KILL_PATIENCE:
            complete = _eventually(lambda: marked() == count, KILL_PACE)
            if not complete:
                bench.produce(system, "warm", **options)
        found = {"lost": float(count - marked())}
        if complete:
            found["recovery"] = time.monotonic() - killed
    return found


def _eventually(condition: Callable[[], bool], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


_IMPORT: Final = "import time; start = time.process_time(); {0}; print(time.process_time() - start)"
_IMPORTS: Final = {
    "raw": "import redis",
    "taskrunner": "from taskrunner import TaskRunner, task",
    "dramatiq": "import dramatiq; from dramatiq.brokers.redis import RedisBroker",
    "taskiq": "from taskiq_redis import RedisStreamBroker",
    "saq": "from saq import Queue",
    "streaq": "from streaq import Worker",
    "celery": "from celery import Celery; Celery().task",
    "huey": "from huey import RedisHuey",
    "rq": "from rq import Queue",
}
"""What a process needs that dispatches."""


def _imports(bench: Bench, system: str, scale: float) -> Figures:
    found: list[float] = []
    for _ in range(5):
        output = subprocess.run(
            [bench.python(system), "-c", _IMPORT.format(_IMPORTS[system])],
            check=True,
            capture_output=True,
            text=True,
            cwd=bench.code,
        )
        found.append(float(output.stdout) * 1000)
    return {"import": min(found)}


_RATE = Metric("rate", "tasks/s", "/s", "more")
_COST = (
    Metric("commands", "commands/task", "", "less", 3),
    Metric("reads", "reads/task", "", "less", 3),
    Metric("bytes", "bytes/task", "B", "less"),
)
_CPU = Metric("cpu", "CPU s/1000", "s", "less", 4)
_LATENESS = (
    Metric("p50", "p50 ms", "ms", "less", 2),
    Metric("p99", "p99 ms", "ms", "less", 2),
)

WORKLOADS: Final[tuple[Workload, ...]] = (
    Workload(
        name="kill",
        title="48 tasks of 0.2 s, the worker killed with SIGKILL amid them, another one started",
        measure=_kill,
        metrics=(
            Metric("lost", "never run", "", "less"),
            Metric("recovery", "all run after s", "s", "less", 1),
        ),
        not_for=("raw",),
        once=True,
        together=True,
    ),
    Workload(
        name="enqueue",
        title="Enqueue one by one",
        measure=_enqueue,
        metrics=(_RATE, Metric("cpu", "CPU µs/call", "µs", "less")),
    ),
    Workload(
        name="drain",
        title="Drain no-op tasks, 8 workers (and enqueue in bulk before)",
        measure=_drain,
        metrics=(
            _RATE,
            _CPU,
            *_COST,
            Metric("bulk", "bulk enqueue/s", "/s", "more"),
            Metric("resident", "MiB after", "MiB", "less", 1),
            Metric("first_task", "first task ms", "ms", "less"),
        ),
    ),
    Workload(
        name="cpu",
        title="Tasks of 50 µs pure Python, 8 workers (raw: the loop without a queue)",
        measure=_cpu,
        metrics=(_RATE, _CPU),
    ),
    Workload(
        name="io",
        title="2000 tasks of 10 ms waiting, 32 workers",
        measure=_io,
        metrics=(
            Metric("wall", "wall s", "s", "less", 3),
            Metric("ideal", "x ideal", "", "less", 3),
            _CPU,
            *_COST,
        ),
        not_for=("raw",),
    ),
    Workload(
        name="latency",
        title="From call to run, a task each 10 ms on an idle worker",
        measure=_latency,
        metrics=(*_LATENESS, Metric("resident", "MiB idle", "MiB", "less", 1)),
    ),
    Workload(
        name="delayed",
        title="Lateness of delayed tasks",
        measure=_delayed,
        metrics=(*_LATENESS, Metric("early", "early", "", "less")),
        not_for=("raw",),
    ),
    Workload(
        name="retry",
        title="Lateness of a retry after 0.5 s",
        measure=_retry,
        metrics=(*_LATENESS, Metric("early", "early", "", "less")),
        only_for=("taskrunner",),
    ),
    Workload(
        name="unique",
        title="Enqueue unique tasks one by one",
        measure=_unique,
        metrics=(_RATE, Metric("cpu", "CPU µs/call", "µs", "less"), *_COST),
    ),
    Workload(
        name="import",
        title="Import of what a process needs that dispatches, CPU time, the least of five",
        measure=_imports,
        metrics=(Metric("import", "ms", "ms", "less", 1),),
    ),
    Workload(
        name="grow-drain",
        title="Growth: drain with so many waiting (the first 100,000 are measured)",
        measure=growth.drain,
        metrics=(
            *(Metric(f"at_{n}", f"/s at {n:,}", "/s", "more") for n in growth.WAITING),
            *(Metric(f"cpu_{n}", f"CPU s/1000 at {n:,}", "s", "less", 4) for n in growth.WAITING),
        ),
        only_for=("raw", "taskrunner"),
    ),
    Workload(
        name="grow-processes",
        title="Growth: tasks of 50 µs pure Python on 1, 2 and 4 processes",
        measure=growth.processes,
        metrics=(
            *(Metric(f"processes_{n}", f"{n} /s", "/s", "more") for n in growth.PROCESSES),
            *(Metric(f"gain_{n}", f"{n} / 1", "", "more", 2) for n in growth.PROCESSES[1:]),
        ),
        only_for=("taskrunner",),
    ),
    Workload(
        name="grow-flight",
        title="Growth: stats(), and a heartbeat round that renews all, with so many in flight",
        measure=growth.in_flight,
        metrics=(
            *(
                Metric(f"stats_{n}", f"stats() ms at {n:,}", "ms", "less", 3)
                for n in growth.IN_FLIGHT
            ),
            *(
                Metric(f"heartbeat_{n}", f"heartbeat ms at {n:,}", "ms", "less", 2)
                for n in growth.IN_FLIGHT
            ),
        ),
        only_for=("taskrunner",),
    ),
    Workload(
        name="grow-delayed",
        title="Growth: lateness of delayed tasks with so many others in the set",
        measure=lambda bench, system, scale: growth.delayed(bench, _delayed, system),
        metrics=tuple(
            Metric(
                f"{name}_{n}", f"{name} {unit} at {n:,}".replace("  ", " "), unit, "less", digits
            )
            for n in growth.DELAYED
            for name, unit, digits in (("p50", "ms", 2), ("p99", "ms", 2), ("early", "", 0))
        ),
        only_for=("taskrunner",),
    ),
)
