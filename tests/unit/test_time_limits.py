"""What watches the clock for running tasks keeps no more than runs."""

from taskrunner.reports import Health, Reports
from taskrunner.services.time_limits import TimeLimits
from taskrunner.store import connection


def test_many_short_tasks_with_a_long_limit_leave_nothing_behind() -> None:
    """A day's worth of them would else wait for their limits in memory."""
    limits = TimeLimits(Health(Reports(), connection.lost))

    for _ in range(5000):
        limits.run(24 * 3600, lambda: None)

    assert len(limits._deadlines) <= 1100  # pyright: ignore[reportPrivateUsage]
