"""Floor 0: both clocks, the server's clock, durations and jitter.

Intervals are measured with `monotonic`, which no one can set. Instants that instances compare are
Redis's: `ServerClock` knows them without asking each time.
"""

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

monotonic = time.monotonic
now = time.time
uniform = random.random  # in [0, 1)

Duration: TypeAlias = float | int | timedelta
"""Seconds, or a timedelta: how every public name takes a duration."""

LONGEST = (2**63 - 1) // 10**9
"""Seconds, about 292 years: durations travel as 64-bit nanoseconds."""


def seconds(value: Duration, field: str) -> float:
    """Return a duration as float seconds; it may be negative.

    Raises TypeError for what is no duration (a bool is none) and ValueError for NaN, infinities and
    what is longer than `LONGEST`; both texts name `field` and the value.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{field}={value!r} is not a duration: give seconds or a timedelta")
    if not abs(value) <= LONGEST:  # NaN is not either
        raise ValueError(f"{field}={value!r} is not a number of seconds up to {LONGEST}")
    return float(value)


def jittered(
    interval: float, fraction: float = 0.1, random: Callable[[], float] = uniform
) -> float:
    """Return the interval, moved evenly by at most the fraction of itself either way."""
    return interval * (1 + fraction * (2 * random() - 1))


class ServerClock:
    """Redis's wall clock, told between measurements by the local monotonic one.

    Before the first measurement it is the local wall clock. Any thread may read and measure.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = monotonic,
        wall: Callable[[], float] = now,
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._offset: float | None = None

    def observe(self, server_time: float, sent: float, received: float) -> None:
        """Take a TIME reply, in unix seconds; `sent` and `received` are monotonic seconds.

        The reply is taken to be made halfway, so it is wrong by half the round trip at most.
        """
        self._offset = server_time - (sent + received) / 2

    def now(self) -> float:
        """Return the server's time in unix seconds."""
        offset = self._offset
        return self._wall() if offset is None else self._monotonic() + offset
