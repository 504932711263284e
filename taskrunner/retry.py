"""Floor 3: whether a failed attempt is tried again, and when; pure functions.

Where the wait is spent, parked or in the delayed set, is the executor's and the store's affair.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias, cast

from taskrunner import clock
from taskrunner.errors import Reject, Retry
from taskrunner.task import RetryDelay

Outcome: TypeAlias = Literal["succeeded", "retry", "failed", "rejected", "lost"]
"""How an attempt can end; `lost`: it failed, but another consumer had taken the message over."""

_FIRST = 1.0
_CAP = 300.0
_DOUBLINGS = 9  # the ceiling is at the cap from here on; 2**attempt would overflow a float


def is_final(error: BaseException, attempt: int, max_retry: int) -> bool:
    """Return whether an error on this attempt fails the task for good."""
    return attempt >= max_retry or issubclass(type(error), Reject)


def outcome(error: BaseException | None, attempt: int, max_retry: int) -> Outcome:
    """Return how an attempt ended that raised `error`, while its delivery was held."""
    if error is None:
        return "succeeded"
    if issubclass(type(error), Reject):
        return "rejected"
    return "failed" if is_final(error, attempt, max_retry) else "retry"


def may_run(attempt: int, max_retry: int, max_lost: int) -> bool:
    """Return whether this attempt is run, where the ones before may have died with their process.

    An error on attempt `max_retry` is final, so a later attempt means that deliveries were lost.
    """
    return attempt <= max_retry + max_lost


def backoff(attempt: int, random: Callable[[], float] = clock.uniform) -> float:
    """Return seconds to wait after this attempt: evenly from 0 up to 1, 2, 4 … 300 s.

    The whole range is drawn from, so that what failed together doesn't come back together.
    """
    ceiling = min(_FIRST * 2.0 ** min(max(attempt - 1, 0), _DOUBLINGS), _CAP)
    return ceiling * random()


def delay_for(
    retry_delay: float | RetryDelay | None,
    attempt: int,
    error: BaseException,
    random: Callable[[], float] = clock.uniform,
) -> tuple[float, BaseException | None]:
    """Return (seconds to wait before the next attempt, what was wrong with the wish or None).

    A `Retry` with a delay comes first, then the task's retry_delay, then `backoff`, which also
    stands in for a wish that raises or is no duration.
    """
    try:
        # By type: what a task raises may lie about its class.
        asked = cast(Retry, error).delay if issubclass(type(error), Retry) else None
        if asked is not None:
            return _wait(asked, "delay"), None
        if isinstance(retry_delay, int | float):
            return retry_delay, None  # checked when the task was made
        if retry_delay is not None:
            return _wait(retry_delay(attempt, error), "retry_delay"), None
    except BaseException as problem:  # the user's function may raise anything
        return backoff(attempt, random), problem
    return backoff(attempt, random), None


def _wait(value: clock.Duration, field: str) -> float:
    seconds = clock.seconds(value, field)
    if seconds < 0:
        raise ValueError(f"{field}={value!r} is below 0 seconds")
    return seconds
