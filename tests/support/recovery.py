"""The check after every fault: the same worker process works on as if nothing had happened."""

import time
from collections import Counter

from tests.support.desk import Desk
from tests.support.ledger import Ledger
from tests.support.waiting import eventually
from tests.support.worker import WorkerProcess

_MOST_CPU = 0.2  # of a core
_MOST_LINES = 5  # a second


def service_threads(worker: WorkerProcess) -> set[str]:
    """Names of the worker's threads that belong to the library."""
    return {name for name in worker.status()["threads"] if name.startswith("taskrunner-")}


def assert_said_once(lines: list[str]) -> None:
    """Fail if one part of the worker says twice, in these lines of log, that it fails.

    For the lines of one fault: a failure is said when it begins, not at each try.
    """
    said = Counter(
        line.partition(" taskrunner.")[2].partition(": ")[2].partition(", retrying")[0]
        for line in lines
        if ", retrying with backoff" in line
    )
    again = {text: times for text, times in said.items() if times > 1}
    assert not again, f"said again and again: {again}"


def assert_recovered(
    worker: WorkerProcess,
    desk: Desk,
    ledger: Ledger,
    threads: set[str],
    *,
    quiet: float = 1.0,
    within: float = 10.0,
) -> None:
    """Fail unless a fresh task runs in the same process, `threads` live, and it is quiet then.

    `threads`: what `service_threads` returned before the fault. Quiet: less than a fifth of a core
    and five log lines a second, for `quiet` seconds.
    """
    fresh = f"fresh-{time.monotonic_ns()}"
    eventually(lambda: desk.send("note", [fresh]), within)  # the server may not be back yet
    ledger.wait_finished([fresh], within)
    assert worker.running, worker.log()
    eventually(
        lambda: not threads - service_threads(worker),
        within,
        message=lambda: f"threads gone: {threads - service_threads(worker)}\n{worker.log()}",
    )
    eventually(desk.is_empty, within, message=lambda: f"{desk.held()}\n{worker.log()[-3000:]}")
    lines, cpu, started = len(worker.log().splitlines()), worker.cpu_seconds(), time.monotonic()
    time.sleep(quiet)
    seconds = time.monotonic() - started
    new = worker.log().splitlines()[lines:]
    used = (worker.cpu_seconds() - cpu) / seconds
    assert used < _MOST_CPU, f"uses {used:.0%} of a core while idle\n{worker.log()[-3000:]}"
    assert len(new) < _MOST_LINES * seconds, "\n".join(new[:100])
