"""`make chaos` itself: its seed, and that a short run of it keeps every promise."""

import subprocess
import sys

import pytest

from tests.chaos_run.schedule import INSTANCE_FAULTS, SHARED_FAULTS, draw
from tests.support.worker import ROOT


def test_a_seed_gives_the_same_faults_and_another_gives_others() -> None:
    """What was found can be looked for again."""
    faults = draw(7, 120, 4)
    assert draw(7, 120, 4) == faults
    assert draw(8, 120, 4) != faults
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert all(0 <= fault.target < 4 for fault in faults)


def test_a_long_schedule_has_every_fault() -> None:
    """None is too rare to come."""
    assert {fault.kind for fault in draw(1, 600, 5)} == {*INSTANCE_FAULTS, *SHARED_FAULTS}


@pytest.mark.chaos
@pytest.mark.slow
def test_a_short_run_keeps_every_promise() -> None:
    """Fifteen seconds of it, from a fixed seed; `make chaos SECONDS=600` takes its time."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.chaos_run", "--seconds", "15", "--seed", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "every promise was kept" in run.stdout
