"""Durations, jitter and the server's clock."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskrunner import clock
from taskrunner.clock import ServerClock


class Hands:
    """A clock that is set by hand."""

    def __init__(self, time: float) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, 5.0),
        (0.25, 0.25),
        (timedelta(minutes=1), 60.0),
        (-3, -3.0),
        (clock.LONGEST, 2**63 // 10**9),
    ],
)
def test_seconds_are_a_float_whatever_the_duration_was(
    value: clock.Duration, expected: float
) -> None:
    """Inside, a duration has one type; whether it may be negative is the caller's rule."""
    result = clock.seconds(value, "field")

    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize("value", [True, None, "5", b"5", 1j, [5]])
def test_seconds_refuse_what_is_no_duration(value: Any) -> None:
    """A text or a flag is a mistake, not a number."""
    with pytest.raises(TypeError, match=r"^run_in=.* is not a duration"):
        clock.seconds(value, "run_in")


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), 1e300, 10**400, timedelta.max, -clock.LONGEST - 1],
)
def test_seconds_refuse_what_64_bits_of_nanoseconds_cannot_hold(value: clock.Duration) -> None:
    """The wire and the Go library count nanoseconds in an int64."""
    with pytest.raises(ValueError, match=r"^run_in=.* is not a number of seconds up to"):
        clock.seconds(value, "run_in")


@given(interval=st.floats(0, 1e9), fraction=st.floats(0, 1), drawn=st.floats(0, 1))
def test_jittered_stays_within_the_fraction(interval: float, fraction: float, drawn: float) -> None:
    """Loops drift apart, but none runs far more often or more rarely than asked."""
    result = clock.jittered(interval, fraction, lambda: drawn)

    slack = interval * 1e-9
    assert interval * (1 - fraction) - slack <= result <= interval * (1 + fraction) + slack


def test_jittered_spreads_both_ways() -> None:
    """The mean stays the interval."""
    assert clock.jittered(10, 0.1, lambda: 0.0) == pytest.approx(9)
    assert clock.jittered(10, 0.1, lambda: 0.5) == pytest.approx(10)
    assert clock.jittered(10, 0.1, lambda: 1.0) == pytest.approx(11)


def test_server_clock_is_the_local_one_before_a_measurement() -> None:
    """A producer that never asked Redis for the time still has one."""
    assert ServerClock(monotonic=Hands(50), wall=Hands(1_700_000_000)).now() == 1_700_000_000


def test_server_clock_goes_on_from_the_last_measurement() -> None:
    """Between measurements only the monotonic clock counts: setting the wall clock does nothing."""
    monotonic, wall = Hands(50), Hands(1_700_000_000)
    server = ServerClock(monotonic=monotonic, wall=wall)

    server.observe(server_time=1_800_000_000, sent=40, received=42)
    wall.time = 0
    monotonic.time = 51

    assert server.now() == 1_800_000_010


def test_server_clock_follows_the_server_when_that_is_set() -> None:
    """A failover to a server with another clock is noticed at the next measurement."""
    server = ServerClock(monotonic=Hands(100))

    server.observe(1_800_000_000, 100, 100)
    server.observe(1_700_000_000, 100, 100)

    assert server.now() == 1_700_000_000
