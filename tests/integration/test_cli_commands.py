"""`info`, `dead`, `delayed`, `enqueue` and `purge`, as typed, against a real server."""

import io
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from taskrunner.cli import main
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.task import task
from tests.support import eventually
from tests.support.desk import Desk
from tests.support.ledger import Ledger
from tests.support.names import Names
from tests.support.server import OwnServer
from tests.support.worker import ROOT, WorkerProcess

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(
    server: EmbeddedServer, names: Names, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Type a command about this test's group: (exit code, output, complaints)."""

    def run(command: str, *words: str) -> tuple[int, str, str]:
        place = ["--url", server.url, "--group", names.group, "--prefix", names.prefix]
        code = main([*command.split(), *place, *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def bury(desk: Desk, *payloads: Any) -> None:
    """Dead letters as a worker writes them."""
    for payload in payloads:

        def fail(_: Any) -> None:
            raise ValueError("it broke\x1b[2J")

        if "break" not in desk.runner.registry:
            task(name="break", registry=desk.runner.registry)(fail)
        desk.runner.dispatch("break", payload)
    before = len(desk.runner.dead_letters)
    with desk.runner:
        eventually(lambda: len(desk.runner.dead_letters) >= before + len(payloads), 10)


def test_info_of_a_group_nobody_has_used(typed: Run) -> None:
    """Nothing there is an answer, not an error."""
    code, out, _ = typed("info")

    assert code == 0
    assert "(not there: no worker of it has run on this queue)\n" in out
    assert "waiting         0\n" in out
    assert "leader          none\n" in out
    assert "\x1b" not in out


def test_info_shows_a_group_at_work(
    typed: Run, desk: Desk, make_worker: Callable[..., WorkerProcess], names: Names
) -> None:
    """Length, waiting, pending by consumer, delayed, dead, leader, instances, means."""
    desk.send("noop", range(20))
    desk.send("noop", [1], run_in=3600)
    make_worker()
    eventually(lambda: desk.length() == 0, 10)
    eventually(lambda: "lease" in typed("info")[1], 10)
    eventually(lambda: json.loads(typed("info", "--json")[1])["per_task"], 10)

    code, out, _ = typed("info")
    assert code == 0
    assert f"instances       {names.host}-w1" in out
    assert f"leader          {names.host}-w1 (lease" in out
    assert "delayed         1 (next: noop in " in out
    assert f"{names.group}_{names.host}-w1_1" in out
    assert "alive" in out

    shown = json.loads(typed("info", "--json")[1])
    assert shown["group"] == names.group
    assert shown["delayed"] == 1
    assert shown["waiting"] == shown["pending"] == shown["dead"] == 0
    assert shown["leader"]["host"] == f"{names.host}-w1"
    assert {one["host"] for one in shown["consumers"]} == {f"{names.host}-w1"}


def test_info_names_what_is_held_longest(typed: Run, desk: Desk, names: Names) -> None:
    """Whoever finds that nothing moves sees in which task the workers hang."""
    desk.client.xgroup_create(names.stream, names.group, "0-0", mkstream=True)
    first, *_ = desk.strand("hangs", [1, 2], idle=0)
    desk.strand("behind", [3], idle=0, consumer="a")

    code, out, _ = typed("info")

    assert code == 0
    assert "pending         3 (oldest: hangs, for " in out
    assert f"in the queue, held by stranger, entry {first})" in out
    shown = json.loads(typed("info", "--json")[1])["oldest_pending"]
    assert (shown["task"], shown["entry_id"], shown["consumer"]) == ("hangs", first, "stranger")
    assert 0 <= shown["age"] < 60


def test_what_is_enqueued_runs(
    typed: Run, desk: Desk, make_worker: Callable[..., WorkerProcess], ledger: Ledger
) -> None:
    """The name need not be known here."""
    code, out, _ = typed("enqueue", "note", '{"id": "from-the-shell"}')
    assert code == 0
    assert out.startswith("sent note: id ")
    sent = json.loads(typed("enqueue", "--json", "note", '{"id": "second"}')[1])
    assert sent["task_name"] == "note"
    assert sent["entry_id"]

    make_worker()
    eventually(lambda: desk.length() == 0, 10)
    assert set(ledger.finished()) == {"from-the-shell", "second"}


def test_enqueue_delays_and_reads_standard_input(
    typed: Run, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large payloads come through a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO('["piped"]'))
    code, out, _ = typed("enqueue", "--in", "60", "later", "-")

    assert code == 0
    assert out.startswith("delayed later until ")
    (found,) = desk.runner.delayed.list()
    assert found.payload == ["piped"]
    assert 50 < found.run_at - time.time() < 65


def test_delayed_is_listed_and_cancelled(typed: Run, desk: Desk) -> None:
    """The next due first; cancelling needs a yes."""
    assert typed("delayed list")[1] == "nothing is delayed\n"
    desk.send("b", ["second"], run_in=200)
    desk.send("a", ["first"], run_in=100)
    first, second = desk.runner.delayed.list()

    code, out, _ = typed("delayed list")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["ID", "TASK", "DUE", "AT", "DUE", "IN", "ATTEMPTS", "PAYLOAD"]
    assert lines[1].startswith(first.id)
    assert lines[1].endswith('"first"')
    shown = json.loads(typed("delayed list", "--json")[1])
    assert [one["id"] for one in shown] == [first.id, second.id]

    code, _, err = typed("delayed cancel", first.id)  # nobody can be asked
    assert code == 2
    assert "--yes" in err
    assert typed("delayed cancel", first.id, "--yes")[0] == 0
    assert typed("delayed cancel", first.id, "--yes")[0] == 1
    assert [one.id for one in desk.runner.delayed.list()] == [second.id]


def test_dead_letters_are_listed_shown_requeued_and_deleted(typed: Run, desk: Desk) -> None:
    """The whole life of an operator's morning."""
    assert typed("dead list")[1] == "no dead letters\n"
    bury(desk, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 4})
    one, two, three, four = desk.runner.dead_letters.list()

    code, out, _ = typed("dead list")
    assert code == 0
    assert out.splitlines()[0].split() == ["ID", "TASK", "FAILED", "AT", "ATTEMPTS", "ERROR"]
    assert len(out.splitlines()) == 5
    assert "\x1b" not in out
    listed = json.loads(typed("dead list", "--limit", "1", "--after", one.id, "--json")[1])
    assert [letter["id"] for letter in listed] == [two.id]

    code, out, _ = typed("dead show", one.id)
    assert code == 0
    assert "ValueError: it broke?[2J" in out
    assert "Traceback" in out
    assert "\x1b" not in out
    shown = json.loads(typed("dead show", one.id, "--json")[1])
    assert shown["payload"] == one.payload
    assert json.loads(shown["message"])["task_name"] == "break"

    code, out, _ = typed("dead requeue", one.id)
    assert code == 0
    assert desk.length() == 1
    assert typed("dead requeue", one.id)[0] == 1
    assert typed("dead show", "1-1")[0] == 1

    assert typed("dead delete", two.id)[0] == 2
    assert typed("dead delete", two.id, "--yes")[0] == 0
    assert typed("dead delete", two.id, "--yes")[0] == 1
    assert {letter.id for letter in desk.runner.dead_letters.list()} == {three.id, four.id}

    assert typed("dead requeue", "all")[1] == "requeued 2\n"
    bury(desk, 5)
    assert typed("dead purge", "--yes")[0] == 0
    assert len(desk.runner.dead_letters) == 0


def test_purge_empties_the_queue(typed: Run, desk: Desk) -> None:
    """Only with a yes."""
    desk.send("noop", range(5))

    assert typed("purge")[0] == 2
    assert desk.length() == 5
    code, out, _ = typed("purge", "--yes")
    assert (code, out) == (0, "deleted 5\n")
    assert desk.length() == 0


@pytest.mark.parametrize(("answer", "left"), [("y", 0), ("n", 3), ("", 3)])
def test_on_a_terminal_it_asks(
    server: EmbeddedServer, desk: Desk, names: Names, answer: str, left: int
) -> None:
    """An empty answer is no."""
    desk.send("noop", range(3))
    mine, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "taskrunner", "purge", "--url", server.url),
                *("--group", names.group, "--prefix", names.prefix),
            ],
            cwd=ROOT,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.write(mine, f"{answer}\n".encode())
        out, err = process.communicate(timeout=20)
    finally:
        os.close(mine)
        os.close(theirs)

    assert f"Delete all 3 entries of {names.stream}" in err
    assert process.returncode == (0 if left == 0 else 1), out + err
    assert desk.length() == left


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:wrong@"])
def test_a_wrong_login_is_said_in_one_line(
    own_server: Callable[..., OwnServer], capsys: pytest.CaptureFixture[str], login: str
) -> None:
    """With where it belongs, and without the password."""
    server = own_server(arguments=["--requirepass", "sesame"], start=False)
    server.start(wait=False)
    url = f"redis://{login}127.0.0.1:{server.port}"
    eventually(lambda: main(["info", "--url", url, "--group", "g"]) == 1)
    capsys.readouterr()
    eventually(lambda: "Connection refused" not in told(capsys, url))

    said = told(capsys, url)
    assert "redis://user:password@host" in said
    assert "wrong" not in said
    assert said.count("\n") == 1


def told(capsys: pytest.CaptureFixture[str], url: str) -> str:
    """What `info` complains of."""
    main(["info", "--url", url, "--group", "g"])
    return capsys.readouterr().err
