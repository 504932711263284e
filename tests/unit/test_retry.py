"""Whether and when a failed attempt is tried again."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskrunner import retry
from taskrunner.errors import Reject, Retry

CAP = 300.0
DRAWN = st.floats(0, 1, exclude_max=True)


def _half() -> float:
    return 0.5


@given(attempt=st.integers(-(10**6), 10**6), drawn=DRAWN)
def test_backoff_stays_within_the_cap_at_any_attempt(attempt: int, drawn: float) -> None:
    """A task that failed a million times waits five minutes at most, without overflow."""
    assert 0 <= retry.backoff(attempt, lambda: drawn) <= CAP


@given(attempt=st.integers(1, 10**6), drawn=DRAWN)
def test_backoff_draws_from_the_whole_range(attempt: int, drawn: float) -> None:
    """Full jitter: what failed at one instant comes back spread over the whole wait."""
    ceiling = min(CAP, 2.0 ** min(attempt - 1, 100))

    assert retry.backoff(attempt, lambda: drawn) == pytest.approx(ceiling * drawn)


def test_backoff_doubles_from_a_second_to_five_minutes() -> None:
    """The ceilings a reader of the docs expects."""
    ceilings = [retry.backoff(attempt, _half) * 2 for attempt in range(1, 12)]

    assert ceilings == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


@pytest.mark.parametrize(
    ("error", "attempt", "final"),
    [
        (ValueError(), 1, False),
        (ValueError(), 2, False),
        (ValueError(), 3, True),
        (ValueError(), 5, True),
        (Retry(), 2, False),
        (Retry(), 3, True),
        (Reject("no"), 1, True),
        (SystemExit(), 1, False),
    ],
)
def test_is_final_when_the_attempts_are_spent(
    error: BaseException, attempt: int, final: bool
) -> None:
    """The code fails at most max_retry times; Retry spends an attempt, Reject all of them."""
    assert retry.is_final(error, attempt, max_retry=3) is final


@pytest.mark.parametrize(
    ("attempt", "max_lost", "runs"), [(1, 0, True), (2, 0, False), (3, 2, True), (4, 2, False)]
)
def test_may_run_counts_lost_deliveries_on_top(attempt: int, max_lost: int, runs: bool) -> None:
    """One kill doesn't fail what was merely buffered, and what kills its process ends."""
    assert retry.may_run(attempt, max_retry=1, max_lost=max_lost) is runs


@pytest.mark.parametrize(
    ("retry_delay", "error", "expected"),
    [
        (None, ValueError(), 2.0),
        (7.0, ValueError(), 7.0),
        (0.0, ValueError(), 0.0),
        (lambda attempt, error: attempt * 10, ValueError(), 30.0),
        (lambda attempt, error: timedelta(minutes=1), ValueError(), 60.0),
        (7.0, Retry(), 7.0),
        (7.0, Retry(2), 2.0),
        (7.0, Retry(0), 0.0),
        (7.0, Retry(timedelta(seconds=90)), 90.0),
    ],
)
def test_delay_for_takes_the_nearest_wish(
    retry_delay: Any, error: Exception, expected: float
) -> None:
    """The raised Retry is asked first, then the task's retry_delay, then the backoff."""
    assert retry.delay_for(retry_delay, 3, error, _half) == (expected, None)


def test_delay_for_hands_attempt_and_error_to_the_function() -> None:
    """A rate limit's error can carry the wait itself."""
    asked: list[tuple[int, BaseException]] = []
    error = ValueError()

    def ask(attempt: int, error: BaseException) -> float:
        asked.append((attempt, error))
        return 1

    retry.delay_for(ask, 4, error)

    assert asked == [(4, error)]


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("retry_delay", "error", "problem", "text"),
    [
        (lambda attempt, error: None, ValueError(), TypeError, "retry_delay=None "),
        (lambda attempt, error: "5", ValueError(), TypeError, "retry_delay='5' "),
        (lambda attempt, error: -1, ValueError(), ValueError, "retry_delay=-1 is below 0 seconds"),
        (lambda attempt, error: float("nan"), ValueError(), ValueError, "retry_delay=nan "),
        (lambda attempt, error: 2.0**attempt**20, ValueError(), OverflowError, ""),
        (lambda attempt, error: _raise(SystemExit(3)), ValueError(), SystemExit, "3"),
        (7.0, Retry(-1), ValueError, "delay=-1 is below 0 seconds"),
        (7.0, Retry("5"), TypeError, "delay='5' "),  # type: ignore[arg-type]
    ],
)
def test_delay_for_backs_off_and_tells_when_the_wish_is_bad(
    retry_delay: Any, error: Exception, problem: type[BaseException], text: str
) -> None:
    """A mistake in a delay function costs neither the message nor the worker."""
    delay, told = retry.delay_for(retry_delay, 3, error, _half)

    assert delay == 2.0
    assert type(told) is problem
    assert str(told).startswith(text)
