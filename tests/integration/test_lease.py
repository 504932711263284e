"""The elector alone: one round at a time, its clock, its lease and what it says."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import redis

from taskrunner import clock, keys
from taskrunner.cli.embedded import EmbeddedServer, free_port
from taskrunner.reports import Health, Reports
from taskrunner.services.elector import Elector
from taskrunner.store import connection
from taskrunner.store.connection import Connections
from taskrunner.store.instances import OwnedKey
from tests.support import Names, busy, eventually


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def elector(
    server: EmbeddedServer, names: Names, reports: Reports
) -> Iterator[Callable[..., Elector]]:
    connections = Connections(server.url)

    def make(value: str = "me", ttl: float = 2.0, won: Callable[[], None] | None = None) -> Elector:
        return Elector(
            Health(reports, connection.lost),
            lease=OwnedKey(connections, keys.leader(names.group), value),
            ttl=ttl,
            poll=5.0,
            channel=keys.channel(names.group),
            won=won or (lambda: None),
        )

    yield make
    connections.close()


def test_leadership_is_trusted_for_nine_tenths_of_the_ttl_from_the_sending(
    elector: Callable[..., Elector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from before the request left, on the monotonic clock."""
    now = [1000.0]
    monkeypatch.setattr("taskrunner.services.elector.monotonic", lambda: now[0])
    one = elector(ttl=10.0)
    keep = one.lease.keep

    def slow_keep(ttl: float) -> int:
        result = keep(ttl)
        now[0] += 3.0  # the answer took its time
        return result

    monkeypatch.setattr(one.lease, "keep", slow_keep)
    assert not one.is_leader()
    assert one.tick() == 5.0
    assert one.is_leader()
    now[0] = 1000.0 + 9.0 - 0.001
    assert one.is_leader()
    now[0] = 1000.0 + 9.0
    assert not one.is_leader()


def test_a_follower_s_next_try_is_when_the_lease_it_sees_runs_out(
    elector: Callable[..., Elector],
    client: redis.Redis,
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never before, so that it need not come twice; a little apart from the other followers."""
    client.set(keys.leader(names.group), "another", px=60_000)
    waits = list[float]()
    for number in range(20):
        one = elector(f"me-{number}", ttl=10.0)
        assert 0 < (one.lease.left() or 0) <= 60
        monkeypatch.setattr(one.lease, "left", lambda: 4.0)
        waits.append(one.tick())
    assert all(4.2 * 0.98 <= wait <= 4.2 * 1.02 for wait in waits)
    assert len(set(waits)) > 5


@pytest.mark.parametrize(("ttl", "wait"), [(2.0, 2.0), (10.0, 5.0)])
def test_a_follower_looks_again_soon_when_the_lease_it_lost_to_is_gone(
    elector: Callable[..., Elector],
    client: redis.Redis,
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
    ttl: float,
    wait: float,
) -> None:
    """It ran out between the two looks: after the poll, or the TTL where that is shorter."""
    client.set(keys.leader(names.group), "another", px=60_000)
    one = elector(ttl=ttl)
    left = one.lease.left

    def late() -> float | None:
        client.delete(keys.leader(names.group))
        return left()

    monkeypatch.setattr(one.lease, "left", late)
    assert one.tick() == wait
    assert not one.is_leader()


def test_a_leader_that_was_told_it_is_none_asks_at_once(elector: Callable[..., Elector]) -> None:
    """A step found another's lease; its own next round would come in half a minute."""
    won: list[float] = []
    one = elector(ttl=60.0, won=lambda: won.append(clock.monotonic()))
    one.start()
    try:
        eventually(lambda: len(won) == 1)
        assert "taskrunner-elector" in {thread.name for thread in threading.enumerate()}
        one.lose()
        eventually(lambda: len(won) == 2)
    finally:
        one.stop()
        assert one.join(10)


def test_an_elector_that_fails_tells_it_and_tries_some_times_in_a_ttl(
    elector: Callable[..., Elector], monkeypatch: pytest.MonkeyPatch, reports: Reports
) -> None:
    """Its lease may run out meanwhile, so it waits a quarter of the TTL at most."""
    won: list[float] = []
    one = elector(ttl=0.8, won=lambda: won.append(clock.monotonic()))
    keep, failed = one.lease.keep, list[float]()

    def refused(ttl: float) -> int:
        if len(failed) < 12:
            failed.append(clock.monotonic())
            raise redis.ResponseError("refused")
        return keep(ttl)

    monkeypatch.setattr(one.lease, "keep", refused)
    one.start()
    try:
        eventually(lambda: won, 20)
        last = [later - earlier for earlier, later in itertools.pairwise(failed)][-5:]
        assert max(last) < 0.2 + busy()
        assert sum(last) > 5 * 0.2 * 0.65
    finally:
        one.stop()
        assert one.join(10)
    assert [report.action for report in reports.recent] == ["service_error"]
    assert [thread for thread in threading.enumerate() if thread.name == "taskrunner-elector"] == []


def test_a_lease_that_can_t_be_given_up_runs_out(names: Names) -> None:
    """Redis is away at the stop: that is no reason for it to fail."""
    connections = Connections(f"redis://127.0.0.1:{free_port()}")
    one = Elector(
        Health(Reports(), connection.lost),
        lease=OwnedKey(connections, keys.leader(names.group), "me"),
        ttl=2.0,
        poll=5.0,
        channel=keys.channel(names.group),
        won=lambda: None,
    )
    with pytest.raises(redis.ConnectionError):
        one.tick()
    one.close()
    assert not one.is_leader()
    connections.close()


def test_resigning_releases_only_one_s_own_lease(
    elector: Callable[..., Elector], client: redis.Redis, names: Names
) -> None:
    """And tells the channel, once."""
    listening = client.pubsub()
    listening.subscribe(keys.channel(names.group))
    eventually(lambda: listening.get_message(timeout=1))
    one = elector()
    one.tick()
    client.set(keys.leader(names.group), "another")
    one.close()
    assert client.get(keys.leader(names.group)) == b"another"
    client.delete(keys.leader(names.group))
    one.tick()
    one.close()
    one.close()
    assert client.exists(keys.leader(names.group)) == 0
    assert not one.is_leader()
    assert eventually(lambda: listening.get_message(timeout=1))["data"] == b"lease"
    assert listening.get_message(timeout=0.2) is None
    listening.close()


def test_winning_is_said_once_for_each_time_it_is_won(
    elector: Callable[..., Elector], caplog: pytest.LogCaptureFixture
) -> None:
    """The poller is woken then, not at each renewal."""
    caplog.set_level(logging.INFO, "taskrunner.elector")
    won: list[float] = []
    one = elector(won=lambda: won.append(clock.monotonic()))
    one.tick()
    one.tick()
    assert len(won) == 1
    one.lose()
    assert not one.is_leader()
    one.tick()
    assert len(won) == 2
    one.close()
    one.close()
    told = [(record.__dict__["action"], record.getMessage()) for record in caplog.records]
    assert (
        told
        == [
            ("lease_won", "this instance leads"),
            ("lease_lost", "this instance no longer leads"),
        ]
        * 2
    )


def test_two_electors_that_race_for_a_free_lease_make_one_leader(
    elector: Callable[..., Elector], client: redis.Redis, names: Names
) -> None:
    """SET NX decides, a hundred times."""
    pair = [elector("a", 60.0), elector("b", 60.0)]
    for _ in range(100):
        client.delete(keys.leader(names.group))
        for one in pair:
            one.lose()
        barrier = threading.Barrier(2)

        def race(one: Elector, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            one.tick()

        threads = [threading.Thread(target=race, args=(one,)) for one in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(one.is_leader() for one in pair) == 1
