"""The moves of a delivery, against real servers: each is one step, made once, by its owner only."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, cast

import attrs
import pytest
import redis

from taskrunner import RedisStreamQueue, keys
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.delivery import Delivery
from taskrunner.store import connection, group
from taskrunner.store.connection import Connections
from taskrunner.store.dead_letters import DeadLetters
from taskrunner.store.delayed_set import DelayedSet, Promotion
from taskrunner.store.group import (
    BODY_GONE,
    HAND_BACK_IDLE_MS,
    HELD_BY_ANOTHER,
    MOVED,
    NOT_PENDING,
    Claimed,
    ConsumerGroup,
    Lock,
    Park,
)
from taskrunner.store.instances import ANOTHERS, GONE, KEPT, Instances
from tests.support.binaries import servers_at_hand
from tests.support.faults import out_of_memory
from tests.support.names import Names
from tests.support.server import OwnServer
from tests.support.waiting import eventually

RECLAIM_MS = 60_000
TOKEN = "token"


@pytest.fixture(scope="module", params=servers_at_hand().items(), ids=lambda item: item[0])
def binary(request: pytest.FixtureRequest) -> Path:
    return cast(Path, request.param[1])


@pytest.fixture(scope="module")
def server(binary: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(command=binary, tcp=True) as embedded:
        yield embedded


@attrs.frozen
class Row:
    """One pending entry; idle in ms."""

    consumer: str
    idle: int
    count: int


class Store:
    """One group on one stream, and a look at everything a move may touch."""

    def __init__(self, url: str, names: Names, **options: Any) -> None:
        self.names = names
        self.client = redis.Redis.from_url(url)
        self.connections = Connections(url)
        self.queue = RedisStreamQueue(
            url, prefix=names.prefix, reclaim_delay=RECLAIM_MS / 1000, **options
        )
        self.group = self.queue.for_group(names.group)
        self.group.create()
        self.link = self.connections.open(read_timeout=5)
        self.lock = Lock(keys.unique(f"t:{names.group}"), TOKEN, 120_000)

    def consumer(self, number: int, host: str | None = None) -> str:
        return keys.consumer(self.names.group, host or self.names.host, number)

    @property
    def parking(self) -> str:
        return self.consumer(keys.PARKING)

    def add(self, *bodies: str) -> list[str]:
        return [self.queue.add(body) for body in bodies]

    def read(self, count: int = 100, consumer: str | None = None) -> list[Delivery]:
        return self.group.read(self.link, consumer or self.consumer(1), count, 1)

    def held(self, body: str = "body") -> Delivery:
        """A new message, held by the first reader."""
        self.add(body)
        (delivery,) = self.read()
        return delivery

    def row(self, delivery: Delivery) -> Row | None:
        rows = cast(
            Any,
            self.client.xpending_range(
                self.names.stream, self.names.group, delivery.entry_id, delivery.entry_id, 1
            ),
        )
        if not rows:
            return None
        return Row(
            rows[0]["consumer"].decode(),
            rows[0]["time_since_delivered"],
            rows[0]["times_delivered"],
        )

    def in_stream(self, delivery: Delivery) -> bool:
        return bool(self.client.xrange(self.names.stream, delivery.entry_id, delivery.entry_id))

    def take(self, delivery: Delivery, *, idle: int = 0, consumer: str | None = None) -> None:
        """Another instance takes the delivery over."""
        self.client.xclaim(
            self.names.stream, self.names.group, consumer or self.consumer(1, "other"), idle,
            [delivery.entry_id.decode()],
        )  # fmt: skip

    def age(self, *deliveries: Delivery, ms: int = RECLAIM_MS + 1000) -> None:
        """Let them look as if nobody had touched them for so long."""
        for delivery in deliveries:
            row = self.row(delivery)
            assert row is not None
            self.client.xclaim(
                self.names.stream, self.names.group, row.consumer, 0,
                [delivery.entry_id.decode()], idle=ms, justid=True,
            )  # fmt: skip

    def set_lock(self, token: str = TOKEN, ms: int = 5000) -> None:
        self.client.set(self.lock.key, token, px=ms)

    def lock_ms(self) -> int:
        return int(cast(int, self.client.pttl(self.lock.key)))

    def members(self) -> list[tuple[bytes, float]]:
        return cast(Any, self.client.zrange(self.names.delayed, 0, -1, withscores=True))

    def letters(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in cast(Any, self.client.xrange(self.names.dead))]

    def second_group(self) -> None:
        self.client.xgroup_create(self.names.stream, f"{self.names.group}-second", "0-0")

    def close(self) -> None:
        self.link.close()
        self.connections.close()
        self.queue.connections.close()
        self.client.close()


@pytest.fixture
def make_store(server: EmbeddedServer, names: Names) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def make(**options: Any) -> Store:
        made.append(Store(server.url, names, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    return make_store()


# --- the group ---


def test_a_group_begins_at_the_very_start(server: EmbeddedServer, names: Names) -> None:
    """What was dispatched before the first worker lived is delivered too, and after a flush what
    came in the gap."""
    queue = RedisStreamQueue(server.url, prefix=names.prefix)
    queue.add("early")
    deliveries = queue.for_group(names.group)
    link = queue.connections.open(read_timeout=5)

    with pytest.raises(redis.ResponseError) as caught:
        deliveries.read(link, f"{names.group}_h_1", 10, 1)
    assert connection.missing_group(caught.value)
    deliveries.create()
    deliveries.create()  # another instance was faster: no fault

    assert [one.body for one in deliveries.read(link, f"{names.group}_h_1", 10, 1)] == [b"early"]
    link.close()
    queue.connections.close()


@pytest.mark.parametrize("there", ["nothing", "the stream"])
def test_readers_are_made_with_the_group_where_it_is_missing(
    server: EmbeddedServer, names: Names, there: str
) -> None:
    """On a fresh server, and after a flush: no error is the right answer to an empty Redis."""
    queue = RedisStreamQueue(server.url, prefix=names.prefix)
    if there == "the stream":
        queue.add("early")
    deliveries = queue.for_group(names.group)
    consumers = [f"{names.group}_h_{number}" for number in (1, 2)]

    deliveries.create_consumers(consumers)
    deliveries.create_consumers(consumers)

    assert sorted(name for name, _, _ in deliveries.consumers()) == consumers
    queue.connections.close()


@pytest.mark.parametrize("there", ["nothing", "the stream"])
def test_looking_for_overdue_entries_finds_none_where_the_group_is_missing(
    server: EmbeddedServer, names: Names, there: str
) -> None:
    """An error here would be told to people as a fault, on each start of the first worker."""
    queue = RedisStreamQueue(server.url, prefix=names.prefix)
    if there == "the stream":
        queue.add("early")

    assert queue.for_group(names.group).overdue(b"-", 10) == ([], None)
    assert queue.for_group(names.group).consumers() == []
    queue.connections.close()


def test_an_idle_reader_is_counted_before_its_first_message(store: Store) -> None:
    """Before 7.2 an empty read does not make a consumer: instances would not see each other."""
    store.group.create_consumers([store.consumer(1)])

    assert [name for name, _, _ in store.group.consumers()] == [store.consumer(1)]


# --- reading ---


def test_a_read_brings_what_is_new_with_count_one(store: Store) -> None:
    """In order, as many as asked for."""
    ids = store.add("a", "b", "c")

    first, second = store.read(2), store.read(2)

    assert [one.body for one in first] == [b"a", b"b"]
    assert [one.body for one in second] == [b"c"]
    assert [one.entry_id.decode() for one in first + second] == ids
    assert {(one.consumer, one.count) for one in first + second} == {(store.consumer(1), 1)}
    assert store.read() == []


def test_an_entry_with_other_fields_is_read_as_it_is(store: Store) -> None:
    """Whoever wrote it, its neighbours in the batch must not suffer (D9)."""
    client, stream = store.client, store.names.stream
    client.xadd(stream, {"other": "x"})
    client.xadd(stream, {"first": "x", "payload": "body", "last": "y"})
    client.xadd(stream, {"payload": b"\xff\x00"})

    odd, middle, binary = store.read()

    assert (odd.body, list(odd.fields)) == (None, [b"other", b"x"])
    assert middle.body == b"body"
    assert binary.body == b"\xff\x00"


def test_a_blocked_read_ends_when_something_comes(store: Store) -> None:
    """And in time when nothing does."""
    started = monotonic()
    assert store.group.read(store.link, store.consumer(1), 10, 200) == []
    assert monotonic() - started > 0.15

    threading.Timer(0.1, store.add, ["late"]).start()
    assert [one.body for one in store.group.read(store.link, store.consumer(1), 10, 4000)] == [
        b"late"
    ]


# --- acknowledging ---


def test_an_ack_ends_the_entry_altogether(store: Store) -> None:
    """Acknowledged and deleted in one step: neither list grows (BL-16)."""
    store.add("a", "b", "c")
    one, two, three = store.read()

    store.group.ack([one.entry_id, three.entry_id])

    assert store.row(one) is None
    assert not store.in_stream(one)
    assert store.row(two) is not None
    assert store.client.xlen(store.names.stream) == 1


def test_an_ack_may_come_twice(store: Store) -> None:
    """Its first reply was lost: nothing more happens."""
    one, other = store.held(), store.held()

    store.group.ack([one.entry_id])
    store.group.ack([one.entry_id])

    assert store.client.xlen(store.names.stream) == 1
    assert store.row(other) is not None


def test_an_ack_of_five_hundred_is_one_step(store: Store) -> None:
    """That is how many the settler sends at once."""
    store.add(*["x"] * 500)
    batch = store.read(500)
    assert len(batch) == 500

    store.group.ack([one.entry_id for one in batch])

    assert store.client.xlen(store.names.stream) == 0


def test_a_late_ack_ends_what_another_took_over(store: Store) -> None:
    """The work is done: running it once more would help nobody."""
    one = store.held()
    store.take(one)

    store.group.ack([one.entry_id])

    assert store.row(one) is None
    assert not store.in_stream(one)


def test_with_two_groups_an_ack_leaves_the_entry_to_the_other(store: Store) -> None:
    """Each group gets every message: deleting at the first ack would rob the second (D13)."""
    store.second_group()
    one = store.held()

    store.group.ack([one.entry_id])

    assert store.row(one) is None
    assert store.in_stream(one)


def test_delete_on_ack_false_keeps_the_entry(make_store: Callable[..., Store]) -> None:
    """Whoever wants the history has asked for it."""
    store = make_store(delete_on_ack=False)
    one = store.held()

    store.group.ack([one.entry_id])

    assert store.row(one) is None
    assert store.in_stream(one)


def test_an_ack_of_a_unique_message_releases_its_lock(store: Store) -> None:
    """The next dispatch is accepted as soon as the work is done."""
    one = store.held()
    store.set_lock()

    store.group.ack_unique([(one.entry_id, store.lock)])

    assert store.lock_ms() == -2
    assert store.row(one) is None
    assert not store.in_stream(one)


def test_an_ack_never_releases_another_messages_lock(store: Store) -> None:
    """The lock lapsed and was taken anew: it belongs to that message now (D15)."""
    one = store.held()
    store.set_lock("anothers")

    store.group.ack_unique([(one.entry_id, store.lock)])

    assert store.lock_ms() > 0
    assert store.row(one) is None


def test_only_the_ack_that_ends_the_message_releases_the_lock(store: Store) -> None:
    """One that comes twice would free a lock which the next message with the same token holds: that
    of a requeued copy."""
    one = store.held()
    store.group.ack_unique([(one.entry_id, store.lock)])
    store.set_lock()

    store.group.ack_unique([(one.entry_id, store.lock)])

    assert store.lock_ms() > 0


# --- parking ---


@pytest.mark.parametrize("count", [None, 0, 1, 7])
def test_a_parked_delivery_waits_with_the_parking_consumer(store: Store, count: int | None) -> None:
    """Its idle time says when it may be claimed, its count what it has cost."""
    one = store.held()

    assert store.group.park([Park(one, 40_000, count)], store.names.host) == [MOVED]

    row = store.row(one)
    assert row is not None
    assert row.consumer == store.parking
    assert 40_000 <= row.idle < 45_000
    assert row.count == (1 if count is None else count)
    assert store.in_stream(one)


def test_parking_twice_is_as_once(store: Store) -> None:
    """The first reply was lost: the second try finds it parked, and says so."""
    one, two = store.held(), store.held()
    parks = [Park(one, 40_000, 0), Park(two, 40_000)]

    assert store.group.park(parks, store.names.host) == [MOVED, MOVED]
    assert store.group.park(parks, store.names.host) == [MOVED, MOVED]

    assert [store.row(each).count for each in (one, two)] == [0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["another consumer", "another count", "both"])
def test_only_the_holder_of_this_very_delivery_may_park_it(store: Store, how: str) -> None:
    """A late retry must not pull the message from under whoever runs it now."""
    one = store.held()
    store.set_lock()
    if how == "another consumer":
        store.client.xclaim(
            store.names.stream, store.names.group, store.consumer(1, "other"), 0,
            [one.entry_id.decode()], justid=True,
        )  # fmt: skip
    else:
        store.take(one, consumer=store.consumer(1) if how == "another count" else None)
    before, lock = store.row(one), store.lock_ms()

    assert store.group.park([Park(one, 40_000, 0, store.lock)], store.names.host) == [
        HELD_BY_ANOTHER
    ]

    after = store.row(one)
    assert before is not None
    assert after is not None
    assert (after.consumer, after.count) == (before.consumer, before.count)
    assert after.idle < 30_000
    assert store.lock_ms() <= lock


def test_parking_what_is_finished_finds_nothing(store: Store) -> None:
    """It was acknowledged elsewhere."""
    one = store.held()
    store.group.ack([one.entry_id])

    assert store.group.park([Park(one, 40_000)], store.names.host) == [NOT_PENDING]
    assert store.row(one) is None


def test_parking_many_answers_for_each(store: Store) -> None:
    """One call, one answer for each delivery, in order."""
    store.add("a", "b", "c", "d")
    mine, taken, gone, also = store.read()
    store.take(taken)
    store.group.ack([gone.entry_id])

    statuses = store.group.park(
        [Park(one, 1000) for one in (mine, taken, gone, also)], store.names.host
    )

    assert statuses == [MOVED, HELD_BY_ANOTHER, NOT_PENDING, MOVED]


def test_parking_keeps_the_lock_alive_for_the_wait(store: Store) -> None:
    """Until the retry is due, and its time on top: no duplicate slips in meanwhile (D16)."""
    one = store.held()
    store.set_lock(ms=5000)

    store.group.park([Park(one, 0, None, store.lock)], store.names.host)

    assert 115_000 < store.lock_ms() <= 120_000


@pytest.mark.parametrize(("token", "ms"), [("anothers", 5000), (TOKEN, 500_000)])
def test_a_lock_is_neither_anothers_nor_made_shorter(store: Store, token: str, ms: int) -> None:
    """Extending means: at least so long, and only our own."""
    one, two = store.held(), store.held()
    store.set_lock(token, ms)

    store.group.park([Park(one, 0, None, store.lock)], store.names.host)
    store.group.renew([(two, store.lock)])

    assert ms - 5000 < store.lock_ms() <= ms


def test_a_hand_back_can_be_claimed_at_once(store: Store) -> None:
    """By any instance of either language, and it cost no attempt."""
    one = store.held()
    store.group.park([Park(one, HAND_BACK_IDLE_MS, 0)], store.names.host)

    (claimed,) = store.group.claim([one.entry_id], store.consumer(2, "other"))

    assert claimed.delivery is not None
    assert claimed.delivery.count == 1
    assert claimed.former == store.parking


def test_the_unseen_are_parked_only_while_the_name_is_ours(store: Store) -> None:
    """A namesake's deliveries are not ours to judge."""
    one, host = store.held(), store.names.host
    presence = keys.presence(host)
    park = [Park(one, HAND_BACK_IDLE_MS, 0)]

    assert store.group.park(park, host, guard="me", presence=presence) != [MOVED]
    store.client.set(presence, "somebody else", ex=20)
    assert store.group.park(park, host, guard="me", presence=presence) != [MOVED]
    row = store.row(one)
    assert row is not None
    assert (row.consumer, row.count) == (store.consumer(1), 1)
    store.client.set(presence, "me", ex=20)
    assert store.group.park(park, host, guard="me", presence=presence) == [MOVED]


# --- renewing ---


def test_a_renewal_resets_the_idle_time_and_leaves_the_count(store: Store) -> None:
    """A task may run longer than reclaim_delay, and it costs no attempt (BL-13)."""
    one = store.held()
    store.age(one)

    assert store.group.renew([(one, None)]) == [MOVED]

    row = store.row(one)
    assert row is not None
    assert row.idle < 5000
    assert (row.consumer, row.count) == (store.consumer(1), 1)


def test_a_foreign_renewal_changes_nothing(store: Store) -> None:
    """Who was slow must not steal back what others took over (D6)."""
    one = store.held()
    store.take(one)
    store.age(one, ms=40_000)
    store.set_lock()

    assert store.group.renew([(one, store.lock)]) == [HELD_BY_ANOTHER]

    row = store.row(one)
    assert row is not None
    assert (row.consumer, row.count) == (store.consumer(1, "other"), 2)
    assert row.idle >= 40_000
    assert store.lock_ms() <= 5000


def test_a_renewal_of_an_earlier_delivery_changes_nothing(store: Store) -> None:
    """The same consumer claimed it again: the count tells the two apart."""
    one = store.held()
    store.take(one, consumer=one.consumer)
    store.age(one, ms=40_000)

    assert store.group.renew([(one, None)]) == [HELD_BY_ANOTHER]
    row = store.row(one)
    assert row is not None
    assert row.idle >= 40_000


def test_a_renewal_of_what_is_finished_finds_nothing(store: Store) -> None:
    """And does not bring it back into the pending list."""
    one = store.held()
    store.group.ack([one.entry_id])

    assert store.group.renew([(one, None)]) == [NOT_PENDING]
    assert store.row(one) is None


def test_an_entry_without_a_body_is_not_renewed(store: Store) -> None:
    """Before 7.0 it would be kept in the pending list for ever (BL-12)."""
    one = store.held()
    store.age(one, ms=40_000)
    store.client.xdel(store.names.stream, one.entry_id)

    assert store.group.renew([(one, None)]) == [BODY_GONE]
    row = store.row(one)
    assert row is None or row.idle >= 40_000


def test_renewing_many_answers_for_each(store: Store) -> None:
    """One call for all that is held, locks among them."""
    store.add(*"abcde")
    mine, taken, gone, bodiless, unique = store.read()
    store.take(taken)
    store.group.ack([gone.entry_id])
    store.client.xdel(store.names.stream, bodiless.entry_id)
    store.set_lock()

    statuses = store.group.renew(
        [(mine, None), (taken, None), (gone, None), (bodiless, None), (unique, store.lock)]
    )

    assert statuses == [MOVED, HELD_BY_ANOTHER, NOT_PENDING, BODY_GONE, MOVED]
    assert store.lock_ms() > 100_000


# --- claiming ---


def only(claimed: Sequence[Claimed]) -> Claimed:
    (one,) = claimed
    return one


def test_a_claim_takes_what_has_been_silent_for_reclaim_delay(store: Store) -> None:
    """With one delivery more, and the body as it is."""
    one = store.held("the body")
    store.age(one)

    claimed = only(store.group.claim([one.entry_id], store.consumer(2, "other")))

    assert claimed.former == store.consumer(1)
    assert claimed.delivery is not None
    assert claimed.delivery.body == b"the body"
    assert claimed.delivery.count == 2
    row = store.row(one)
    assert row is not None
    assert (row.consumer, row.count) == (store.consumer(2, "other"), 2)
    assert row.idle < 5000


def test_a_claim_leaves_what_is_renewed(store: Store) -> None:
    """And says how long it must wait still."""
    one = store.held()
    store.age(one, ms=20_000)

    claimed = only(store.group.claim([one.entry_id], store.consumer(2, "other")))

    assert claimed.delivery is None
    assert claimed.early_ms is not None
    assert 30_000 < claimed.early_ms <= 40_000
    row = store.row(one)
    assert row is not None
    assert (row.consumer, row.count) == (store.consumer(1), 1)


def test_two_that_claim_at_once_get_it_once(store: Store) -> None:
    """The first claim makes it young again."""
    one = store.held()
    store.age(one)

    first = only(store.group.claim([one.entry_id], store.consumer(2, "other")))
    second = only(store.group.claim([one.entry_id], store.consumer(2, "third")))

    assert first.delivery is not None
    assert second.delivery is None
    assert second.early_ms is not None
    assert second.former == store.consumer(2, "other")


def test_a_claim_of_what_is_finished_finds_nothing(store: Store) -> None:
    """It is neither taken nor counted as lost."""
    one = store.held()
    store.group.ack([one.entry_id])

    claimed = only(store.group.claim([one.entry_id], store.consumer(2)))

    assert claimed == Claimed(one.entry_id)


def test_a_claim_acknowledges_what_has_no_body(store: Store) -> None:
    """Deleted by hand or trimmed while pending: it would be claimed for ever (BL-12)."""
    store.add("a", "b", "c")
    first, middle, last = store.read()
    store.age(first, middle, last)
    store.client.xdel(store.names.stream, middle.entry_id)

    claimed = store.group.claim(
        [first.entry_id, middle.entry_id, last.entry_id], store.consumer(2, "other")
    )

    assert [one.entry_id for one in claimed] == [
        first.entry_id, middle.entry_id, last.entry_id,
    ]  # fmt: skip
    assert [one.body_gone for one in claimed] == [False, True, False]
    assert [one.delivery and one.delivery.body for one in claimed] == [b"a", None, b"c"]
    assert store.row(middle) is None


def test_a_claim_ends_where_it_has_bytes_enough(store: Store) -> None:
    """The first is taken whatever its size; what was not looked at is as it was."""
    store.add("a" * 500, "b" * 500, "c")
    held = store.read()
    store.age(*held)
    ids = [one.entry_id for one in held]

    claimed = store.group.claim(ids, store.consumer(2, "other"), 1)

    assert [one.entry_id for one in claimed] == ids[:1]
    assert claimed[0].delivery is not None
    for one in held[1:]:
        row = store.row(one)
        assert row is not None
        assert (row.consumer, row.count) == (one.consumer, 1)
    assert len(store.group.claim(ids[1:], store.consumer(2, "other"), 1000)) == 2


def test_a_read_of_several_is_cut_off_where_it_has_bytes_too_many(store: Store) -> None:
    """They count as delivered, and the connection is gone; a single one is read whatever its
    size."""
    store.add(*("x" * 50_000 for _ in range(10)))
    with pytest.raises(connection.ReplyTooLargeError) as refused:
        store.group.read(store.link, store.consumer(1), 10, 1, 200_000)
    assert connection.lost(refused.value)
    assert not store.link.connected
    assert len(store.group.pending_of(store.consumer(1), b"-", 100)) == 10
    store.add("y" * 50_000, "z")
    assert [one.size for one in store.group.read(store.link, store.consumer(1), 1, 1, 1000)] == [
        50_000
    ]
    assert [one.size for one in store.group.read(store.link, store.consumer(1), 10, 1, 1000)] == [1]
    assert store.link.connected


def test_a_claim_answers_for_each_id_by_itself(store: Store) -> None:
    """Whatever became of its neighbours, and where an id is asked for twice."""
    store.add(*"abcd")
    old, young, gone, bodiless = store.read()
    store.age(old, bodiless)
    store.group.ack([gone.entry_id])
    store.client.xdel(store.names.stream, bodiless.entry_id)
    ids = [one.entry_id for one in (young, old, gone, bodiless, old)]

    claimed = store.group.claim(ids, store.consumer(2))

    assert [one.entry_id for one in claimed] == ids
    assert [one.delivery is not None for one in claimed] == [False, True, False, False, False]
    assert [one.early_ms is not None for one in claimed] == [True, False, False, False, True]
    assert [one.body_gone for one in claimed] == [False, False, False, True, False]


def test_a_claimed_entry_without_a_payload_field_comes_with_its_fields(store: Store) -> None:
    """Also what can't be run must end somewhere."""
    store.client.xadd(store.names.stream, {"other": "x"})
    (one,) = store.read()
    store.age(one)

    claimed = only(store.group.claim([one.entry_id], store.consumer(2)))

    assert claimed.delivery is not None
    assert (claimed.delivery.body, list(claimed.delivery.fields)) == (None, [b"other", b"x"])


# --- looking for the overdue ---


@pytest.mark.parametrize("version", [None, "6.0.16", "7.0.0"])
def test_overdue_pages_through_all_that_is_pending(
    make_store: Callable[..., Store], version: str | None
) -> None:
    """With the server's IDLE filter or, for servers older than 6.2, without (D12)."""
    store = make_store(redis_version=version)
    store.add(*["x"] * 25)
    batch = store.read()
    store.age(*batch[::3])
    found: list[bytes] = []
    pages = 0

    after: bytes | None = b"-"
    while after is not None:
        rows, after = store.group.overdue(after, 4)
        found += [row.entry_id for row in rows]
        pages += 1

    assert found == [one.entry_id for one in batch[::3]]
    assert pages <= 8


@pytest.mark.parametrize("version", [None, "6.0.16"])
def test_overdue_tells_who_holds_it_and_for_how_long(
    make_store: Callable[..., Store], version: str | None
) -> None:
    """Enough to judge whether it killed its process."""
    store = make_store(redis_version=version)
    one = store.held()
    store.take(one)
    store.age(one)

    (row,), following = store.group.overdue(b"-", 100)

    assert (row.entry_id, row.consumer, row.count) == (one.entry_id, store.consumer(1, "other"), 2)
    assert row.idle_ms >= RECLAIM_MS
    assert following is None


def test_pending_of_pages_through_one_consumer(store: Store) -> None:
    """What was delivered without ever arriving is found there."""
    store.add(*["x"] * 7)
    mine = store.read(5)
    store.read(2, store.consumer(2))

    first = store.group.pending_of(store.consumer(1), b"-", 3)
    second = store.group.pending_of(store.consumer(1), b"(" + first[-1].entry_id, 3)

    assert [row.entry_id for row in first + second] == [one.entry_id for one in mine]


# --- burying ---

FIELDS = (("task_name", "t"), ("error", "bad: ä"), ("attempts", "3"))


def bury(store: Store, one: Delivery, *, limit: int = 100, without_body: bool = False) -> int:
    return store.group.bury(one, FIELDS, limit, lock=store.lock, without_body=without_body)


def test_a_buried_message_is_a_dead_letter_with_its_text_whole(store: Store) -> None:
    """Nothing is dropped silently, and no byte of it changed."""
    text = '{"payload": {"ä": 9007199254740993},  "task_name":"t"}'
    one = store.held(text)
    store.set_lock()

    assert bury(store, one) == MOVED

    (letter,) = store.letters()
    assert letter == {
        b"task_name": b"t", b"error": "bad: ä".encode(), b"attempts": b"3",
        b"message": text.encode(),
    }  # fmt: skip
    assert store.row(one) is None
    assert not store.in_stream(one)
    assert store.lock_ms() == -2


def test_a_body_that_is_no_text_is_buried_as_it_is(store: Store) -> None:
    """It is copied inside the server."""
    body = bytes(range(256))
    store.client.xadd(store.names.stream, {"payload": body})
    (one,) = store.read()

    assert bury(store, one) == MOVED
    assert store.letters()[0][b"message"] == body


def test_an_entry_without_a_payload_field_is_buried_with_an_empty_message(store: Store) -> None:
    """What it had instead is among the fields."""
    store.client.xadd(store.names.stream, {"other": "x"})
    (one,) = store.read()

    assert bury(store, one) == MOVED
    assert store.letters()[0][b"message"] == b""


def test_a_body_may_stay_out(store: Store) -> None:
    """One that is too large for the server to store again."""
    one = store.held("x" * 1000)

    assert bury(store, one, without_body=True) == MOVED
    assert store.letters()[0][b"message"] == b""
    assert not store.in_stream(one)


def test_burying_twice_makes_one_letter(store: Store) -> None:
    """The first reply was lost."""
    one = store.held()

    assert bury(store, one) == MOVED
    assert bury(store, one) == NOT_PENDING
    assert len(store.letters()) == 1


def test_only_the_holder_may_bury(store: Store) -> None:
    """Another runs it now, and may yet succeed."""
    one = store.held()
    store.set_lock()
    store.take(one)

    assert bury(store, one) == HELD_BY_ANOTHER

    assert store.letters() == []
    assert store.row(one) is not None
    assert store.in_stream(one)
    assert store.lock_ms() > 0


def test_burying_what_has_no_body_ends_it(store: Store) -> None:
    """There is nothing left to keep, and no reason to look at it again."""
    one = store.held()
    store.set_lock()
    store.client.xdel(store.names.stream, one.entry_id)

    assert bury(store, one) == BODY_GONE

    assert store.letters() == []
    assert store.row(one) is None
    assert store.lock_ms() == -2


def test_with_two_groups_a_buried_entry_stays_for_the_other(store: Store) -> None:
    """It failed here; there it may succeed."""
    store.second_group()
    one = store.held()

    assert bury(store, one) == MOVED

    assert len(store.letters()) == 1
    assert store.row(one) is None
    assert store.in_stream(one)


def test_the_newest_letters_are_kept(store: Store) -> None:
    """Exactly as many as the limit says."""
    for number in range(5):
        assert bury(store, store.held(f"body {number}"), limit=3) == MOVED

    assert [letter[b"message"] for letter in store.letters()] == [b"body 2", b"body 3", b"body 4"]


def test_a_limit_of_zero_keeps_no_letters(store: Store) -> None:
    """It was asked for; the entry ends all the same."""
    one = store.held()

    assert bury(store, one, limit=0) == MOVED

    assert store.client.exists(store.names.dead) == 0
    assert not store.in_stream(one)


# --- postponing ---

MEMBER = ('{"id":"i","task":"t","time":', ',"payload":9007199254740993}')


def postpone(store: Store, one: Delivery, delay: float = 100.0) -> int:
    return store.group.postpone(one, delay, MEMBER, store.lock)


def server_time(store: Store) -> float:
    seconds, micros = cast(Any, store.client.time())
    return seconds + micros / 1e6


def test_a_postponed_message_is_in_the_delayed_set_and_nowhere_else(store: Store) -> None:
    """Due by the server's clock; the score has the fraction, the member a whole second, later."""
    one = store.held()
    store.set_lock()
    before = server_time(store)

    assert postpone(store, one, 100.25) == MOVED

    ((member, score),) = store.members()
    assert before + 100.25 - 0.001 <= score <= server_time(store) + 100.25 + 0.001
    head, tail = MEMBER
    time = int(member.decode().removeprefix(head).removesuffix(tail))
    assert time - 1 < score <= time
    assert store.row(one) is None
    assert not store.in_stream(one)
    assert 115_000 < store.lock_ms() <= 120_000


def test_postponing_twice_makes_one_member(store: Store) -> None:
    """The first reply was lost."""
    one = store.held()

    assert postpone(store, one) == MOVED
    assert postpone(store, one) == NOT_PENDING
    assert len(store.members()) == 1


def test_only_the_holder_may_postpone(store: Store) -> None:
    """Otherwise it would run here and come back from there."""
    one = store.held()
    store.take(one)

    assert postpone(store, one) == HELD_BY_ANOTHER

    assert store.members() == []
    assert store.row(one) is not None
    assert store.in_stream(one)


def test_with_two_groups_a_postponed_entry_stays_for_the_other(store: Store) -> None:
    """The retry is this group's affair."""
    store.second_group()
    one = store.held()

    assert postpone(store, one) == MOVED

    assert len(store.members()) == 1
    assert store.row(one) is None
    assert store.in_stream(one)


def test_the_leader_is_told_when_it_is_the_first_due(store: Store) -> None:
    """It sleeps until what it thinks is the next due time."""
    with store.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(keys.channel(store.names.group))
        eventually(lambda: channel.subscribed, 5)
        channel.get_message(timeout=1)
        assert postpone(store, store.held(), 100) == MOVED
        assert postpone(store, store.held(), 200) == MOVED
        assert postpone(store, store.held(), 50) == MOVED

        heard = [channel.get_message(timeout=1) for _ in range(3)]

    assert [message and message["data"] for message in heard] == [b"due", b"due", None]


# --- consumers ---


def test_a_consumer_with_something_pending_is_never_removed(store: Store) -> None:
    """XGROUP DELCONSUMER would drop its deliveries with it (D7)."""
    one = store.held()

    assert not store.group.remove_consumer(store.consumer(1), store.names.host, idle_ms=0)

    assert store.row(one) is not None


def test_an_empty_consumer_of_a_dead_host_is_removed(store: Store) -> None:
    """Else names would pile up with every deploy."""
    store.group.ack([store.held().entry_id])

    assert store.group.remove_consumer(store.consumer(1), store.names.host, idle_ms=0)
    assert not store.group.remove_consumer(store.consumer(1), store.names.host, idle_ms=0)
    assert store.group.consumers() == []


def test_a_consumer_is_left_while_it_is_young_or_its_host_lives(store: Store) -> None:
    """Its own instance may remove it, when it leaves."""
    host, name = store.names.host, store.consumer(1)
    store.group.ack([store.held().entry_id])

    assert not store.group.remove_consumer(name, host, idle_ms=60_000)
    store.client.set(keys.presence(host), "me", ex=20)
    assert not store.group.remove_consumer(name, host, idle_ms=0)
    assert store.group.remove_consumer(name, host, idle_ms=0, owner="me")


# --- names and leases ---


def test_a_host_name_belongs_to_one_instance(store: Store) -> None:
    """Two with one name would share consumers (D43)."""
    instances = Instances(store.connections, store.group)
    host = store.names.host

    assert instances.take_name(host, "me", 20)
    assert not instances.take_name(host, "other", 20)
    assert instances.living([host, "nobody"]) == {host: "me"}
    assert instances.presence(host, "me").release()
    assert instances.take_name(host, "other", 20)


def test_a_name_is_not_free_while_a_dead_ones_deliveries_are_pending(store: Store) -> None:
    """They would look like ours, and never be reclaimed. Parked ones belong to nobody."""
    instances = Instances(store.connections, store.group)
    host = store.names.host
    one = store.held()

    assert not instances.take_name(host, "me", 20)
    store.group.park([Park(one, 1000)], host)
    assert instances.take_name(host, "me", 20)


def test_a_name_that_only_begins_alike_is_free(store: Store) -> None:
    """`web` and `web_1` are two hosts."""
    instances = Instances(store.connections, store.group)
    store.add("a")
    store.read(consumer=store.consumer(1, f"{store.names.host}_1"))

    assert instances.take_name(store.names.host, "me", 20)


def test_an_owned_key_is_touched_by_its_owner_only(store: Store) -> None:
    """Lease and presence: renewed and given up by value."""
    instances = Instances(store.connections, store.group)
    mine = instances.presence(store.names.host, "me")
    other = instances.presence(store.names.host, "other")

    assert mine.keep(20) == GONE
    assert mine.left() is None
    assert mine.take(5)
    assert not other.take(5)
    assert other.keep(20) == ANOTHERS
    assert not other.release()
    assert mine.keep(20) == KEPT
    left = mine.left()
    assert left is not None
    assert 15 < left <= 20
    assert mine.release()
    assert mine.keep(20) == GONE


def test_replications_counts_the_living_hosts_of_this_group(
    make_store: Callable[..., Store],
) -> None:
    """Not other groups' hosts, and not the parking consumer (D37)."""
    store = make_store()
    host = store.names.host
    for each in (host, f"{host}-2", f"{host}-dead"):
        store.group.create_consumers([store.consumer(1, each), store.consumer(2, each)])
    store.group.create_consumers([store.consumer(keys.PARKING, f"{host}-parked")])
    for each in (host, f"{host}-2", f"{host}-parked", f"{host}-elsewhere"):
        store.client.set(keys.presence(each), "x", ex=20)

    assert Instances(store.connections, store.group).replications() == 2


# --- refused by the server ---


def test_a_move_that_may_not_add_changes_nothing(
    own_server: Callable[..., OwnServer], binary: Path, names: Names
) -> None:
    """Out of memory: each step that adds is refused whole, and works afterwards; those that only
    take away or renew go on (semantics, the one rule)."""
    server = own_server(command=binary)
    store = Store(server.url, names)
    delayed = DelayedSet(store.connections, names.stream, names.group)
    letters = DeadLetters(store.connections, names.stream, names.group)
    to_bury, to_postpone, to_park, to_ack = (store.held() for _ in range(4))
    assert bury(store, store.held('{"task_name":"t","payload":1}')) == MOVED
    letter = letters.list()[0].id
    store.client.set("lease", "me")
    store.client.zadd(names.delayed, {"member": 1})
    store.set_lock()
    promotion = Promotion(member=b"member", kind="run", body="body")
    moves: list[Callable[[], Any]] = [
        lambda: bury(store, to_bury),
        lambda: postpone(store, to_postpone),
        lambda: letters.requeue(letter),
        lambda: delayed.promote("lease", "me", [promotion]),
    ]

    with out_of_memory(store.client):
        for move in moves:
            with pytest.raises(redis.RedisError) as caught:
                move()
            assert connection.code(caught.value) == "OOM"
            assert connection.outage(caught.value)
            assert not connection.lost(caught.value)
        for held in (to_bury, to_postpone):
            assert store.row(held) is not None
            assert store.in_stream(held)
        assert len(letters) == 1
        assert [member for member, _ in store.members()] == [b"member"]
        assert store.lock_ms() > 0

        assert store.group.renew([(to_park, None)]) == [MOVED]
        assert store.group.park([Park(to_park, 1000)], names.host) == [MOVED]
        store.group.ack([to_ack.entry_id])
        assert store.row(to_ack) is None
        store.age(to_park)
        assert only(store.group.claim([to_park.entry_id], store.consumer(2))).delivery

    assert [move() for move in moves[:2]] == [MOVED, MOVED]
    moves[2]()
    assert moves[3]() == [1]
    assert len(letters) == 1
    store.close()


@pytest.mark.parametrize("target", ["dead letters", "delayed set"])
def test_a_move_to_a_key_of_the_wrong_type_changes_nothing(store: Store, target: str) -> None:
    """Somebody else's key stands in the way: the message stays where it was."""
    one = store.held()
    key = store.names.dead if target == "dead letters" else store.names.delayed
    store.client.set(key, "in the way")

    with pytest.raises(redis.ResponseError) as caught:
        bury(store, one) if target == "dead letters" else postpone(store, one)

    assert connection.outage(caught.value)
    assert store.row(one) is not None
    assert store.in_stream(one)


def test_steps_are_sent_again_whole_when_the_server_forgot_them(store: Store) -> None:
    """NOSCRIPT means that nothing ran (BL-06)."""
    one = store.held()
    store.client.script_flush()

    assert store.group.renew([(one, None)]) == [MOVED]
    store.client.script_flush()
    store.group.ack([one.entry_id])
    assert store.row(one) is None


def test_the_names_of_statuses_are_those_of_the_steps() -> None:
    """What the Lua headers call 1, 0, -1 and -2."""
    assert (group.MOVED, group.HELD_BY_ANOTHER, group.NOT_PENDING, group.BODY_GONE) == (
        1,
        0,
        -1,
        -2,
    )
    assert ConsumerGroup.renew.__doc__
