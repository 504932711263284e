"""Retries come when they are due, also when the instance that parked them is dead."""

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import Desk, Ledger, WorkerProcess, eventually
from tests.support.ledger import Run
from tests.support.worker import DEFAULTS

pytestmark = pytest.mark.chaos

TASKS = 200


def test_retries_of_a_living_instance_come_on_time(
    desk: Desk, ledger: Ledger, make_worker: Callable[..., WorkerProcess]
) -> None:
    """The instance that parked a retry claims it by id when it is due (semantics §3, Parking)."""
    make_worker(**DEFAULTS)
    desk.send("fail-once-delay-half", range(TASKS))
    ledger.wait_finished(range(TASKS), 20)
    desk.wait_done()
    late = [again.start - first.end - 0.5 for first, again in _pairs(ledger)]
    assert len(late) == TASKS
    _print("own retries", late)
    assert min(late) > -0.05, "before its time"
    assert statistics.median(late) <= 0.1
    assert max(late) <= 1.5


def test_retries_of_a_killed_instance_come_soon_after(
    desk: Desk,
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """The reclaim scan of another instance finds parked retries within seconds, not after
    reclaim_delay."""
    tasks = tasks_file(
        """
        @task(name="fail-once", max_retry=2, retry_delay=1.5)
        def fail_once(payload):
            with record(payload):
                if current_task().attempt == 1:
                    raise ValueError("first")
        """
    )
    doomed = make_worker(tasks_file=tasks, **DEFAULTS)
    desk.send("fail-once", range(TASKS))
    parking = f"{desk.names.group}_{doomed.status()['host']}_0"

    def all_parked() -> bool:
        return [held.consumer for held in desk.held()] == [parking] * TASKS

    eventually(all_parked, 10)
    pid = doomed.pid
    doomed.kill()
    make_worker(tasks_file=tasks, **DEFAULTS)
    ledger.wait_finished(range(TASKS), 20)
    desk.wait_done()
    pairs = [(first, again) for first, again in _pairs(ledger) if again.pid != pid]
    assert len(pairs) == TASKS, "the test was too slow to kill in time"
    late = [again.start - first.end - 1.5 for first, again in pairs]
    _print("retries of a killed instance", late)
    assert min(late) > -0.05, "before its time"
    assert max(late) <= 5


def test_retries_at_once_come_at_once(
    desk: Desk,
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """A retry that is due while its parking is still being noted is neither lost nor late."""
    tasks = tasks_file(
        """
        @task(name="fail-twice", max_retry=3, retry_delay=0)
        def fail_twice(payload):
            with record(payload):
                if current_task().attempt < 3:
                    raise ValueError("not yet")
        """
    )
    make_worker(tasks_file=tasks, log_level="ERROR", **DEFAULTS)
    ids = range(1000)
    desk.send("fail-twice", ids)
    ledger.wait_finished(ids, 30)
    desk.wait_done()
    assert set(ledger.counts().values()) == {3}


def _pairs(ledger: Ledger) -> list[tuple[Run, Run]]:
    """The first run of each id, and its second and last."""
    runs: dict[object, list[Run]] = {}
    for run in ledger.runs():
        runs.setdefault(run.id, []).append(run)
    for of_one in runs.values():
        assert len(of_one) == 2, of_one
    return [(first, again) for first, again in runs.values()]


def _print(what: str, late: list[float]) -> None:
    print(
        f"{what}: median {statistics.median(late) * 1000:.1f} ms late, "
        f"95 % within {statistics.quantiles(late, n=20)[-1] * 1000:.1f} ms, "
        f"all within {max(late) * 1000:.1f} ms"
    )
