"""Waiting for a condition with a deadline, instead of sleeping and hoping."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def busy(least: float = 1.0) -> float:
    """Seconds that a busy machine may add to what is promised.

    At least so many; beyond them, as many as processes wait for each of its processors, so that a
    quiet machine tests the promise and a crowded one doesn't cry wolf.
    """
    return max(least, os.getloadavg()[0] / (os.cpu_count() or 1))


def eventually(
    predicate: Callable[[], T],
    timeout: float = 10.0,
    *,
    interval: float = 0.01,
    message: str | Callable[[], str] = "",
) -> T:
    """Return the first truthy value of `predicate()`; fail after `timeout` seconds, on a busy
    machine some later.

    Assertion errors and errors of a server that is away count as "not yet". The failure shows the
    last value or error, and `message` (called only then, if callable).
    """
    deadline = time.monotonic() + timeout + busy(0)
    while True:
        try:
            value = predicate()
            if value:
                return value
            last = repr(value)
        except (AssertionError, OSError, LookupError) as error:
            last = f"{type(error).__name__}: {error}"
        except Exception as error:
            if not type(error).__module__.startswith("redis"):
                raise
            last = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            text = message() if callable(message) else message
            raise AssertionError(f"not within {timeout:g} s (last: {last}) {text}".rstrip())
        time.sleep(interval)


def stays(predicate: Callable[[], object], seconds: float, *, interval: float = 0.02) -> None:
    """Fail as soon as `predicate()` is not truthy within the next `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = predicate()
        assert value, f"stopped holding {deadline - time.monotonic():.2f} s early: {value!r}"
        time.sleep(interval)
