"""`/metrics` of a worker, read by Prometheus' own parser and compared with a ledger of what ran."""

import os
import re
import signal
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from taskrunner import RedisStreamQueue, Registry, TaskRunner, task
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import eventually
from tests.support.names import Names
from tests.support.proxy import Proxy
from tests.support.shop import Shop, Typed

APP = """
import os, time
from pathlib import Path
from taskrunner import *

registry = Registry()
out = Path(os.environ["SHOP_OUT"])

def note(*words):
    with out.open("a") as file:
        print(os.getpid(), *words, file=file)

@task(name="good", registry=registry)
def good(payload):
    note("good", "succeeded")

@task(name="again", registry=registry, max_retry=2, retry_delay=0.05)
def again(payload):
    last = current_task().attempt == 2
    note("again", "succeeded" if last else "retry")
    if not last:
        raise ValueError("not yet")

@task(name="bad", registry=registry, max_retry=3)
def bad(payload):
    if payload:
        note("bad", "rejected")
        raise Reject("no")
    note("bad", "retry" if current_task().attempt < 3 else "failed")
    raise Retry(0.05)

@task(name="long", registry=registry, max_lost=50)
def long(payload):
    note("long", "begun")
    while not os.path.exists(payload):
        time.sleep(0.02)
    note("long", "succeeded")

runner = TaskRunner(
    consumer_group=os.environ["SHOP_GROUP"],
    queue=RedisStreamQueue(os.environ["SHOP_URL"], prefix=os.environ["SHOP_PREFIX"], reclaim_delay=2),
    registry=registry,
    host=os.environ["SHOP_HOST"],
    num_workers=4,
    block_duration=1,
    shutdown_timeout=5,
    timings=Timings(presence=3, poll=0.5, lease=1),
)
"""

Figures = dict[tuple[str, ...], float]


@pytest.fixture
def shop(tmp_path: Path, server: EmbeddedServer, names: Names) -> Iterator[Shop]:
    """The application of this test."""
    made = Shop(tmp_path, server.url, names)
    (tmp_path / "app.py").write_text(APP)
    yield made
    made.close()


@pytest.fixture
def desk(server: EmbeddedServer, names: Names) -> TaskRunner:
    """Dispatches to the application's tasks by their names."""
    registry = Registry()
    for name in ("good", "again", "bad", "long", "stranger"):
        task(name=name, registry=registry)(lambda payload: None)
    return TaskRunner(
        consumer_group=names.group,
        queue=RedisStreamQueue(server.url, prefix=names.prefix),
        registry=registry,
    )


def page(worker: Typed) -> str:
    """`/metrics` as it stands; nothing before there is a port."""
    port = re.search(r"metrics +port (\d+)", worker.log)
    if port is None:
        return ""
    with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=10) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return str(answer.read().decode())


def scrape(worker: Typed) -> Figures:
    """Every sample by its name without `taskrunner_`, and the labels beside the group."""
    found: Figures = {}
    groups = set()
    for family in text_string_to_metric_families(page(worker)):
        for sample in family.samples:
            labels = dict(sample.labels)
            groups.add(labels.pop("group"))
            key = (sample.name.removeprefix("taskrunner_"), *map(str, labels.values()))
            assert key not in found, key
            found[key] = sample.value
    assert len(groups) <= 1
    return found


def attempts(figures: Figures) -> Counter[tuple[str, str]]:
    """Attempts by task and outcome."""
    return Counter(
        {
            (task, outcome): int(value)
            for (name, *labels), value in figures.items()
            if name == "attempts_total" and value
            for task, outcome in [sorted(labels, key=lambda one: one in OUTCOMES)]
        }
    )


OUTCOMES = ("succeeded", "retry", "failed", "rejected", "lost")


def ledger(shop: Shop) -> Counter[tuple[str, str]]:
    """What ran, by task and outcome."""
    lines = [tuple(what.split()) for _, what in shop.ran()]
    return Counter((task, end) for task, end in lines if end != "begun")


def total(figures: Figures, name: str, *labels: str) -> float:
    """Sum over all series of a name that have these labels."""
    return sum(
        value for key, value in figures.items() if key[0] == name and set(labels) <= set(key[1:])
    )


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_page_tells_what_the_ledger_tells(shop: Shop, desk: TaskRunner, processes: str) -> None:
    """Attempts by task and outcome, times, failures and errors, summed over all processes; what
    concerns the group is there once."""
    gate = shop.directory / "gate"
    worker = shop.worker("--metrics-port", "0", "--processes", processes, spec="app:runner")
    worker.wait_started(int(processes))
    eventually(lambda: scrape(worker)[("processes",)] == int(processes), 20)
    desk.dispatch_many("good", range(50))
    desk.dispatch_many("again", range(5))
    desk.dispatch_many("bad", [0, 1, 1])
    desk.dispatch("good", run_in=0.3)
    desk.dispatch("good", run_in=600)
    desk.dispatch("stranger")
    desk.queue.add("no message")
    expected = Counter(
        {
            ("good", "succeeded"): 51,
            ("again", "retry"): 5,
            ("again", "succeeded"): 5,
            ("bad", "rejected"): 2,
            ("bad", "retry"): 2,
            ("bad", "failed"): 1,
        }
    )
    eventually(lambda: attempts(scrape(worker)) == expected, 20, message=lambda: worker.log)
    assert ledger(shop) == expected
    desk.dispatch_many("long", [str(gate)] * (4 * int(processes) + 3))
    busy = 4 * int(processes)
    # What is beyond the threads waits in the stream or, where a read took it along, is pending.
    found = eventually(
        lambda: (
            (now := scrape(worker))[("running",)] == busy
            and now[("waiting",)] + now[("pending",)] >= busy + 3
            and now
        ),
        20,
        message=lambda: page(worker),
    )
    assert found
    assert found[("task_running", "long")] == busy
    assert found[("workers",)] == busy
    assert busy <= found[("in_flight",)] <= busy + 3
    assert 0 < found[("task_longest_run_seconds", "long")] < 30
    assert total(found, "attempt_duration_seconds_count", "again") == 10
    assert total(found, "attempt_duration_seconds_bucket", "again", "+Inf") == 10
    assert total(found, "queue_wait_seconds_count", "again") == 5
    assert 0 < total(found, "queue_wait_seconds_sum", "good") < 51 * 20
    assert total(found, "failures_total", "bad", "rejected") == 2
    assert total(found, "failures_total", "bad", "raised") == 1
    assert total(found, "failures_total", "(other)", "undecodable") == 1
    assert found[("errors_total", "task_retry")] == 7
    assert found[("errors_total", "task_failed")] == 4
    assert found[("lateness_seconds_count", "retry")] == 7
    assert found[("lateness_seconds_count", "delayed")] >= 1
    assert 0 <= found[("lateness_seconds_sum", "delayed")] < 10
    assert found[("reclaims_total",)] == 0
    assert found[("unknown_tasks_total",)] >= 1
    assert found[("leader",)] == 1
    assert found[("redis_up",)] == 1
    assert found[("dead",)] == 4
    assert 1 <= found[("delayed",)] <= 2  # due in ten minutes; the one nobody knows goes around
    assert busy + 3 <= found[("waiting",)] + found[("pending",)] <= busy + 4
    assert found[("instances",)] == int(processes)
    assert "stranger" not in page(worker)

    gate.touch()
    eventually(lambda: total(scrape(worker), "attempts_total", "long") == busy + 3, 20)


def test_a_kill_lowers_no_counter(shop: Shop, desk: TaskRunner) -> None:
    """What a child has counted outlives it, and the next one goes on from there; what it held is no
    longer shown as held."""
    worker = shop.worker("--metrics-port", "0", "--processes", "2", spec="app:runner")
    worker.wait_started(2)
    before: Figures = {}

    def look() -> Figures:
        """The page, on which nothing may have gone back."""
        now = scrape(worker)
        for key, value in before.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert now[key] >= value, key
        before.update(now)
        return now

    def kill_one(life: int) -> None:
        desk.dispatch_many("good", range(40))
        desk.dispatch("long", str(shop.directory / "gate"))
        eventually(lambda: look()[("running",)] >= 1, 20)
        victim = next(
            pid
            for pid, what in reversed(shop.ran())
            if what == "long begun" and pid in worker.living
        )
        eventually(lambda: ledger(shop)[("good", "succeeded")] >= 40 * life, 20)
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: len(worker.living) == 2 and victim not in worker.living, 20)
        eventually(lambda: look()[("processes",)] == 2, 20, message=lambda: worker.log)

    for life in range(1, 4):
        kill_one(life)
    (shop.directory / "gate").touch()
    eventually(lambda: ledger(shop)[("long", "succeeded")] == 3, 30, message=lambda: worker.log)
    eventually(lambda: look()[("in_flight",)] == 0, 20)
    eventually(lambda: attempts(look()) == ledger(shop), 20, message=lambda: page(worker))
    assert look()[("reclaims_total",)] >= 1


def test_counters_go_on_where_children_are_renewed(shop: Shop, desk: TaskRunner) -> None:
    """`--max-tasks` replaces a process after so many tasks."""
    worker = shop.worker("--metrics-port", "0", "--max-tasks", "10", spec="app:runner")
    worker.wait_started()
    for done in range(25, 101, 25):
        desk.dispatch_many("good", range(25))
        eventually(
            lambda done=done: attempts(scrape(worker))[("good", "succeeded")] == done,  # type: ignore[misc]
            30,
            message=lambda: worker.log,
        )
    assert len(worker.children) >= 3


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_silent_redis_gives_a_page_without_the_group(
    shop: Shop, server: EmbeddedServer, make_proxy: Callable[[str], Proxy], processes: str
) -> None:
    """Within a time limit, with `redis_up` 0; and a probe on the same port is not held up."""
    proxy = make_proxy(server.url)
    with_port = _free_port()
    worker = shop.worker(
        *("--metrics-port", with_port, "--health-port", with_port, "--processes", processes),
        spec="app:runner",
        SHOP_URL=proxy.url,
    )
    eventually(
        lambda: (now := scrape(worker))[("redis_up",)] and now[("processes",)] == int(processes),
        20,
        message=lambda: worker.log,
    )
    assert worker.get("/live") == (200, "alive")
    assert ("waiting",) in scrape(worker)

    for fault in (proxy.swallow, proxy.refuse):
        fault()
        eventually(lambda: scrape(worker)[("redis_up",)] == 0, 10)
        began = time.monotonic()
        figures = scrape(worker)
        assert time.monotonic() - began < 5
        assert figures[("workers",)] == 4 * int(processes)
        assert not {("waiting",), ("pending",), ("delayed",), ("dead",)} & figures.keys()
        assert worker.get("/live") == (200, "alive")

    proxy.pass_through()
    eventually(lambda: scrape(worker)[("redis_up",)] == 1, 20, message=lambda: worker.log)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def test_without_prometheus_client_the_error_names_the_extra(shop: Shop) -> None:
    """Nothing else needs it: a worker without the option starts."""
    (shop.directory / "prometheus_client.py").write_text("raise ImportError('not there')")
    worker = shop.worker("--metrics-port", "0", spec="app:runner")
    assert worker.wait() == 2
    assert "pip install 'redis-taskrunner[prometheus]'" in worker.log
    other = shop.worker(spec="app:runner")
    other.wait_started()
