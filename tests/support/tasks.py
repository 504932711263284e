"""Tasks that most tests can use; a payload is an id, or a dict with `id` and what is needed."""

import os
import signal
import threading
import time
from typing import Any

from taskrunner import Reject, Retry, current_task, task
from tests.support.ledger import record


def _id(payload: Any) -> Any:
    return payload["id"] if isinstance(payload, dict) else payload


@task(name="noop")
def noop(payload: Any = None) -> None:
    """Do nothing at all, not even in the ledger."""


@task(name="note")
def note(payload: Any) -> None:
    """Enter the run in the ledger."""
    with record(_id(payload)):
        pass


@task(name="sleep")
def sleep(payload: dict[str, Any]) -> None:
    """Take `seconds`."""
    with record(payload["id"]):
        time.sleep(payload["seconds"])


@task(name="spin")
def spin(payload: dict[str, Any]) -> None:
    """Use the processor for `seconds`."""
    with record(payload["id"]):
        until = time.monotonic() + payload["seconds"]
        while time.monotonic() < until:
            pass


@task(name="wait-for-file")
def wait_for_file(payload: dict[str, Any]) -> None:
    """Run until the file `path` exists: the test decides when."""
    with record(payload["id"]):
        while not os.path.exists(payload["path"]):
            time.sleep(0.01)


@task(name="until-stopping")
def until_stopping(payload: Any) -> None:
    """Run until the runner is asked to stop."""
    with record(_id(payload)):
        while not current_task().stopping:
            time.sleep(0.01)


@task(name="fail-below", max_retry=5, retry_delay=0.2)
def fail_below(payload: dict[str, Any]) -> None:
    """Fail on each attempt below `attempt`."""
    with record(payload["id"]):
        if current_task().attempt < payload["attempt"]:
            raise ValueError(f"attempt {current_task().attempt}")


@task(name="fail", max_retry=3, retry_delay=0.2)
def fail(payload: Any) -> None:
    """Fail always."""
    with record(_id(payload)):
        raise ValueError("always")


@task(name="fail-once-delay-half", max_retry=2, retry_delay=0.5)
def fail_once_delay_half(payload: Any) -> None:
    """Fail on the first attempt; the retry is due half a second later."""
    with record(_id(payload)):
        if current_task().attempt == 1:
            raise ValueError("first")


@task(name="retry-once", max_retry=3)
def retry_once(payload: dict[str, Any]) -> None:
    """Ask for a retry after `delay` on the first attempt."""
    with record(payload["id"]):
        if current_task().attempt == 1:
            raise Retry(payload.get("delay"))


@task(name="reject", max_retry=5)
def reject(payload: Any) -> None:
    """Give up at once."""
    with record(_id(payload)):
        raise Reject("not wanted")


@task(name="raise-system-exit", max_retry=2, retry_delay=0.1)
def raise_system_exit(payload: Any) -> None:
    """Raise SystemExit."""
    with record(_id(payload)):
        raise SystemExit(3)


@task(name="exit-process", max_retry=3, max_lost=0)
def exit_process(payload: Any) -> None:
    """End the whole process on the spot."""
    with record(_id(payload)):
        os._exit(1)


@task(name="kill-process", max_retry=3, max_lost=0)
def kill_process(payload: Any) -> None:
    """Kill the whole process with SIGKILL."""
    with record(_id(payload)):
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


@task(name="exit-process-default")
def exit_process_default(payload: Any) -> None:
    """End the whole process on the spot, with the default limits."""
    with record(_id(payload)):
        os._exit(1)


@task(name="note-many-lives", max_lost=50)
def note_many_lives(payload: Any) -> None:
    """Take a moment, and survive many lost processes."""
    with record(_id(payload)):
        time.sleep(0.005)


@task(name="limited", time_limit=0.5, max_retry=1)
def limited(payload: dict[str, Any]) -> None:
    """Take `seconds` under a time limit of half a second."""
    with record(payload["id"]):
        until = time.monotonic() + payload["seconds"]
        while time.monotonic() < until:
            time.sleep(0.01)


@task(name="unique", unique_for=60, unique_key=lambda payload: str(_id(payload)))
def unique(payload: Any) -> None:
    """One at a time for each id; takes `seconds` if given."""
    with record(_id(payload)):
        if isinstance(payload, dict):
            time.sleep(payload.get("seconds", 0))
