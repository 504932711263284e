"""`taskrunner demo` as a user runs it: a process of its own, judged by its output and exit code."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskrunner.cli import demo_work, main
from taskrunner.cli.demo import find_files
from tests.support import eventually
from tests.support.server import process_is_alive
from tests.support.worker import ROOT

DEMO = [sys.executable, "-m", "taskrunner", "demo"]
ON_LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def run_demo(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [*DEMO, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        env={**os.environ, **(env or {})},
        check=False,
    )
    return done.returncode, done.stdout


def pids(output: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"\bpid (\d+)", output)]


def directory_of(output: str) -> Path:
    found = re.search(r"unix://(\S+)/redis\.sock", output)
    assert found is not None, output
    return Path(found[1])


def test_demo_does_every_task_although_a_worker_is_killed() -> None:
    """Its promise: each file measured and right, with deliveries reclaimed from the dead."""
    code, output = run_demo()
    assert code == 0, output
    assert "every result is there and equals a direct computation" in output
    assert re.search(r"worker-\d pid \d+ killed with SIGKILL", output), output
    assert "worker-3 pid" in output
    reclaimed = re.search(r"reclaimed\s+([\d,]+) after the kill", output)
    assert reclaimed is not None, output
    assert int(reclaimed[1].replace(",", "")) >= 1
    files = re.search(r"files\s+([\d,]+) of ([\d,]+)", output)
    assert files is not None
    assert files[1] == files[2]
    assert "\r" not in output  # not a terminal
    assert len(pids(output)) == 5
    assert not any(process_is_alive(pid) for pid in pids(output))
    assert not directory_of(output).exists()


def test_demo_works_without_a_kill_on_few_files(tmp_path: Path) -> None:
    """A directory of one's own will do, however small; an empty file counts too."""
    (tmp_path / "a.txt").write_bytes(b"one two\nthree")
    (tmp_path / "empty").write_bytes(b"")
    code, output = run_demo(str(tmp_path), "--no-kill")
    assert code == 0, output
    for row in ("files +2 of 2", "bytes +13", "lines +1", "words +3", "reclaimed +0"):
        assert re.search(row, output), output


@ON_LINUX
def test_demo_fails_when_a_result_is_wrong(tmp_path: Path) -> None:
    """A file that each process reads differently can't be right: exit 1, and the file is named."""
    (tmp_path / "good").write_text("good")
    (tmp_path / "two-faced").symlink_to("/proc/self/stat")
    code, output = run_demo(str(tmp_path), "--no-kill")
    assert code == 1, output
    assert re.search(r"wrong: \S+two-faced", output), output
    assert not re.search(r"wrong: \S+good", output), output
    assert output.rstrip().endswith("FAILED")


@ON_LINUX
def test_demo_fails_when_a_result_is_missing(tmp_path: Path) -> None:
    """A file that can be opened and not read fails for good: retried, dead, reported, exit 1."""
    (tmp_path / "good").write_text("good")
    (tmp_path / "unreadable").symlink_to("/proc/self/mem")
    start = time.monotonic()
    code, output = run_demo(str(tmp_path), "--no-kill")
    assert code == 1, output
    assert re.search(r"missing: \S+unreadable", output), output
    assert re.search(r"dead letter: \S+unreadable: \w*", output), output
    assert re.search(r"retries +3", output), output
    assert time.monotonic() - start < 25  # it doesn't wait for what can't come


def test_demo_says_so_when_there_is_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty directory is an error that names it."""
    assert main(["demo", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_demo_names_the_variable_when_its_server_is_not_there(tmp_path: Path) -> None:
    """One line on standard error, no traceback."""
    (tmp_path / "a").touch()
    code, output = run_demo(str(tmp_path), env={"TASKRUNNER_REDIS_SERVER": "/no/such"})
    assert code == 1
    assert output == "taskrunner: TASKRUNNER_REDIS_SERVER='/no/such' is not an executable file\n"


def test_demo_shows_a_changing_line_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal the progress is one line, drawn again in its place."""
    for number in range(300):
        (tmp_path / f"{number}.txt").write_text("word " * number)
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [*DEMO, str(tmp_path), "--no-kill"], cwd=ROOT, stdin=inner, stdout=inner, stderr=inner
    )
    os.close(inner)
    output = b""
    try:
        while select.select([outer], [], [], 60)[0]:
            try:
                output += os.read(outer, 65536)
            except OSError:  # Linux's way to say that the other end is closed
                break
        assert process.wait(30) == 0, output
    finally:
        process.kill()
        process.wait()
        os.close(outer)
    assert b"\r[" in output
    assert b"/300 " in output


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_demo_leaves_nothing_behind_when_it_is_ended(tmp_path: Path, signum: int) -> None:
    """Killed or interrupted half way: workers, server and directory go with it."""
    large = tmp_path / "large"
    large.write_bytes(b"some words\n" * 500_000)
    for number in range(200):
        (tmp_path / f"{number}").hardlink_to(large)
    log = tmp_path.with_name(f"{tmp_path.name}.log")
    with log.open("wb") as file:
        process = subprocess.Popen([*DEMO, str(tmp_path)], cwd=ROOT, stdout=file, stderr=file)
    try:
        eventually(lambda: len(pids(log.read_text())) >= 3, 20, message=log.read_text)
        assert process.poll() is None
        process.send_signal(signum)
        code = process.wait(20)
    finally:
        process.kill()
        process.wait()
    output = log.read_text()
    assert code == (130 if signum == signal.SIGINT else -signum), output
    assert "Traceback" not in output
    eventually(lambda: not any(process_is_alive(pid) for pid in pids(output)), 10)
    eventually(lambda: not directory_of(output).exists(), 10)


@given(st.lists(st.binary(max_size=5), max_size=8).map(b" ".join), st.integers(1, 7))
def test_measure_equals_a_reading_in_one_piece(data: bytes, chunk: int) -> None:
    """Wherever the pieces are cut, words and lines are those of the whole."""
    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile() as file:
        patch.setattr(demo_work, "_CHUNK", chunk)
        file.write(data)
        file.flush()
        found = demo_work.measure(file.name)
    assert (found.size, found.lines, found.words) == (
        len(data),
        data.count(b"\n"),
        len(data.split()),
    )


def test_find_files_skips_caches_and_names_that_are_no_text(tmp_path: Path) -> None:
    """Same files in the same order on each call; what JSON can't carry is left out."""
    for name in ("b", "a", "__pycache__/c", "site-packages/d", "sub/e"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).touch()
    except OSError:
        pass  # this file system has no such names
    os.mkfifo(tmp_path / "fifo")
    assert find_files(tmp_path, 9) == [str(tmp_path / name) for name in ("a", "b", "sub/e")]
    assert find_files(tmp_path, 2) == [str(tmp_path / name) for name in ("a", "b")]


def test_command_without_subcommand_lists_them() -> None:
    """Wrong arguments are exit code 2, with the usage; `--help` lists the commands."""
    bare = subprocess.run(
        [sys.executable, "-m", "taskrunner"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert bare.returncode == 2
    assert "usage: taskrunner" in bare.stderr
    listed = subprocess.run(
        [*DEMO[:-1], "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.search(r"demo +real work", listed.stdout)
