"""`taskrunner doctor` finds each planted fault, and its command mends it; a healthy system has
none."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from taskrunner import RedisStreamQueue, Registry, TaskRunner, keys, task
from taskrunner.cli import findings, main
from taskrunner.cli.locate import find_runner
from tests.support import eventually
from tests.support.names import Names
from tests.support.server import OwnServer

APP = """
from taskrunner import RedisStreamQueue, Registry, TaskRunner, task

registry = Registry()

@task(name="known", registry=registry, max_retry=2, max_lost=1)
def known(payload):
    pass

runner = TaskRunner(
    consumer_group={group!r},
    queue=RedisStreamQueue({url!r}, prefix={prefix!r}, reclaim_delay=2),
    registry=registry,
    host={host!r},
)
"""


class Patient:
    """A system with a server of its own, and what the doctor says of it."""

    def __init__(
        self,
        server: OwnServer,
        names: Names,
        capsys: pytest.CaptureFixture[str],
        directory: Path,
    ) -> None:
        self.server = server
        self.names = names
        self.client = server.client()
        self._capsys = capsys
        self.registry = Registry()

        @task(name="known", registry=self.registry, max_retry=2, max_lost=1)
        def known(payload: Any) -> None:
            pass

        self.known = known
        self.runner = TaskRunner(
            consumer_group=names.group,
            queue=RedisStreamQueue(server.url, prefix=names.prefix, reclaim_delay=2),
            registry=self.registry,
            host=names.host,
        )
        self.module = f"app_{names.group}"
        (directory / f"{self.module}.py").write_text(
            APP.format(group=names.group, url=server.url, prefix=names.prefix, host=names.host)
        )

    def audit(
        self, *, application: bool = False, words: tuple[str, ...] = ()
    ) -> tuple[int, dict[str, dict[str, Any]]]:
        """(exit code, findings by check)."""
        code = main(self._typed(application, words, "--json"))
        said = json.loads(self._capsys.readouterr().out)
        assert said["skipped"] == []
        return code, {one["check"]: one for one in said["findings"]}

    def _typed(self, application: bool, words: tuple[str, ...], *more: str) -> list[str]:
        place = ["--url", self.server.url, "--group", self.names.group]
        place += ["--prefix", self.names.prefix]
        return ["doctor", *([f"{self.module}:runner"] if application else place), *words, *more]

    def finds(
        self, check: str, *, application: bool = False, words: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """The one finding there must be; with the exit code for it."""
        code, found = self.audit(application=application, words=words)
        assert check in found, found
        assert code == (0 if all(one["severity"] == "note" for one in found.values()) else 3)
        return found[check]

    def mend(
        self,
        finding: dict[str, Any],
        *,
        application: bool = False,
        words: tuple[str, ...] = (),
    ) -> None:
        """Execute the finding's command, word for word as it is printed; by hand where there is no
        redis-cli."""
        main(self._typed(application, words))
        lines = self._capsys.readouterr().out.splitlines()
        (command,) = [line.strip() for line in lines if line == f"    {finding['command']}"]
        if shutil.which("redis-cli"):
            subprocess.run(command, shell=True, check=True, timeout=20, stdout=subprocess.DEVNULL)
        else:
            split = shlex.split(command)
            assert split[:3] == ["redis-cli", "-s", str(self.server.socket_path)]
            self.runner.queue.connections.call(*split[3:])

    def lacks(self, check: str, *, application: bool = False) -> bool:
        return check not in self.audit(application=application)[1]

    def hold(self, consumer: str, *, times: int = 1) -> bytes:
        """Have a consumer read one message that often, and fall silent."""
        self.known.delay(1)
        stream, group = self.names.stream, self.names.group
        if not any(one["name"] == group.encode() for one in self._groups()):
            self.client.xgroup_create(stream, group, "0-0")
        read: Any = self.client.xreadgroup(group, consumer, {stream: ">"}, count=1)
        entry_id: bytes = read[0][1][0][0]
        if times > 1:
            self.client.xclaim(stream, group, consumer, 0, [entry_id], retrycount=times)
        return entry_id

    def _groups(self) -> Any:
        return self.client.xinfo_groups(self.names.stream)


@pytest.fixture
def patient(
    own_server: Callable[..., OwnServer],
    names: Names,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Patient]:
    """A system with nothing wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = Patient(own_server(appendonly=True), names, capsys, tmp_path)
    yield made
    made.runner.stop()
    sys.modules.pop(made.module, None)


def test_nothing_is_found_where_nothing_is_wrong(
    patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything was used, at work, and after a stop."""
    assert patient.audit() == (0, {})
    assert patient.audit(application=True) == (0, {})
    with patient.runner:
        patient.known.delay_many(range(50))
        patient.known.delay(1, run_in=3600)
        eventually(lambda: patient.audit(application=True) == (0, {}), 5)
        eventually(lambda: len(patient.runner.queue) == 0, 5)
        assert patient.audit() == (0, {})
    assert patient.audit() == (0, {})

    assert main(["doctor", f"{patient.module}:runner"]) == 0
    assert capsys.readouterr().out.startswith(f"nothing found: group {patient.names.group}")


def test_work_that_nobody_does(patient: Patient) -> None:
    """The most frequent of all faults."""
    patient.known.delay(1)
    finding = patient.finds("nobody-works", application=True)

    assert finding["severity"] == "error"
    assert f"taskrunner worker {patient.module}:runner" in finding["cure"]
    with patient.runner:
        eventually(lambda: patient.lacks("nobody-works"), 10)


@pytest.mark.parametrize("host", ["gone", None])
def test_deliveries_of_a_dead_consumer(patient: Patient, host: str | None) -> None:
    """Of an instance that was killed, or of a stranger."""
    name = f"{patient.names.group}_{host}_1" if host else "stranger"
    patient.hold(name)
    finding = patient.finds("dead-consumer")
    assert name in finding["text"]

    patient.mend(finding)
    assert patient.lacks("dead-consumer")
    with patient.runner:  # and a worker takes it at once
        eventually(lambda: len(patient.runner.queue) == 0, 10)


def test_a_leader_key_without_expiry(patient: Patient) -> None:
    """Left behind by hand: it would hold off every leader for ever."""
    patient.client.set(keys.leader(patient.names.group), "somebody")
    patient.mend(patient.finds("leader-without-expiry"))
    assert patient.lacks("leader-without-expiry")


def test_a_leader_that_is_none_of_ours(patient: Patient) -> None:
    """Nothing delayed would become due."""
    patient.client.set(keys.leader(patient.names.group), "somebody", ex=600)
    finding = patient.finds("leader-unknown")
    assert "somebody" in finding["evidence"]
    patient.mend(finding)
    assert patient.lacks("leader-unknown")


def test_a_second_group_on_the_stream(patient: Patient) -> None:
    """Made by a typo, it keeps every entry."""
    patient.known.delay(1)
    patient.client.xgroup_create(patient.names.stream, "typo", "0-0")
    finding = patient.finds("several-groups")
    assert finding["severity"] == "warning"
    patient.mend(finding)
    assert patient.lacks("several-groups")


@pytest.mark.parametrize(
    ("group", "copied"),
    [("a'; exit 1; '$(exit 1)", True), ("a\x1b[2J\nb", False), (b"a\xff", False)],
)
def test_names_from_anyone_do_no_harm(
    patient: Patient, capsys: pytest.CaptureFixture[str], group: str | bytes, copied: bool
) -> None:
    """What is printed to be pasted into a shell is quoted, and left out where the name can't be
    shown; nothing moves the cursor, in `info` neither."""
    patient.known.delay(1)
    patient.client.xgroup_create(patient.names.stream, group, "0-0")
    finding = patient.finds("several-groups")
    assert (finding["command"] is not None) == copied
    place = ["--group", patient.names.group, "--prefix", patient.names.prefix]
    for command in ("doctor", "info"):
        main([command, "--url", patient.server.url, *place])
        assert capsys.readouterr().out.replace("\n", "").isprintable()
    if copied:
        patient.mend(finding)
        assert patient.lacks("several-groups")


def test_an_eviction_policy(patient: Patient) -> None:
    """Worse where there is a limit to memory."""
    patient.client.config_set("maxmemory-policy", "allkeys-lru")
    assert patient.finds("eviction-policy")["severity"] == "warning"
    patient.client.config_set("maxmemory", "100mb")
    finding = patient.finds("eviction-policy")
    assert finding["severity"] == "error"
    patient.mend(finding)
    assert patient.lacks("eviction-policy")


def test_a_full_memory(patient: Patient) -> None:
    """The server refuses what is new, and its group stands still."""
    used = int(patient.client.info("memory")["used_memory"])
    patient.client.config_set("maxmemory", used * 100)
    assert patient.lacks("memory-full")
    patient.client.config_set("maxmemory", used // 2)
    finding = patient.finds("memory-full")
    assert finding["severity"] == "error"
    patient.client.config_set("maxmemory", used)
    patient.mend(patient.finds("memory-full"))
    assert patient.lacks("memory-full")


def test_a_server_without_persistence(patient: Patient) -> None:
    """Its restart would lose every task."""
    patient.client.config_set("appendonly", "no")
    patient.mend(patient.finds("no-persistence"))
    assert patient.lacks("no-persistence")


def test_a_server_that_cannot_save(patient: Patient) -> None:
    """Here a directory is in the way of its file; the cure lies on the disk, and is named."""
    in_the_way = patient.server.directory / "dump.rdb"
    in_the_way.mkdir()
    patient.client.bgsave()
    eventually(lambda: not patient.lacks("persistence-fails"))
    finding = patient.finds("persistence-fails")
    assert finding["severity"] == "error"
    assert finding["command"] is None
    assert "its disk" in finding["cure"]

    in_the_way.rmdir()
    patient.client.bgsave()
    eventually(lambda: patient.lacks("persistence-fails"))


def test_commands_name_the_server_and_the_user_and_never_the_password(
    patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copied from the screen they reach the same place."""
    patient.client.execute_command("ACL", "SETUSER", "ops", "on", ">secret", "~*", "&*", "+@all")
    patient.client.select(3)
    patient.client.set(keys.leader("g"), "somebody")
    url = f"redis://ops:secret@127.0.0.1:{patient.server.port}/3"

    assert main(["doctor", "--url", url, "--group", "g"]) == 3
    said = capsys.readouterr().out
    assert (
        f"    redis-cli -h 127.0.0.1 -p {patient.server.port} -n 3 --user ops "
        f"DEL {keys.leader('g')}\n"
    ) in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://", "-h localhost -p 6379"),
        ("unix:///run/r.sock?db=2", "-s /run/r.sock -n 2"),
        (
            "rediss://u:p@h:1/0?ssl_ca_certs=/ca.pem&ssl_cert_reqs=none",
            "-h h -p 1 --user u --tls --cacert /ca.pem --insecure",
        ),
    ],
)
def test_redis_cli_is_told_what_the_url_says(url: str, options: str) -> None:
    """Sockets, databases, users and certificates have options of their own."""
    assert " ".join(RedisStreamQueue(url).connections.cli_options()) == options


def test_a_server_that_hangs_up_on_the_silent(patient: Patient) -> None:
    """Its timeout is below a blocking read."""
    patient.client.config_set("timeout", "3")
    patient.mend(patient.finds("client-timeout"))
    assert patient.lacks("client-timeout")


def test_clocks_that_differ(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command mends it: the cure is named."""

    class Late:
        @staticmethod
        def time() -> float:
            return time.time() - 90

    monkeypatch.setattr(findings, "time", Late)
    finding = patient.finds("clock-skew")
    assert finding["command"] is None
    assert "1 min 30 s ahead" in finding["evidence"]
    assert "NTP" in finding["cure"]


def test_entries_that_are_no_messages(patient: Patient) -> None:
    """Something else writes to the stream."""
    patient.client.xadd(patient.names.stream, {"payload": "{torn"})
    patient.client.xadd(patient.names.stream, {"other": "field"})
    patient.known.delay(1)
    finding = patient.finds("undecodable")
    assert finding["text"].startswith("2 entries")
    patient.mend(finding)
    assert patient.lacks("undecodable")
    assert len(patient.runner.queue) == 1


def test_messages_of_a_task_that_nobody_registers(patient: Patient) -> None:
    """Waiting or delayed; only with the application can it be known."""

    @task(name="forgotten", registry=patient.registry)
    def forgotten(payload: Any) -> None:
        pass

    forgotten.delay(1)
    forgotten.delay(2, run_in=3600)
    assert patient.finds("unknown-task", application=True)["evidence"] == "forgotten (2)"
    assert patient.lacks("unknown-task")
    patient.runner.queue.purge()
    patient.runner.delayed.cancel(patient.runner.delayed.list()[0].id)
    assert patient.lacks("unknown-task", application=True)


def test_messages_beyond_their_attempts(patient: Patient) -> None:
    """They fail for good at the next delivery, and hold up nobody until then."""
    patient.hold(f"{patient.names.group}_gone_1", times=3)
    patient.hold(f"{patient.names.group}_gone_1", times=2)
    finding = patient.finds("beyond-attempts", application=True)
    assert finding["text"].startswith("1 messages")
    patient.mend(finding, application=True)
    with patient.runner:
        eventually(lambda: len(patient.runner.dead_letters) == 1, 10)
        eventually(lambda: patient.lacks("beyond-attempts", application=True), 5)


def test_a_reclaim_delay_below_what_a_task_takes(patient: Patient) -> None:
    """The cure is a setting, in every instance."""
    patient.client.hset(patient.names.metrics, mapping={"known_sum": 50_000, "known_count": 10})
    finding = patient.finds("short-reclaim-delay", application=True)
    assert "known takes 5.0 s" in finding["evidence"]
    assert "reclaim_delay to 10" in finding["cure"]


def test_unique_locks_that_no_message_holds(
    patient: Patient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not those of waiting and delayed messages, nor those of other applications on the server."""
    module = tmp_path / f"{patient.module}.py"
    module.write_text(
        module.read_text()
        + """
@task(name="on*ce", registry=registry, unique_for=600, unique_key=str)
def once(payload):
    pass

@task(name="alone", registry=registry, unique_for=600)
def alone(payload):
    pass
"""
    )
    application = find_runner(f"{patient.module}:runner")
    application.dispatch("on*ce", "waits")
    application.dispatch("on*ce", "late", run_in=100)
    application.dispatch_many("on*ce", range(20))  # more than is looked at in one step
    application.queue.add("no message")
    patient.client.zadd(patient.names.delayed, {"no message": 2e9})
    lost = [application.dispatch("on*ce", "lost"), application.dispatch("alone")]
    for sent in lost:
        patient.client.xdel(patient.names.stream, sent.entry_id or "")
    patient.client.set(keys.unique("another:1"), "token")
    patient.client.set(keys.unique("onxce:1"), "token")

    assert patient.lacks("lock-without-task", application=True)
    finding = patient.finds("lock-without-task", application=True, words=("--locks",))
    assert finding["evidence"] == f"{keys.unique('alone')}, {keys.unique('on*ce:lost')}"
    patient.mend(finding, application=True, words=("--locks",))
    _, found = patient.audit(application=True, words=("--locks",))
    assert "lock-without-task" not in found
    assert patient.client.exists(keys.unique("on*ce:waits"), keys.unique("on*ce:late")) == 2

    assert main(["doctor", "--group", "g", "--locks"]) == 2
    assert "needs MODULE:RUNNER" in capsys.readouterr().err


def test_what_it_may_not_ask_is_said(patient: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    """Under an ACL without CONFIG the rest is still looked at, and nothing is claimed of that."""
    patient.client.execute_command(
        *("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-config")
    )
    patient.client.config_set("appendonly", "no")
    url = patient.server.url.replace("unix://", "unix://limited:secret@")
    with redis.Redis.from_url(url) as check:
        check.ping()

    code = main(["doctor", "--url", url, "--group", "g", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == 0
    assert said["findings"] == []
    assert [one.split(":")[0] for one in said["skipped"]] == [
        "CONFIG GET save",
        "CONFIG GET timeout",
    ]


def test_a_user_that_may_do_little_can_look(
    patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    """INFO is a dangerous command for ACLs: without it only the version is missing."""
    patient.client.execute_command(
        *("ACL", "SETUSER", "small", "on", ">secret", "~*", "&*", "+@all", "-@dangerous")
    )
    url = patient.server.url.replace("unix://", "unix://small:secret@")

    assert main(["info", "--url", url, "--group", "g"]) == 0
    assert "Redis of unknown version at unix:" in capsys.readouterr().out
    assert main(["doctor", "--url", url, "--group", "g"]) == 0
    assert "not looked at: INFO memory: NoPermissionError" in capsys.readouterr().out


def test_the_findings_read_well(patient: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    """The worst first, without colour on a pipe, each with its command."""
    patient.client.config_set("appendonly", "no")
    patient.client.set(keys.leader(patient.names.group), "some\x1b[2Jbody")
    place = ["--url", patient.server.url, "--group", patient.names.group]

    assert main(["doctor", *place]) == 3
    said = capsys.readouterr().out
    assert said.index("ERROR leader-without-expiry") < said.index("WARNING no-persistence")
    assert "CONFIG SET appendonly yes\n" in said
    assert said.endswith(
        f"2 found: group {patient.names.group} on default:queue at unix:"
        f"{patient.server.socket_path}\n"
    )
    assert "\x1b" not in said
