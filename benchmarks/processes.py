"""`python -m benchmarks.processes`: what a second worker process gives to tasks that compute.

`taskrunner worker --processes 1` and `--processes 2`, as typed, take turns at draining the same
tasks of 5 ms of pure Python. Prints each pair, and the median of their ratios; on two cores with
nothing beside, 2 is the most there can be, and the goal is 1.8.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from taskrunner import Registry, TaskRunner, task
from taskrunner.cli.embedded import EmbeddedServer

_TASK = 0.005  # seconds of this thread's processor time
_POLL = 0.005
_MOST = 120.0
_VARIABLE = "TASKRUNNER_REDIS_URL"

registry = Registry()
runner = TaskRunner(consumer_group="processes", registry=registry, num_workers=2, batch_size=10)


@task(name="compute", registry=registry)
def compute(_: int) -> None:
    """Five milliseconds of a processor, however long that takes."""
    end = time.thread_time() + _TASK
    while time.thread_time() < end:
        pass


def drain_rate(url: str, processes: int, count: int) -> float:
    """Tasks a second of that many processes, once all have started."""
    producer = TaskRunner(consumer_group="processes", client=url, registry=registry)
    with tempfile.TemporaryFile() as log:
        worker = subprocess.Popen(
            [
                *(sys.executable, "-m", "taskrunner", "worker", "benchmarks.processes:runner"),
                *("--processes", str(processes)),
            ],
            env={**os.environ, _VARIABLE: url},
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + _MOST
            while _said(log.fileno()).count(b" started: ") < processes:
                _pause(deadline)
            start = time.monotonic()
            producer.dispatch_many("compute", range(count))
            while len(producer.queue):
                _pause(deadline)
            return count / (time.monotonic() - start)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait()
            producer.stop()


def _said(log: int) -> bytes:
    return os.pread(log, 1 << 20, 0)


def _pause(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"not done within {_MOST:g} s")
    time.sleep(_POLL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in turns and print; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="pairs (default: 7)")
    parser.add_argument("--tasks", type=int, default=800, help="in each drain (default: 800)")
    options = parser.parse_args(arguments)
    ratios = []
    with EmbeddedServer() as server:
        for number in range(options.repeats):
            turns = (1, 2) if number % 2 == 0 else (2, 1)
            rates = {turn: drain_rate(server.url, turn, options.tasks) for turn in turns}
            ratios.append(rates[2] / rates[1])
            print(
                f"1 process {rates[1]:6.1f}/s, 2 processes {rates[2]:6.1f}/s: {ratios[-1]:.2f} x, "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.2f} x, best {max(ratios):.2f} x")
    return 0


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    sys.exit(main())
