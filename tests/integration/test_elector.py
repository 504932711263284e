"""The lease: at most one leader, who knows by its own clock when it is none, and a quick successor."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from taskrunner import TaskRunner, keys
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.store.instances import new_instance_id
from tests.support import Names, OwnServer, Proxy, busy, eventually, faults, stays
from tests.support.fleet import Fleet

LEASE = 2.0  # what `Fleet` sets


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


def leaders(runners: list[TaskRunner]) -> list[TaskRunner]:
    return [runner for runner in runners if runner.is_leader]


# --- one leader ---


def test_one_of_several_leads_and_stays_leader(fleet: Fleet) -> None:
    """Nobody takes a lease that is renewed, and never do two lead."""
    runners = [fleet.start(timings={"lease": 0.6}) for _ in range(4)]
    eventually(lambda: leaders(runners))
    (leader,) = leaders(runners)
    stays(lambda: leaders(runners) in ([leader], []), 2.5)
    assert leaders(runners) == [leader]


def test_the_lease_is_the_key_the_group_s_name_gives(fleet: Fleet) -> None:
    """Value: the instance's id; life: 5 s by default, renewed at half of it."""
    leader = fleet.start_leader(timings={"lease": 5})
    key = keys.leader(fleet.names.group)
    assert fleet.client.get(key) == leader.instance_id.encode()
    left = [fleet.client.pttl(key) for _ in range(1)]
    assert 0 < left[0] <= 5000
    stays(lambda: 2000 < fleet.client.pttl(key) <= 5000, 3.5)


def test_two_groups_have_a_leader_each(fleet: Fleet) -> None:
    """Leadership is a group's."""
    first = fleet.start(consumer_group=f"{fleet.names.group}-a")
    second = fleet.start(consumer_group=f"{fleet.names.group}-b")
    eventually(lambda: first.is_leader and second.is_leader)


def test_is_leader_asks_nobody(own_server: Callable[..., OwnServer], names: Names) -> None:
    """It may be asked in a loop: no command is sent for it."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        leader = fleet.start_leader(timings={"lease": 60, "poll": 60, "presence": 60})
        client = own.client()
        before: Any = client.info("stats")
        for _ in range(10_000):
            assert leader.is_leader
        after: Any = client.info("stats")
        assert after["total_commands_processed"] - before["total_commands_processed"] < 100


def test_nobody_leads_before_the_start_and_after_the_stop(fleet: Fleet) -> None:
    """A stopped leader says so at once, and its lease is gone when `stop` returns (D28)."""
    runner = fleet.make()
    assert not runner.is_leader
    runner.start()
    eventually(lambda: runner.is_leader)
    runner.stop()
    assert not runner.is_leader
    assert fleet.client.exists(fleet.lease) == 0
    runner.start()
    eventually(lambda: runner.is_leader)


def test_ids_of_electors_never_repeat() -> None:
    """Made by many threads at one instant, they differ: each renews its own lease only (D29)."""
    made: list[str] = []

    def make() -> None:
        made.extend([new_instance_id() for _ in range(2000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == len(made) == 8000


# --- a leader that can't renew ---


def test_a_leader_counts_itself_out_before_its_lease_is_over(
    fleet: Fleet, server: EmbeddedServer
) -> None:
    """A renewal without an answer: no longer leader by its own clock, and the other isn't yet (D3)."""
    with Proxy(server.tcp_url) as proxy:
        first = fleet.start_leader(url=proxy.url)
        second = fleet.start()
        both: list[float] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.0005):
                if first.is_leader and second.is_leader:
                    both.append(time.monotonic())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            proxy.hold()
            eventually(lambda: not first.is_leader, LEASE + busy(), interval=0.001)
            assert fleet.client.get(fleet.lease) in (first.instance_id.encode(), None)
            eventually(lambda: second.is_leader, LEASE + busy())
            proxy.release()
            stays(lambda: second.is_leader and not first.is_leader, 2.5)
        finally:
            stop.set()
            watcher.join()
            proxy.pass_through()
        assert both == []


def test_a_renewal_that_arrives_after_the_lease_was_taken_over_changes_nothing(
    fleet: Fleet, server: EmbeddedServer
) -> None:
    """It is guarded by the value: the new leader's lease is neither prolonged nor deleted."""
    with Proxy(server.tcp_url) as proxy:
        first = fleet.start_leader(url=proxy.url)
        proxy.hold("request")
        fleet.client.delete(fleet.lease)
        fleet.client.set(fleet.lease, "another", px=60_000)
        proxy.release()
        eventually(lambda: not first.is_leader)
        stays(lambda: not first.is_leader, 1.0)
        first.stop()
        assert fleet.client.get(fleet.lease) == b"another"
        assert fleet.client.pttl(fleet.lease) > 50_000


def test_a_leader_follows_as_soon_as_it_sees_another_s_lease(fleet: Fleet) -> None:
    """It does not wait for its own deadline once it was told."""
    leader = fleet.start_leader()
    fleet.client.set(fleet.lease, "another", px=30_000)
    eventually(lambda: not leader.is_leader, LEASE / 2 + busy())
    stays(lambda: not leader.is_leader, 0.5)


def test_a_lost_reply_to_the_taking_of_the_lease_is_found_out(
    server: EmbeddedServer, names: Names
) -> None:
    """The lease is ours though nobody told us: the next round finds our value in it."""
    with Proxy(server.tcp_url) as proxy, Fleet(server.url, names) as fleet:
        rule = faults.lose_reply(proxy, "SET", containing=keys.leader(names.group))
        runner = fleet.start(url=proxy.url, timings={"lease": 20})
        eventually(lambda: runner.is_leader, 5)
        assert rule.hits == 1


def test_the_lease_is_kept_while_redis_is_out_of_memory(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """PEXPIRE works then, SET does not: so renewal is no SET."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        leader = fleet.start_leader(timings={"lease": 0.6})
        with faults.out_of_memory(own.client()):
            stays(lambda: own.client().get(fleet.lease) == leader.instance_id.encode(), 2.0)
            assert leader.is_leader


def test_a_leader_that_redis_forgot_takes_the_lease_again(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """FLUSHALL, or a failover to an empty server."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        runners = [fleet.start() for _ in range(2)]
        eventually(lambda: leaders(runners))
        own.client().flushall()
        eventually(lambda: own.client().get(fleet.lease), LEASE + busy())
        eventually(lambda: len(leaders(runners)) == 1, LEASE + busy())


def test_nobody_leads_while_redis_is_away_and_one_does_when_it_is_back(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """Within the lease the leader is out by its own clock; one outage is one report."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        runners = [fleet.start(timings={"lease": 1}) for _ in range(2)]
        eventually(lambda: leaders(runners))
        with faults.killed(own):
            eventually(lambda: not leaders(runners), 1 + busy())
            faults.down_for(0.5)
        eventually(lambda: len(leaders(runners)) == 1, 10)
        stays(lambda: len(leaders(runners)) <= 1, 1.0)
        fleet.note.delay("after", run_in=0.2)
        fleet.wait_ran("after")


def test_a_frozen_server_makes_no_second_leader(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """Longer than the lease: everybody is out, and one is in when it goes on."""
    own = own_server()
    with Fleet(own.url, names) as fleet:
        runners = [fleet.start(timings={"lease": 1}) for _ in range(3)]
        eventually(lambda: leaders(runners))
        with faults.frozen(own):
            eventually(lambda: not leaders(runners), 1 + busy())
            stays(lambda: not leaders(runners), 1.0)
        eventually(lambda: len(leaders(runners)) == 1, 10)
        stays(lambda: len(leaders(runners)) <= 1, 1.0)


# --- succession ---


def test_a_follower_takes_over_at_once_from_one_that_stops(fleet: Fleet) -> None:
    """Giving up the lease is said aloud (D28)."""
    first = fleet.start_leader(timings={"lease": 30, "poll": 30})
    second = fleet.start(timings={"lease": 30, "poll": 30})
    eventually(lambda: second.host != "" and second.state == "started")
    faults.down_for(0.5)  # the follower has looked, and would look again in 30 s
    first.stop()
    stopped = time.monotonic()
    eventually(lambda: second.is_leader, 5, interval=0.002)
    taken = time.monotonic() - stopped
    print(f"takeover after an orderly stop: {taken * 1000:.0f} ms")
    assert taken < 0.5 + busy()


def test_a_follower_takes_over_within_the_lease_where_pub_sub_is_forbidden(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """Without the channel it looks again when the lease it saw has run out."""
    own = own_server()
    user = faults.restricted_user(own.client(), names.prefix, "resetchannels")
    with Fleet(own.url, names) as fleet:

        def limited() -> redis.Redis:
            return own.client(**user)

        first = fleet.start_leader(url=limited(), timings={"lease": 2})
        second = fleet.start(url=limited(), timings={"lease": 2})
        faults.down_for(0.5)
        first.stop()
        stopped = time.monotonic()
        eventually(lambda: second.is_leader, 10, interval=0.005)
        taken = time.monotonic() - stopped
        print(f"takeover without pub/sub: {taken:.2f} s of a lease of 2 s")
        assert taken < 2 + busy()
        assert not any("PUBLISH" in repr(r.error) for r in (*first.errors, *second.errors))


def test_delayed_tasks_run_where_pub_sub_is_forbidden(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """PUBLISH is refused inside the script, after the member was added: that is no error."""
    own = own_server()
    user = faults.restricted_user(own.client(), names.prefix, "resetchannels")
    with Fleet(own.url, names) as fleet:
        fleet.task(name="once", unique_for=60)
        runner = fleet.make(url=own.client(**user), timings={"poll": 0.5})
        runner.start()
        eventually(lambda: runner.is_leader)
        runner.dispatch("note", "plain", run_in=0.3)
        runner.dispatch("once", "unique", run_in=0.3)
        fleet.wait_ran("plain", "unique")
        refused = [str(each) for each in own.client().execute_command("ACL", "LOG") or []]
        assert all("taskrunner:" in each or "channel" in each for each in refused), refused


def test_a_follower_takes_over_when_a_dead_leader_s_lease_runs_out(fleet: Fleet) -> None:
    """It looks when the lease it sees ends, not after a fixed wait (D28)."""
    for left in (700, 1500):
        fleet.client.set(fleet.lease, "a dead one's", px=left)
        until = time.monotonic() + left / 1000
        runner = fleet.start(timings={"lease": 2, "poll": 60})
        eventually(lambda runner=runner: runner.is_leader, 10, interval=0.002)
        late = time.monotonic() - until
        print(f"takeover {late * 1000:.0f} ms after a lease of {left} ms ran out")
        assert -0.01 <= late < busy()
        runner.stop()


def test_a_go_leader_s_lease_is_respected(fleet: Fleet) -> None:
    """Its value is no UUID; what counts is that it isn't ours."""
    value = "JBSWY3DPEHPK3PXPJBSWY3DPEA======"
    fleet.client.set(fleet.lease, value, px=5000)
    runner = fleet.start()

    def renewed_by_go() -> bool:
        fleet.client.pexpire(fleet.lease, 5000)
        return not runner.is_leader

    stays(renewed_by_go, 2.5)
    assert fleet.client.get(fleet.lease) == value.encode()
    fleet.client.delete(fleet.lease)
    eventually(lambda: runner.is_leader, 6 + busy())


def test_due_tasks_do_not_wait_for_a_leader_that_drains(fleet: Fleet) -> None:
    """A stopping leader schedules nothing any more, so it must not keep the lease for its tasks."""
    gate = threading.Event()
    fleet.task(lambda payload: gate.wait(30), name="slow")
    first = fleet.start_leader(shutdown_timeout=20)
    fleet.producer.dispatch("slow", 1)
    eventually(lambda: len(fleet.producer.queue) == 1 and _held(fleet) == 1)
    second = fleet.start()
    faults.down_for(0.5)
    stopping = threading.Thread(target=first.stop)
    stopping.start()
    try:
        fleet.note.delay("due", run_in=0.5)
        fleet.wait_ran("due", timeout=8)  # far less than the drain may take
        assert second.is_leader
        assert not first.is_leader
    finally:
        gate.set()
        stopping.join()


def test_due_tasks_do_not_wait_for_a_leader_whose_stop_returned_false(fleet: Fleet) -> None:
    """Its hung task is renewed for as long as the process lives; the lease must not be."""
    gate = threading.Event()
    fleet.task(lambda payload: gate.wait(30), name="hung")
    first = fleet.start_leader()
    fleet.producer.dispatch("hung", 1)
    eventually(lambda: _held(fleet) == 1)
    fleet.start()
    faults.down_for(0.5)
    try:
        assert first.stop(0.5) is False
        assert not first.is_leader
        fleet.note.delay("due", run_in=0.2)
        fleet.wait_ran("due", timeout=8)
    finally:
        gate.set()


def _held(fleet: Fleet) -> int:
    pending: Any = fleet.client.xpending(fleet.names.stream, fleet.names.group)
    return int(pending["pending"])
