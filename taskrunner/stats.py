"""Floor 3: what an operator steers by, as equations (semantics §5)."""

from datetime import timedelta

import attrs

from taskrunner.task import RESERVED_NAME

_ASSUMED_MS = 1.0
"""Mean run time where there is a backlog and nothing has run yet."""


@attrs.frozen(kw_only=True)
class Stats:
    """The group's figures now.

    `per_task_timing` mean run time by task in ms; `predicted_wait_time` in ms, for a message added
    now; `avg_timing` mean run time over all tasks; `avg_schedule_timing` mean ms of a round of the
    delayed set; `tps` tasks a second that the group can run; `queue_length` entries in the stream,
    `waiting` those that nobody runs yet; `workers` this instance's capacity; `replications`
    instances; `long` whether the predicted wait is above long_queue_threshold.
    """

    per_task_timing: dict[str, int]
    predicted_wait_time: float
    avg_timing: timedelta
    avg_schedule_timing: int
    tps: float
    queue_length: int
    waiting: int
    workers: int
    replications: int
    long: bool


@attrs.frozen(kw_only=True)
class Load:
    """What one instance holds and does now.

    `held` messages it answers for, buffered ones included; `running` name and seconds of each task
    that runs; `workers` capacity of its pool; `unsettled` ends that Redis has not accepted yet;
    `leads` whether it leads its group.
    """

    held: int = 0
    running: tuple[tuple[str, float], ...] = ()
    workers: int = 0
    unsettled: int = 0
    leads: bool = False


def compute(
    *,
    sums: dict[str, int],
    counts: dict[str, int],
    queue_length: int,
    waiting: int,
    workers: int,
    replications: int,
    threshold: float,
) -> Stats:
    """Return the figures from summed timings (ms and runs by task) and the state of the queue;
    `threshold` in s."""
    tasks = [name for name in counts if counts[name] > 0 and name != RESERVED_NAME]
    total = sum(sums.get(name, 0) for name in tasks)
    runs = sum(counts[name] for name in tasks)
    mean = total / runs if runs else 0.0
    hands = max(1, workers) * max(1, replications)
    assumed = mean if total else _ASSUMED_MS
    predicted = assumed * waiting / hands if waiting else 0.0
    schedules = counts.get(RESERVED_NAME, 0)
    return Stats(
        per_task_timing={name: round(sums.get(name, 0) / counts[name]) for name in sorted(tasks)},
        predicted_wait_time=predicted,
        avg_timing=timedelta(milliseconds=mean),
        avg_schedule_timing=round(sums.get(RESERVED_NAME, 0) / schedules) if schedules else 0,
        tps=float(round(1000 / mean * hands)) if mean else 0.0,
        queue_length=queue_length,
        waiting=waiting,
        workers=workers,
        replications=replications,
        long=threshold > 0 and predicted > threshold * 1000,
    )
