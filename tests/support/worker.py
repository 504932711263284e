"""A worker in a process of its own, that a test may signal, freeze, kill and question."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs

from taskrunner import TaskRunnerConfig, Timings
from tests.support.ledger import ENV_VARIABLE, Ledger
from tests.support.server import pause_process, process_is_alive
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
STOCK_TASKS = Path(__file__).with_name("tasks.py")

FAST_TIMINGS: dict[str, float] = {"lease": 2, "presence": 3, "poll": 0.5, "janitor": 2}
FAST_QUEUE: dict[str, Any] = {"reclaim_delay": 2}
FAST_CONFIG: dict[str, Any] = {"shutdown_timeout": 3, "num_workers": 4}

DEFAULTS: dict[str, dict[str, Any]] = {
    "config": {name: getattr(TaskRunnerConfig(consumer_group="g"), name) for name in FAST_CONFIG},
    "timings": attrs.asdict(Timings()),
    "queue": {"reclaim_delay": 300},
}
"""`make_worker(**DEFAULTS)`: as a user gets it, without the short times above."""


class WorkerProcess:
    """Runs `tasks_file` with a runner in a fresh Python process.

    `config`, `timings`, `queue` and `client` are JSON-able arguments of TaskRunnerConfig, Timings,
    RedisStreamQueue and `tests.support.connect`, laid over short defaults (FAST_…). The task bodies
    write to `ledger` through `tests.support.ledger.record`. The log is kept in `log_file`.
    """

    def __init__(
        self,
        *,
        directory: Path,
        url: str,
        group: str,
        prefix: str,
        ledger: Ledger,
        tasks_file: Path = STOCK_TASKS,
        config: dict[str, Any] | None = None,
        timings: dict[str, Any] | None = None,
        queue: dict[str, Any] | None = None,
        client: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        log_level: str = "INFO",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log_file = directory / "worker.log"
        self._spec_file = directory / "spec.json"
        self._spec = {
            "url": url,
            "group": group,
            "prefix": prefix,
            "module": str(tasks_file),
            "config": {**FAST_CONFIG, **(config or {})},
            "timings": {**FAST_TIMINGS, **(timings or {})},
            "queue": {**FAST_QUEUE, **(queue or {})},
            "client": client or {},
            "log_level": log_level,
        }
        self._env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
            ),
            ENV_VARIABLE: str(ledger.path),
            **(env or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the worker was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal's number for a killed one; None while it lives."""
        return self.process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True, timeout: float = 20.0) -> "WorkerProcess":
        """Start the process; with `wait`, until its runner says that it has started."""
        self._spec_file.write_text(json.dumps(self._spec))
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.worker_main", str(self._spec_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                cwd=ROOT,
                bufsize=0,
            )
        if wait:
            eventually(self._has_started, timeout, message=self.log)
        return self

    def _has_started(self) -> bool:
        try:
            return bool(self.status()["state"] == "started")
        except AssertionError:
            if self.running:
                raise
            raise RuntimeError(f"ended with {self.returncode}\n{self.log()}") from None

    def signal(self, signum: int) -> None:
        """Send a signal; one to a process that has ended is ignored."""
        self.process.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        pause_process(self.pid)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self.signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """SIGINT, without waiting."""
        self.signal(signal.SIGINT)

    def wait(self, timeout: float = 15.0) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s\n{self.log()}") from None

    def stop(self, timeout: float = 15.0) -> int:
        """SIGTERM, wait for the orderly end and return the exit code."""
        self.terminate()
        return self.wait(timeout)

    def close(self) -> None:
        """End it whatever state it is in; called at the end of each test."""
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            # Without its control channel it exits, and `make coverage` counts what it ran.
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self.kill()

    def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """Ask the process for its state, threads (names), workers, errors, CPU time, memory …"""
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"status\n")
        except BrokenPipeError:
            raise AssertionError(f"ended with {process.wait()}\n{self.log()}") from None
        deadline = time.monotonic() + timeout
        answer = b""
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, left))
            assert ready, f"no answer within {timeout:g} s\n{self.log()}"
            piece = process.stdout.read(65536)
            assert piece, f"ended with {process.wait()}\n{self.log()}"
            answer += piece
        status: dict[str, Any] = json.loads(answer.splitlines()[-1])
        return status

    def log(self) -> str:
        """Return all it has logged and printed so far, over all its starts."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def log_lines(self, *parts: str) -> list[str]:
        """Return the log lines that hold each of `parts`."""
        return [line for line in self.log().splitlines() if all(part in line for part in parts)]

    def cpu_seconds(self) -> float:
        """Return the processor time used so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Return the present resident size."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


__all__ = [
    "DEFAULTS",
    "FAST_CONFIG",
    "FAST_QUEUE",
    "FAST_TIMINGS",
    "WorkerProcess",
    "process_is_alive",
]
