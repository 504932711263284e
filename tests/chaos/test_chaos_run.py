"""`make chaos` itself: its seed, and that a short run of it keeps every promise."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos_run.schedule import INSTANCE_FAULTS, SHARED_FAULTS, draw
from tests.support import eventually
from tests.support.server import process_is_alive, process_state
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


@pytest.mark.chaos
def test_nothing_is_left_when_the_run_is_killed_while_an_instance_is_frozen(tmp_path: Path) -> None:
    """A process that stands still reads no end-of-file: it is ended all the same."""
    seed = next(
        seed
        for seed in itertools.count()
        if (first := draw(seed, 10, 3)[0]).kind == "freeze" and first.seconds > 3
    )
    command = [sys.executable, "-m", "tests.chaos_run", "--seconds", "60", "--instances", "3"]
    with (tmp_path / "out").open("wb") as out:
        run = subprocess.Popen([*command, "--seed", str(seed)], cwd=ROOT, stdout=out, stderr=out)
    try:
        frozen = eventually(
            lambda: [pid for pid in _descendants(run.pid) if process_state(pid) == "T"],
            60,
            message=(tmp_path / "out").read_text,
        )
        started = _descendants(run.pid)
        assert len(started) > 6  # instances, producers, the relay, the server and its watcher
        assert set(frozen) <= set(started)
    finally:
        run.kill()
        run.wait()
    eventually(lambda: not [pid for pid in started if process_is_alive(pid)], 15)


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [
        below for child in children for below in _descendants(int(child))
    ]
