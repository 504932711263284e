"""Timings, stats and claim delays on a real server: exact, and never in the way of a worker."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from taskrunner import RedisStreamQueue, Stats, TaskRunner, clock, keys, scripts
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.clock import ServerClock
from taskrunner.timings import Timings as Sums
from tests.support import Names, OwnServer, Proxy, busy, eventually, faults, stays
from tests.support.numbers import Crew, Monitor, RoundTrips, server_now, wait_until_idle

SECOND = 10**9  # claim delays are in nanoseconds


@pytest.fixture
def crew(server: EmbeddedServer, names: Names) -> Iterator[Crew]:
    """Runners of one group on the shared server."""
    with Crew(server.tcp_url, names) as made:
        yield made


@pytest.fixture
def own(own_server: Callable[..., OwnServer], names: Names) -> Iterator[Crew]:
    """Runners of one group on a server of the test's own, which it may watch and restrict."""
    with Crew(own_server().tcp_url, names) as made:
        yield made


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Every run time that is handed in, by task name, as it was measured."""
    seen: dict[str, list[float]] = {}
    add = Sums.add

    def spy(self: Sums, task_name: str, seconds: float) -> None:
        seen.setdefault(task_name, []).append(seconds)
        add(self, task_name, seconds)

    monkeypatch.setattr(Sums, "add", spy)
    return seen


def _lease(crew: Crew) -> str:
    return keys.leader(crew.names.group)


def _waiting(runner: TaskRunner) -> tuple[int, int]:
    stats = runner.stats()
    return stats.queue_length, stats.waiting


# --- timings ---


def test_timings_of_two_thousand_no_ops_add_up(crew: Crew, summed: dict[str, list[float]]) -> None:
    """D39: tasks far below a millisecond are counted, and their sum is right to the millisecond."""
    noop = crew.task(name="noop")
    runner = crew.start()
    runner.dispatch_many(noop.name, [None] * 2000)

    eventually(lambda: crew.figures().get("noop_count") == 2000, 30)

    true = sum(summed["noop"]) * 1000
    eventually(lambda: abs(crew.figures()["noop_sum"] - true) <= 1, 3)
    assert len(summed["noop"]) == 2000


def test_timings_hold_the_run_and_not_the_wait(crew: Crew) -> None:
    """What a task takes in its thread, between the hooks; not how long it lay in the queue."""
    crew.task(lambda payload: time.sleep(0.05), name="nap")
    bounds: list[float] = []
    runner = crew.start(
        num_workers=1,
        before_task=lambda context: bounds.append(-time.monotonic()),
        after_task=lambda context, error: bounds.append(time.monotonic()),
    )
    runner.dispatch_many("nap", [None] * 10)

    eventually(lambda: crew.figures().get("nap_count") == 10, 20)

    assert 500 <= crew.figures()["nap_sum"] <= sum(bounds) * 1000 + 1


def test_timings_count_failed_attempts_too(crew: Crew) -> None:
    """A failing run costs a worker as much as one that returns."""

    def fail(payload: Any) -> None:
        raise ValueError("no")

    crew.task(fail, name="fail", max_retry=3, retry_delay=0.05)
    runner = crew.start(queue={"reclaim_delay": 1})
    runner.dispatch("fail")

    eventually(lambda: crew.figures().get("fail_count") == 3, 20)


def test_timings_of_the_last_second_are_written_at_the_stop(crew: Crew) -> None:
    """D40: what ended a moment before the stop counts."""
    noop = crew.task(name="noop")
    runner = crew.start()
    runner.dispatch_many(noop.name, [None] * 50)
    wait_until_idle(crew.client, crew.names)

    assert runner.stop(5)

    assert crew.figures()["noop_count"] == 50


def test_scheduling_rounds_are_summed(crew: Crew) -> None:
    """How long the leader takes for due messages is a figure of its own."""
    crew.task(name="noop")
    runner = crew.start(leads=True)
    runner.dispatch("noop", run_in=0.2)

    eventually(lambda: crew.figures().get("noop_count") == 1, 15)
    eventually(lambda: crew.figures().get("delayed_tasks_schedule_count", 0) >= 1, 5)

    assert "delayed_tasks_schedule_sum" in crew.figures()
    assert "delayed_tasks_schedule" not in runner.stats().per_task_timing
    assert runner.stats().avg_schedule_timing < 1000


def test_slow_write_of_timings_delays_no_worker(
    server: EmbeddedServer, crew: Crew, make_proxy: Callable[[str], Proxy]
) -> None:
    """D40: while a write waits for its answer, tasks run on; what they add is kept."""
    proxy = make_proxy(server.url)
    crew.task(name="noop")
    runner = crew.start(url=proxy.url)
    held = faults.hold_request(proxy, "HINCRBY", containing=crew.names.metrics)
    runner.dispatch("noop")
    assert held.hit.wait(10)

    latest: list[float] = []
    crew.task(lambda payload: latest.append(time.monotonic() - payload), name="late")
    for _ in range(50):
        runner.dispatch("late", time.monotonic())
    eventually(lambda: len(latest) == 50, 3)
    assert max(latest) < 2

    held.release()
    eventually(lambda: crew.figures().get("late_count") == 50, 10)
    assert crew.figures()["noop_count"] == 1


def test_failed_write_of_timings_counts_with_the_next(
    server: EmbeddedServer, crew: Crew, make_proxy: Callable[[str], Proxy]
) -> None:
    """A connection that breaks under the write costs nothing."""
    proxy = make_proxy(server.url)
    crew.task(name="noop")
    runner = crew.start(url=proxy.url)
    lost = faults.lose_request(proxy, "HINCRBY", containing=crew.names.metrics)
    runner.dispatch_many("noop", [None] * 20)
    assert lost.hit.wait(10)

    eventually(lambda: crew.figures().get("noop_count") == 20, 10)
    stays(lambda: crew.figures()["noop_count"] == 20, 2.5)


def test_timings_count_once_when_one_of_them_is_refused(crew: Crew) -> None:
    """One field that Redis refuses must not have the others written again, second after second."""
    crew.client.hset(crew.names.metrics, "spoilt_sum", "no number")
    crew.task(name="spoilt")
    crew.task(name="noop")
    runner = crew.start()
    runner.dispatch_many("noop", [None] * 20)
    runner.dispatch_many("spoilt", [None] * 20)

    def noops() -> int:
        return int(crew.client.hget(crew.names.metrics, "noop_count") or 0)

    eventually(lambda: noops() >= 20, 10)
    stays(lambda: noops() == 20, 5)


# --- reset ---


def test_reset_comes_at_its_interval(crew: Crew) -> None:
    """The leader sets all figures back, whoever wrote them."""
    crew.client.hset(crew.names.metrics, mapping={"of-go_sum": 70, "of-go_count": 7})

    crew.start(leads=True, metrics_reset_interval=1)

    eventually(lambda: crew.figures() == {"of-go_sum": 0, "of-go_count": 0}, 10)


def test_reset_is_the_leaders(crew: Crew) -> None:
    """An instance that doesn't lead resets nothing."""
    crew.client.set(_lease(crew), "somebody else", px=60_000)
    crew.client.hset(crew.names.metrics, mapping={"t_sum": 70, "t_count": 7})

    crew.start(leads=False, metrics_reset_interval=0.5)

    stays(lambda: crew.figures() == {"t_sum": 70, "t_count": 7}, 2.5)


def test_reset_never_comes_when_its_interval_is_zero(crew: Crew) -> None:
    """0 means never."""
    crew.client.hset(crew.names.metrics, mapping={"t_sum": 70, "t_count": 7})

    crew.start(leads=True, metrics_reset_interval=0, long_queue_threshold=0.4)

    stays(lambda: crew.figures() == {"t_sum": 70, "t_count": 7}, 2)


def test_reset_loses_no_samples_that_arrive_meanwhile(own: Crew) -> None:
    """D39: each sample counts before or after a reset: what was sent adds up to what ran, and the
    hash holds what was sent since the last reset."""
    own.task(name="noop")
    runner = own.start(leads=True, metrics_reset_interval=0.3)
    with Monitor(own.url) as monitor:
        for _ in range(60):
            runner.dispatch_many("noop", [None] * 20)
            time.sleep(0.05)
        wait_until_idle(own.client, own.names)
        assert runner.stop(5)

        resets = total = since = 0
        for command in monitor.all("HINCRBY", "HSET"):
            if command.words[1:3] != [own.names.metrics, "noop_count"]:
                continue
            if command.name == "HSET":
                resets, since = resets + 1, 0
            else:
                total += int(command.words[3])
                since += int(command.words[3])

    assert total == 1200
    assert resets >= 3
    assert own.figures()["noop_count"] == since


def test_reset_never_parts_a_sum_from_its_count(
    server: EmbeddedServer, crew: Crew, make_proxy: Callable[[str], Proxy]
) -> None:
    """A reset between the two halves of a pair would leave runs without their time."""
    proxy = make_proxy(server.url)
    crew.task(lambda payload: time.sleep(0.05), name="nap")
    runner = crew.start(leads=True, url=proxy.url)
    held = faults.hold_request(proxy, "HINCRBY", containing="nap_count")
    runner.dispatch("nap")
    assert held.hit.wait(10)

    lease = crew.client.get(_lease(crew))
    assert isinstance(lease, bytes)
    reset = scripts.load("reset_metrics")
    crew.client.eval(reset.text, 2, _lease(crew), crew.names.metrics, lease)  # type: ignore[no-untyped-call]
    held.release()

    eventually(lambda: crew.figures().get("nap_count"), 10)
    assert crew.figures()["nap_sum"] > 0


def test_reset_is_tried_again_when_it_failed(
    server: EmbeddedServer, crew: Crew, make_proxy: Callable[[str], Proxy]
) -> None:
    """A connection that breaks under the reset must not put it off by a day."""
    proxy = make_proxy(server.url)
    crew.client.hset(crew.names.metrics, mapping={"t_sum": 70, "t_count": 7})
    lost = proxy.on("EVALSHA", "cut_before", containing=crew.names.metrics)
    crew.start(leads=True, url=proxy.url, metrics_reset_interval=8)
    assert lost.hit.wait(20)

    eventually(lambda: crew.figures() == {"t_sum": 0, "t_count": 0}, 5)


# --- stats ---


def test_stats_travel_in_one_pipeline(own: Crew) -> None:
    """One wait for Redis, whatever the number of tasks; a second and third when the count of
    instances is older than 10 s."""
    with RoundTrips(own.url) as trips, Monitor(own.url) as monitor:
        runner = own.make(url=trips.url)
        own.client.xadd(own.names.stream, {"payload": "x"})
        for number in range(50):
            own.client.hset(own.names.metrics, f"t{number}_count", 1)
        runner.stats()  # connects, and counts the instances
        before, sent = trips.turns, len(monitor.sent())

        stats = runner.stats()

        assert trips.turns - before == 1
        assert len(monitor.sent()) - sent == 3
        assert len(stats.per_task_timing) == 50


def test_replications_take_two_round_trips_and_are_cached(own: Crew) -> None:
    """Two waits at most every ten seconds, however often it is asked."""
    own.add_go_instance("go-1")
    with RoundTrips(own.url) as trips:
        runner = own.make(url=trips.url)
        runner.queue.add("x")  # connects
        before = trips.turns

        counted = [runner.replications() for _ in range(20)]

        assert counted == [1] * 20
        assert trips.turns - before == 2


def test_stats_of_an_empty_group_are_zero(crew: Crew) -> None:
    """No stream, no group, no figures: nothing to wait for, and nothing to fail on."""
    stats = crew.make().stats()

    assert isinstance(stats, Stats)
    assert (stats.queue_length, stats.waiting, stats.predicted_wait_time, stats.tps) == (0, 0, 0, 0)
    assert stats.replications == 1
    assert not stats.long


def test_stats_count_a_backlog_before_the_group_exists(crew: Crew) -> None:
    """Producers may come first: everything waits then, at an assumed millisecond each."""
    crew.task(name="noop")
    runner = crew.make(num_workers=2)
    runner.dispatch_many("noop", [None] * 100)

    stats = runner.stats()

    assert (stats.queue_length, stats.waiting) == (100, 100)
    assert stats.predicted_wait_time == 50


def test_running_tasks_do_not_wait(crew: Crew) -> None:
    """XLEN minus pending: what runs, and what a worker holds, is no backlog."""
    release = threading.Event()
    crew.task(lambda payload: release.wait(30), name="hold")
    runner = crew.start(num_workers=3)
    runner.dispatch_many("hold", [None] * 3)
    try:
        eventually(lambda: _waiting(runner) == (3, 0))
        runner.dispatch_many("hold", [None] * 5)
        eventually(lambda: _waiting(runner) == (8, 5))
        assert runner.stats().predicted_wait_time == pytest.approx(5 / 3)  # no timings yet: 1 ms
    finally:
        release.set()


def test_history_does_not_wait(crew: Crew) -> None:
    """With delete_on_ack=False the stream's length only grows; the backlog comes down to 0."""
    crew.task(name="noop")
    history = {"delete_on_ack": False}
    runner = crew.start(queue=history)
    runner.dispatch_many("noop", [None] * 50)
    eventually(lambda: crew.figures().get("noop_count") == 50, 15)

    assert _waiting(runner) == (50, 0)

    runner.stop(5)
    runner.dispatch_many("noop", [None] * 3)

    assert _waiting(crew.make(queue=history)) == (53, 3)


@pytest.mark.parametrize("which", [0, 1])
def test_history_does_not_wait_when_a_waiting_entry_was_deleted(crew: Crew, which: int) -> None:
    """BL-27: `lag` is falsified by deletions (on 7.0 it stays above 0 for ever), and a pool that
    trusts it never comes down again."""
    crew.task(name="noop")
    history = {"delete_on_ack": False}
    runner = crew.make(queue=history)
    group, stream = crew.names.group, crew.names.stream
    runner.dispatch_many("noop", [None] * 3)
    crew.client.xgroup_create(stream, group, "0-0")
    crew.client.xreadgroup(group, "reader", {stream: ">"}, count=1)
    undelivered = [entry for entry, _ in crew.client.xrange(stream)][1:]
    crew.client.xdel(stream, undelivered[which])
    assert runner.stats().waiting == 1

    runner.dispatch("noop")
    crew.client.xreadgroup(group, "reader", {stream: ">"}, count=1)
    assert runner.stats().waiting == 1

    crew.client.xreadgroup(group, "reader", {stream: ">"}, count=10)
    assert runner.stats().waiting == 0


@pytest.mark.parametrize("held", [0, 2])
def test_history_left_by_a_group_that_is_gone_does_not_wait(crew: Crew, held: int) -> None:
    """Until the leader trims it; also where the server knows no lag, as before 7.0, or after a
    deletion as here."""
    runner, stream, group = crew.make(), crew.names.stream, crew.names.group
    crew.task(name="noop")
    crew.client.xgroup_create(stream, "gone", "0-0", mkstream=True)
    crew.client.xgroup_create(stream, group, "0-0")
    runner.dispatch_many("noop", [None] * 10)
    entries = [entry for entry, _ in crew.client.xrange(stream)]
    crew.client.xreadgroup(group, "reader", {stream: ">"}, count=6)
    crew.client.xack(stream, group, *entries[: 6 - held])
    crew.client.xgroup_destroy(stream, "gone")
    crew.client.xdel(stream, entries[7])
    (info,) = crew.client.xinfo_groups(stream)
    assert info.get("lag") is None
    assert runner.stats().waiting == 3


def test_history_is_counted_without_fetching_it(own: Crew) -> None:
    """Where the server does not know the lag, bodies of megabytes are not sent to be counted."""
    history = {"delete_on_ack": False}
    own.client.xgroup_create(own.names.stream, own.names.group, "0-0", mkstream=True)
    for _ in range(64):
        own.client.xadd(own.names.stream, {"payload": "x" * 1_000_000})
    entries = [entry for entry, _ in own.client.xrange(own.names.stream, count=3)]
    own.client.xreadgroup(own.names.group, "reader", {own.names.stream: ">"}, count=1)
    own.client.xdel(own.names.stream, entries[1])  # the lag is unknown from here on
    with RoundTrips(own.url) as trips:
        stats = own.make(url=trips.url, queue=history).stats()

    assert stats.waiting == 62
    assert trips.received < 20_000_000


def test_backlog_is_ones_own_when_several_groups_share_the_stream(crew: Crew) -> None:
    """What another group still has to read is not our backlog, and the other way round."""
    crew.task(name="noop")
    crew.client.xgroup_create(crew.names.stream, "other", "0-0", mkstream=True)
    runner = crew.start()
    runner.dispatch_many("noop", [None] * 30)
    eventually(lambda: crew.figures().get("noop_count") == 30, 15)

    assert _waiting(runner) == (30, 0)
    assert crew.make(consumer_group="other").stats().waiting == 30


def test_stats_read_what_go_writes(crew: Crew) -> None:
    """In a mixed fleet half of the timings come from Go; fields that are no figures are left."""
    crew.client.hset(
        crew.names.metrics,
        mapping={
            "a_sum": 100,
            "a_count": 1,
            "b_sum_sum": 500,
            "b_sum_count": 2,
            f"taskrunner:{crew.names.group}:delayed_tasks_schedule_sum": 9999,
            f"taskrunner:{crew.names.group}:delayed_tasks_schedule_count": 1,
            "odd": "x",
            "c_sum": "x",
        },
    )

    stats = crew.make().stats()

    assert stats.per_task_timing == {"a": 100, "b_sum": 250}
    assert stats.avg_timing.total_seconds() == 0.2


# --- claim delays ---


def _add(crew: Crew, entry_id: str) -> None:
    noop = '{"unique":false,"unique_for":0,"unique_key":"","unique_lock_value":"",'
    noop += '"reservation_timeout":1000000000,"task_name":"noop","payload":null}'
    crew.client.xadd(crew.names.stream, {"payload": noop}, id=entry_id)


def test_ring_holds_the_newest_first(crew: Crew) -> None:
    """D41: "last" is the newest sample, at the head."""
    crew.task(name="noop")
    now = round(server_now(crew.client) * 1000)
    for ago in (30_000, 20_000, 10_000):
        _add(crew, f"{now - ago}-0")

    crew.start()

    eventually(lambda: len(crew.ring()) == 3, 15)
    newest, middle, oldest = crew.ring()
    assert 10 * SECOND <= newest < 20 * SECOND <= middle < 30 * SECOND <= oldest < 50 * SECOND


def test_ring_takes_new_samples_when_it_is_full(crew: Crew) -> None:
    """D41: in Go a full ring took no sample any more; a thousand are kept, the oldest go."""
    crew.task(name="noop")
    crew.client.rpush(crew.names.ring, *range(7_000_000_000_000, 7_000_000_001_000))
    runner = crew.start()
    runner.dispatch_many("noop", [None] * 20)

    eventually(lambda: sum(1 for value in crew.ring() if value < 60 * SECOND) == 20, 15)

    ring = crew.ring()
    assert len(ring) == 1000
    assert all(value < 60 * SECOND for value in ring[:20])
    assert ring[20:] == list(range(7_000_000_000_000, 7_000_000_000_980))


def test_ring_never_grows_beyond_a_thousand(crew: Crew) -> None:
    """However many messages come at once."""
    crew.task(name="noop")
    runner = crew.start()
    runner.dispatch_many("noop", [None] * 3000)
    eventually(lambda: crew.figures().get("noop_count") == 3000, 30)

    eventually(lambda: len(crew.ring()) == 1000, 5)
    stays(lambda: len(crew.ring()) == 1000, 0.5)


def test_ring_gets_a_sample_of_every_message_that_comes_alone(crew: Crew) -> None:
    """Messages read one by one, many in a tenth of a second, are all sampled."""
    crew.task(name="noop")
    runner = crew.start()
    for _ in range(600):
        runner.dispatch("noop")
    eventually(lambda: crew.figures().get("noop_count") == 600, 30)

    eventually(lambda: len(crew.ring()) == 600, 3, message=lambda: f"{len(crew.ring())} of 600")


def test_claim_delay_is_never_negative(crew: Crew) -> None:
    """An id ahead of the server's clock is a delay of 0."""
    crew.task(name="noop")
    _add(crew, f"{round(server_now(crew.client) * 1000) + 3_600_000}-0")

    crew.start()

    eventually(lambda: crew.ring() == [0], 15)


@pytest.mark.parametrize("first_answer", ["in time", "late"])
def test_claim_delay_is_by_the_servers_clock(
    server: EmbeddedServer,
    crew: Crew,
    make_proxy: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
    first_answer: str,
) -> None:
    """This machine's clock may be an hour ahead: not even the first samples show it."""
    monkeypatch.setattr(
        ServerClock.__init__, "__defaults__", (clock.monotonic, lambda: time.time() + 3600)
    )
    proxy = make_proxy(server.url)
    crew.task(name="noop")
    if first_answer == "late":
        proxy.on("TIME", "delay_request", seconds=1.0)
    runner = crew.start(url=proxy.url)
    runner.dispatch_many("noop", [None] * 20)

    eventually(lambda: len(crew.ring()) == 20, 15)

    assert max(crew.ring()) < 60 * SECOND


@pytest.mark.parametrize("samples", [0, 1, 10])
def test_claim_delays_are_minus_one_when_there_are_few(crew: Crew, samples: int) -> None:
    """Ten samples or fewer say nothing."""
    if samples:
        crew.client.rpush(crew.names.ring, *[5] * samples)

    metrics = crew.make().queue.get_metrics()

    assert (
        metrics.message_claim_delay_avg,
        metrics.message_claim_delay_std,
        metrics.message_claim_delay_max,
        metrics.message_claim_delay_last,
    ) == (-1, -1, -1, -1)


def test_claim_delays_are_figures_of_the_ring(crew: Crew) -> None:
    """From eleven samples on, in nanoseconds."""
    crew.client.rpush(crew.names.ring, 30, *[10] * 10)

    metrics = crew.make().queue.get_metrics()

    assert metrics.message_claim_delay_last == 30
    assert metrics.message_claim_delay_max == 30
    assert metrics.message_claim_delay_avg == pytest.approx(130 / 11)
    assert metrics.message_claim_delay_std == pytest.approx(5.7496, abs=1e-3)


def test_get_metrics_tells_groups_and_consumers_apart(crew: Crew) -> None:
    """D41: Go gathers the consumers and drops them."""
    client, stream = crew.client, crew.names.stream
    for _ in range(3):
        client.xadd(stream, {"payload": "x"})
    for group, reader in (("g-1", "g-1_h_1"), ("g-2", "g-2_h_1")):
        client.xgroup_create(stream, group, "0-0")
        client.xreadgroup(group, reader, {stream: ">"}, count=1)

    queue = crew.make().queue
    metrics = queue.get_metrics()

    assert metrics.queue_size == 3
    assert [(group.name, group.pending, group.lag) for group in metrics.groups] == [
        ("g-1", 1, 2),
        ("g-2", 1, 2),
    ]
    (consumer,) = metrics.groups[0].consumers
    assert (consumer.name, consumer.pending) == ("g-1_h_1", 1)
    assert 0 <= consumer.idle < 60
    assert [group.name for group in queue.get_metrics(group="g-2").groups] == ["g-2"]


def test_get_metrics_of_no_queue_is_empty(crew: Crew) -> None:
    """Nothing was ever added."""
    metrics = crew.make().queue.get_metrics()

    assert (metrics.queue_size, metrics.groups) == (0, [])


# --- the hook ---


def test_hook_gets_the_present_figures_every_tick(crew: Crew) -> None:
    """Half the threshold is a tick; whatever the queue's length, and whoever leads."""
    crew.client.set(_lease(crew), "somebody else", px=60_000)
    seen: list[tuple[float, Stats]] = []
    crew.start(
        leads=False,
        long_queue_threshold=1,
        long_queue_hook=lambda stats: seen.append((time.monotonic(), stats)),
    )

    eventually(lambda: len(seen) >= 5, 15)

    assert 0.4 < (seen[4][0] - seen[0][0]) / 4 < 1.5
    assert all(stats.waiting == 0 and not stats.long for _, stats in seen)


def test_hook_is_told_of_a_long_queue(crew: Crew) -> None:
    """A predicted wait above the threshold."""
    release = threading.Event()
    crew.task(lambda payload: release.wait(30), name="hold")
    crew.client.hset(crew.names.metrics, mapping={"hold_sum": 1000, "hold_count": 1})
    seen: list[Stats] = []
    runner = crew.start(num_workers=1, long_queue_threshold=0.5, long_queue_hook=seen.append)
    runner.dispatch_many("hold", [None] * 10)
    try:
        found = eventually(lambda: [stats for stats in list(seen) if stats.long], 10)[-1]
        assert found.waiting >= 5
        assert found.predicted_wait_time >= 5000
        assert found.per_task_timing == {"hold": 1000}
    finally:
        release.set()


@pytest.mark.parametrize("error", [ValueError("hook"), SystemExit(3), KeyboardInterrupt()])
def test_hook_that_raises_hurts_nobody(crew: Crew, error: BaseException) -> None:
    """It is the application's: it is reported, called again, and the runner works on."""
    calls: list[Stats] = []

    def hook(stats: Stats) -> None:
        calls.append(stats)
        raise error

    crew.task(name="noop")
    runner = crew.start(long_queue_threshold=0.4, long_queue_hook=hook)
    eventually(lambda: len(calls) >= 3, 10)
    runner.dispatch_many("noop", [None] * 10)

    eventually(lambda: crew.figures().get("noop_count") == 10, 10)
    assert runner.state == "started"
    told = type(error).__name__
    eventually(lambda: [report for report in list(runner.errors) if told in str(report.error)])


def test_hook_that_hangs_hurts_nobody(crew: Crew) -> None:
    """It is not called again meanwhile; tasks, ticks and the stop go on without it."""
    release = threading.Event()
    calls: list[Stats] = []

    def hook(stats: Stats) -> None:
        calls.append(stats)
        release.wait(60)

    crew.task(name="noop")
    runner = crew.start(long_queue_threshold=0.2, long_queue_hook=hook, metrics_reset_interval=3)
    eventually(lambda: calls, 10)
    runner.dispatch_many("noop", [None] * 10)
    eventually(lambda: crew.figures().get("noop_count") == 10, 10)
    eventually(lambda: crew.figures().get("noop_count") == 0, 15)  # the tick's other duties
    try:
        assert len(calls) == 1
        started = time.monotonic()
        assert runner.stop(5)
        assert time.monotonic() - started < 1 + busy()
    finally:
        release.set()


def test_redis_client_of_the_application_is_left_alone(crew: Crew, server: EmbeddedServer) -> None:
    """Figures read the same through a client that decodes and speaks RESP3."""
    crew.client.hset(crew.names.metrics, mapping={"t_sum": 70, "t_count": 7})
    crew.client.xadd(crew.names.stream, {"payload": "x"})
    client = redis.Redis.from_url(server.tcp_url, decode_responses=True, protocol=3)
    runner = TaskRunner(
        consumer_group=crew.names.group,
        queue=RedisStreamQueue(client, prefix=crew.names.prefix),
        registry=crew.registry,
    )

    stats = runner.stats()

    assert (stats.per_task_timing, stats.queue_length, stats.waiting) == ({"t": 10}, 1, 1)
    runner.queue.connections.close()
    client.close()
