"""How often a task runs: once while it is renewed, and a bounded number of times when it kills."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import Desk, Ledger, WorkerProcess, eventually

pytestmark = pytest.mark.chaos

RECLAIM = 0.5
LETHAL = {"exit": "os._exit(1)", "kill": "os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)"}


def test_task_longer_than_reclaim_delay_runs_once(
    desk: Desk, ledger: Ledger, make_worker: Callable[..., WorkerProcess]
) -> None:
    """Heartbeats renew what runs, so that nobody takes it over (semantics §3, Heartbeats)."""
    workers = [make_worker(queue={"reclaim_delay": RECLAIM}) for _ in range(2)]
    ids = [f"long-{number}" for number in range(6)]
    desk.send("sleep", [{"id": id_, "seconds": 4 * RECLAIM} for id_ in ids])
    for id_ in ids:
        ledger.wait_started(id_)
    assert {held.count for held in desk.held()} == {1}
    ledger.wait_finished(ids, 15)
    desk.wait_done()
    ledger.assert_once(ids)
    assert all(run.seconds >= 4 * RECLAIM for run in ledger.runs())
    assert not any(
        error["action"] == "delivery_lost"
        for worker in workers
        for error in worker.status()["errors"]
    )


@pytest.mark.parametrize("limits", [{"max_retry": 3, "max_lost": 0}, {}], ids=["3+0", "default"])
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_task_that_kills_its_process_stops_and_spares_its_neighbours(
    how: str,
    limits: dict[str, int],
    desk: Desk,
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """It runs max_retry + max_lost times, and what was lost beside it is not held against it.

    Each neighbour has the default limits, so it may be lost with the process twice.
    """
    options = ", ".join(f"{name}={value}" for name, value in limits.items())
    tasks = tasks_file(
        f"""
        @task(name="lethal", {options})
        def lethal(payload):
            with record(payload):
                {LETHAL[how]}

        @task(name="neighbour")
        def neighbour(payload):
            with record(payload):
                time.sleep(0.01)
        """
    )
    before, after = list(range(100)), list(range(100, 200))
    desk.send("neighbour", before)
    desk.send("lethal", ["lethal"])
    desk.send("neighbour", after)
    workers = [
        make_worker(tasks_file=tasks, start=False, queue={"reclaim_delay": 1}) for _ in range(2)
    ]

    def done() -> bool:
        _keep_running(workers)
        return len(desk.letters()) == 1 and desk.is_done()

    eventually(done, 60, interval=0.05, message=lambda: _state(desk, ledger))
    counts = ledger.counts()
    assert counts["lethal"] == 3
    finished = ledger.finished()
    assert all(finished[id_] >= 1 for id_ in before + after)
    (letter,) = desk.letters()
    assert (letter.task_name, letter.payload, letter.attempts) == ("lethal", "lethal", 3)
    assert letter.error_type == "MaxRetryExceededError"
    assert max(counts[id_] for id_ in before + after) <= 3


def _keep_running(workers: list[WorkerProcess]) -> None:
    """Start again what has ended, as a process supervisor does."""
    for worker in workers:
        if not worker.running:
            worker.close()
            worker.start(wait=False)


def _state(desk: Desk, ledger: Ledger) -> dict[str, Any]:
    return {
        "lethal runs": ledger.counts()["lethal"],
        "finished": len(ledger.finished()),
        "letters": [(letter.task_name, letter.error) for letter in desk.letters()],
        "length": desk.length(),
        "held": desk.held()[:5],
    }
