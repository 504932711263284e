"""What becomes of measurements: goals, tables, and the page they are put into."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import summary
from benchmarks.goals import goals
from benchmarks.report import collect, tables


def _line(workload: str, system: str, **figures: float) -> dict[str, Any]:
    return {"workload": workload, "system": system, "figures": figures}


RUN = collect(
    [
        _line("drain", "raw", rate=200.0, cpu=2.0),
        _line("drain", "taskrunner", rate=90.0, cpu=5.0),
        _line("drain", "taskrunner", rate=110.0, cpu=9.0),
        _line("drain", "huey", rate=50.0, cpu=90.0),
        _line("drain", "celery", rate=5.0, cpu=900.0),
        _line("kill", "taskrunner", lost=0),
        _line("kill", "huey", lost=8),
        _line("kill", "celery", lost=0),
        _line("unique", "taskrunner", rate=10.0),
        _line("unique", "huey"),
    ]
)


def _judged(title: str) -> tuple[str, str]:
    """What was measured, without its unit, and whether that is enough."""
    (row,) = [line for line in goals(RUN).splitlines() if line.startswith(f"| {title}")]
    cells = [cell.strip() for cell in row.split("|")]
    return cells[4].split(" ")[0], cells[5]


def test_a_goal_is_judged_by_medians_and_cpu_by_the_least() -> None:
    """Whatever else runs on the machine only adds to what the processor did."""
    assert _judged("drain, no-op") == ("0.50", "yes")
    assert _judged("CPU per 1000") == ("2.50", "yes")


def test_a_peer_that_lost_tasks_is_no_measure() -> None:
    """huey is quicker than celery, and lost eight."""
    assert _judged("the same against") == ("20.0", "yes")


def test_what_was_not_measured_is_not_judged() -> None:
    """A run of some workloads has a table of goals, too."""
    assert _judged("io wall") == ("not", "")


def test_a_system_that_has_no_such_thing_is_named_below_the_table() -> None:
    """An empty row would look like a fault."""
    shown = tables(RUN).partition("### Enqueue unique tasks")[2]

    assert "| huey" not in shown
    assert "No such thing, or not within the time: huey." in shown


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "performance.md"
    copy.write_text(summary.PAGE.read_text())
    monkeypatch.setattr(summary, "PAGE", copy)
    return copy


@pytest.mark.parametrize("part", ["goals", "machine", "tables"])
def test_a_part_of_the_page_is_renewed_and_the_rest_stays(page: Path, part: str) -> None:
    """What people wrote around it isn't lost, and a second time replaces the first."""
    before = page.read_text()
    summary._renew(part, "first")
    summary._renew(part, r"second \1")
    after = page.read_text()

    begin, end = f"<!-- {part}: written by benchmarks.summary -->", f"<!-- end of {part} -->"
    assert after.partition(begin)[0] == before.partition(begin)[0]
    assert after.partition(end)[2] == before.partition(end)[2]
    assert after.partition(begin)[2].partition(end)[0].strip() == r"second \1"
