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
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

from taskrunner.cli.arguments import positive
from taskrunner.cli.demo_results import Results, Worker
from taskrunner.cli.demo_work import GROUP, RECLAIM_DELAY, make_runner, make_task, measure, work
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.cli.progress import Progress
from taskrunner.cli.watcher import has_ended
from taskrunner.store.stream import ConsumerMetrics
from taskrunner.task import Registry

HELP: Final = "real work on real files: kills a worker half way and checks every result"

_NOT_READ: Final = frozenset({"__pycache__", "site-packages", "dist-packages"})
_ROUND: Final = 0.02
_AHEAD: Final = 500  # tasks dispatched and not done
_A_FEW: Final = 20
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
        "--limit",
        type=positive,
        default=2000,
        metavar="N",
        help="at most so many files (default: %(default)s)",
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


class _Demo:
    def __init__(self, server: EmbeddedServer, paths: list[str], *, kill: bool) -> None:
        self._url = server.url
        self._watcher = server.watcher
        self._paths = paths
        self._kill = kill
        self._sent = 0
        self._workers: list[Worker] = []
        self._killed: Worker | None = None
        self._at_kill = (0.0, 0)  # when, and how many results there were
        self._results = Results()
        self._progress = Progress(len(paths))
        registry = Registry()
        self._task = make_task(registry)
        self._runner = make_runner(self._url, registry)

    def run(self) -> int:
        for host in ("worker-1", "worker-2"):
            self._start_worker(host)
        self._wait_for_workers()
        self._progress.say(f"dispatching one task for each of {len(self._paths):,} files")
        started = time.monotonic()
        complete = self._dispatch_and_wait()
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
        self._workers.append(Worker(host=host, process=process, log=log, results=results))
        self._progress.say(f"{host} pid {process.pid} started")

    def _wait_for_workers(self) -> None:
        """Wait until each living worker has joined the group, or has ended, or too long."""
        deadline = time.monotonic() + _STALLED
        for worker in self._living():
            while not has_ended(worker.process) and time.monotonic() < deadline:
                if any(f"_{worker.host}_" in one.name for one in self._consumers()):
                    break
                time.sleep(_ROUND)

    def _living(self) -> list[Worker]:
        return [worker for worker in self._workers if worker is not self._killed]

    def _stop_workers(self) -> list[int]:
        """Stop what lives, in order, and return the exit codes."""
        self._wait_for_workers()  # one that is still being started takes no orderly stop
        living = self._living()
        codes = [self._watcher.end(worker.process, signal.SIGTERM) for worker in living]
        self._read_results()
        return codes

    def _dispatch_and_wait(self) -> bool:
        """Dispatch a task for each path, and wait for its result; False where some will have none."""
        heard = time.monotonic()
        # What a killed worker had done and not settled is still there when all results are.
        while len(self._results) < len(self._paths) or len(self._runner.queue):
            now = time.monotonic()
            if self._read_results():
                heard = now
            elif now - heard > _STALLED:
                print(f"no result for {_STALLED:g} s: giving up")
                return False
            dead = len(self._runner.dead_letters)
            done = len(self._results) + dead
            if dead and done >= len(self._paths):
                return len(self._results) == len(self._paths)
            must_kill = self._kill and self._killed is None
            if must_kill and 2 * len(self._results) >= len(self._paths):
                self._kill_one()
            # A producer that keeps a little ahead: half way there is work left to be lost and found.
            self._send(done + _AHEAD - self._sent, keep=len(self._paths) // 10 if must_kill else 0)
            waiting = self._killed is not None and now - heard > 5 * _ROUND
            self._progress.show(len(self._results), "waiting for the reclaim" if waiting else "")
            time.sleep(_ROUND)
        return True

    def _send(self, count: int, *, keep: int = 0) -> None:
        """Dispatch the next `count` tasks, or fewer: the last `keep` stay."""
        end = min(self._sent + max(0, count), max(self._sent, len(self._paths) - keep))
        self._task.delay_many(self._paths[self._sent : end])
        self._sent = end

    def _read_results(self) -> bool:
        """Take in what the workers have written; whether there was anything."""
        news = [result for worker in self._workers for result in worker.new_results()]
        for result in news:
            self._results.add(result)
        return bool(news)

    def _kill_one(self) -> None:
        """Kill a worker that holds deliveries; one that holds none, when frozen, may go on."""
        for worker in self._living():
            if has_ended(worker.process):
                continue
            os.kill(worker.process.pid, signal.SIGSTOP)
            if self._held_by(worker) == 0:
                # Its process stands still, its blocked read doesn't: the server answers that.
                self._send(_A_FEW)
            held = self._held_by(worker)
            if held == 0:
                os.kill(worker.process.pid, signal.SIGCONT)
                continue
            self._watcher.end(worker.process, signal.SIGKILL)
            self._killed = worker
            self._read_results()
            self._at_kill = (time.monotonic(), len(self._results))
            self._progress.say(
                f"{worker.host} pid {worker.process.pid} killed with SIGKILL; the {held} "
                f"deliveries it held are reclaimed after {RECLAIM_DELAY:g} s"
            )
            self._start_worker("worker-3")
            return

    def _held_by(self, worker: Worker) -> int:
        """How many deliveries a worker holds: fetched, and not settled."""
        return sum(one.pending for one in self._consumers() if f"_{worker.host}_" in one.name)

    def _consumers(self) -> list[ConsumerMetrics]:
        groups = self._runner.queue.get_metrics(GROUP).groups
        return [consumer for group in groups for consumer in group.consumers]

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
            "seconds": f"{elapsed:.1f} (from the first dispatch to the last settlement)",
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
