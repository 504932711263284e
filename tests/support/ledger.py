"""The ledger: what really ran, written by task bodies to a file that no fault in Redis can hide.

A run writes a line when it starts and one when it ends, each with one write in append mode, so a
run that was killed shows as started and not ended.
"""

import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import eventually

ENV_VARIABLE = "TASKRUNNER_TEST_LEDGER"


@dataclass(frozen=True)
class Run:
    """One run of a task body; times are of the monotonic clock, which all processes share."""

    id: Any
    pid: int
    thread: str
    start: float
    end: float | None
    outcome: str | None

    @property
    def seconds(self) -> float:
        assert self.end is not None, f"{self} never ended"
        return self.end - self.start


@contextmanager
def record(id_: Any, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Write this run to the ledger: a line now, and one when the block ends, however it does."""
    target = path if path is not None else os.environ[ENV_VARIABLE]
    token = secrets.token_hex(6)
    thread = threading.current_thread().name
    _append(
        target,
        {"run": token, "id": id_, "pid": os.getpid(), "thread": thread, "start": time.monotonic()},
    )
    outcome = "returned"
    try:
        yield
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        _append(target, {"run": token, "end": time.monotonic(), "outcome": outcome})


def _append(path: str | os.PathLike[str], line: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


class Ledger:
    """Reads the runs of one ledger file; may be asked while workers write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._read_up_to = 0
        self._lines: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def runs(self, id_: Any = None) -> list[Run]:
        """Return all runs in order of their start, or those of one id."""
        with self._lock:
            self._read_on()
            runs = [Run(**line) for line in self._lines.values() if id_ in (None, line["id"])]
        return sorted(runs, key=lambda run: run.start)

    def _read_on(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._read_up_to)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # a torn last line is not there yet
        self._read_up_to += len(whole)
        for raw in whole.splitlines():
            line = json.loads(raw)
            token = line.pop("run")
            if "start" in line:
                self._lines[token] = {"end": None, "outcome": None, **line}
            else:
                self._lines[token].update(line)

    def counts(self) -> Counter[Any]:
        """Return how often each id was started."""
        return Counter(run.id for run in self.runs())

    def finished(self) -> Counter[Any]:
        """Return how often each id ended without an error."""
        return Counter(run.id for run in self.runs() if run.outcome == "returned")

    def wait_started(self, id_: Any, timeout: float = 10.0, *, times: int = 1) -> Run:
        """Return the `times`-th run of `id_` once it has started."""
        eventually(
            lambda: len(self.runs(id_)) >= times, timeout, message=lambda: f"{id_!r} to start"
        )
        return self.runs(id_)[times - 1]

    def wait_finished(self, ids: Iterable[Any], timeout: float = 10.0) -> None:
        """Wait until each of `ids` has ended without an error at least once."""
        wanted = set(ids)

        def missing() -> set[Any]:
            return wanted - self.finished().keys()

        eventually(
            lambda: not missing(),
            timeout,
            interval=0.05,
            message=lambda: (
                f"{len(missing())} never finished, such as {sorted(missing(), key=str)[:5]}"
            ),
        )

    def assert_once(self, ids: Iterable[Any]) -> None:
        """Fail unless each of `ids` ran exactly once, and nothing else did."""
        counts, wanted = self.counts(), set(ids)
        lost, foreign = wanted - counts.keys(), counts.keys() - wanted
        twice = {id_: n for id_, n in counts.items() if n > 1}
        assert not (lost or foreign or twice), f"{lost=} {twice=} {foreign=}"
