"""The equations an operator steers by."""

from datetime import timedelta
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskrunner.stats import Stats, compute


def _stats(**changes: Any) -> Stats:
    """100 ms a run, ten messages waiting, one worker, five instances; with changes."""
    given: dict[str, Any] = {
        "sums": {"t": 100},
        "counts": {"t": 1},
        "queue_length": 10,
        "waiting": 10,
        "workers": 1,
        "replications": 5,
        "threshold": 0.0,
    }
    return compute(**{**given, **changes})


def test_predicted_wait_divides_by_workers_and_instances() -> None:
    """D38: five instances work five times as fast; Go multiplied and said 5000 ms."""
    stats = _stats()

    assert stats.predicted_wait_time == 200
    assert stats.tps == 50


@pytest.mark.parametrize(
    ("workers", "replications", "wait", "tps"), [(1, 1, 1000, 10), (4, 1, 250, 40), (4, 5, 50, 200)]
)
def test_predicted_wait_and_tps_follow_the_hands(
    workers: int, replications: int, wait: float, tps: float
) -> None:
    """Twice the hands, half the wait, twice the rate."""
    stats = _stats(workers=workers, replications=replications)

    assert (stats.predicted_wait_time, stats.tps) == (wait, tps)


def test_backlog_without_timings_counts_as_one_millisecond_each() -> None:
    """A fresh group with a backlog must look busy, or its pool would never grow."""
    stats = _stats(sums={}, counts={}, waiting=1000, workers=2)

    assert stats.predicted_wait_time == 100
    assert stats.tps == 0
    assert stats.avg_timing == timedelta(0)
    assert stats.per_task_timing == {}


def test_backlog_after_a_reset_counts_as_one_millisecond_each() -> None:
    """A reset leaves fields of 0, which say as little as none."""
    stats = _stats(sums={"t": 0}, counts={"t": 0}, waiting=1000, workers=2)

    assert (stats.predicted_wait_time, stats.tps) == (100, 0)
    assert stats.per_task_timing == {}


def test_backlog_of_tasks_below_a_millisecond_still_predicts_a_wait() -> None:
    """D39: a mean of 0 would predict that any number of them is done at once."""
    stats = _stats(sums={"t": 0}, counts={"t": 3}, waiting=1000)

    assert stats.predicted_wait_time > 0


def test_mean_keeps_what_is_below_a_millisecond() -> None:
    """D39: 2,000 runs of 0.2 ms are 400 ms, and the mean of them is not 0."""
    stats = _stats(sums={"t": 400}, counts={"t": 2000}, waiting=1000, replications=1)

    assert stats.avg_timing == timedelta(microseconds=200)
    assert stats.predicted_wait_time == 200
    assert stats.tps == 5000


def test_nothing_waiting_predicts_no_wait() -> None:
    """What runs does not wait: a full stream with nothing undelivered is no backlog."""
    stats = _stats(queue_length=50, waiting=0)

    assert stats.predicted_wait_time == 0
    assert stats.queue_length == 50
    assert stats.tps == 50


def test_mean_is_over_runs_and_not_over_names() -> None:
    """A rare slow task hardly moves the wait of many quick ones."""
    stats = _stats(sums={"quick": 900, "slow": 1100}, counts={"quick": 99, "slow": 1})

    assert stats.avg_timing == timedelta(milliseconds=20)
    assert stats.per_task_timing == {"quick": 9, "slow": 1100}


def test_rounds_of_the_delayed_set_are_not_tasks() -> None:
    """Scheduling is measured beside the tasks and would falsify their mean."""
    stats = _stats(
        sums={"t": 100, "delayed_tasks_schedule": 90},
        counts={"t": 1, "delayed_tasks_schedule": 30},
    )

    assert stats.avg_timing == timedelta(milliseconds=100)
    assert stats.avg_schedule_timing == 3
    assert stats.per_task_timing == {"t": 100}


def test_avg_schedule_timing_is_zero_when_nothing_was_scheduled() -> None:
    """No rounds, no division by none."""
    assert _stats().avg_schedule_timing == 0


@pytest.mark.parametrize(
    ("threshold", "long"), [(0.0, False), (0.1, True), (0.2, False), (0.3, False)]
)
def test_long_says_whether_the_wait_is_above_the_threshold(threshold: float, long: bool) -> None:
    """200 ms predicted; the threshold is in seconds, and 0 turns it off."""
    assert _stats(threshold=threshold).long is long


@pytest.mark.parametrize(("workers", "replications"), [(0, 1), (1, 0), (0, 0)])
def test_compute_divides_by_no_zero(workers: int, replications: int) -> None:
    """D36: a pool of 0 gave a wait of +Inf and a rate below 0."""
    stats = _stats(workers=workers, replications=replications)

    assert stats.predicted_wait_time == 1000
    assert stats.tps == 10


def test_sum_without_a_count_is_left_out() -> None:
    """Half a pair says nothing about a mean."""
    stats = _stats(sums={"t": 100, "half": 5000}, counts={"t": 1})

    assert stats.avg_timing == timedelta(milliseconds=100)


def test_stats_are_frozen() -> None:
    """A hook keeps them; nobody changes them under it."""
    stats: Any = _stats()

    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        stats.waiting = 0


@given(
    sums=st.dictionaries(st.sampled_from("abc"), st.integers(0, 10**15)),
    counts=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10**15)),
    waiting=st.integers(0, 10**9),
    workers=st.integers(1, 10**4),
    replications=st.integers(1, 10**4),
)
def test_compute_takes_any_figures(
    sums: dict[str, int],
    counts: dict[str, int],
    waiting: int,
    workers: int,
    replications: int,
) -> None:
    """What other instances wrote may be odd; the figures are finite and never negative."""
    stats = compute(
        sums=sums,
        counts=counts,
        queue_length=waiting,
        waiting=waiting,
        workers=workers,
        replications=replications,
        threshold=1.0,
    )

    assert 0 <= stats.predicted_wait_time < float("inf")
    assert 0 <= stats.tps < float("inf")
    assert (stats.predicted_wait_time > 0) == (waiting > 0)
