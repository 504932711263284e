"""The table of what this process holds, and the budget of bytes for the next read."""

import threading
from time import monotonic

import pytest

from taskrunner.delivery import Delivery
from taskrunner.in_flight import ByteBudget, InFlight

MIB = 1024 * 1024


def delivery(
    number: int = 1, *, body: bytes | None = b"{}", consumer: str = "g_h_1", count: int = 1
) -> Delivery:
    return Delivery(f"{number}-0".encode(), body, consumer, count, monotonic())


def test_what_is_added_is_held_until_it_is_removed() -> None:
    """The heartbeat renews exactly what is in here."""
    table = InFlight()
    one, two = delivery(1), delivery(2)

    assert table.add(one)
    assert table.add(two)

    assert b"1-0" in table
    assert len(table) == 2
    assert table.snapshot() == [one, two]
    table.remove(one)
    assert b"1-0" not in table
    table.remove(one)
    newer = delivery(2, count=2)
    table.remove_all([newer])
    assert b"2-0" in table, "a newer delivery of the entry is another one"
    table.remove_all([two, one])
    assert len(table) == 0


def test_an_empty_table_is_still_a_table() -> None:
    """`if in_flight` asks whether there is one."""
    assert InFlight()


def test_the_same_entry_again_is_adopted_not_held_twice() -> None:
    """After the group was lost and made again a running message is delivered anew: it goes on under
    the new delivery, and is not started beside itself."""
    table = InFlight()
    running = delivery(1, consumer="g_h_1", count=2)
    running.lost = True
    running.started = 5.0
    assert table.add(running)

    again = delivery(1, consumer="g_h_2", count=1)
    again.confirmed = running.confirmed + 7

    assert not table.add(again)
    assert table.snapshot() == [running]
    assert (running.consumer, running.count) == ("g_h_2", 1)
    assert running.confirmed == again.confirmed
    assert not running.lost
    assert running.started == 5.0


def test_removing_a_stale_delivery_leaves_the_present_one() -> None:
    """A late word about an earlier delivery of the entry must not take it out."""
    table = InFlight()
    early, late = delivery(1), delivery(1)
    table.add(early)
    table.remove(early)
    table.add(late)

    table.remove(early)

    assert table.snapshot() == [late]
    assert table.holds(late)
    assert not table.holds(early)
    assert not table.holds(delivery(2))


def test_a_snapshot_is_a_copy() -> None:
    """Whoever walks over it may remove from the table meanwhile."""
    table = InFlight()
    for number in range(10):
        table.add(delivery(number))

    for held in table.snapshot():
        table.remove(held)

    assert len(table) == 0


def test_bytes_counts_the_bodies() -> None:
    """An entry without a payload field has no body."""
    table = InFlight()
    assert table.bytes() == 0
    table.add(delivery(1, body=b"x" * 100))
    table.add(delivery(2, body=None))
    table.add(delivery(3, body=b"y" * 11))

    assert table.bytes() == 111


def test_oldest_confirmation_is_now_when_nothing_is_held() -> None:
    """Nothing held means nothing overdue."""
    before = monotonic()

    assert InFlight().oldest_confirmation() >= before


def test_oldest_confirmation_is_that_of_the_longest_unconfirmed() -> None:
    """It decides whether renewing comes before reclaiming."""
    table = InFlight()
    for number, confirmed in [(1, 30.0), (2, 10.0), (3, 20.0)]:
        held = delivery(number)
        held.confirmed = confirmed
        table.add(held)

    assert table.oldest_confirmation() == 10.0


def test_many_threads_may_use_it_at_once() -> None:
    """Fetchers add, workers and settler remove, the heartbeat looks; no lock stands between."""
    table = InFlight()
    faults: list[BaseException] = []

    def churn(offset: int) -> None:
        try:
            for number in range(offset, offset + 3000):
                held = delivery(number)
                assert table.add(held)
                table.snapshot()[-1:]
                assert held.entry_id in table
                table.remove(held)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=churn, args=(i * 10_000,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert faults == []
    assert len(table) == 0


# --- the budget ---


def test_before_anything_was_seen_the_largest_allowed_entry_is_assumed() -> None:
    """Redis bounds a reply by entries, so the first read must reckon with the worst."""
    budget = ByteBudget(InFlight(), 10 * MIB)

    assert budget.allow(100) == 6
    assert budget.allow(3) == 3


def test_small_entries_may_be_read_in_full_batches() -> None:
    """After a few reads of small ones the assumption has come down to what is seen."""
    budget = ByteBudget(InFlight(), 10 * MIB)

    for _ in range(20):
        budget.saw([delivery(1, body=b"x" * 200)])

    assert budget.allow(1000) == 1000


def test_each_read_of_smaller_ones_halves_what_is_assumed() -> None:
    """One read of small entries says little about the next one."""
    budget = ByteBudget(InFlight(), 8 * MIB + 1)

    for allowed in (16, 32, 64):
        budget.saw([delivery(1, body=b"x" * 200)])
        assert budget.allow(100) == allowed


def test_tiny_entries_are_not_read_without_end() -> None:
    """Each costs memory here that is not in its body."""
    budget = ByteBudget(InFlight(), 1)
    most = ByteBudget.LIMIT // 256

    assert budget.allow(10**6) == most
    for _ in range(3):
        budget.saw([delivery(1, body=b"x")])
        assert budget.allow(10**6) == most


def test_one_large_entry_counts_at_once() -> None:
    """The next read is bounded by it already."""
    budget = ByteBudget(InFlight(), 1000)
    assert budget.allow(1000) == 1000

    budget.saw([delivery(1, body=b"x"), delivery(2, body=b"x" * 8 * MIB)])

    assert budget.allow(1000) == 8


def test_what_is_held_already_is_taken_off() -> None:
    """The bound is on what this process holds, not on one read."""
    table = InFlight()
    budget = ByteBudget(table, 8 * MIB)
    for number in range(6):
        table.add(delivery(number, body=b"x" * 8 * MIB))

    assert budget.allow(100) == 2


@pytest.mark.parametrize("held", [8, 20])
def test_one_is_always_allowed(held: int) -> None:
    """Otherwise an entry larger than what is left would never be read at all."""
    table = InFlight()
    body = b"x" * 8 * MIB
    for number in range(held):
        table.add(delivery(number, body=body))

    assert ByteBudget(table, 8 * MIB).allow(100) == 1


def test_an_empty_read_teaches_nothing() -> None:
    """A quiet queue must not make it forget how large entries are."""
    budget = ByteBudget(InFlight(), 8 * MIB)

    for _ in range(50):
        budget.saw([])

    assert budget.allow(100) == 8
