"""What runs under chaos; a payload is a dict with `id`, and each run is in the ledger.

A ledger id is [task, payload id, message id, attempt, key of a unique one].
"""

import json
import os
import random
import signal
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from taskrunner import Retry, TaskRunner, current_task, task
from tests.support.ledger import record

SETTINGS = {"dead_letter_limit": 10_000_000}
KEYS = 8
UNIQUE_FOR = 30
_MANY = 40  # deliveries lost with their process: innocents outlive them

Payload = dict[str, Any]


def _run(payload: Payload, key: str = "") -> AbstractContextManager[None]:
    context = current_task()
    return record([context.name, payload["id"], context.id, context.attempt, key])


@task(name="quick", max_lost=_MANY)
def quick(payload: Payload) -> None:
    """Take no time."""
    with _run(payload):
        pass


@task(name="takes-time", max_lost=_MANY)
def takes_time(payload: Payload) -> None:
    """Take up to a second and a half."""
    with _run(payload):
        time.sleep(random.random() * 1.5)


@task(name="long", max_lost=_MANY)
def long(payload: Payload) -> None:
    """Take longer than reclaim_delay: only heartbeats keep it."""
    with _run(payload):
        time.sleep(4.5)


@task(name="default")
def default(payload: Payload) -> None:
    """Default limits: one failure, two lost deliveries on top."""
    with _run(payload):
        time.sleep(0.02)


@task(name="flaky", max_retry=4, max_lost=_MANY, retry_delay=0.3)
def flaky(payload: Payload) -> None:
    """Fail below attempt 3; the retries are parked."""
    with _run(payload):
        if current_task().attempt < 3:
            raise ValueError("not yet")


@task(name="late-retry", max_retry=4, max_lost=_MANY)
def late_retry(payload: Payload) -> None:
    """Ask for a retry beyond reclaim_delay, once: it waits in the delayed set."""
    with _run(payload):
        if current_task().attempt < 2:
            raise Retry(4)


@task(name="doomed", max_retry=3, max_lost=_MANY, retry_delay=0.1)
def doomed(payload: Payload) -> None:
    """Fail always."""
    with _run(payload):
        raise ValueError("always")


@task(name="limited", max_retry=2, max_lost=_MANY, retry_delay=0.1, time_limit=0.4)
def limited(payload: Payload) -> None:
    """Exceed the time limit always."""
    with _run(payload):
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            time.sleep(0.01)


@task(name="crash", max_retry=1, max_lost=1)
def crash(payload: Payload) -> None:
    """End the process, but for the one whose memory is watched: there it only fails."""
    with _run(payload):
        if os.environ.get("CHAOS_STEADY"):
            raise ValueError("not this process")
        if payload["n"] % 2:
            os._exit(77)
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


@task(
    name="unique", unique_for=UNIQUE_FOR, unique_key=lambda payload: payload["key"], max_lost=_MANY
)
def unique(payload: Payload) -> None:
    """One at a time for each key."""
    with _run(payload, payload["key"]):
        time.sleep(random.random() * 0.6)


@task(
    name="unique-flaky",
    unique_for=UNIQUE_FOR,
    unique_key=lambda payload: payload["key"],
    max_retry=4,
    max_lost=_MANY,
    retry_delay=0.4,
)
def unique_flaky(payload: Payload) -> None:
    """The same, and the lock is kept over a parked retry."""
    with _run(payload, "flaky-" + payload["key"]):
        time.sleep(random.random() * 0.2)
        if current_task().attempt < 2:
            raise ValueError("not yet")


ENDS_BADLY = frozenset({"doomed", "limited", "crash"})
WEIGHTS = {
    "quick": 30,
    "takes-time": 10,
    "long": 1,
    "default": 12,
    "flaky": 10,
    "late-retry": 5,
    "doomed": 5,
    "limited": 3,
    "crash": 0.5,
    "unique": 12,
    "unique-flaky": 8,
}


def on_runner(runner: TaskRunner) -> None:
    """Write down, fifty times a second, whether this instance takes itself for the leader."""

    def watch() -> None:
        path = os.environ["CHAOS_LEADERS"]
        while True:
            before = time.monotonic()
            led = runner.is_leader
            after = time.monotonic()
            if led and after - before < 0.005:  # else it stood still in between
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.write(descriptor, json.dumps([os.getpid(), after]).encode() + b"\n")
                os.close(descriptor)
            time.sleep(0.02)

    threading.Thread(target=watch, name="chaos-leader", daemon=True).start()
