"""Floor 5. `taskrunner demo`: real work on real files, with a worker killed in the middle of it.

Starts a private server and two worker processes, and dispatches one task for each file of a
directory: it reads the file and computes its SHA-256, its lines and its words. Half way, one worker
is killed with SIGKILL while it holds deliveries, and another is started. In the end every result is
checked against a direct computation; one that is missing or wrong makes the exit code 1.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from taskrunner.cli.demo_work import GROUP, RECLAIM_DELAY, make_runner, make_task, measure, work
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.cli.progress import Progress
from taskrunner.cli.watcher import has_ended
from taskrunner.task import Registry

HELP: Final = "real work on real files: kills a worker half way and checks every result"

_NOT_READ: Final = frozenset({"__pycache__", "site-packages", "dist-packages"})
_ROUND: Final = 0.02
_STALLED: Final = 30.0  # seconds without any result
_SHOWN_FAULTS: Final = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `taskrunner demo`."""
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="whose files are measured (default: Python's standard library)",
    )
    parser.add_argument(
        "--limit", type=_positive, default=2000, help="at most so many files (default: %(default)s)"
    )
    parser.add_argument("--no-kill", action="store_true", help="let both workers live")
    parser.add_argument("--as-worker", metavar="SPEC", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo, or one of its workers, and return the exit code."""
    if arguments.as_worker:
        work(arguments.as_worker)
        return 0
    paths = find_files(arguments.directory, arguments.limit)
    if not paths:
        print(f"taskrunner demo: no readable files in {arguments.directory}", file=sys.stderr)
        return 1
    with EmbeddedServer() as server:
        print(f"server  pid {server.pid}, {server.url}")
        return _Demo(server, paths, kill=not arguments.no_kill).run()


def find_files(directory: Path, limit: int) -> list[str]:
    """Return up to `limit` readable regular files below a directory, in order of their paths."""
    return [path for _, path in zip(range(limit), _walk(directory), strict=False)]


def _walk(directory: Path) -> Iterator[str]:
    for root, folders, names in os.walk(directory.absolute()):
        folders[:] = sorted(name for name in folders if name not in _NOT_READ)
        for name in sorted(names):
            path = os.path.join(root, name)
            # A payload is JSON, which can't carry a name that isn't text.
            if path.isprintable() and os.path.isfile(path) and os.access(path, os.R_OK):
                yield path


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


@attrs.define(kw_only=True)
class _Worker:
    """A worker process, and how far its results have been read."""

    host: str
    process: subprocess.Popen[bytes]
    log: Path
    results: Path
    read_up_to: int = 0

    def new_results(self) -> list[dict[str, Any]]:
        """Return what was written since the last call; a line torn by a kill is not a result."""
        if not self.results.exists():
            return []
        with self.results.open("rb") as file:
            file.seek(self.read_up_to)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.read_up_to += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


@attrs.define
class _Results:
    """The results of all workers; of a path that ran twice, the first one counts."""

    by_path: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    runs: Counter[str] = attrs.field(factory=Counter)
    failures: Counter[str] = attrs.field(factory=Counter)
    reclaimed: set[str] = attrs.field(factory=set)
    first_at: float = float("inf")
    last_at: float = 0.0

    def __len__(self) -> int:
        return len(self.by_path)

    def add(self, result: dict[str, Any]) -> None:
        path = result["path"]
        if "error" in result:
            self.failures[path] += 1
            return
        self.runs[path] += 1
        # Attempts that no failure explains were lost with their worker.
        if result["attempt"] - 1 > self.failures[path]:
            self.reclaimed.add(path)
        self.by_path.setdefault(path, result)
        self.first_at = min(self.first_at, result["at"])
        self.last_at = max(self.last_at, result["at"])

    def total(self, name: str) -> int:
        return sum(result[name] for result in self.by_path.values())


class _Demo:
    def __init__(self, server: EmbeddedServer, paths: list[str], *, kill: bool) -> None:
        self._url = server.url
        self._watcher = server.watcher
        self._paths = paths
        self._kill = kill
        self._workers: list[_Worker] = []
        self._killed: _Worker | None = None
        self._at_kill = (0.0, 0)  # when, and how many results there were
        self._results = _Results()
        self._progress = Progress(len(paths))
        registry = Registry()
        self._task = make_task(registry)
        self._runner = make_runner(self._url, registry)

    def run(self) -> int:
        for host in ("worker-1", "worker-2"):
            self._start_worker(host)
        started = time.monotonic()
        self._task.delay_many(self._paths)
        took = time.monotonic() - started
        self._progress.say(f"one task for each of {len(self._paths):,} files sent in {took:.2f} s")
        complete = self._wait_for_results()
        elapsed = time.monotonic() - started
        codes = self._stop_workers()
        self._progress.end()
        faults = self._check()
        if not complete or any(codes):
            self._show_logs()
        self._summarise(elapsed, codes)
        return self._conclude(faults, codes)

    def _start_worker(self, host: str) -> None:
        directory = self._watcher.directory
        results, log = directory / f"{host}.results", directory / f"{host}.log"
        spec = json.dumps({"url": self._url, "host": host, "results": str(results)})
        process = self._watcher.launch(
            [sys.executable, "-m", "taskrunner", "demo", "--as-worker", spec], log=log
        )
        self._workers.append(_Worker(host=host, process=process, log=log, results=results))
        self._progress.say(f"{host} pid {process.pid} started")

    def _stop_workers(self) -> list[int]:
        """Stop what lives, in order, and return the exit codes."""
        living = [worker for worker in self._workers if worker is not self._killed]
        codes = [self._watcher.end(worker.process, signal.SIGTERM) for worker in living]
        self._read_results()
        return codes

    def _wait_for_results(self) -> bool:
        """Wait until every path has a result; False where some will have none."""
        heard = time.monotonic()
        while len(self._results) < len(self._paths):
            now = time.monotonic()
            if self._read_results():
                heard = now
            elif now - heard > _STALLED:
                print(f"no result for {_STALLED:g} s: giving up")
                return False
            elif len(self._results) + len(self._runner.dead_letters) >= len(self._paths):
                return False
            waiting = self._killed is not None and now - heard > 5 * _ROUND
            self._progress.show(len(self._results), "waiting for the reclaim" if waiting else "")
            half_way = len(self._results) >= len(self._paths) // 2
            if self._kill and half_way and self._killed is None:
                self._kill_one()
            time.sleep(_ROUND)
        return True

    def _read_results(self) -> bool:
        """Take in what the workers have written; whether there was anything."""
        news = [result for worker in self._workers for result in worker.new_results()]
        for result in news:
            self._results.add(result)
        return bool(news)

    def _kill_one(self) -> None:
        """Kill a worker that holds deliveries; one that holds none, when frozen, may go on."""
        for worker in self._workers:
            if has_ended(worker.process):
                continue
            os.kill(worker.process.pid, signal.SIGSTOP)
            held = self._held_by(worker)
            if held == 0:
                os.kill(worker.process.pid, signal.SIGCONT)
                continue
            self._watcher.end(worker.process, signal.SIGKILL)
            self._killed = worker
            self._read_results()
            self._at_kill = (time.monotonic(), len(self._results))
            self._progress.say(
                f"{worker.host} pid {worker.process.pid} killed with SIGKILL: the {held} deliveries "
                f"it held are reclaimed after {RECLAIM_DELAY:g} s"
            )
            self._start_worker("worker-3")
            return

    def _held_by(self, worker: _Worker) -> int:
        groups = self._runner.queue.get_metrics(GROUP).groups
        consumers = [consumer for group in groups for consumer in group.consumers]
        return sum(one.pending for one in consumers if f"_{worker.host}_" in one.name)

    def _check(self) -> list[str]:
        """Compare every result with a direct computation; return what is missing or wrong."""
        faults = []
        for path in self._paths:
            result = self._results.by_path.get(path)
            if result is None:
                faults.append(f"missing: {path}")
                continue
            wanted = attrs.asdict(measure(path))
            found = {name: result[name] for name in wanted}
            if found != wanted:
                faults.append(f"wrong: {path}: {found}, not {wanted}")
        if left := len(self._runner.queue):
            faults.append(f"left in the stream: {left}")
        faults += [
            f"dead letter: {letter.payload}: {letter.error_type}: {letter.error}"
            for letter in self._runner.dead_letters.list()
        ]
        return faults

    def _summarise(self, elapsed: float, codes: list[int]) -> None:
        results = self._results
        until, done = self._at_kill if self._killed else (results.last_at, len(results))
        rate = done / max(until - results.first_at, 0.001) if done else 0
        twice = sum(1 for runs in results.runs.values() if runs > 1)
        rows = {
            "files": f"{len(results):,} of {len(self._paths):,}",
            "bytes": f"{results.total('size'):,}",
            "lines": f"{results.total('lines'):,}",
            "words": f"{results.total('words'):,}",
            "tasks/s": f"{rate:,.0f}{' (up to the kill)' if self._killed else ''}",
            "seconds": f"{elapsed:.1f} (from the first dispatch to the last result)",
            "retries": f"{results.failures.total():,}",
            "reclaimed": f"{len(results.reclaimed):,} after the kill",
            "run twice": f"{twice:,} (done, but not settled, when their worker died)",
        }
        if not self._killed:
            rows["reclaimed"] = f"{len(results.reclaimed):,} (no worker was killed)"
        print()
        for name, value in rows.items():
            print(f"  {name:<9}  {value}")
        print()

    def _conclude(self, faults: list[str], codes: list[int]) -> int:
        for fault in faults[:_SHOWN_FAULTS]:
            print(fault)
        if len(faults) > _SHOWN_FAULTS:
            print(f"and {len(faults) - _SHOWN_FAULTS} more")
        if any(codes):
            print(f"workers ended with {codes}, not with 0")
        if faults or any(codes):
            print("FAILED")
            return 1
        print("every result is there and equals a direct computation")
        return 0

    def _show_logs(self) -> None:
        for worker in self._workers:
            if worker.log.exists():
                tail = worker.log.read_text(errors="replace").splitlines()[-20:]
                print(f"--- log of {worker.host}", *tail, sep="\n")
