"""`taskrunner worker` as typed: processes of its own, judged by what they do, say and return."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import eventually, stays
from tests.support.desk import Desk
from tests.support.names import Names
from tests.support.server import pause_process
from tests.support.shop import Shop


@pytest.fixture
def shop(tmp_path: Path, server: EmbeddedServer, names: Names) -> Iterator[Shop]:
    """The application of this test."""
    made = Shop(tmp_path, server.url, names)
    yield made
    made.close()


def cpu_seconds(pid: int) -> float:
    """What the process has used of a processor so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_worker_says_what_it_serves_and_runs_it(shop: Shop, desk: Desk, names: Names) -> None:
    """The banner holds what one asks first when nothing happens."""
    desk.send("note", range(3))
    worker = shop.worker("--workers", "3", "--batch-size", "7")
    eventually(lambda: len(shop.ran()) == 3, 20, message=lambda: worker.log)

    for line in (
        rf"^group +{names.group}$",
        rf"^stream +{names.stream}$",
        r"^server +unix:\S+, (Redis|Valkey) \d+\.\d+",
        r"^tasks +6: child, compute, grow, nap, note, parent$",
        r"^workers +3$",
        rf"^host +{names.host}$",
    ):
        assert re.search(line, worker.log, re.MULTILINE), worker.log
    eventually(lambda: "3 workers on" in worker.log, message=lambda: worker.log)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_log_lines_are_json_if_wanted(shop: Shop, desk: Desk, names: Names) -> None:
    """Every line, the banner too, with the action as a field; of both processes."""
    worker = shop.worker("--log-format", "json", "--processes", "2", "--log-level", "INFO")
    eventually(lambda: worker.log.count("runner_started") == 2, 20, message=lambda: worker.log)
    worker.process.send_signal(signal.SIGINT)
    assert worker.wait() == 0

    lines = [json.loads(line) for line in worker.log.splitlines()]
    assert lines[0]["action"] == "worker_banner"
    assert lines[0]["group"] == names.group
    assert {line.get("process") for line in lines} == {None, "p1", "p2"}
    assert all(line["level"] and line["logger"] and line["time"].endswith("Z") for line in lines)


def test_a_typo_ends_with_2(shop: Shop) -> None:
    """Before a server is asked for anything."""
    worker = shop.worker(spec="shop:runer")

    assert worker.wait() == 2
    assert "did you mean runner?" in worker.log
    assert "Traceback" not in worker.log


@pytest.mark.parametrize("words", [[], ["--processes", "2"], ["--max-tasks", "2"]])
def test_a_burst_ends_when_nothing_is_left(shop: Shop, desk: Desk, words: list[str]) -> None:
    """What its tasks dispatch belongs to it; what is not due yet does not."""
    desk.send("parent", [0])
    desk.send("note", range(4))
    desk.send("note", ["late"], run_in=3600)
    worker = shop.worker("--burst", *words)

    assert worker.wait(30) == 0, worker.log
    assert sorted(what for _, what in shop.ran()) == ["0", "1", "2", "3", "child", "parent"]
    assert len(desk.runner.delayed) == 1


def test_a_burst_waits_for_a_retry(shop: Shop, desk: Desk) -> None:
    """A parked message is pending: the queue is not empty."""
    desk.send("nap", ["no number"])  # fails three times, a second or so apart
    worker = shop.worker("--burst")

    assert worker.wait(30) == 0, worker.log
    assert [what for _, what in shop.ran()] == ["begin"] * 3


def test_sigterm_ends_all_children_in_order(shop: Shop, desk: Desk, names: Names) -> None:
    """A running task ends, nothing is pending, each child had a host name of its own."""
    worker = shop.worker("--processes", "2", "--workers", "1")
    worker.wait_started(2)
    desk.send("nap", [1.0, 1.0])
    eventually(lambda: len(shop.ran()) == 2, 10)
    consumers: Any = desk.client.xinfo_consumers(names.stream, names.group)
    hosts = {one["name"].decode().rpartition("_")[0] for one in consumers}
    assert hosts == {f"{names.group}_{names.host}-p{n}" for n in (1, 2)}
    assert len({pid for pid, _ in shop.ran()}) == 2

    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log
    assert not worker.living
    assert [what for _, what in shop.ran()].count("end") == 2
    assert desk.length() == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_two_processes_share_what_computes(shop: Shop, desk: Desk) -> None:
    """Each does its share, with a processor's time of its own, at the same time as the other: that
    is what makes two faster. How much: `python -m benchmarks.processes`. A busy machine may favour
    one of them for a second, so one round in four has to be fair."""
    worker = shop.worker("--processes", "2", "--workers", "2", "--batch-size", "5")
    worker.wait_started(2)

    def shares() -> str:
        before = {pid: cpu_seconds(pid) for pid in worker.living}
        done = len(shop.ran())
        desk.send("compute", [0.005] * 300)
        eventually(lambda: len(shop.ran()) == done + 300, 60, message=lambda: worker.log)
        spent = {pid: cpu_seconds(pid) - before[pid] for pid in worker.living}
        spans: dict[int, list[float]] = {pid: [] for pid in worker.living}
        for pid, times in shop.ran()[done:]:
            spans[pid] += (float(time) for time in times.split())
        assert all(spans.values()), "one of them did nothing"
        begins, ends = [min(s) for s in spans.values()], [max(s) for s in spans.values()]
        fair = (
            all(
                0.35 <= len(times) / 600 <= 0.65
                and 0.35 <= spent[pid] / sum(spent.values()) <= 0.65
                for pid, times in spans.items()
            )
            and min(ends) - max(begins) > (max(ends) - min(begins)) / 2
        )
        counts = [len(times) // 2 for times in spans.values()]
        return "" if fair else f"tasks {counts}, CPU {[*spent.values()]}, {begins}, {ends}"

    unfair = [shares()]
    while unfair[-1]:
        assert len(unfair) < 4, unfair
        unfair.append(shares())


def test_a_signal_to_everyone_at_once_is_one_stop(shop: Shop, desk: Desk) -> None:
    """systemd signals every process of a unit: for no child may that be a second signal."""
    worker = shop.worker("--processes", "2", "--workers", "1")
    worker.wait_started(2)
    desk.send("nap", [1.0, 1.0])
    eventually(lambda: len(shop.ran()) == 2, 10)

    for pid in (worker.process.pid, *worker.living):
        os.kill(pid, signal.SIGTERM)
    assert worker.wait() == 0, worker.log
    assert [what for _, what in shop.ran()].count("end") == 2
    assert "second signal" not in worker.log.replace("a second signal ends at once", "")


def test_a_second_signal_ends_at_once(shop: Shop, desk: Desk) -> None:
    """With 128 and its number; what ran stays pending and comes back elsewhere."""
    worker = shop.worker("--processes", "2")
    worker.wait_started(2)
    desk.send("nap", [30])
    eventually(lambda: len(shop.ran()) == 1, 10)

    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: "stopping in order" in worker.log, 5)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait(5) == 128 + signal.SIGTERM
    eventually(lambda: not worker.living, 5)


def test_a_killed_child_is_replaced_at_once(shop: Shop, desk: Desk) -> None:
    """The other goes on meanwhile. It takes the 0.1 s that the log names, and a start of Python:
    well below two seconds, but for a busy machine."""
    worker = shop.worker("--processes", "2")
    worker.wait_started(2)
    victim, other = worker.living

    os.kill(victim, signal.SIGKILL)
    eventually(lambda: worker.log.count(" started: ") == 3, 20, message=lambda: worker.log)
    assert "the next starts in 0.1 s" in worker.log
    assert other in worker.living
    assert len(worker.living) == 2
    assert "was ended by SIGKILL" in worker.log


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_supervisor_leaves_no_orphan(shop: Shop, desk: Desk, busy: bool) -> None:
    """Its children stop in order: a running task ends first."""
    worker = shop.worker("--processes", "2")
    worker.wait_started(2)
    if busy:
        desk.send("nap", [1.0])
        eventually(lambda: len(shop.ran()) == 1, 10)

    worker.process.kill()
    worker.process.wait()
    eventually(lambda: not worker.living, 5)
    if busy:
        assert [what for _, what in shop.ran()] == ["begin", "end"]
        assert desk.length() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_a_killed_supervisor_leaves_no_frozen_orphan(shop: Shop, desk: Desk) -> None:
    """A child that is stopped can notice nothing: it is woken, ends its task, and stops in
    order."""
    worker = shop.worker("--processes", "2", "--workers", "1")
    worker.wait_started(2)
    desk.send("nap", [1.0, 1.0])
    eventually(lambda: len(shop.ran()) == 2, 10)
    for pid in worker.living:
        pause_process(pid)

    worker.process.kill()
    worker.process.wait()
    eventually(lambda: not worker.living, 15, message=lambda: worker.log)
    assert [what for _, what in shop.ran()].count("end") == 2
    assert desk.length() == 0


def test_when_no_child_can_live_the_supervisor_gives_up(shop: Shop) -> None:
    """It says so with its exit code, and whoever watches it decides."""
    worker = shop.worker("--processes", "2", SHOP_DIES="1")

    assert worker.wait(30) == 1
    assert "no process can live: giving up" in worker.log
    assert len(worker.children) == 10


def test_a_child_is_renewed_after_its_tasks(shop: Shop, desk: Desk) -> None:
    """Each process runs about that many; none is lost or run twice."""
    worker = shop.worker("--max-tasks", "5", "--workers", "1", "--batch-size", "1")
    desk.send("note", range(5))
    eventually(lambda: "is renewed" in worker.log, 20, message=lambda: worker.log)
    desk.send("note", range(5, 12))
    eventually(lambda: len(shop.ran()) == 12, 20, message=lambda: worker.log)

    assert sorted(int(what) for _, what in shop.ran()) == list(range(12))
    assert len({pid for pid, _ in shop.ran()}) >= 2
    assert "was ended" not in worker.log


def test_a_child_is_renewed_when_it_has_grown(shop: Shop, desk: Desk) -> None:
    """A leak costs a restart, not a machine."""
    worker = shop.worker("--max-memory", "200")
    worker.wait_started()
    stays(lambda: "is renewed" not in worker.log, 1.5)
    desk.send("grow", [300_000_000])
    eventually(lambda: "is renewed" in worker.log, 20, message=lambda: worker.log)
    worker.wait_started(2)
    assert len(worker.living) == 1
    assert re.search(r"\d+ MB in use, more than 200: to be renewed", worker.log)


def test_tuned_workers_are_not_set_by_hand(shop: Shop) -> None:
    """An option without effect is an error, not a surprise."""
    source = (shop.directory / "shop.py").read_text()
    tuned = "min_workers=1, max_workers=2, desired_wait_time=1, desired_wait_time_tolerance=0.3,"
    (shop.directory / "tuned.py").write_text(
        source.replace("shutdown_timeout=5,", f"shutdown_timeout=5, {tuned}")
    )
    worker = shop.worker("--workers", "3", spec="tuned:runner")

    assert worker.wait() == 2
    assert "--workers has no effect" in worker.log


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-", ">/dev/full"])
def test_standard_files_may_be_closed_or_full(shop: Shop, desk: Desk, closed: str) -> None:
    """As some service managers start programs: no pipe takes the place of one of them."""
    if "full" in closed and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    desk.send("note", range(3))
    command = f'exec "$@" 2>>"$0" {closed}'
    shell = ["/bin/sh", "-c", command, str(shop.directory / "log")]
    worker = [sys.executable, "-m", "taskrunner", "worker", "shop:runner", "--processes", "2"]
    code = subprocess.run(
        [*shell, *worker, "--burst", "--health-port", "0"],
        check=False,
        cwd=shop.directory,
        env=shop.env,
        timeout=60,
    ).returncode

    log = (shop.directory / "log").read_text()
    assert code == 0, log
    assert len(shop.ran()) == 3
    assert "Traceback" not in log
    assert "process_died" not in log
