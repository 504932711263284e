"""Floor 3: how many workers the next tick should have: the Go library's rule, as a pure function.

The rule is stated, and proved by vectors, in `tests/wire/tuning_vectors.json`.
"""

import math
from typing import NamedTuple

_SHRINK = 0.9
_FAR_ABOVE = 1.5
_FAR_BELOW = 0.5


class Decision(NamedTuple):
    """The capacity to go on with, and why; the reason's names are those of the vectors."""

    capacity: int
    reason: str


def next_capacity(
    *,
    current: int,
    replication: int,
    least: int,
    most: int,
    predicted: float,
    desired: float,
    tolerance: float,
) -> Decision:
    """Return the capacity that brings the predicted wait to the desired one; waits in ms.

    Far from the band it aims at its centre, near it at its edge, so that it settles.
    """
    if current <= 0 or least <= 0 or most <= 0:
        return Decision(current, "invalid_inputs")
    if desired <= 0 or tolerance < 0:
        return Decision(current, "invalid_wait_params")
    if predicted <= 0:
        return Decision(max(least, int(current * _SHRINK)), "predicted_wait_zero")
    lower, upper = max(0.0, desired - tolerance), desired + tolerance
    if lower <= predicted <= upper:
        return Decision(current, "in_tolerance_band")
    if predicted > upper:
        far = predicted > _FAR_ABOVE * desired
        target, reason = (
            (desired, "deviation_large_above_center") if far else (upper, "above_upper_boundary")
        )
    else:
        far = predicted < _FAR_BELOW * desired
        target, reason = (
            (desired, "deviation_large_below_center") if far else (lower, "below_lower_boundary")
        )
    instances = max(1, replication)
    total = max(1, _half_up(current * instances * (predicted / target)))
    return Decision(min(most, max(least, _half_up(total / instances))), reason)


def _half_up(value: float) -> int:
    return math.floor(value + 0.5)
