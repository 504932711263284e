"""A hostile producer can make a worker log and dead-letter, nothing else.

No code runs that is no registered task, nothing of a payload is in the log, memory stays within the
byte budget, and pickle is nowhere. Each kind of bad entry by name is in BL-14's test; here they are
drawn at random.
"""

import ast
import bisect
import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import taskrunner
from taskrunner import InvalidTaskPayloadError
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.in_flight import ByteBudget
from taskrunner.message import decode, encode
from taskrunner.store.group import ConsumerGroup
from tests.fuzz import promises
from tests.fuzz.promises import SECRET
from tests.support import Desk, Ledger, Names, OwnServer, WorkerProcess, eventually
from tests.support.fleet import Fleet

MIB = 1024 * 1024
GOOD: dict[str, Any] = {
    "unique": False,
    "unique_for": 0,
    "unique_key": "",
    "unique_lock_value": "",
    "reservation_timeout": 10**9,
    "task_name": "note",
    "payload": SECRET,
}
NAMES = [
    "os.system",
    "eval",
    "__import__",
    "note.__globals__",
    "../note",
    "noté",
    "NOTE",
    "",
    "x" * 99,
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=20),
    st.sampled_from(NAMES),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
names_of_fields = st.sampled_from(
    [*GOOD, "id", "attempt", "unknown", "only_group", "enqueued_at", "task", "time", "Task_Name", "PAYLOAD"]
)  # fmt: skip


@st.composite
def wrong_types(draw: st.DrawFn) -> bytes:
    """A message some of whose fields hold what they shouldn't."""
    changed = GOOD | draw(st.dictionaries(names_of_fields, values, min_size=1, max_size=4))
    return json.dumps(changed, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message with some bytes cut off, put in or overwritten."""
    body = bytearray(draw(wrong_types()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        to = draw(st.integers(at, min(len(body), at + 30)))
        body[at:to] = draw(st.binary(max_size=8))
    return bytes(body)


@st.composite
def deep(draw: st.DrawFn) -> bytes:
    """Nested beyond any stack, closed or not, or a number of very many digits."""
    opening, closing = draw(st.sampled_from([("[", "]"), ('{"a":', "}"), ('[{"":', "}]")]))
    depth = draw(st.sampled_from([500, 5_000, 60_000]))
    inner = draw(st.sampled_from(["1", "9" * 9_000, "1e999", '"\\ud800"', f'"{SECRET}"']))
    end = closing * depth if draw(st.booleans()) else ""
    field = draw(names_of_fields)
    return f'{{"task_name":"note","{field}":{opening * depth}{inner}{end}}}'.encode()


bodies = st.one_of(wrong_types(), damaged(), deep(), st.binary(max_size=300))


@given(bodies)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_reader_gives_a_sound_message_or_refuses_whatever_it_is_given(body: bytes) -> None:
    """Nothing else is ever raised, what is accepted has the types that the rest relies on, and it
    keeps its payload, name, lock and count on every move."""
    promises.check(body)


@given(bodies, bodies)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_reader_is_not_led_astray_by_what_it_read_before(first: bytes, second: bytes) -> None:
    """What it remembers of earlier messages is a matter of speed only."""

    before = repr(promises.told(decode, second))
    promises.told(decode, first)
    assert repr(promises.told(decode, second)) == before


entries = st.one_of(
    bodies.map(lambda body: {b"payload": body}),
    st.dictionaries(
        st.binary(min_size=1, max_size=20), st.binary(max_size=50), min_size=1, max_size=3
    ).filter(lambda fields: b"payload" not in fields),
)


def test_good_messages_run_once_between_200_bad_ones(
    make_desk: Callable[..., Desk],
    make_worker: Callable[..., WorkerProcess],
    own_server: Callable[..., OwnServer],
    names: Names,
    ledger: Ledger,
) -> None:
    """In the same process; each bad one is run as the registered task it names, or is a dead
    letter; none of its payload is in the log."""
    server = own_server()
    worker = make_worker(
        url=server.url,
        config={"batch_size": 30, "num_workers": 3, "unknown_task_deliveries": 1},
        log_level="DEBUG",
    )
    desk = make_desk(server.url)
    pid, sent = worker.pid, 0

    @given(st.lists(entries, min_size=50, max_size=50))
    @settings(
        max_examples=4,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(bad: list[dict[bytes, bytes]]) -> None:
        nonlocal sent
        for fields in bad:
            desk.client.xadd(names.stream, fields)  # type: ignore[arg-type]
            desk.send("note", [f"good-{sent}"])
            sent += 1

    send()
    assert sent >= 200
    good = [f"good-{number}" for number in range(sent)]
    eventually(lambda: {*good} <= {str(run.id) for run in ledger.runs()}, 30, interval=0.1)
    eventually(desk.is_done, 30, interval=0.1, message=lambda: worker.log()[-3000:])
    counts = Counter(str(run.id) for run in ledger.runs())
    assert {id_: counts[id_] for id_ in good} == dict.fromkeys(good, 1)
    letters = desk.letters()
    print(f"{sent} bad ones: {len(letters)} dead letters, {len(ledger.runs()) - sent} runs")
    assert worker.pid == pid
    assert worker.status()["state"] == "started"
    assert {letter.error_type for letter in letters} <= {
        "InvalidTaskPayloadError",
        "TaskNotFoundError",
        "MaxRetryExceededError",
        "TypeError",
        "KeyError",
    }
    assert SECRET not in worker.log()
    assert "could not be handled" not in worker.log()
    assert max(map(len, worker.log().splitlines())) < 2500


def test_good_delayed_tasks_run_once_between_bad_members(
    make_desk: Callable[..., Desk],
    make_worker: Callable[..., WorkerProcess],
    own_server: Callable[..., OwnServer],
    names: Names,
    ledger: Ledger,
) -> None:
    """Whatever lies in the delayed set, the leader goes on: bad members become dead letters."""
    server = own_server()
    worker = make_worker(url=server.url, config={"unknown_task_deliveries": 1}, log_level="DEBUG")
    desk = make_desk(server.url)
    pid, sent = worker.pid, 0

    @given(st.lists(bodies, min_size=50, max_size=50, unique=True))
    @settings(
        max_examples=4,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(bad: list[bytes]) -> None:
        nonlocal sent
        for body in bad:
            member = body.replace(b'"task_name"', b'"task"').replace(b'"attempt"', b'"time"')
            desk.client.zadd(names.delayed, {member: 1})
            desk.send("note", [f"good-{sent}"], run_in=0.2)
            sent += 1

    send()
    good = [f"good-{number}" for number in range(sent)]
    eventually(lambda: {*good} <= {str(run.id) for run in ledger.runs()}, 30, interval=0.1)
    # A unique message from outside takes its lock when it is moved: it may have to wait for it.
    eventually(desk.is_empty, 60, interval=0.1, message=lambda: worker.log()[-3000:])
    counts = Counter(str(run.id) for run in ledger.runs())
    assert {id_: counts[id_] for id_ in good} == dict.fromkeys(good, 1)
    print(f"{sent} bad ones: {len(desk.letters())} dead letters, {len(ledger.runs()) - sent} runs")
    assert worker.pid == pid
    assert worker.status()["state"] == "started"
    assert SECRET not in worker.log()
    assert "could not be handled" not in worker.log()
    assert "failed, retrying" not in worker.log()
    assert max(map(len, worker.log().splitlines())) < 2500


def _deepest() -> int:
    """How deep the nesting of a message may be here: from Python 3.12 on C has a limit of its own."""

    def read(depth: int) -> bool:
        try:
            decode(b'{"task_name":"a","payload":%s%s}' % (b"[" * depth, b"]" * depth))
        except InvalidTaskPayloadError:
            return False
        return True

    found: list[int] = []

    def search() -> None:  # with an empty stack, as a worker's
        found.append(bisect.bisect(range(1_000_000), 0, key=lambda depth: not read(depth)) - 1)

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    return found[0]


def test_a_message_nested_about_as_deep_as_can_be_read_ends_whatever_way_it_takes(
    server: EmbeddedServer, names: Names
) -> None:
    """The limit is the interpreter's, and a call deeper in the stack it is one less: what was read
    to be run may be refused where it is to be moved. Run or refused, it ends as a dead letter."""
    deepest = _deepest()
    depths = range(deepest - 50, deepest + 10)
    with Fleet(server.url, names) as fleet:

        def fails(_: Any) -> None:
            raise ValueError("always")

        fleet.task(fails, name="soon", max_retry=2, retry_delay=0.1)
        fleet.task(fails, name="late", max_retry=2, retry_delay=2.5)  # beyond reclaim_delay
        runner = fleet.start_leader()
        for depth in depths:
            nested = "[" * depth + "]" * depth
            for name in ("soon", "late"):
                body = encode(
                    name, nested, id=f"{name}-{depth}", enqueued_at=1.5, reservation_timeout_ns=1
                )
                fleet.client.xadd(names.stream, {"payload": body})
            member = f'{{"id":"due-{depth}","task":"late","time":1,"payload":{nested}}}'
            fleet.client.zadd(names.delayed, {member: 1})
        eventually(lambda: len(runner.dead_letters) >= 3 * len(depths), 40, interval=0.1)
        eventually(fleet.settled, 10)
        ends = Counter(letter.error_type for letter in runner.dead_letters.list(1000))
        print(dict(ends))
        assert ends.keys() == {"ValueError", "InvalidTaskPayloadError"}
        assert sum(ends.values()) == 3 * len(depths)


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("payload", 100),
        ("another field", 100),
        ("beside the payload", 100),
        ("task_name", 2),
        ("unique_key", 30),
    ],
)
def test_memory_stays_within_the_byte_budget_when_entries_are_huge(
    where: str,
    number: int,
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    make_worker: Callable[..., WorkerProcess],
    names: Names,
) -> None:
    """100 of 10 MiB would be a gigabyte in one batch: they are read few at a time, wherever in the
    entry the bytes are, and nothing of them is kept."""
    server = own_server()
    worker = make_worker(url=server.url, config={"batch_size": 100, "unknown_task_deliveries": 1})
    desk = make_desk(server.url)
    before = worker.rss_bytes()
    huge = SECRET * (10 * MIB // len(SECRET))
    fields = {
        "payload": {"payload": json.dumps(GOOD | {"task_name": "noop", "payload": huge})},
        "another field": {"other": huge},
        "beside the payload": {"other": huge, "payload": json.dumps(GOOD | {"task_name": "noop"})},
        "task_name": {"payload": json.dumps(GOOD | {"task_name": huge, "unique": "wrong"})},
        "unique_key": {
            "payload": json.dumps(
                GOOD
                | {"task_name": "noop", "unique": True, "unique_for": 9, "unique_lock_value": "x"}
                | {"unique_key": huge}
            )
        },
    }[where]
    worker.pause()  # so that all of them are there at its next read
    for _ in range(number):
        desk.client.xadd(names.stream, fields)  # type: ignore[arg-type]
    worker.resume()
    eventually(desk.is_done, 100, interval=0.1, message=lambda: worker.log()[-500:])
    peak, after = _peak_bytes(worker), worker.rss_bytes()
    print(
        f"{where}: {before / MIB:.0f} MiB before, at most {peak / MIB:.0f}, {after / MIB:.0f} after"
    )
    logged = len(worker.log())
    assert logged < 2 * MIB
    shown = SECRET * 100 in worker.log()
    assert not shown
    assert peak - before < 7 * 64 * MIB  # the reply, its parts, their text, and the value
    assert after - before < 7 * 64 * MIB  # what the allocator keeps of it: not ten times as much


@pytest.mark.parametrize("how", ["read", "taken over"])
def test_large_entries_that_follow_at_once_on_small_ones_come_few_at_a_time(
    how: str,
    server: EmbeddedServer,
    names: Names,
    make_desk: Callable[..., Desk],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Small ones teach that a hundred may be asked for, and Redis bounds no reply: the reader does,
    and a takeover in its step. What was cut off is read again, and costs no attempt. (A thousandth
    of the real limits, and of the real sizes.)"""
    monkeypatch.setattr(ByteBudget, "LIMIT", 64 * 1024)
    monkeypatch.setattr(ByteBudget, "MOST", 128 * 1024)
    most: dict[str, int] = {"read": 0, "taken over": 0}

    def watched(method: Callable[..., Any], key: str, size: Callable[[Any], int]) -> Any:
        def call(*args: Any) -> Any:
            result = method(*args)
            most[key] = max(most[key], sum(map(size, result)))
            return result

        return call

    monkeypatch.setattr(
        ConsumerGroup, "read", watched(ConsumerGroup.read, "read", lambda one: one.size)
    )
    monkeypatch.setattr(
        ConsumerGroup,
        "claim",
        watched(
            ConsumerGroup.claim, "taken over", lambda one: one.delivery.size if one.delivery else 0
        ),
    )
    desk = make_desk()
    with Fleet(server.url, names) as fleet:
        runner = fleet.start(num_workers=100, batch_size=100)
        for number in range(20):  # each halves what the largest one is thought to be
            fleet.producer.dispatch("note", number)
            fleet.wait_ran(number)
        eventually(fleet.settled, 10)
        large = [f"{number}-" + "x" * 10_000 for number in range(60)]
        if how == "read":
            with fleet.client.pipeline(transaction=True) as pipe:  # one read finds them all
                for body in large:
                    pipe.xadd(names.stream, {"payload": _message("note", body)})
                pipe.execute()
        else:
            desk.strand("note", large, idle=60)
        fleet.wait_ran(*large, timeout=30)
        eventually(fleet.settled, 20)
        runs = Counter(run.payload for run in fleet.runs)
        assert {body: runs[body] for body in large} == dict.fromkeys(large, 1)
        expected = 1 if how == "read" else 2
        assert {run.attempt for run in fleet.runs if run.payload in large} == {expected}
        assert most["read"] <= ByteBudget.MOST
        assert most["taken over"] <= ByteBudget.LIMIT + 11_000
        assert ("was cut off" in caplog.text) == (how == "read")
        assert list(runner.errors) == []


def _message(name: str, payload: Any) -> str:
    return encode(
        name, json.dumps(payload), id=str(uuid.uuid4()), enqueued_at=1.5, reservation_timeout_ns=1
    )


def _peak_bytes(worker: WorkerProcess) -> int:
    """Its largest resident size so far (getrusage would count the process it was forked from)."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@pytest.mark.parametrize(
    "changes", [{"unique": "wrong"}, {"payload": None}], ids=["undecodable", "unknown"]
)
def test_a_name_or_id_cannot_forge_a_line_of_log(
    changes: dict[str, Any],
    make_desk: Callable[..., Desk],
    make_worker: Callable[..., WorkerProcess],
    names: Names,
) -> None:
    """Line ends in what the producer chose don't end the line."""
    worker = make_worker(config={"unknown_task_deliveries": 1}, log_level="DEBUG")
    desk = make_desk()
    forged = "12:00:00.000 CRITICAL forged"
    body = GOOD | {"task_name": f"a\n{forged}", "id": f"b\r\n{forged}", "attempt": 0} | changes
    desk.client.xadd(names.stream, {"payload": json.dumps(body)})
    eventually(lambda: desk.letters() and desk.is_done(), 10)
    assert not [line for line in worker.log().splitlines() if line.startswith(forged)]


def test_no_module_imports_what_runs_code_from_data() -> None:
    """No pickle or its like, no eval, no exec, no import by a name that came over the wire."""
    forbidden = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"}
    called = {"eval", "exec", "compile", "__import__"}
    found: list[str] = []
    root = Path(taskrunner.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                modules = [node.func.id] if node.func.id in called else []
                forbidden_here = called
                found += [f"{path.name}: {name}" for name in modules if name in forbidden_here]
                continue
            found += [f"{path.name}: {m}" for m in modules if m.partition(".")[0] in forbidden]
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "import_module"
                and path.parent == root
            ):
                found.append(f"{path.name}: import_module")
    assert found == []
