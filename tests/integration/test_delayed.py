"""Delayed tasks: due by the server's clock, never early, moved whole, and nothing in front of them."""

import json
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from taskrunner import InvalidTaskPayloadError, Retry, clock, current_task
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.store.delayed_set import SCHEDULE
from tests.support import Names, OwnServer, Proxy, busy, eventually, faults, stays
from tests.support.fleet import Fleet
from tests.support.label import label


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


def member(id_: str, task_name: str, payload: str, due: int, **extra: Any) -> str:
    """A member as Go writes it, with `extra` keys behind."""
    more = "".join(f',"{key}":{json.dumps(value)}' for key, value in extra.items())
    return f'{{"id":"{id_}","task":"{task_name}","time":{due},"payload":{payload}{more}}}'


# --- when it runs ---


@pytest.mark.slow
def test_delayed_tasks_start_when_they_are_due(fleet: Fleet) -> None:
    """200 tasks due over 4 s: none early, none later than a busy machine explains."""
    fleet.start_leader(num_workers=8)
    first = time.time() + 1.0
    wanted = [first + 4.0 * number / 200 for number in range(200)]
    for number, due in enumerate(wanted):
        fleet.note.delay(number, run_at=due)

    runs = fleet.wait_ran(*range(200))

    late = sorted(run.at - due for run, due in zip(runs, wanted, strict=True))
    print(
        f"lateness of 200 tasks: median {statistics.median(late) * 1000:.1f} ms, "
        f"p99 {late[197] * 1000:.1f} ms, most {late[-1] * 1000:.1f} ms"
    )
    assert late[0] >= 0, "a task started before it was due"
    assert late[-1] < busy(2)
    assert len(fleet.runs) == 200


def test_a_short_delay_starts_on_time_when_the_leader_sleeps_until_a_far_one(
    fleet: Fleet,
) -> None:
    """What is added earlier than everything else wakes the leader, whatever its poll interval."""
    fleet.start_leader(timings={"poll": 60, "lease": 30})
    fleet.note.delay("far", run_in=3600)
    eventually(fleet.members)
    for number in range(5):
        faults.down_for(0.2)  # the leader sleeps again
        before = time.time()
        fleet.note.delay(number, run_in=0.05)
        (run,) = fleet.wait_ran(number)
        assert 0.05 <= run.at - before < busy(2)
    assert len(fleet.members()) == 1


def test_a_member_added_without_a_word_is_seen_within_the_poll_interval(fleet: Fleet) -> None:
    """Go publishes nothing: the leader looks every `poll` seconds at the latest."""
    fleet.start_leader(timings={"poll": 1})
    fleet.note.delay("far", run_in=3600)
    faults.down_for(0.5)
    due = int(time.time()) + 1
    fleet.client.zadd(fleet.names.delayed, {member("go", "note", '"quiet"', due): due})
    (run,) = fleet.wait_ran("quiet")
    assert due <= run.at < due + 1 + busy(2)


def test_tasks_due_at_once_are_moved_without_waiting_for_a_poll(fleet: Fleet) -> None:
    """From the front, batch after batch, until nothing is due (D1)."""
    fleet.note.delay_many(range(1000), run_in=0.3)
    assert fleet.client.zcard(fleet.names.delayed) == 1000
    fleet.start_leader(timings={"poll": 60, "lease": 30}, num_workers=8)
    fleet.wait_ran(*range(1000), timeout=30)
    eventually(fleet.settled)
    assert sorted(fleet.payloads()) == list(range(1000))


def test_a_delay_that_is_over_at_the_call_goes_to_the_stream_at_once(fleet: Fleet) -> None:
    """Past, now and a negative delay are all "now"; what comes back says so."""
    for options in (
        {"run_at": time.time() - 1},
        {"run_at": 0},
        {"run_at": -1},
        {"run_at": datetime.now(UTC)},
        {"run_at": datetime(1, 1, 2, tzinfo=UTC)},
        {"run_in": 0},
        {"run_in": -5.5},
        {"run_in": timedelta(seconds=-1)},
    ):
        sent = fleet.note.delay("x", **options)
        assert sent.entry_id is not None, options
        assert sent.run_at is None, options
    assert fleet.client.xlen(fleet.names.stream) == 8
    assert fleet.members() == []


def test_the_server_s_clock_decides_when_the_producer_s_is_wrong(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer whose clock is an hour off still means the same instant and the same duration."""
    for skew in (-3600.0, 3600.0):
        with monkeypatch.context() as patch:
            patch.setattr(clock, "now", lambda skew=skew: time.time() + skew)
            before = time.time()
            duration = fleet.note.delay("in", run_in=30)
            instant = fleet.note.delay("at", run_at=before + 30)
            past = fleet.note.delay("past", run_at=before - 30)
        assert duration.run_at == pytest.approx(before + 30, abs=2)
        assert instant.run_at == pytest.approx(before + 30, abs=1e-5)
        assert past.entry_id is not None


def test_a_delayed_message_says_when_it_is_due(fleet: Fleet) -> None:
    """The score has the fraction, the member the whole second, rounded up: Go refuses a fraction."""
    due = math.floor(time.time()) + 100.25
    sent = fleet.note.delay({"a": 1}, run_at=due)
    ((text, score),) = fleet.members()
    assert score == due == sent.run_at
    assert sent.entry_id is None
    fields = json.loads(text)
    assert list(fields)[:4] == ["id", "task", "time", "payload"]
    assert fields["time"] == math.ceil(due)
    assert type(fields["time"]) is int
    assert (fields["id"], fields["task"], fields["payload"]) == (sent.id, "note", {"a": 1})


def test_dispatch_and_delay_many_take_a_time_too(fleet: Fleet) -> None:
    """All of the producer's ways in lead to the same set."""
    due = time.time() + 50
    fleet.producer.dispatch("note", 1, run_at=due)
    fleet.producer.dispatch_many("note", [2, 3], run_at=due)
    fleet.note.delay_many([4, 5], run_in=timedelta(seconds=50))
    assert len(fleet.members()) == 5
    assert sorted(json.loads(text)["payload"] for text, _ in fleet.members()) == [1, 2, 3, 4, 5]
    assert all(abs(score - due) < 2 for _, score in fleet.members())


def test_delay_many_with_a_time_takes_one_round_trip_per_thousand(
    fleet: Fleet, server: EmbeddedServer
) -> None:
    """A thousand delayed messages don't cost a thousand waits."""
    with Proxy(server.tcp_url) as proxy:
        proxy.delay(0.05)
        producer = fleet.make(url=proxy.url)
        started = time.monotonic()
        sent = producer.dispatch_many("note", range(20), run_in=60)
        taken = time.monotonic() - started
        proxy.pass_through()
    assert len({one.id for one in sent if one is not None}) == 20
    # the relay delays each command: twenty of them one after another, there and back, take 2 s
    assert taken < 1.9
    assert fleet.client.zcard(fleet.names.delayed) == 20


def test_the_server_s_memory_of_scripts_may_be_emptied_at_any_time(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """NOSCRIPT means that nothing ran: the text is sent along then, alone and in bulk."""
    own = own_server()
    with Fleet(own.url, names) as fleet, faults.scripts_forgotten(own.client(), every=0.02):
        fleet.start_leader()
        expected = set(range(300))
        for number in range(50):
            fleet.note.delay(number, run_in=0.1)
        fleet.note.delay_many(range(50, 300), run_in=0.1)
        fleet.wait_ran(*expected, timeout=30)
        eventually(fleet.settled)
        assert sorted(fleet.payloads()) == sorted(expected)


# --- what names an instant ---


@pytest.mark.parametrize(
    "run_at",
    [
        pytest.param(datetime(2031, 5, 1, 12, 0, 0, 250_000, tzinfo=UTC), id="utc"),
        pytest.param(
            datetime(2031, 5, 1, 17, 45, 0, 250_000, tzinfo=ZoneInfo("Asia/Kathmandu")),
            id="kathmandu",
        ),
        pytest.param(
            datetime(2031, 5, 1, 2, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=-10))),
            id="offset",
        ),
        pytest.param(1935489600.25 + 0.0, id="float"),
    ],
)
def test_run_at_names_the_same_instant_in_any_zone(fleet: Fleet, run_at: Any) -> None:
    """An aware datetime counts by its own offset, a number is unix seconds."""
    same = datetime(2031, 5, 1, 12, 0, 0, 250_000, tzinfo=UTC).timestamp()
    if isinstance(run_at, float):
        run_at = same
    assert fleet.note.delay(1, run_at=run_at).run_at == same
    assert fleet.members()[0][1] == same


def test_run_at_tells_the_two_readings_of_a_repeated_hour_apart(fleet: Fleet) -> None:
    """fold=0 is the first, fold=1 the second, an hour later."""
    zone = ZoneInfo("Europe/London")
    wall = datetime(2031, 10, 26, 1, 30, tzinfo=zone)
    first = fleet.note.delay(1, run_at=wall.replace(fold=0)).run_at
    second = fleet.note.delay(2, run_at=wall.replace(fold=1)).run_at
    assert first == datetime(2031, 10, 26, 0, 30, tzinfo=UTC).timestamp()
    assert second is not None
    assert second - first == 3600


def test_run_at_takes_a_whole_number(fleet: Fleet) -> None:
    """Unix seconds may be an int."""
    assert fleet.note.delay(1, run_at=1_935_489_600).run_at == 1_935_489_600.0


@pytest.mark.parametrize(
    "run_at",
    [
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone(timedelta(hours=12))),
        253_402_300_799.0,
        253_402_300_799,
        datetime(2999, 1, 1, tzinfo=UTC),
    ],
)
def test_run_at_may_be_as_late_as_the_year_9999(fleet: Fleet, run_at: Any) -> None:
    """It waits, and holds up nothing that is due before it."""
    assert fleet.note.delay("far", run_at=run_at).entry_id is None
    found = fleet.producer.delayed.list()[0]
    assert found.run_at == pytest.approx(
        run_at.timestamp() if isinstance(run_at, datetime) else run_at, abs=1e-4
    )
    fleet.start_leader()
    fleet.note.delay("near", run_in=0.1)
    fleet.wait_ran("near")
    assert fleet.payloads() == ["near"]


@pytest.mark.parametrize(
    "run_at",
    [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=-12))),
        -62_135_596_800.0,
        -62_135_596_800,
        datetime(1969, 12, 31, tzinfo=UTC),
    ],
)
def test_run_at_may_be_as_early_as_the_year_1(fleet: Fleet, run_at: Any) -> None:
    """It is past, so it is now."""
    assert fleet.note.delay("past", run_at=run_at).entry_id is not None


class NoOffset(tzinfo):
    """A zone that doesn't know its own offset: the datetime is naive for all its tzinfo."""

    def utcoffset(self, when: datetime | None) -> timedelta | None:
        return None

    def dst(self, when: datetime | None) -> timedelta | None:
        return None

    def tzname(self, when: datetime | None) -> str | None:
        return None


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"run_at": datetime(2031, 5, 1)}, ValueError, "no time zone"),
        ({"run_at": datetime(2031, 5, 1, tzinfo=NoOffset())}, ValueError, "no time zone"),
        ({"run_at": date(2031, 5, 1)}, TypeError, "without a time"),
        ({"run_at": float("nan")}, ValueError, "1 to 9999"),
        ({"run_at": float("inf")}, ValueError, "1 to 9999"),
        ({"run_at": float("-inf")}, ValueError, "1 to 9999"),
        ({"run_at": 253_402_300_800.0}, ValueError, "1 to 9999"),
        ({"run_at": 253_402_300_800}, ValueError, "1 to 9999"),
        ({"run_at": 10**400}, ValueError, "1 to 9999"),
        ({"run_at": -(10**400)}, ValueError, "1 to 9999"),
        ({"run_at": -62_135_596_801.0}, ValueError, "1 to 9999"),
        (
            {"run_at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=12)))},
            ValueError,
            "1 to 9999",
        ),
        (
            {"run_at": datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-12)))},
            ValueError,
            "1 to 9999",
        ),
        ({"run_at": True}, TypeError, "run_at=True"),
        ({"run_at": "tomorrow"}, TypeError, "run_at='tomorrow'"),
        ({"run_at": timedelta(seconds=5)}, TypeError, "run_at="),
        ({"run_in": float("nan")}, ValueError, "run_in=nan"),
        ({"run_in": float("inf")}, ValueError, "run_in=inf"),
        ({"run_in": 10**400}, ValueError, "run_in="),
        ({"run_in": timedelta.max}, ValueError, "run_in="),
        ({"run_in": True}, TypeError, "run_in=True"),
        ({"run_in": "5"}, TypeError, "run_in='5'"),
        ({"run_in": datetime(2031, 5, 1, tzinfo=UTC)}, TypeError, "run_in="),
        ({"run_in": 1, "run_at": 1}, ValueError, "not both"),
    ],
    ids=label,
)
def test_a_time_that_names_no_instant_is_refused_at_the_call(
    fleet: Fleet, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    """The error names the argument; nothing is sent, by any way in."""
    for call in (
        lambda: fleet.note.delay(1, **options),
        lambda: fleet.note.delay_many([1, 2], **options),
        lambda: fleet.producer.dispatch("note", 1, **options),
    ):
        with pytest.raises(error, match=says):
            call()
    assert fleet.members() == []
    assert fleet.client.xlen(fleet.names.stream) == 0


# --- what is moved ---


def test_a_payload_s_text_is_moved_unchanged(fleet: Fleet) -> None:
    """Digits, exponents, escapes and the order of keys come out of the set as they went in."""
    text = (
        '{"z":9007199254740993,"a":[1.0,1e3,1E-2,-0.0,100000000000000000000000000000001],'
        '"e":"\\u003cb\\u003e \\ud83d\\ude80 é","b":null}'
    )
    entries: list[bytes] = []

    def body_of_task(payload: Any) -> None:
        entries.extend(fleet.bodies())

    fleet.task(body_of_task, name="look")
    fleet.client.zadd(fleet.names.delayed, {member("exact", "look", text, 1): 1})
    fleet.start_leader()
    (body,) = eventually(lambda: entries)
    assert f'"payload":{text},' in body.decode()
    fields = json.loads(body)
    assert fields["id"] == "exact"
    assert list(fields)[:7] == [
        "unique",
        "unique_for",
        "unique_key",
        "unique_lock_value",
        "reservation_timeout",
        "task_name",
        "payload",
    ]
    assert fields["reservation_timeout"] > 0  # Go spins on 0


def test_an_id_stays_the_same_through_the_delayed_set(fleet: Fleet) -> None:
    """What `.delay()` returned is what `current_task().id` says."""
    fleet.start_leader()
    sent = fleet.note.delay("x", run_in=0.2)
    (run,) = fleet.wait_ran("x")
    assert run.id == sent.id
    assert run.attempt == 1


POISON = [
    b"not json at all",
    b"",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b'{"id":"a","time":1,"payload":1}',  # no task
    b'{"id":"b","task":"","time":1,"payload":1}',
    b'{"id":"c","task":"note","time":1.5,"payload":1}',
    b'{"id":"d","task":"note","time":1,"payload":NaN}',
    b'{"id":"e","task":"note","time":1,"payload":' + b"[" * 100_000,
    b'{"id":"f","task":"note","time":1,"payload":' + b"9" * 5000 + b"}",
    b'{"id":"g","task":"note","time":1,"payload":1} trailing',
    b'{"id":"h","task":7,"time":1,"payload":1}',
    b'{"id":"i","task":"note","time":1,"payload":1,"unique":"yes"}',
]


def test_members_that_are_no_message_go_to_the_dead_letters(fleet: Fleet) -> None:
    """Each with its reason and its whole text; what lies behind them runs at once (D22)."""
    fleet.client.zadd(fleet.names.delayed, {text: number for number, text in enumerate(POISON)})
    behind = member("good", "note", '"behind"', 100)
    fleet.client.zadd(fleet.names.delayed, {behind: 100})
    leader = fleet.start_leader()

    fleet.wait_ran("behind", timeout=5)

    eventually(lambda: len(fleet.producer.dead_letters) == len(POISON))
    assert fleet.members() == []
    letters = fleet.producer.dead_letters.list()
    assert {letter.message.encode() for letter in letters if letter.message.isascii()} == {
        text for text in POISON if text.isascii()
    }
    rows: Any = fleet.client.xrange(fleet.names.dead)
    assert {fields[b"message"] for _, fields in rows} == set(POISON)  # byte for byte
    assert all(letter.error_type == "InvalidTaskPayloadError" for letter in letters)
    assert all(letter.error for letter in letters)
    assert all(abs(letter.failed_at - time.time()) < 60 for letter in letters)
    reported = [report for report in leader.errors if report.action == "task_failed"]
    assert len(reported) == len(POISON)  # each once
    with pytest.raises(InvalidTaskPayloadError):
        fleet.producer.dead_letters.requeue(letters[0].id)


def test_members_that_are_no_message_are_dropped_where_letters_are_not_kept(
    fleet: Fleet,
) -> None:
    """dead_letter_limit=0: reported, and gone."""
    fleet.client.zadd(fleet.names.delayed, {b"junk": 1})
    leader = fleet.start_leader(dead_letter_limit=0)
    eventually(lambda: fleet.members() == [])
    eventually(lambda: any(report.action == "task_failed" for report in leader.errors))
    assert not fleet.client.exists(fleet.names.dead)


def test_a_task_the_leader_does_not_know_is_the_workers_question(fleet: Fleet) -> None:
    """The leader moves it; whether somebody knows it shows at its delivery."""
    fleet.client.zadd(
        fleet.names.delayed,
        {member("u", "known-to-nobody", "1", 1): 1, member("n", "note", '"behind"', 2): 2},
    )
    leader = fleet.start_leader()
    fleet.wait_ran("behind", timeout=5)
    eventually(lambda: b'"unknown":1' in fleet.members()[0][0])  # a worker put it off
    assert [report for report in leader.errors if report.action == "task_failed"] == []


@pytest.mark.parametrize("score", ["-inf", "-1e300", "0", "1e-300"])
def test_any_score_that_is_past_is_due(fleet: Fleet, score: str) -> None:
    """Whatever another program wrote as a score, the member runs."""
    fleet.client.zadd(fleet.names.delayed, {member("x", "note", '"odd"', 1): score})
    fleet.start_leader()
    fleet.wait_ran("odd", timeout=5)


@pytest.mark.parametrize("score", ["+inf", "1e300", "1.7976931348623157e308"])
def test_a_score_of_never_blocks_nothing(fleet: Fleet, score: str) -> None:
    """It waits, and the leader works on."""
    fleet.client.zadd(fleet.names.delayed, {member("x", "note", '"never"', 1): score})
    leader = fleet.start_leader()
    fleet.note.delay("due", run_in=0.2)
    fleet.wait_ran("due", timeout=5)
    assert len(fleet.members()) == 1
    assert not [r for r in leader.errors if "delayed-poller" in repr(r.error)]


def test_a_batch_is_bounded_in_bytes(fleet: Fleet) -> None:
    """At most 16 MiB are read at once, at least one member; and all of them are moved."""
    big = '"' + "x" * (1 << 20) + '"'
    for number in range(40):
        fleet.client.zadd(fleet.names.delayed, {member(str(number), "big", big, number): number})
    _, following, members = fleet.producer.delayed.due(200)
    assert 15 <= len(members) <= 17
    assert following == len(members)
    huge = '"' + "x" * (20 << 20) + '"'
    fleet.client.zadd(fleet.names.delayed, {member("huge", "big", huge, -1): -1})
    _, following, members = fleet.producer.delayed.due(200)
    assert len(members) == 1
    assert following == 0
    sizes: list[int] = []
    fleet.task(lambda payload: sizes.append(len(payload)), name="big")
    fleet.start_leader()
    eventually(lambda: len(sizes) == 41, 30)
    eventually(fleet.settled)


def test_due_stops_at_the_first_member_that_is_not_due(fleet: Fleet) -> None:
    """Now, the next score, and the members in order, over the script's pages of 16."""
    now = time.time()
    for number in range(50):
        fleet.client.zadd(fleet.names.delayed, {f"m{number:02}": now - 50 + number})
    fleet.client.zadd(fleet.names.delayed, {"later": now + 100})
    for most, expected in ((1, 1), (15, 15), (16, 16), (17, 17), (49, 49), (50, 50), (200, 50)):
        read, following, members = fleet.producer.delayed.due(most)
        assert [text for text, _ in members] == [f"m{n:02}".encode() for n in range(expected)]
        assert following == pytest.approx(now - 50 + expected if expected < 50 else now + 100)
        assert abs(read - time.time()) < 5
    fleet.client.zrem(fleet.names.delayed, "later")
    assert fleet.producer.delayed.due(50)[1] is None
    assert fleet.producer.delayed.due(200)[1] is None


# --- long retries ---


def test_a_long_retry_waits_in_the_delayed_set(fleet: Fleet) -> None:
    """Beyond reclaim_delay nothing is pending meanwhile, and the attempts go on counting."""

    def body(payload: Any) -> None:
        fleet.record(payload)
        if current_task().attempt < 3:
            raise Retry(1.2)

    fleet.task(body, name="again", max_retry=3)
    fleet.start_leader(queue={"reclaim_delay": 0.5})
    sent = fleet.producer.dispatch("again", {"n": 9007199254740993})
    fleet.wait_ran({"n": 9007199254740993})
    ((text, score),) = eventually(fleet.members)
    assert fleet.client.xlen(fleet.names.stream) == 0
    fields = json.loads(text)
    assert (fields["id"], fields["attempt"], fields["task"]) == (sent.id, 1, "again")
    assert fields["only_group"] == fleet.names.group
    assert b'"payload":{"n":9007199254740993}' in text
    assert fields["enqueued_at"] == pytest.approx(time.time(), abs=30)
    assert fields["time"] == math.ceil(score)

    eventually(lambda: len(fleet.runs) == 3, 20)

    first, second, third = fleet.runs
    assert [run.attempt for run in fleet.runs] == [1, 2, 3]
    assert {run.id for run in fleet.runs} == {sent.id}
    assert 1.2 <= second.at - first.at < 1.2 + busy(2)
    assert 1.2 <= third.at - second.at < 1.2 + busy(2)
    eventually(fleet.settled)


def test_a_long_retry_that_is_final_ends_in_the_dead_letters(fleet: Fleet) -> None:
    """The attempts spent before the delayed set are in the letter."""

    def body(payload: Any) -> None:
        fleet.record(payload)
        raise ValueError("always")

    fleet.task(body, name="again", max_retry=2, retry_delay=0.6)
    fleet.start_leader(queue={"reclaim_delay": 0.3})
    fleet.producer.dispatch("again", 1)
    letter = eventually(fleet.producer.dead_letters.list, 15)[0]
    assert (letter.attempts, letter.error_type, letter.payload) == (2, "ValueError", 1)
    assert [run.attempt for run in fleet.runs] == [1, 2]
    eventually(fleet.settled)


def test_a_long_retry_goes_back_to_its_own_group_only(fleet: Fleet) -> None:
    """The other group on the stream had its copy: it acks the second round unseen."""
    seen: list[tuple[str, int]] = []

    def body(group: str) -> Callable[[Any], None]:
        def run(payload: Any) -> None:
            seen.append((group, current_task().attempt))
            if group == "one" and current_task().attempt == 1:
                raise Retry(0.8)

        return run

    from taskrunner import Registry, task

    for group in ("one", "two"):
        registry = Registry()
        task(name="both", max_retry=3, registry=registry)(body(group))
        runner = fleet.start(
            registry=registry,
            consumer_group=f"{fleet.names.group}-{group}",
            queue={"reclaim_delay": 0.4},
        )
    eventually(lambda: runner.is_leader)
    eventually(
        lambda: len(fleet.client.xinfo_groups(fleet.names.stream)) == 2,
    )
    runner.dispatch("both", 1)
    eventually(lambda: ("one", 2) in seen, 15)
    eventually(lambda: _nothing_pending(fleet), 15)
    assert sorted(seen) == [("one", 1), ("one", 2), ("two", 1)]


def _nothing_pending(fleet: Fleet) -> bool:
    groups: Any = fleet.client.xinfo_groups(fleet.names.stream)
    return all(group["pending"] == 0 for group in groups)


def test_a_retry_in_the_delayed_set_survives_its_worker(fleet: Fleet) -> None:
    """No process has to live for it: another takes it up when it is due."""
    fleet.task(lambda payload: 1 / 0, name="again", max_retry=9, retry_delay=1.0)
    first = fleet.start_leader(queue={"reclaim_delay": 0.5})
    fleet.producer.dispatch("again", 1)
    eventually(fleet.members)
    assert first.stop(3)
    fleet.start_leader(queue={"reclaim_delay": 0.5})
    eventually(lambda: fleet.members() and b'"attempt":2' in fleet.members()[0][0], 15)


# --- Redis refuses, or is away ---


def test_nothing_is_left_of_a_delayed_dispatch_that_redis_refused(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """Out of memory raises to the caller as it is; afterwards the same call is accepted."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        fleet.task(name="unique", unique_for=100)
        client = own.client()
        with faults.out_of_memory(client):
            with pytest.raises(redis.ResponseError, match="maxmemory"):
                fleet.note.delay(1, run_in=60)
            with pytest.raises(redis.ResponseError, match="maxmemory"):
                fleet.producer.dispatch("unique", 1, run_in=60)
        assert client.dbsize() == 0
        fleet.note.delay(1, run_in=60)
        fleet.producer.dispatch("unique", 1, run_in=60)
        assert len(fleet.members()) == 2


def test_due_members_wait_while_redis_is_out_of_memory(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """An XADD that is refused leaves the member where it is; the lease is renewed all the while."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        client = own.client()
        leader = fleet.start_leader(timings={"lease": 1})
        fleet.note.delay("warm-up", run_in=0.05)
        fleet.wait_ran("warm-up")
        fleet.note.delay_many(range(300), run_in=1)
        with faults.out_of_memory(client):
            faults.down_for(2.5)  # due, and two lives of the lease
            assert leader.is_leader
            assert client.zcard(fleet.names.delayed) == 300
            assert client.xlen(fleet.names.stream) == 0
        fleet.wait_ran(*range(300), timeout=20)
        eventually(fleet.settled)
        assert sorted(fleet.payloads()[1:]) == list(range(300))


def test_a_stop_is_obeyed_between_batches(fleet: Fleet) -> None:
    """A leader in the middle of a large move ends as fast as any other."""
    for start in range(0, 20_000, 1000):
        fleet.client.zadd(
            fleet.names.delayed,
            {member(str(n), "elsewhere", "1", 1): n for n in range(start, start + 1000)},
        )
    leader = fleet.start()
    eventually(lambda: fleet.client.xlen(fleet.names.stream), interval=0.001)
    started = time.monotonic()
    leader.stop(5)
    taken = time.monotonic() - started
    left = fleet.client.zcard(fleet.names.delayed)
    assert 0 < left < 20_000, "stopped too late to show anything"
    assert taken < 3
    total = left + fleet.client.xlen(fleet.names.stream)
    # workers may have put back (unknown task) what they had: still each in one place
    assert total == 20_000


def test_nothing_due_costs_next_to_nothing(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """An idle leader asks once per poll interval, not in a loop."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        fleet.start_leader(timings={"poll": 1, "lease": 10, "presence": 30})
        fleet.note.delay("far", run_in=3600)
        faults.down_for(1.0)
        client = own.client()
        client.config_resetstat()
        faults.down_for(3.0)
        stats: Any = client.info("commandstats")
        assert stats["cmdstat_zrange"]["calls"] <= 8


def test_the_poller_lives_on_when_a_round_fails(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """A key of the wrong type is an operator's to repair, and then all is moved."""
    own = own_server()
    client = own.client()
    with Fleet(own.url, names) as fleet:
        client.set(names.delayed, "not a zset")
        fleet.start()
        faults.down_for(1.0)
        client.delete(names.delayed)
        fleet.note.delay("after", run_in=0.1)
        fleet.wait_ran("after")


def test_a_delayed_dispatch_from_many_threads_loses_and_doubles_nothing(fleet: Fleet) -> None:
    """`.delay()` may be called from any thread."""
    fleet.start_leader()
    fleet.start()

    def produce(base: int) -> None:
        for number in range(base, base + 50):
            fleet.note.delay(number, run_in=0.001 * (number % 50))

    threads = [threading.Thread(target=produce, args=(50 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fleet.wait_ran(*range(300), timeout=20)
    eventually(fleet.settled)
    stays(lambda: len(fleet.runs) == 300, 0.3)


def test_a_delayed_dispatch_whose_script_is_new_to_the_server_is_sent_once(fleet: Fleet) -> None:
    """The first EVALSHA of a fresh server is answered NOSCRIPT; the second try adds one member."""
    fleet.client.script_flush()
    fleet.note.delay(1, run_in=60)
    assert len(fleet.members()) == 1
    assert fleet.client.script_exists(SCHEDULE.sha) == [True]


# --- whatever is in the set ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = (
    "id task time payload unique unique_for unique_key unique_lock_value reservation_timeout "
    "attempt unknown only_group enqueued_at ID Task TIME task_name other"
)


@st.composite
def members_of_any_kind(draw: st.DrawFn) -> bytes:
    """Something like a member: right keys with wrong values, repeated, cut, overwritten."""
    names = st.sampled_from(KEYS.split())
    values = JSON | st.sampled_from(["note", "hashed", "keyed", ""]) | st.integers(-5, 5)
    pairs = draw(st.lists(st.tuples(names, values), max_size=9))
    pairs.insert(0, ("task", draw(st.sampled_from(["note", "hashed", "keyed", "nobody"]))))
    text = ",".join(
        f"{json.dumps(name)}:{json.dumps(value, ensure_ascii=draw(st.booleans()))}"
        for name, value in pairs
    )
    found = b"{" + text.encode("utf-8", "surrogatepass") + b"}"
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(found)))
        found = found[:at] + draw(st.binary(max_size=2)) + found[at + draw(st.integers(0, 2)) :]
    return found


def test_no_member_stops_the_leader(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever somebody put there, one round moves it: to the stream, or to the dead letters."""
    caplog.set_level(logging.CRITICAL, "taskrunner")
    with Fleet(server.url, Names()) as fleet:
        suffix = fleet.names.group
        fleet.task(name="hashed", unique_for=1, unique_key="payload")
        fleet.task(name="keyed", unique_for=1, unique_key=lambda p: f"{suffix}{p['other']}")
        poller = fleet.believer()

        @settings(max_examples=400, deadline=None, database=None)
        @given(members_of_any_kind())
        def one_round(text: bytes) -> None:
            keys = [fleet.names.stream, fleet.names.dead, fleet.names.delayed]
            fleet.client.delete(*keys)
            fleet.client.zadd(fleet.names.delayed, {text: 1})
            assert poller.tick() == 0.0
            left = fleet.members()
            moved = fleet.client.xlen(fleet.names.stream) + fleet.client.xlen(fleet.names.dead)
            # A unique one whose lock an example before it has taken is put off.
            assert moved == 1 or (left and left[0][1] > 1)
            assert moved + len(left) == 1

        one_round()
        for name in ("hashed", "keyed"):
            for key in fleet.locks(name):
                fleet.client.delete(key)
