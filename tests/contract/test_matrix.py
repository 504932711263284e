"""The matrix of servers and clients (`make test-all`) leaves nothing out unsaid."""

from pathlib import Path

import attrs
import pytest

from tests.matrix import rows
from tests.matrix.__main__ import floors

ROOT = Path(__file__).resolve().parents[2]


def test_what_no_row_has_shown_is_named() -> None:
    """A value of an axis that was not run on is an error, not a silence."""
    shown = [row for row in rows.ROWS if row.server != "redis-7.0."]

    assert rows.missing(shown)["server"] == ["redis-7.0."]
    assert not any(rows.missing(rows.ROWS).values())
    assert rows.missing([]) == rows.covered(rows.ROWS)


def test_every_axis_has_two_values_at_least() -> None:
    """An axis of one value is none."""
    assert all(len(values) > 1 for values in rows.covered(rows.ROWS).values())
    assert list(rows.covered(rows.ROWS)) == list(attrs.fields_dict(rows.Row))


def test_every_server_that_lacks_has_a_cure() -> None:
    """What to do is said with what is missing."""
    assert {row.server for row in rows.ROWS} == set(rows.CURES)


@pytest.mark.parametrize(
    "named", [*rows.EVERYTHING, *rows.QUICK, *(beginning for _, beginning, _ in rows.NOT_ON)]
)
def test_what_is_named_exists(named: str) -> None:
    """A renamed test is neither left out nor left in without anybody noticing."""
    path, _, function = named.partition("::")
    assert (ROOT / path).exists()
    assert f"def {function}" in ((ROOT / path).read_text() if function else "def ")


def test_the_floors_are_read_from_the_package_itself() -> None:
    """The oldest environment holds the oldest of each dependency."""
    assert floors().keys() == {"redis", "hiredis", "attrs"}
    assert floors()["redis"] == "5.0.8"
