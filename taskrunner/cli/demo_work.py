"""Floor 5. The demo's work: what one task does with a file, and the worker that runs it.

Each worker appends its results to a file of its own, where no fault of Redis can hide or fake one.
"""

import hashlib
import json
import os
import time
from typing import Any, Final

import attrs

from taskrunner.config import Timings
from taskrunner.context import current_task
from taskrunner.runner import TaskRunner
from taskrunner.store.stream import RedisStreamQueue
from taskrunner.task import Registry, Task, task

GROUP: Final = "demo"
TASK: Final = "measure-file"
RECLAIM_DELAY: Final = 2.0
_CHUNK: Final = 1 << 20


@attrs.frozen(kw_only=True)
class Measurement:
    """What a task finds out about one file."""

    size: int
    sha256: str
    lines: int
    words: int


def measure(path: str) -> Measurement:
    """Read a file in pieces; words are what whitespace separates."""
    digest, size, lines, words, in_word = hashlib.sha256(), 0, 0, 0, False
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            lines += chunk.count(b"\n")
            # A word that goes on over the edge of two pieces is counted once.
            words += len(chunk.split()) - (in_word and not chunk[:1].isspace())
            in_word = not chunk[-1:].isspace()
    return Measurement(size=size, sha256=digest.hexdigest(), lines=lines, words=words)


def make_runner(url: str, registry: Registry, **settings: Any) -> TaskRunner:
    """Make a runner with short periods, so that a lost delivery is back in seconds."""
    return TaskRunner(
        consumer_group=GROUP,
        queue=RedisStreamQueue(url, prefix=GROUP, reclaim_delay=RECLAIM_DELAY),
        registry=registry,
        num_workers=4,
        timings=Timings(lease=2, presence=3, poll=1),
        **settings,
    )


def make_task(registry: Registry, results: int | None = None) -> Task[str]:
    """Register the task; where it runs, `results` is the open file that takes its results.

    A result is a line of JSON: `path`, `attempt`, `at` (monotonic), and the measurement, or `error`
    for an attempt that failed.
    """

    @task(name=TASK, registry=registry, max_retry=3, retry_delay=0.2)
    def measure_file(path: str) -> None:
        line: dict[str, Any] = {"path": path, "attempt": current_task().attempt}
        try:
            line |= attrs.asdict(measure(path))
        except OSError as error:
            line["error"] = str(error)
            raise
        finally:
            line["at"] = time.monotonic()
            # One write in append mode: the line is there whole, or torn at the file's end.
            if results is not None:
                os.write(results, json.dumps(line).encode() + b"\n")

    return measure_file


def work(spec: str) -> None:
    """Be a worker until SIGTERM; `spec` is JSON: `url`, `host`, and `results`, a path."""
    wanted: dict[str, str] = json.loads(spec)
    registry = Registry()
    make_task(registry, os.open(wanted["results"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    make_runner(wanted["url"], registry, host=wanted["host"]).run_forever()
