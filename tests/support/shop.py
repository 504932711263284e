"""An application for `taskrunner worker`, typed as a user would, and what its tasks did."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.support.names import Names
from tests.support.server import process_is_alive
from tests.support.waiting import eventually
from tests.support.worker import ROOT

APP = """
import os, signal, time
from pathlib import Path

from taskrunner import RedisStreamQueue, Registry, TaskRunner, current_task, task

registry = Registry()
out = Path(os.environ["SHOP_OUT"])

def ran(payload):
    with out.open("a") as file:
        file.write(f"{os.getpid()} {payload}\\n")

@task(name="note", registry=registry)
def note(payload):
    ran(payload)

@task(name="nap", registry=registry, max_retry=3)
def nap(payload):
    ran("begin")
    time.sleep(payload)
    ran("end")

@task(name="grow", registry=registry)
def grow(payload):
    global kept
    kept = b"x" * payload
    ran("grown")

@task(name="compute", registry=registry)
def compute(payload):
    begin, end = time.time(), time.thread_time() + payload
    while time.thread_time() < end:
        pass
    ran(f"{begin} {time.time()}")

@task(name="child", registry=registry)
def child(payload):
    ran("child")

@task(name="parent", registry=registry)
def parent(payload):
    ran("parent")
    child.delay(1)

runner = TaskRunner(
    consumer_group=os.environ["SHOP_GROUP"],
    queue=RedisStreamQueue(os.environ["SHOP_URL"], prefix=os.environ["SHOP_PREFIX"]),
    registry=registry,
    host=os.environ["SHOP_HOST"],
    block_duration=float(os.environ.get("SHOP_BLOCK", "5")),
    shutdown_timeout=5,
)
if os.environ.get("SHOP_DIES"):
    if not os.environ.get("SHOP_PARENT"):
        os.environ["SHOP_PARENT"] = "1"
    else:
        os._exit(9)
"""


_IN_ORDER = 3.0


class Typed:
    """One `taskrunner worker`, started; its children are found by what they log."""

    def __init__(self, words: list[str], cwd: Path, env: dict[str, str]) -> None:
        self.log_file = cwd / "log"
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "taskrunner", "worker", *words],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def children(self) -> list[int]:
        """The pids of all children there ever were, in order."""
        return [int(pid) for pid in re.findall(r"process p\d+ started, pid (\d+)", self.log)]

    @property
    def living(self) -> list[int]:
        return [pid for pid in self.children if process_is_alive(pid)]

    def wait_started(self, times: int = 1) -> None:
        eventually(lambda: self.log.count(" started: ") >= times, 20, message=lambda: self.log)

    def wait(self, timeout: float = 20) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log) from None

    def get(self, path: str) -> tuple[int, str]:
        """Ask a probe; (0, "") before there is a port."""
        port = re.search(r"probes +port (\d+)", self.log)
        if port is None:
            return 0, ""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode().strip()

    def close(self) -> None:
        """End it whatever state it is in: in order, for `make coverage` counts only what was not
        killed; by force where that lasts."""
        for pid in self.living:
            _send(pid, signal.SIGCONT)
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        with suppress(AssertionError):
            eventually(lambda: self.process.poll() is not None and not self.living, _IN_ORDER)
        for pid in self.living:
            _send(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def _send(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


class Shop:
    """An application in a directory of its own, and what its tasks did."""

    def __init__(self, directory: Path, url: str, names: Names) -> None:
        self.directory = directory
        self.out = directory / "out"
        (directory / "shop.py").write_text(APP)
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SHOP_OUT": str(self.out),
            "SHOP_GROUP": names.group,
            "SHOP_PREFIX": names.prefix,
            "SHOP_HOST": names.host,
            "SHOP_URL": url,
        }
        self.made: list[Typed] = []

    def worker(self, *words: str, spec: str = "shop:runner", **env: str) -> Typed:
        typed = Typed([spec, *words], self.directory, {**self.env, **env})
        self.made.append(typed)
        return typed

    def ran(self) -> list[tuple[int, str]]:
        """(pid, what) of every run so far."""
        if not self.out.exists():
            return []
        lines = [line.split(" ", 1) for line in self.out.read_text().splitlines()]
        return [(int(pid), what) for pid, what in lines]

    def close(self) -> None:
        for worker in self.made:
            worker.close()
