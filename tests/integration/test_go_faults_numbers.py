"""D37 to D41: the Go library's faults in its figures, as it showed them, and what is right.

Each test repeats the run in which the fault was seen. The rules themselves are proved in
`test_numbers`, `test_instances` and in the unit tests.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from taskrunner import RedisStreamQueue
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Names, OwnServer, Proxy, busy, eventually, faults
from tests.support.numbers import Crew, Monitor, wait_until_idle

SECOND = 10**9


@pytest.fixture
def crew(server: EmbeddedServer, names: Names) -> Iterator[Crew]:
    """Runners of one group on the shared server."""
    with Crew(server.tcp_url, names) as made:
        made.task(name="noop")
        yield made


def test_d37_two_on_one_host_and_three_strangers_count_two(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """Go: one became four with three of an unrelated group, two on one host were one, the first to
    stop deleted the key of both, and each asked by KEYS."""
    own = own_server()
    with (
        Crew(own.tcp_url, names) as crew,
        Crew(own.tcp_url, Names()) as strangers,
        Monitor(own.tcp_url) as monitor,
    ):
        for _ in range(3):
            strangers.start(leads=None)
        first, second = (crew.start(leads=None, host=names.host) for _ in range(2))
        eventually(lambda: {first.host, second.host} == {names.host, f"{names.host}-2"})
        eventually(lambda: crew.make().replications() == 2)

        assert first.stop(5)

        assert crew.is_present(second)
        assert crew.make().replications() == 1
        assert not monitor.all("KEYS", "SCAN")


def test_d38_predicted_wait_is_shared_by_the_instances(crew: Crew) -> None:
    """Go: 100 ms, 10 queued, 1 worker, 5 replicas gave 5000 ms. Right is 200, and 50 a second."""
    for number in range(5):
        crew.add_go_instance(f"{crew.names.host}-go-{number}")
    crew.client.hset(crew.names.metrics, mapping={"noop_sum": 100_000, "noop_count": 1000})
    runner = crew.make(num_workers=1)
    runner.dispatch_many("noop", [None] * 10)

    stats = runner.stats()

    assert stats.replications == 5
    assert stats.avg_timing == timedelta(milliseconds=100)
    assert (stats.predicted_wait_time, stats.tps) == (200, 50)


def test_d38_predicted_wait_leaves_out_what_runs_and_what_is_done(crew: Crew) -> None:
    """Go took the stream's whole length: running ones, and all finished ones where they stay."""
    history = {"delete_on_ack": False}
    runner = crew.start(leads=None, num_workers=1, queue=history)
    runner.dispatch_many("noop", [None] * 500)
    eventually(lambda: crew.figures().get("noop_count") == 500, 20)

    stats = runner.stats()

    assert stats.queue_length == 500
    assert (stats.waiting, stats.predicted_wait_time) == (0, 0)


def test_d39_tasks_below_a_millisecond_have_a_mean_and_a_rate(crew: Crew) -> None:
    """Go: 2,000 no-op tasks gave a sum of 5 ms, an average of 0, predicted 0, TPS 0."""
    crew.task(lambda payload: sum(range(2000)), name="tiny")  # some hundredths of a millisecond
    runner = crew.start(leads=None)
    runner.dispatch_many("tiny", [None] * 2000)
    eventually(lambda: crew.figures().get("tiny_count") == 2000, 30)
    runner.stop(5)
    runner.dispatch_many("tiny", [None] * 1000)

    stats = runner.stats()

    assert crew.figures()["tiny_sum"] > 10
    assert timedelta(0) < stats.avg_timing < timedelta(milliseconds=20)
    assert stats.tps > 0
    assert stats.predicted_wait_time > 0


def test_d40_write_of_two_seconds_stops_no_worker(
    server: EmbeddedServer, crew: Crew, make_proxy: Callable[[str], Proxy]
) -> None:
    """Go: a write that took 2 s let no task start for 2.0 s."""
    proxy = make_proxy(server.url)
    starts: list[float] = []
    crew.task(lambda payload: starts.append(time.monotonic()), name="tick")
    runner = crew.start(leads=None, url=proxy.url)
    slow = proxy.on("HINCRBY", "delay_reply", containing=crew.names.metrics, seconds=2.0)
    runner.dispatch("tick")
    assert slow.hit.wait(10)
    hit = time.monotonic()
    producer = crew.make()
    while time.monotonic() - hit < 2.0:
        producer.dispatch("tick")
        time.sleep(0.02)

    during = [at for at in starts if hit < at < hit + 2.0]
    assert len(during) > 20
    assert max(after - before for before, after in itertools.pairwise(during)) < 1.0
    eventually(lambda: crew.figures().get("tick_count") == len(starts), 10)


def test_d40_last_second_is_written_at_the_stop(crew: Crew) -> None:
    """Go: what was summed in the last second could be lost."""
    runner = crew.start(leads=None)
    runner.dispatch("noop")
    eventually(lambda: crew.figures().get("noop_count") == 1, 10)  # the next write is a second off
    runner.dispatch_many("noop", [None] * 100)
    wait_until_idle(crew.client, crew.names)

    assert runner.stop(5)

    assert crew.figures()["noop_count"] == 101


def test_d40_figures_that_cannot_be_written_stop_no_work(
    server: EmbeddedServer, crew: Crew, make_proxy: Callable[[str], Proxy]
) -> None:
    """Writes that never get an answer: tasks run, and the stop is not held up."""
    proxy = make_proxy(server.url)
    held = faults.hold_request(proxy, "HINCRBY")
    runner = crew.start(leads=None, url=proxy.url)
    runner.dispatch("noop")
    assert held.hit.wait(10)
    runner.dispatch_many("noop", [None] * 200)
    wait_until_idle(crew.client, crew.names)

    started = time.monotonic()
    assert runner.stop(3)
    assert time.monotonic() - started < 3 + busy(2)


def test_d41_full_ring_takes_the_newest(crew: Crew) -> None:
    """Go: a full ring rotated its old samples, took none, and called the oldest the last."""
    crew.client.rpush(crew.names.ring, *[900 * SECOND] * 1000)
    runner = crew.start(leads=None)
    runner.dispatch_many("noop", [None] * 600)

    eventually(lambda: crew.figures().get("noop_count") == 600, 20)
    eventually(lambda: crew.ring().count(900 * SECOND) <= 400, 5)

    metrics = runner.queue.get_metrics()
    assert len(crew.ring()) == 1000
    assert 0 <= metrics.message_claim_delay_last < 60 * SECOND
    assert metrics.message_claim_delay_max == 900 * SECOND


def test_d41_claim_delay_is_not_the_run_time(crew: Crew) -> None:
    """Go called the processing time the claim delay."""
    crew.task(lambda payload: time.sleep(1.0), name="slow")
    runner = crew.start(leads=None, num_workers=12)
    runner.dispatch_many("slow", [None] * 12)

    eventually(lambda: len(crew.ring()) == 12, 15)

    assert max(crew.ring()) < SECOND


def test_d41_ring_is_named_after_its_queue(server: EmbeddedServer, names: Names) -> None:
    """Go's options always named it ring:default:metrics:queue."""
    queue = RedisStreamQueue(server.tcp_url, prefix=names.prefix, queue="mails")

    assert queue.ring == f"ring:{names.prefix}:metrics:mails"


def test_d41_get_metrics_tells_of_the_consumers(crew: Crew) -> None:
    """Go gathered them and dropped them."""
    runner = crew.start(leads=True)
    runner.dispatch("noop")
    eventually(lambda: crew.figures().get("noop_count") == 1, 10)

    (group,) = runner.queue.get_metrics(group=crew.names.group).groups

    assert f"{crew.names.group}_{runner.host}_1" in {one.name for one in group.consumers}
    assert group.pending == 0
