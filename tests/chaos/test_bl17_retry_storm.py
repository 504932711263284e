"""BL-17: retries come back spread out, bounded, at no cost while they wait."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Desk, Ledger, WorkerProcess, eventually

pytestmark = pytest.mark.chaos


def test_bl17_what_failed_together_does_not_come_back_together(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """500 tasks fail at one moment: with the default backoff their second attempts are spread over
    the whole second, and no thread waits for them."""
    make_worker(
        tasks_file=tasks_file(
            """
            @task(name="fail-together", max_retry=2)
            def fail_together(payload):
                with record(payload):
                    if current_task().attempt == 1:
                        raise ValueError
            """
        ),
        queue={"reclaim_delay": 30},
    )
    desk = make_desk(server.url, reclaim_delay=30)
    desk.send("fail-together", range(500))
    ledger.wait_finished(range(500), 15)
    eventually(desk.is_empty)
    waits = []
    for number in range(500):
        first, second = ledger.runs(number)
        assert first.end is not None
        waits.append(second.start - first.end)
    buckets = [sum(n <= wait * 10 < n + 1 for wait in waits) for n in range(10)]
    assert max(buckets) < 125, buckets
    assert min(buckets) > 10, buckets
    assert max(waits) < 2


def test_bl17_very_late_attempt_waits_no_longer_than_the_cap(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """Attempt 1,990 of 2,000 fails: no overflow, no error, due within five minutes in the delayed
    set; the rest of a long life is run through when there is no wait."""
    worker = make_worker(
        tasks_file=tasks_file(
            """
            @task(name="old", max_retry=2000)
            def old(payload):
                with record(["old", current_task().attempt]):
                    raise ValueError

            @task(name="tireless", max_retry=300, retry_delay=0)
            def tireless(payload):
                with record("tireless"):
                    raise ValueError
            """
        ),
        queue={"reclaim_delay": 0.5},
    )
    desk = make_desk(server.url, reclaim_delay=0.5)
    ledger_ids = [["old", attempt] for attempt in (1990, 2000)]
    eventually(lambda: desk.client.exists(desk.names.stream))
    for _, attempt in ledger_ids:
        for _ in range(3):
            (entry_id,) = desk.strand("old", [None], idle=0)
            desk.client.xclaim(
                *(desk.names.stream, desk.names.group, "stranger", 0, [entry_id]),
                idle=5000, retrycount=int(attempt) - 1, justid=True,
            )  # fmt: skip
    eventually(lambda: len(desk.letters()) == 3, 15)
    assert {letter.attempts for letter in desk.letters()} == {2000}
    waiting = eventually(desk.runner.delayed.list)
    seconds, _ = desk.client.time()
    assert all(0 < one.run_at - seconds <= 301 for one in waiting)
    assert {one.attempt for one in waiting} <= {1990, 1991}
    for one in waiting:
        assert desk.runner.delayed.cancel(one.id)
    assert not worker.log_lines("could not be handled")

    desk.send("tireless", [None])
    eventually(lambda: len(desk.letters()) == 4, 30)
    assert len(ledger.runs("tireless")) == 300


@pytest.mark.parametrize(("delay", "where"), [(0.8, "parked"), (1.6, "delayed")])
def test_bl17_attempts_are_counted_over_killed_processes(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
    delay: float,
    where: str,
) -> None:
    """The worker is killed between attempts, while the retry waits: it comes when it is due, and
    exactly max_retry attempts are made."""
    tasks = tasks_file(
        f"""
        @task(name="fail", max_retry=3, retry_delay={delay})
        def fail(payload):
            with record("fail"):
                raise ValueError
        """
    )
    desk = make_desk(server.url, reclaim_delay=1)
    desk.send("fail", [None])
    for attempt in (1, 2, 3):
        worker = make_worker(tasks_file=tasks, queue={"reclaim_delay": 1})
        ledger.wait_started("fail", times=attempt, timeout=15)
        if attempt < 3:
            if where == "parked":
                eventually(lambda: [one.consumer[-2:] for one in desk.held()] == ["_0"])
            else:
                eventually(lambda: len(desk.runner.delayed) == 1)
            worker.kill()
    eventually(desk.is_empty)
    runs = ledger.runs("fail")
    assert len(runs) == 3
    for earlier, later in itertools.pairwise(runs):
        assert earlier.end is not None
        assert later.start - earlier.end > delay - 0.05
    (letter,) = desk.letters()
    assert letter.attempts == 3


def test_bl17_failures_keep_no_payload_in_memory(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """Exceptions that hold the payload, by argument and by traceback, are let go when the attempt
    is settled, though the errors are kept for the application to look at."""
    worker = make_worker(
        tasks_file=tasks_file(
            """
            def on_error(report):
                pass

            SETTINGS = {"on_error": on_error}

            @task(name="fail", max_retry=2, retry_delay=0.01)
            def fail(payload):
                copy = payload + "!"
                if current_task().attempt == 1:
                    raise ValueError(copy)
                raise KeyError(payload) from ValueError(copy)
            """
        ),
        config={"dead_letter_limit": 2, "num_workers": 2, "batch_size": 2},
    )
    desk = make_desk(server.url)

    def fail(times: int) -> int:
        for _ in range(times):
            desk.send("fail", ["x" * 5_000_000])
            eventually(desk.is_done, 10)
        return worker.rss_bytes()

    before = fail(10)
    grown = fail(40) - before
    assert grown < 60e6, f"{grown / 1e6:.0f} MB more after 40 failures with 5 MB each"
    assert len(worker.status()["errors"]) >= 100
