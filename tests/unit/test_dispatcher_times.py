"""The instant a caller asks for: what is taken, what is refused, and that nothing is sent then."""

import datetime as dt
import math
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any

import attrs
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from taskrunner import Registry, Task, TaskRunner, clock, task
from taskrunner.dispatcher import StreamDispatcher
from taskrunner.message import decode, decode_delayed
from taskrunner.scripts import Script

YEAR_10000 = 253_402_300_800
EAST = timezone(timedelta(hours=5, minutes=45))
WEST = timezone(timedelta(hours=-11))


@attrs.define
class Sent:
    """One call of the schedule step."""

    kind: str
    when: float
    body: str
    member: bytes
    lock_ms: int


class FakeConnections:
    """Takes the steps in place of a server, and answers as one whose clock stands at `now`."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now
        self.steps: list[Sent] = []
        self.added: list[str] = []
        self.locks: dict[str, str] = {}
        self.lose_next_reply = False

    def call(self, *args: Any) -> Any:
        if args[0] == "GET":
            value = self.locks.get(args[1])
            return None if value is None else value.encode()
        assert args[0] == "XADD"
        self.added.append(args[-1])
        return b"1-0"

    def calls(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        replies = []
        for command in commands:
            if command[0] == "XADD":
                replies.append(self.call(*command))
            else:
                count = command[2]
                replies.append(self._schedule(command[3 : 3 + count], command[3 + count :]))
        return replies

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        assert script.name == "schedule"
        reply = self._schedule(keys, args)
        if self.lose_next_reply:
            self.lose_next_reply = False
            raise redis.ConnectionError("the reply was lost")
        return reply

    def _schedule(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        kind, when, body, head, tail, token, lock_ms, _ = args
        due = float(when) if kind == "at" else self.now + float(when)
        member = f"{head}{math.ceil(due)}{tail}".encode()
        self.steps.append(Sent(kind, float(when), body, member, int(lock_ms)))
        if len(keys) == 3:
            self.locks[keys[2]] = token
        return [1, b"1-0"] if due <= self.now else [2, f"{due:.6f}".encode()]


@pytest.fixture
def connections() -> FakeConnections:
    return FakeConnections()


@pytest.fixture
def plain(connections: FakeConnections) -> Task[Any]:
    return make_task(connections)


def make_task(connections: FakeConnections, **options: Any) -> Task[Any]:
    registry = Registry()
    registry.dispatcher = StreamDispatcher(
        connections,  # type: ignore[arg-type]
        "p:q",
        "g",
        reclaim_delay=300,
        max_payload_bytes=1000,
    )
    return task(name="t", registry=registry, **options)(lambda payload: None)


@pytest.mark.parametrize(
    "run_at",
    [
        datetime(2033, 5, 18, 3, 33, 20, tzinfo=UTC),
        datetime(2033, 5, 18, 9, 18, 20, tzinfo=EAST),
        datetime(2033, 5, 17, 16, 33, 20, tzinfo=WEST),
        2_000_000_000,
        2_000_000_000.0,
    ],
    ids=str,
)
def test_the_same_instant_is_the_same_however_it_is_said(
    plain: Task[Any], connections: FakeConnections, run_at: Any
) -> None:
    """A time zone is a way to write an instant, no part of it (BL-20)."""
    dispatched = plain.delay(1, run_at=run_at)

    assert connections.steps[0].kind == "at"
    assert connections.steps[0].when == 2_000_000_000
    assert dispatched.run_at == 2_000_000_000
    assert dispatched.entry_id is None


def test_both_readings_of_a_repeated_hour_are_two_instants(
    plain: Task[Any], connections: FakeConnections
) -> None:
    """When clocks go back, `fold` says which of the two is meant (BL-20)."""

    class Autumn(tzinfo):
        def utcoffset(self, when: datetime | None) -> timedelta:
            return timedelta(hours=1 if when is not None and when.fold else 2)

        def dst(self, when: datetime | None) -> timedelta:
            return timedelta(0)

        def tzname(self, when: datetime | None) -> str:
            return "autumn"

    for fold in (0, 1):
        plain.delay(1, run_at=datetime(2030, 10, 27, 2, 30, tzinfo=Autumn(), fold=fold))

    first, second = (sent.when for sent in connections.steps)
    assert second - first == 3600


@given(
    st.datetimes(
        min_value=datetime(1000, 1, 1), max_value=datetime(9999, 12, 30), timezones=st.just(UTC)
    )
)
def test_an_instant_keeps_its_microseconds(run_at: datetime) -> None:
    """The score carries the fraction; the member's own time is rounded up, never down (D24)."""
    connections = FakeConnections()

    make_task(connections).delay(1, run_at=run_at)

    (sent,) = connections.steps
    exact = (run_at - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1)
    assert abs(sent.when * 1e6 - exact) <= 50  # a float of this size holds no more
    time = decode_delayed(sent.member).time
    assert time - 1 < sent.when <= time


@pytest.mark.parametrize(
    ("run_in", "seconds"),
    [
        (0, 0),
        (0.25, 0.25),
        (90, 90),
        (timedelta(minutes=2), 120),
        (-5, -5),
        (timedelta(-1), -86400),
    ],
    ids=str,
)
def test_a_duration_is_added_by_the_server(
    plain: Task[Any], connections: FakeConnections, run_in: Any, seconds: float
) -> None:
    """A producer whose clock is wrong does no harm: it sends the duration, not an instant."""
    plain.delay(1, run_in=run_in)

    assert (connections.steps[0].kind, connections.steps[0].when) == ("in", seconds)


@pytest.mark.parametrize(
    "when", [{"run_in": 0}, {"run_in": -1}, {"run_at": 0}, {"run_at": -1e9}], ids=str
)
def test_what_is_due_already_goes_to_the_stream(plain: Task[Any], when: dict[str, Any]) -> None:
    """The server says so; the answer tells which it was (D25)."""
    dispatched = plain.delay(1, **when)

    assert dispatched.entry_id == "1-0"
    assert dispatched.run_at is None


def test_without_a_time_no_step_is_needed(plain: Task[Any], connections: FakeConnections) -> None:
    """The usual dispatch is one XADD."""
    dispatched = plain.delay({"a": 1})

    assert connections.steps == []
    assert decode(connections.added[0].encode()).payload == {"a": 1}
    assert (dispatched.entry_id, dispatched.run_at) == ("1-0", None)
    assert decode(connections.added[0].encode()).id == dispatched.id


@pytest.mark.parametrize(
    ("when", "error", "text"),
    [
        ({"run_at": datetime(2030, 1, 1)}, ValueError, "no time zone"),
        ({"run_at": date(2030, 1, 1)}, TypeError, "date without a time"),
        ({"run_at": dt.time(12)}, TypeError, "neither an aware datetime nor unix seconds"),
        ({"run_at": "2030-01-01"}, TypeError, "neither an aware datetime nor unix seconds"),
        ({"run_at": True}, TypeError, "neither an aware datetime nor unix seconds"),
        ({"run_at": Decimal(5)}, TypeError, "neither an aware datetime nor unix seconds"),
        ({"run_at": timedelta(5)}, TypeError, "neither an aware datetime nor unix seconds"),
        ({"run_at": math.nan}, ValueError, "outside the years"),
        ({"run_at": math.inf}, ValueError, "outside the years"),
        ({"run_at": -math.inf}, ValueError, "outside the years"),
        ({"run_at": 10**400}, ValueError, "outside the years"),
        ({"run_at": YEAR_10000}, ValueError, "outside the years"),
        ({"run_at": 1e12}, ValueError, "outside the years"),  # milliseconds by mistake
        ({"run_at": -62_135_596_801}, ValueError, "outside the years"),
        ({"run_at": datetime(1, 1, 1, tzinfo=EAST)}, ValueError, "outside the years"),
        ({"run_at": datetime(9999, 12, 31, 23, tzinfo=WEST)}, ValueError, "outside the years"),
        ({"run_in": math.nan}, ValueError, "run_in=nan"),
        ({"run_in": math.inf}, ValueError, "run_in=inf"),
        ({"run_in": 10**400}, ValueError, "run_in=1000"),
        ({"run_in": timedelta(days=365 * 8001)}, ValueError, "run_in="),
        ({"run_in": "5"}, TypeError, "run_in='5' is not a duration"),
        ({"run_in": True}, TypeError, "run_in=True is not a duration"),
        ({"run_in": datetime(2030, 1, 1, tzinfo=UTC)}, TypeError, "is not a duration"),
        ({"run_in": 5, "run_at": 2_000_000_000}, ValueError, "not both"),
        ({"run_in": 0, "run_at": 0}, ValueError, "not both"),
    ],
    ids=str,
)
@pytest.mark.parametrize("many", [False, True], ids=["delay", "delay_many"])
def test_what_names_no_instant_is_refused_at_the_call(
    plain: Task[Any],
    connections: FakeConnections,
    when: dict[str, Any],
    error: type[Exception],
    text: str,
    many: bool,
) -> None:
    """The value is named, and nothing was sent: a later fault would hit nobody who can mend it."""
    call: Callable[..., Any] = plain.delay_many if many else plain.delay
    with pytest.raises(error, match=text) as caught:
        call([1] if many else 1, **when)

    name = next(iter(when))
    assert name in str(caught.value)
    assert connections.steps == []
    assert connections.added == []


def test_a_duration_beyond_the_year_9999_is_refused(
    plain: Task[Any], connections: FakeConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the duration alone is not too long."""
    monkeypatch.setattr(clock, "now", lambda: YEAR_10000 - 10.0)

    plain.delay(1, run_in=9)
    with pytest.raises(ValueError, match="year 9999"):
        plain.delay(1, run_in=11)

    assert len(connections.steps) == 1


def test_many_take_one_time(plain: Task[Any], connections: FakeConnections) -> None:
    """Each message has an id of its own, and all the same due time."""
    results = plain.delay_many(range(2500), run_in=60)

    assert len(results) == 2500
    assert {sent.when for sent in connections.steps} == {60}
    ids = [result.id for result in results if result is not None]
    assert len(set(ids)) == 2500
    assert ids == [decode_delayed(sent.member).id for sent in connections.steps]
    assert [decode_delayed(sent.member).payload for sent in connections.steps] == list(range(2500))


def test_an_empty_many_sends_nothing(plain: Task[Any], connections: FakeConnections) -> None:
    """And raises nothing: a list may well be empty."""
    assert plain.delay_many([]) == []
    assert plain.delay_many(iter(()), run_in=5) == []
    assert connections.steps == []
    assert connections.added == []


def test_dispatch_by_name_takes_the_same_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """`runner.dispatch` is `.delay` for those who have only a name."""
    registry = Registry()
    task(name="t", registry=registry)(lambda payload: None)
    runner = TaskRunner(consumer_group="g", client=redis.Redis(port=1), registry=registry)

    with pytest.raises(ValueError, match="no time zone"):
        runner.dispatch("t", 1, run_at=datetime(2030, 1, 1))
    with pytest.raises(ValueError, match="not both"):
        runner.dispatch_many("t", [1], run_at=5, run_in=5)


@pytest.mark.parametrize(
    ("when", "due"),
    [({"run_in": 60}, 1_800_000_060.0), ({"run_at": 1_800_000_500}, 1_800_000_500.0)],
    ids=["run_in", "run_at"],
)
def test_a_unique_one_whose_reply_was_lost_is_told_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, when: dict[str, Any], due: float
) -> None:
    """The lock with our own token proves that it was carried out: the caller hears when it is
    due, as if the reply had come."""
    connections = FakeConnections()
    connections.lose_next_reply = True
    monkeypatch.setattr(clock, "now", lambda: connections.now)

    dispatched = make_task(connections, unique_for=60).delay(1, **when)

    assert len(connections.steps) == 1  # never sent a second time
    assert dispatched.run_at == pytest.approx(due, abs=5)


def test_a_lost_reply_is_raised_where_no_lock_can_tell(
    plain: Task[Any], connections: FakeConnections
) -> None:
    """Only the caller knows whether to repeat (BL-03)."""
    connections.lose_next_reply = True

    with pytest.raises(redis.ConnectionError):
        plain.delay(1, run_in=60)

    assert len(connections.steps) == 1


def test_the_lock_of_a_delayed_one_is_counted_from_its_due_time(
    connections: FakeConnections,
) -> None:
    """The step adds the time until then; what is sent is unique_for alone."""
    made = make_task(connections, unique_for=2.5)

    made.delay(1, run_in=60)

    assert connections.steps[0].lock_ms == 3000
    assert decode(connections.steps[0].body.encode()).unique_for == 3
