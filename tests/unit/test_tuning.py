"""How many workers the next tick should have: the rule that both libraries share."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskrunner.tuning import Decision, next_capacity

FILE = Path(__file__).parents[1] / "wire" / "tuning_vectors.json"
VECTORS: list[dict[str, Any]] = json.loads(FILE.read_text())["vectors"]

WAITS = st.floats(0.001, 1e9)


def _decide(vector: dict[str, Any]) -> Decision:
    return next_capacity(
        current=vector["current"],
        replication=vector["replication"],
        least=vector["min"],
        most=vector["max"],
        predicted=vector["predicted_wait_ms"],
        desired=vector["desired_ms"],
        tolerance=vector["tolerance_ms"],
    )


def test_vectors_are_all_there() -> None:
    """A recording that lost some of its vectors would prove less than it says."""
    assert len(VECTORS) == 386
    assert len({json.dumps(vector, sort_keys=True) for vector in VECTORS}) == 386


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_next_capacity_gives_the_recorded_answer(vector: dict[str, Any]) -> None:
    """In a mixed fleet the leader may be of either language: both must decide alike."""
    assert _decide(vector) == Decision(vector["next"], vector["reason"])


@given(
    current=st.integers(1, 1000),
    replication=st.integers(-3, 50),
    bounds=st.tuples(st.integers(1, 500), st.integers(1, 500)).map(sorted),
    predicted=WAITS,
    desired=WAITS,
    tolerance=st.floats(0, 1e9),
)
def test_next_capacity_never_leaves_its_bounds_when_it_changes(
    current: int,
    replication: int,
    bounds: list[int],
    predicted: float,
    desired: float,
    tolerance: float,
) -> None:
    """Whatever the figures say, a change ends within [min, max] (scaled to minus nine: BL-27)."""
    least, most = bounds

    decision = next_capacity(
        current=current,
        replication=replication,
        least=least,
        most=most,
        predicted=predicted,
        desired=desired,
        tolerance=tolerance,
    )

    assert decision.reason == "in_tolerance_band" or least <= decision.capacity <= most


@given(current=st.integers(2, 1000), replication=st.integers(1, 50), predicted=WAITS)
def test_next_capacity_moves_against_the_deviation(
    current: int, replication: int, predicted: float
) -> None:
    """Too long a wait never takes workers away, too short a one never adds any."""
    capacity = next_capacity(
        current=current,
        replication=replication,
        least=1,
        most=10**6,
        predicted=predicted,
        desired=200.0,
        tolerance=80.0,
    ).capacity

    if predicted > 280:
        assert capacity >= current
    elif predicted < 120:
        assert capacity <= current
    else:
        assert capacity == current


@given(current=st.integers(1, 1000))
def test_next_capacity_comes_down_to_the_minimum_when_nothing_waits(current: int) -> None:
    """An idle pool shrinks by a tenth a tick, and really reaches its minimum."""
    ticks = 0
    while current > 2 and ticks < 200:
        before = current
        current = next_capacity(
            current=current,
            replication=1,
            least=2,
            most=1000,
            predicted=0.0,
            desired=200.0,
            tolerance=80.0,
        ).capacity
        assert current < before
        ticks += 1

    assert current == 2 or ticks == 0
