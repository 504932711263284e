"""The pool follows the queue: up in a burst, down when idle, alike on every instance."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from taskrunner import Stats, TaskRunner, keys
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Ledger, Names, Proxy, WorkerProcess, eventually, stays
from tests.support.numbers import Crew

TUNED: dict[str, Any] = {
    "min_workers": 2,
    "max_workers": 32,
    "desired_wait_time": 0.2,
    "desired_wait_time_tolerance": 0.08,
    "tuning_cooldown_seconds": 1,
    "long_queue_threshold": 2,  # a tick is half of it
}
QUICK: dict[str, Any] = {**TUNED, "tuning_cooldown_seconds": 0.3, "long_queue_threshold": 0.6}


@pytest.fixture
def crew(server: EmbeddedServer, names: Names) -> Iterator[Crew]:
    """Runners of one group on the shared server, and a task of 20 ms."""
    with Crew(server.tcp_url, names) as made:
        made.task(lambda payload: time.sleep(0.02), name="nap")
        yield made


@attrs.frozen
class Sample:
    """What the pool was at one instant."""

    at: float
    workers: int
    threads: int


class Watch:
    """Looks at a runner's pool a hundred times a second, within its block."""

    def __init__(self, *runners: TaskRunner) -> None:
        self._runners = runners
        self.samples: list[list[Sample]] = [[] for _ in runners]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            for runner, samples in zip(self._runners, self.samples, strict=True):
                samples.append(Sample(time.monotonic(), runner.workers, _threads()))

    def __enter__(self) -> list[list[Sample]]:
        self._thread.start()
        return self.samples

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Threads that an earlier test left are not counted."""
    _before.clear()
    _before.update(threading.enumerate())


def _threads() -> int:
    """Worker threads alive, of all runners of this test."""
    return sum(
        thread.name.startswith("taskrunner-worker") and thread not in _before
        for thread in threading.enumerate()
    )


def _hold(crew: Crew) -> threading.Event:
    """Register a task `hold` that runs until the event is set, and is known to take 100 ms."""
    release = threading.Event()
    crew.task(lambda payload: release.wait(60), name="hold")
    crew.client.hset(crew.names.metrics, mapping={"hold_sum": 1000, "hold_count": 10})
    return release


def _capacity(crew: Crew) -> int | None:
    value = crew.client.get(keys.capacity(crew.names.group))
    return None if value is None else int(value)  # type: ignore[arg-type]


# --- the burst ---


@pytest.mark.slow
def test_burst_raises_the_pool_and_its_end_lowers_it(crew: Crew) -> None:
    """5,000 tasks of 20 ms: up within three ticks, the wait in the band or the pool at its most,
    and back to the least when idle; never outside the bounds on the way."""
    ticks: list[tuple[float, Stats]] = []
    runner = crew.start(
        leads=True,
        long_queue_hook=lambda stats: ticks.append((time.monotonic(), stats)),
        **TUNED,
    )
    assert runner.workers == 2
    with Watch(runner) as (samples,):
        sent = time.monotonic()
        runner.dispatch_many("nap", [None] * 5000)

        eventually(lambda: crew.figures().get("nap_count") == 5000, 60)
        eventually(lambda: runner.workers == 2, 60)
        eventually(lambda: _threads() == 2, 5)

    risen = next(sample.at for sample in samples if sample.workers > 2)
    assert len([at for at, _ in ticks if sent < at < risen]) <= 3
    assert risen - sent < 5
    loaded = [stats for at, stats in ticks if at > risen and stats.waiting]
    assert any(
        stats.workers == 32 or 120 <= stats.predicted_wait_time <= 280 for stats in loaded
    ), [(stats.workers, stats.predicted_wait_time) for stats in loaded]
    assert {sample.workers for sample in samples} <= set(range(2, 33))
    assert max(sample.threads for sample in samples) <= 32
    assert not runner.errors


@pytest.mark.slow
def test_pool_settles_in_the_band_under_a_steady_load(crew: Crew) -> None:
    """The wait that was asked for is what comes out: tasks added as fast as they end."""
    ticks: list[Stats] = []
    runner = crew.start(leads=True, long_queue_hook=ticks.append, **QUICK)
    stop = threading.Event()

    def feed() -> None:
        while not stop.is_set():
            missing = 100 - runner.stats().waiting  # two seconds' work for one, 0.2 s for ten
            if missing > 0:
                runner.dispatch_many("nap", [None] * missing)
            stop.wait(0.01)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        eventually(
            lambda: (
                len(ticks) > 6
                and all(
                    stats.workers == 16 or 100 <= stats.predicted_wait_time <= 300
                    for stats in ticks[-4:]
                )
            ),
            45,
            message=lambda: str([(s.workers, round(s.predicted_wait_time)) for s in ticks[-8:]]),
        )
    finally:
        stop.set()
        feeder.join()


# --- leader and followers ---


def test_followers_take_the_published_capacity_within_a_tick(crew: Crew) -> None:
    """Two instances are of one size: the leader decides, the other applies."""
    leader = crew.start(leads=True, **TUNED)
    follower = crew.start(leads=False, **TUNED)
    hold = _hold(crew)
    try:
        with Watch(leader, follower) as (leading, following):
            leader.dispatch_many("hold", [None] * 60)
            eventually(lambda: [sample for sample in following if sample.workers > 2], 20)
            eventually(lambda: leader.workers == follower.workers == _capacity(crew), 5)

        rose = next(sample for sample in leading if sample.workers > 2)
        followed = next(sample for sample in following if sample.workers > 2)
        assert followed.workers == rose.workers
        assert followed.at - rose.at < 2  # a tick is a second, give or take a tenth
    finally:
        hold.set()


def test_follower_applies_within_its_own_bounds(crew: Crew) -> None:
    """A small machine among large ones stays small."""
    crew.client.set(keys.leader(crew.names.group), "somebody else", px=60_000)
    small = crew.start(leads=False, **{**QUICK, "max_workers": 5})
    large = crew.start(leads=False, **{**QUICK, "min_workers": 8})

    crew.client.set(keys.capacity(crew.names.group), 20, px=60_000)
    eventually(lambda: (small.workers, large.workers) == (5, 20), 10)

    crew.client.set(keys.capacity(crew.names.group), 3, px=60_000)
    eventually(lambda: (small.workers, large.workers) == (3, 8), 10)


@pytest.mark.parametrize("published", [None, b"", b"many", b"1.5", b"-4", b"0", b"9" * 30])
def test_follower_keeps_within_bounds_whatever_is_published(
    crew: Crew, published: bytes | None
) -> None:
    """A missing key changes nothing, and so does one that can't be read; the rest is clamped."""
    crew.client.set(keys.leader(crew.names.group), "somebody else", px=60_000)
    crew.client.set(keys.capacity(crew.names.group), 7, px=60_000)
    runner = crew.start(leads=False, **QUICK)
    eventually(lambda: runner.workers == 7, 10)

    if published is None:
        crew.client.delete(keys.capacity(crew.names.group))
    else:
        crew.client.set(keys.capacity(crew.names.group), published, px=60_000)

    expected = {b"-4": 2, b"0": 2, b"9" * 30: 32}.get(published or b"", 7)
    eventually(lambda: runner.workers == expected, 5)
    stays(lambda: runner.workers == expected, 1)
    assert not runner.errors


def test_follower_decides_nothing(crew: Crew) -> None:
    """It sees the same backlog, and waits for the leader's word."""
    crew.client.set(keys.leader(crew.names.group), "somebody else", px=60_000)
    hold = _hold(crew)
    runner = crew.start(leads=False, **QUICK)
    runner.dispatch_many("hold", [None] * 60)
    try:
        stays(lambda: runner.workers == 2 and _capacity(crew) is None, 2)
    finally:
        hold.set()


@pytest.mark.parametrize(("threshold", "seconds"), [(0.6, 20), (60, 60)])
def test_leader_publishes_with_a_life_of_its_own(
    crew: Crew, threshold: float, seconds: int
) -> None:
    """A capacity that nobody renews is forgotten after 20 s, or the threshold where that is
    longer."""
    crew.start(leads=True, **{**QUICK, "long_queue_threshold": threshold})
    eventually(lambda: _capacity(crew) == 2, 10)

    left = int(crew.client.pttl(keys.capacity(crew.names.group)))  # type: ignore[arg-type]

    assert (seconds - 5) * 1000 < left <= seconds * 1000


def test_heir_of_a_killed_leader_goes_on_from_its_capacity(
    make_worker: Callable[..., WorkerProcess], crew: Crew, ledger: Ledger
) -> None:
    """The leader dies in the middle of a burst: the other works on with as many, then lowers
    itself."""
    workers = [make_worker(config=QUICK) for _ in range(2)]
    eventually(lambda: [worker.status()["is_leader"] for worker in workers].count(True) == 1)
    leader, heir = sorted(workers, key=lambda worker: not worker.status()["is_leader"])
    crew.client.hset(crew.names.metrics, mapping={"sleep_sum": 50, "sleep_count": 1})
    crew.task(name="sleep")
    ids = list(range(1500))
    crew.make().dispatch_many("sleep", [{"id": id_, "seconds": 0.05} for id_ in ids])
    eventually(lambda: heir.status()["workers"] > 8, 15)

    leader.kill()

    eventually(lambda: heir.status()["is_leader"], 15)
    ledger.wait_finished(ids, 60)
    eventually(lambda: heir.status()["workers"] == 2, 30)


def test_leader_publishes_again_though_nothing_changes(crew: Crew) -> None:
    """Every third of its life, so that it never runs out while somebody leads; ticks are rare
    here."""
    crew.start(leads=True, **{**TUNED, "long_queue_threshold": 0})
    eventually(lambda: _capacity(crew) == 2, 10)
    crew.client.delete(keys.capacity(crew.names.group))

    eventually(lambda: _capacity(crew) == 2, 15)


def test_follower_reads_every_five_seconds_when_ticks_are_rare(crew: Crew) -> None:
    """A tick may be a minute; the leader's word is heard sooner."""
    crew.client.set(keys.leader(crew.names.group), "somebody else", px=60_000)
    runner = crew.start(leads=False, **{**TUNED, "long_queue_threshold": 0})
    crew.client.set(keys.capacity(crew.names.group), 9, px=60_000)

    eventually(lambda: runner.workers == 9, 8)


# --- cooldown ---


def test_changes_keep_their_distance(crew: Crew) -> None:
    """No sooner than the cooldown after the last one, however often it looks."""
    hold = _hold(crew)
    runner = crew.start(leads=True, **{**QUICK, "max_workers": 8, "tuning_cooldown_seconds": 1.5})
    with Watch(runner) as (samples,):
        runner.dispatch_many("hold", [None] * 60)
        eventually(lambda: runner.workers > 2, 10)
        hold.set()
        eventually(lambda: runner.workers == 2, 60)

    changes = [
        after.at for before, after in itertools.pairwise(samples) if after.workers != before.workers
    ]
    assert len(changes) >= 2
    assert min(after - before for before, after in itertools.pairwise(changes)) > 1.4


def test_new_leader_keeps_the_distance_too(crew: Crew) -> None:
    """The group's capacity was changed a moment ago, by the leader that left: it still cools
    down."""
    slow = {**QUICK, "tuning_cooldown_seconds": 20}
    hold = _hold(crew)
    leader = crew.start(leads=True, **slow)
    heir = crew.start(leads=False, **slow)
    leader.dispatch_many("hold", [None] * 60)
    try:
        eventually(lambda: heir.workers > 2, 15)
        changed = time.monotonic()
        size = heir.workers
        crew.client.hset(crew.names.metrics, "hold_sum", 10**6)  # far too long a wait now
        leader.stop(0.5)
        eventually(lambda: heir.is_leader, 10)
        assert time.monotonic() - changed < 15, "too slow a machine to tell"

        stays(lambda: heir.workers == size, 3)
    finally:
        hold.set()


# --- the pool ---


def test_pool_starts_at_its_least(crew: Crew) -> None:
    """num_workers is for a pool that is not tuned."""
    runner = crew.make(num_workers=20, **QUICK)
    assert runner.workers == 20

    runner.start()

    assert runner.workers == 2
    eventually(lambda: _threads() == 2)


def test_pool_without_tuning_never_changes(crew: Crew) -> None:
    """Whatever others publish."""
    crew.client.set(keys.leader(crew.names.group), "somebody else", px=60_000)
    crew.client.set(keys.capacity(crew.names.group), 9, px=60_000)
    runner = crew.start(leads=False, num_workers=3, long_queue_threshold=0.4)

    stays(lambda: (runner.workers, _threads()) == (3, 3), 1.5)


def test_shrinking_interrupts_no_task(crew: Crew) -> None:
    """Only idle threads end: what runs ends as it would have."""
    crew.client.set(keys.leader(crew.names.group), "somebody else", px=60_000)
    hold = threading.Event()
    started: list[Any] = []
    ended: list[Any] = []

    def body(payload: Any) -> None:
        started.append(payload)
        hold.wait(60)
        ended.append(payload)

    crew.task(body, name="hold")
    crew.client.set(keys.capacity(crew.names.group), 12, px=60_000)
    runner = crew.start(leads=False, **QUICK)
    eventually(lambda: runner.workers == 12, 10)
    runner.dispatch_many("hold", list(range(12)))
    eventually(lambda: len(started) == 12, 10)
    try:
        for size in range(11, 2, -1):
            crew.client.set(keys.capacity(crew.names.group), size, px=60_000)
            eventually(lambda size=size: runner.workers == size, 5)
        assert (_threads(), len(ended)) == (12, 0)
    finally:
        hold.set()

    eventually(lambda: _threads() == 3, 10)
    eventually(lambda: sorted(ended) == list(range(12)))
    runner.dispatch_many("hold", list(range(12, 40)))
    eventually(lambda: sorted(ended) == list(range(40)), 15)
    assert not runner.errors


def test_pool_grows_again_while_it_shrinks(crew: Crew) -> None:
    """Up and down in quick turns while all are busy: the right number runs in the end."""
    crew.client.set(keys.leader(crew.names.group), "somebody else", px=60_000)
    runner = crew.start(leads=False, **{**QUICK, "long_queue_threshold": 0.1})
    sizes = itertools.cycle([20, 3, 11, 2, 32])
    with Watch(runner) as (samples,):
        runner.dispatch_many("nap", [None] * 1500)
        for size in itertools.islice(sizes, 15):
            crew.client.set(keys.capacity(crew.names.group), size, px=60_000)
            eventually(lambda size=size: runner.workers == size, 5)
        eventually(lambda: crew.figures().get("nap_count") == 1500, 60)
        crew.client.set(keys.capacity(crew.names.group), 6, px=60_000)
        eventually(lambda: (runner.workers, _threads()) == (6, 6), 10)
        stays(lambda: (runner.workers, _threads()) == (6, 6), 1)

    assert max(sample.threads for sample in samples) <= 32
    assert min(sample.workers for sample in samples) >= 2


def test_fetcher_takes_what_the_grown_pool_has_room_for(crew: Crew) -> None:
    """A pool of twenty runs twenty at once, a moment after it grew."""
    crew.client.set(keys.leader(crew.names.group), "somebody else", px=60_000)
    hold = threading.Event()
    running: list[int] = []
    crew.task(lambda payload: (running.append(1), hold.wait(60)), name="hold")
    runner = crew.start(leads=False, **QUICK)
    runner.dispatch_many("hold", [None] * 40)
    try:
        eventually(lambda: len(running) == 2, 10)
        stays(lambda: len(running) == 2, 0.5)
        crew.client.set(keys.capacity(crew.names.group), 20, px=60_000)

        eventually(lambda: len(running) == 20, 10)
        stays(lambda: len(running) == 20, 0.5)
    finally:
        hold.set()


# --- hooks, and a Redis that is away ---


@pytest.mark.parametrize("kind", ["raises", "hangs"])
def test_hook_does_not_keep_the_pool_from_growing(crew: Crew, kind: str) -> None:
    """The hook is told of the queue; what it does with that is its own business."""
    release = threading.Event()

    def hook(stats: Stats) -> None:
        if kind == "raises":
            raise ValueError("hook")
        release.wait(60)

    runner = crew.start(leads=True, long_queue_hook=hook, **QUICK)
    runner.dispatch_many("nap", [None] * 2000)
    try:
        eventually(lambda: runner.workers > 2, 10)
        eventually(lambda: crew.figures().get("nap_count") == 2000, 60)
        eventually(lambda: runner.workers == 2, 30)
    finally:
        release.set()


def test_pool_keeps_its_size_while_redis_is_away(
    server: EmbeddedServer, crew: Crew, make_proxy: Callable[[str], Proxy]
) -> None:
    """No figures, no decision; then it goes on from where it was."""
    proxy = make_proxy(server.url)
    hold = _hold(crew)
    runner = crew.start(leads=True, url=proxy.url, **QUICK)
    crew.make().dispatch_many("hold", [None] * 60)
    try:
        eventually(lambda: runner.workers > 10, 15)
        proxy.refuse()
        size = runner.workers
        stays(lambda: runner.workers == size, 2)
        proxy.pass_through()
    finally:
        hold.set()
    eventually(lambda: runner.workers == 2, 30)
