"""What the figures and the housekeeping cost in commands."""

import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.support import Names, OwnServer, WorkerProcess, eventually
from tests.support.numbers import Crew, Monitor, measure, wait_until_idle
from tests.support.worker import DEFAULTS

WINDOW = 20.0
MOST_PER_SECOND = 4.0
MOST_PER_TASK = 0.01


def _table(counts: Counter[str], per: float) -> str:
    return ", ".join(f"{name} {count / per:.3g}" for name, count in counts.most_common())


@pytest.mark.slow
def test_idle_instance_sends_four_commands_a_second_at_most(
    own_server: Callable[..., OwnServer], make_worker: Callable[..., WorkerProcess]
) -> None:
    """As a user gets it, all defaults: an idle fleet of a hundred is no load."""
    own = own_server()
    worker = make_worker(url=own.tcp_url, **DEFAULTS)
    eventually(lambda: worker.status()["is_leader"])
    with Monitor(own.tcp_url) as monitor:
        seconds = measure(WINDOW)
        sent = Counter(command.name for command in monitor.sent())
        called = Counter(command.name for command in monitor.all())

    rate = sum(sent.values()) / seconds
    print(f"{rate:.2f} a second: {_table(sent, seconds)}; with scripts {_table(called, seconds)}")
    assert rate <= MOST_PER_SECOND, _table(sent, seconds)


@pytest.mark.slow
def test_idle_instance_that_tunes_sends_four_commands_a_second_at_most(
    own_server: Callable[..., OwnServer], make_worker: Callable[..., WorkerProcess]
) -> None:
    """Leader and follower, with tuning and a tick of five seconds: half of the commands each."""
    own = own_server()
    tuned = {
        "min_workers": 2,
        "max_workers": 8,
        "desired_wait_time": 1,
        "desired_wait_time_tolerance": 0.5,
        "long_queue_threshold": 10,
    }
    options = {**DEFAULTS, "config": {**DEFAULTS["config"], **tuned}}
    workers = [make_worker(url=own.tcp_url, **options) for _ in range(2)]
    eventually(lambda: [worker.status()["is_leader"] for worker in workers].count(True) == 1)
    with Monitor(own.tcp_url) as monitor:
        seconds = measure(WINDOW) * len(workers)
        sent = Counter(command.name for command in monitor.sent())

    print(f"{sum(sent.values()) / seconds:.2f} a second: {_table(sent, seconds)}")
    assert sum(sent.values()) / seconds <= MOST_PER_SECOND, _table(sent, seconds)


def test_figures_cost_a_hundredth_of_a_command_per_task_at_most(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """Timings, ring, capacity, figures for the hook: each, while 20,000 tasks run."""
    tasks = 20_000
    own = own_server()
    with Crew(own.tcp_url, names) as crew:
        crew.task(name="noop")
        runner = crew.make(
            num_workers=8,
            min_workers=8,
            max_workers=8,
            desired_wait_time=0.2,
            desired_wait_time_tolerance=0.08,
            long_queue_threshold=2,
            long_queue_hook=lambda stats: None,
        )
        runner.dispatch_many("noop", [None] * tasks)
        with Monitor(own.tcp_url) as monitor:
            runner.start()
            wait_until_idle(own.client(), names, 60)
            eventually(lambda: crew.figures().get("noop_count") == tasks, 10)
            sent = monitor.sent()

    figures = {
        "timings": ("HINCRBY", "MULTI", "EXEC"),
        "claim delays": ("LPUSH", "LTRIM"),
        "capacity": ("SET", "GET"),
        "stats": ("HGETALL", "XLEN", "XINFO", "MGET"),
    }
    costs = {
        figure: sum(command.name in commands for command in sent) / tasks
        for figure, commands in figures.items()
    }
    print(costs, _table(Counter(command.name for command in sent), tasks))
    assert max(costs.values()) <= MOST_PER_TASK, costs


@pytest.mark.parametrize("names_of_tasks", [1, 5])
def test_timings_are_written_once_a_second_at_any_rate(
    own_server: Callable[..., OwnServer], names: Names, names_of_tasks: int
) -> None:
    """One pair per task name and second, not per task; claim delays ten times at most."""
    own = own_server()
    with Crew(own.tcp_url, names) as crew:
        for number in range(names_of_tasks):
            crew.task(name=f"t{number}")
        runner = crew.start(leads=True)
        began = time.monotonic()
        with Monitor(own.tcp_url) as monitor:
            sent = 0
            while time.monotonic() - began < 4:
                for number in range(names_of_tasks):
                    runner.dispatch_many(f"t{number}", [None] * 20)
                sent += 20 * names_of_tasks
                measure(0.05)
            written = monitor.sent("HINCRBY")
            ring = monitor.sent("LPUSH")
            seconds = time.monotonic() - began  # all that was watched, however long it took to ask

    assert sent > 400
    assert len(written) <= 2 * names_of_tasks * (seconds + 2)
    assert len(ring) <= seconds * 12 + 2
