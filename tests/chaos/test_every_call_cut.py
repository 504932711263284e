"""Each Redis call of each move of a task, cut once before it arrives and once before its reply does.

The relay stands between the server and the one instance under test; steps are told apart by the
hash of their script. The rule for all: nothing is lost, nothing runs more often than its attempts,
and the error that comes out (if one does) is the lost connection, at the caller whose call it was.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import redis

from taskrunner import Retry, TaskAlreadyDispatchedError, TaskRunner, current_task, scripts
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Desk, Names, Proxy, Rule, eventually, stays
from tests.support.fleet import Fleet

pytestmark = pytest.mark.chaos

Where = Literal["cut_before", "cut_after"]
WHERES: tuple[Where, ...] = ("cut_before", "cut_after")

RECLAIM = 1.0
LOST = (redis.ConnectionError, redis.TimeoutError)


class Scene:
    """A group whose instance under test (and producer) reaches the server through the relay."""

    def __init__(self, fleet: Fleet, proxy: Proxy, where: Where) -> None:
        self.fleet = fleet
        self.proxy = proxy
        self.where = where
        self.lost_before = where == "cut_before"
        self.desk = Desk(fleet.url, fleet.names, reclaim_delay=RECLAIM)
        self.started: list[TaskRunner] = []

    def start(self, **options: Any) -> TaskRunner:
        """The instance under test, leading."""
        runner = self.fleet.start_leader(url=self.proxy.url, **options)
        eventually(lambda: runner.replications() == 1)
        self.started.append(runner)
        return runner

    def producer(self) -> TaskRunner:
        """Dispatches through the relay."""
        runner = self.fleet.make(url=self.proxy.url)
        runner.make_default()
        return runner

    def cut(self, call: str, **options: Any) -> Rule:
        """Aim at a script by its name, or at a command by its (capital) one."""
        if call.isupper():
            return self.proxy.on(call, self.where, **options)
        script = scripts.load(call)
        self.fleet.client.script_load(script.text)  # or the first answer were NOSCRIPT
        return self.proxy.on("EVALSHA", self.where, containing=script.sha, **options)

    def wait_cut(self, rule: Rule) -> None:
        assert rule.hit.wait(15), f"{rule.command!r} {rule.containing!r} was never sent"

    def ran(self) -> list[tuple[Any, int]]:
        """Payload and attempt of each run."""
        return [(run.payload, run.attempt) for run in list(self.fleet.runs)]

    def wait_settled(self) -> None:
        """Nothing waits anywhere (an empty stream holds nothing to reclaim), and nothing comes."""
        eventually(
            self.fleet.settled,
            15,
            message=lambda: f"{self.desk.held()} {self.fleet.members()} {self.ran()}",
        )
        stays(self.fleet.settled, 0.2)

    def assert_no_wrong_error(self, *expected: str) -> None:
        """Services may tell of the lost connection; no task and no delivery is blamed for it."""
        for runner in self.started:
            for report in list(runner.errors):
                if report.action in expected:
                    continue
                assert report.action == "service_error", report
                assert str(report.error).startswith(("ConnectionError", "TimeoutError")), report


@pytest.fixture(params=WHERES)
def scene(
    request: pytest.FixtureRequest,
    server: EmbeddedServer,
    names: Names,
    make_proxy: Callable[[str], Proxy],
) -> Iterator[Scene]:
    proxy = make_proxy(server.tcp_url)
    with Fleet(server.url, names, reclaim_delay=RECLAIM) as fleet:
        made = Scene(fleet, proxy, request.param)
        yield made
        proxy.clear()
        made.desk.close()


# --- dispatch ---


def test_dispatch_raises_and_is_not_sent_again_when_xadd_is_cut(scene: Scene) -> None:
    """The caller alone knows whether to repeat: one entry where the reply was lost, else none."""
    scene.producer()
    rule = scene.cut("XADD")
    with pytest.raises(LOST):
        scene.fleet.note.delay(1)
    assert rule.hits == 1
    assert len(scene.fleet.bodies()) == (0 if scene.lost_before else 1)
    scene.fleet.note.delay(2)
    assert len(scene.fleet.bodies()) == (1 if scene.lost_before else 2)


def test_dispatch_many_raises_and_adds_none_twice_when_its_pipeline_is_cut(scene: Scene) -> None:
    """What was carried out of it is there once."""
    scene.producer()
    scene.cut("XADD", containing='"payload":3')
    with pytest.raises(LOST):
        scene.fleet.note.delay_many(range(6))
    bodies = scene.fleet.bodies()
    assert len(bodies) == len(set(bodies))
    assert 3 <= len(bodies) <= (3 if scene.lost_before else 6)


def test_unique_dispatch_knows_its_own_lock_when_add_unique_is_cut(scene: Scene) -> None:
    """The lock holds its token: it was added, and that is success; else the lost reply is raised
    and nothing is left behind, no lock either."""
    scene.producer()
    unique = scene.fleet.task(name=f"one-{scene.fleet.names.group}", unique_for=60)
    scene.cut("add_unique")
    if scene.lost_before:
        with pytest.raises(LOST):
            unique.delay(1)
        assert scene.fleet.locks(unique.name) == {}
        unique.delay(1)
    else:
        assert unique.delay(1).entry_id is None
    assert len(scene.fleet.bodies()) == 1
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay(1)


@pytest.mark.parametrize("kind", ["plain", "unique"])
def test_delayed_dispatch_is_there_once_or_not_at_all_when_schedule_is_cut(
    scene: Scene, kind: str
) -> None:
    """Plain: the lost reply is raised. Unique: raised only where it was not added."""
    scene.producer()
    options: dict[str, Any] = {"unique_for": 60} if kind == "unique" else {}
    later = scene.fleet.task(name=f"one-{scene.fleet.names.group}", **options)
    scene.cut("schedule")
    if kind == "unique" and not scene.lost_before:
        assert later.delay(1, run_in=60).run_at is not None
    else:
        with pytest.raises(LOST):
            later.delay(1, run_in=60)
    assert len(scene.fleet.members()) == (0 if scene.lost_before else 1)
    if scene.lost_before:
        assert scene.fleet.locks(later.name) == {}
        later.delay(1, run_in=60)
        assert len(scene.fleet.members()) == 1


def test_unique_dispatch_raises_the_lost_reply_when_its_question_is_cut_too(scene: Scene) -> None:
    """Nothing is known then, and the caller is told so; the lock tells the next one."""
    scene.producer()
    unique = scene.fleet.task(name=f"one-{scene.fleet.names.group}", unique_for=60)
    scene.cut("add_unique")
    scene.cut("GET", containing="taskrunner:unique:")
    with pytest.raises(LOST):
        unique.delay(1)
    assert len(scene.fleet.bodies()) == (0 if scene.lost_before else 1)
    if not scene.lost_before:
        with pytest.raises(TaskAlreadyDispatchedError):
            unique.delay(1)


# --- fetch ---


def test_fetched_messages_run_once_on_their_first_attempt_when_xreadgroup_is_cut(
    scene: Scene,
) -> None:
    """A batch whose reply never came cost no attempt."""
    scene.start()
    rule = scene.cut("XREADGROUP")
    scene.desk.send("note", range(5))
    scene.wait_cut(rule)
    scene.fleet.wait_ran(*range(5))
    scene.wait_settled()
    assert sorted(scene.ran()) == [(n, 1) for n in range(5)]
    scene.assert_no_wrong_error()


def test_fetched_messages_run_once_when_the_park_of_unseen_ones_is_cut_too(scene: Scene) -> None:
    """The reply of the read is lost, then the step that makes up for it fails as well."""
    scene.start()
    lost = scene.proxy.on("XREADGROUP", "cut_after", containing=scene.fleet.names.stream)
    rule = scene.cut("park")
    scene.desk.send("note", range(5))
    scene.wait_cut(lost)
    scene.wait_cut(rule)
    scene.fleet.wait_ran(*range(5))
    scene.wait_settled()
    assert sorted(scene.ran()) == [(n, 1) for n in range(5)]
    scene.assert_no_wrong_error()


# --- settle ---


def test_success_is_settled_and_runs_once_when_ack_is_cut(scene: Scene) -> None:
    """The settlement waits and is sent again; the task isn't run again."""
    scene.start()
    rule = scene.cut("ack")
    scene.desk.send("note", range(5))
    scene.wait_cut(rule)
    scene.fleet.wait_ran(*range(5))
    scene.wait_settled()
    assert sorted(scene.ran()) == [(n, 1) for n in range(5)]
    scene.assert_no_wrong_error()


def test_unique_success_frees_its_lock_once_when_ack_unique_is_cut(scene: Scene) -> None:
    """Sent again, the step finds the message ended and leaves a successor's lock alone."""
    name = f"one-{scene.fleet.names.group}"
    unique = scene.fleet.task(name=name, unique_for=60)
    scene.start()
    scene.fleet.producer.make_default()
    rule = scene.cut("ack_unique")
    unique.delay(1)
    scene.wait_cut(rule)
    scene.fleet.wait_ran(1)
    scene.wait_settled()
    assert scene.ran() == [(1, 1)]
    assert scene.fleet.locks(name) == {}
    scene.assert_no_wrong_error()


def test_unique_message_runs_once_when_the_look_at_its_lock_is_cut(scene: Scene) -> None:
    """Before it runs its lock is made sure of; a lost answer is no failed attempt."""
    name = f"one-{scene.fleet.names.group}"
    unique = scene.fleet.task(name=name, unique_for=60)
    scene.start()
    scene.fleet.producer.make_default()
    rule = scene.cut("start_unique")
    unique.delay(1)
    scene.wait_cut(rule)
    scene.fleet.wait_ran(1)
    scene.wait_settled()
    assert len(scene.ran()) == 1
    assert scene.fleet.locks(name) == {}


# --- retry ---


def retrying(scene: Scene, delay: float, **options: Any) -> Any:
    """A task that asks for a retry on its first attempt."""

    def body(payload: Any) -> None:
        scene.fleet.record(payload)
        if current_task().attempt == 1:
            raise Retry(delay)

    return scene.fleet.task(body, name=f"again-{scene.fleet.names.group}", max_retry=3, **options)


@pytest.mark.parametrize("kind", ["plain", "unique"])
def test_short_retry_is_one_attempt_when_park_is_cut(scene: Scene, kind: str) -> None:
    """Two runs in all, the second on attempt 2, and in its time."""
    task = retrying(scene, 0.3, **({"unique_for": 60} if kind == "unique" else {}))
    scene.start()
    scene.fleet.producer.make_default()
    rule = scene.cut("park")
    task.delay("x")
    scene.wait_cut(rule)
    eventually(lambda: len(scene.ran()) == 2, 15, message=lambda: str(scene.ran()))
    scene.wait_settled()
    assert scene.ran() == [("x", 1), ("x", 2)]
    assert scene.fleet.locks(task.name) == {}
    scene.assert_no_wrong_error("task_retry")


@pytest.mark.parametrize("kind", ["plain", "unique"])
def test_long_retry_is_one_attempt_when_postpone_is_cut(scene: Scene, kind: str) -> None:
    """One member of the delayed set, however often the step was sent."""
    task = retrying(scene, RECLAIM + 0.5, **({"unique_for": 60} if kind == "unique" else {}))
    scene.start()
    scene.fleet.producer.make_default()
    rule = scene.cut("postpone")
    task.delay("x")
    scene.wait_cut(rule)
    eventually(lambda: len(scene.fleet.members()) == 1)
    eventually(lambda: len(scene.ran()) == 2, 15, message=lambda: str(scene.ran()))
    scene.wait_settled()
    assert scene.ran() == [("x", 1), ("x", 2)]
    assert scene.fleet.locks(task.name) == {}
    scene.assert_no_wrong_error("task_retry")


def test_due_retry_runs_once_when_its_claim_is_cut(scene: Scene) -> None:
    """The claim of a parked retry raises the count; a lost reply takes that back."""
    task = retrying(scene, 0.5)
    scene.start()
    scene.fleet.producer.make_default()
    task.delay("x")
    scene.fleet.wait_ran("x")
    rule = scene.cut("claim")
    scene.wait_cut(rule)
    eventually(lambda: len(scene.ran()) == 2, 15, message=lambda: str(scene.ran()))
    scene.wait_settled()
    assert scene.ran() == [("x", 1), ("x", 2)]
    scene.assert_no_wrong_error("task_retry")


# --- Redis away altogether ---


@pytest.mark.parametrize("end", ["success", "short retry", "long retry", "dead letter"])
def test_settlement_of_any_kind_waits_when_redis_is_away(scene: Scene, end: str) -> None:
    """Gone (refusing connections), or silent (taking all and answering nothing), while a task ends:
    it is told when Redis is back, and cost no attempt."""
    gate, running = threading.Event(), threading.Event()

    def body(payload: Any) -> None:
        scene.fleet.record(payload)
        if current_task().attempt > 1:
            return
        running.set()
        gate.wait(30)
        if end == "dead letter":
            raise ValueError("no")
        if end != "success":
            raise Retry(0.2 if end == "short retry" else RECLAIM + 0.5)

    task = scene.fleet.task(body, name="ends", max_retry=1 if end == "dead letter" else 3)
    runner = scene.start(queue={"reclaim_delay": 5} if end != "long retry" else None)
    scene.fleet.producer.make_default()
    task.delay("x")
    assert running.wait(15)
    if scene.lost_before:
        scene.proxy.refuse()
    else:
        scene.proxy.swallow()
        scene.proxy.cut()
    gate.set()
    eventually(lambda: [r for r in runner.errors if r.action == "service_error"], 15)
    stays(lambda: len(scene.desk.held()) == 1, 0.5)
    scene.proxy.pass_through()
    scene.proxy.cut()
    eventually(scene.fleet.settled, 20)
    letters = scene.desk.letters()
    assert len(letters) == (1 if end == "dead letter" else 0)
    assert scene.ran() == [("x", n + 1) for n in range(2 if end.endswith("retry") else 1)]
    scene.assert_no_wrong_error("task_retry", "task_failed")


# --- promote ---


@pytest.mark.parametrize("call", ["due", "promote"])
def test_due_messages_are_moved_once_when_the_leaders_step_is_cut(scene: Scene, call: str) -> None:
    """Sent again, the step finds what is no longer there."""
    scene.start()
    scene.desk.send("note", range(5), run_in=0.5)
    rule = scene.cut(call)
    scene.wait_cut(rule)
    scene.fleet.wait_ran(*range(5))
    scene.wait_settled()
    assert sorted(scene.ran()) == [(n, 1) for n in range(5)]
    assert scene.desk.added() == 5
    scene.assert_no_wrong_error()


# --- renew ---


@pytest.mark.parametrize("kind", ["plain", "unique"])
def test_long_task_stays_ours_when_renew_is_cut(scene: Scene, kind: str) -> None:
    """Another instance stands by to take over what is overdue, and gets nothing."""
    lost: list[bool] = []

    def body(payload: Any) -> None:
        scene.fleet.record(payload)
        until = time.monotonic() + 2.5 * RECLAIM
        while time.monotonic() < until:
            time.sleep(0.02)
        lost.append(current_task().lost)

    name = f"long-{scene.fleet.names.group}"
    task = scene.fleet.task(body, name=name, **({"unique_for": 60} if kind == "unique" else {}))
    scene.start()
    scene.fleet.producer.make_default()
    task.delay("x")
    scene.fleet.wait_ran("x")
    scene.fleet.start()
    rule = scene.cut("renew", times=2)
    scene.wait_cut(rule)
    eventually(lambda: lost, 15)
    scene.wait_settled()
    assert scene.ran() == [("x", 1)]
    assert lost == [False]
    assert scene.fleet.locks(name) == {}
    scene.assert_no_wrong_error()


# --- reclaim ---


@pytest.mark.parametrize("call", ["claim", "XPENDING"])
def test_orphans_are_taken_over_at_the_cost_of_one_delivery_when_a_call_is_cut(
    scene: Scene, call: str
) -> None:
    """The delivery that died with its reader counts; the claim whose reply was lost doesn't."""
    scene.start()
    rule = scene.cut(call)
    scene.desk.send("note", ["first"])
    scene.fleet.wait_ran("first")
    scene.desk.strand("note", range(5), idle=RECLAIM + 5)
    scene.wait_cut(rule)
    scene.fleet.wait_ran(*range(5))
    scene.wait_settled()
    assert sorted(scene.ran()[1:]) == [(n, 2) for n in range(5)]
    scene.assert_no_wrong_error()


# --- dead letters ---


@pytest.mark.parametrize("kind", ["plain", "unique"])
def test_failed_message_is_buried_once_when_bury_is_cut(scene: Scene, kind: str) -> None:
    """One run, one letter, whole."""

    def body(payload: Any) -> None:
        scene.fleet.record(payload)
        raise ValueError("no")

    name = f"fails-{scene.fleet.names.group}"
    task = scene.fleet.task(body, name=name, **({"unique_for": 60} if kind == "unique" else {}))
    runner = scene.start()
    scene.fleet.producer.make_default()
    rule = scene.cut("bury")
    task.delay({"a": 1})
    scene.wait_cut(rule)
    eventually(lambda: len(runner.dead_letters) == 1)
    scene.wait_settled()
    (letter,) = runner.dead_letters.list()
    assert (letter.payload, letter.error_type, letter.attempts) == ({"a": 1}, "ValueError", 1)
    assert scene.ran() == [({"a": 1}, 1)]
    assert scene.fleet.locks(name) == {}
    scene.assert_no_wrong_error("task_failed")


def test_letter_is_in_one_place_when_requeue_is_cut(scene: Scene) -> None:
    """The operator gets the lost reply; the letter is still there, or it is in the stream."""

    def body(payload: Any) -> None:
        raise ValueError("no")

    scene.fleet.task(body, name="fails")
    runner = scene.fleet.start()
    scene.desk.send("fails", [1])
    eventually(lambda: len(runner.dead_letters) == 1)
    scene.wait_settled()
    assert runner.stop()
    through = scene.producer()
    (letter,) = through.dead_letters.list()
    scene.cut("requeue")
    with pytest.raises(LOST):
        through.dead_letters.requeue(letter.id)
    assert len(through.dead_letters) == (1 if scene.lost_before else 0)
    assert len(scene.fleet.bodies()) == (0 if scene.lost_before else 1)


# --- hand-back, start and stop ---


def test_buffered_messages_go_back_uncounted_when_park_is_cut_at_stop(scene: Scene) -> None:
    """What was read ahead is another's at once, on its first attempt."""
    gate, running = threading.Event(), threading.Event()

    def wait(payload: Any) -> None:
        scene.fleet.record(payload)
        running.set()
        gate.wait(20)

    def nothing(payload: Any) -> None:
        pass

    scene.fleet.task(wait, name="wait")
    scene.fleet.task(nothing, name="nothing")
    runner = scene.start(num_workers=1, batch_size=20)
    scene.desk.send("nothing", range(2000))  # a fast pace, so that it reads ahead
    scene.desk.send("wait", ["w"])
    scene.desk.send("note", range(3))
    assert running.wait(20)
    mine = f"{scene.fleet.names.group}_{runner.host}_1"
    assert len([held for held in scene.desk.held() if held.consumer == mine]) > 1
    rule = scene.cut("park")
    stopping = threading.Thread(target=runner.stop)
    stopping.start()
    scene.wait_cut(rule)
    scene.fleet.start()
    scene.fleet.wait_ran(*range(3))
    gate.set()
    stopping.join(15)
    assert not stopping.is_alive()
    scene.wait_settled()
    assert set(scene.ran()) == {(0, 1), (1, 1), (2, 1), ("w", 1)}
    assert len(scene.ran()) == 4
    scene.assert_no_wrong_error()


@pytest.mark.parametrize(
    "call",
    [
        "CLUSTER",
        "TIME",
        "take_name",
        "XGROUP",
        "XINFO",
        "MGET",
        "SET",
        "CLIENT",
    ],
)
def test_instance_starts_when_one_of_its_first_calls_is_cut(scene: Scene, call: str) -> None:
    """It comes up by itself, leads and works."""
    rule = scene.cut(call)
    runner = scene.fleet.start(url=scene.proxy.url)
    scene.started.append(runner)
    scene.desk.send("note", [1])
    scene.fleet.wait_ran(1)
    scene.wait_cut(rule)
    eventually(lambda: runner.is_leader, 15)
    scene.wait_settled()
    assert scene.ran() == [(1, 1)]
    scene.assert_no_wrong_error()


def test_instance_starts_under_its_own_name_when_take_name_is_cut(scene: Scene) -> None:
    """The key that it finds holds its own id: the first try was carried out."""
    rule = scene.cut("take_name")
    runner = scene.fleet.start(url=scene.proxy.url, host=scene.fleet.names.host)
    scene.wait_cut(rule)
    scene.desk.send("note", [1])
    scene.fleet.wait_ran(1)
    assert runner.host == scene.fleet.names.host


def test_channel_is_heard_again_when_its_subscription_is_cut(scene: Scene) -> None:
    """Before: SUBSCRIBE itself; after: every connection, once all is quiet."""
    rule = scene.proxy.on("SUBSCRIBE", "cut_before") if scene.lost_before else None
    runner = scene.start(timings={"poll": 20, "lease": 4})
    if rule is not None:
        scene.wait_cut(rule)
    else:
        scene.proxy.cut()
    channel = scene.fleet.names.delayed
    eventually(lambda: scene.fleet.client.pubsub_numsub(channel)[0][1] == 1, 15)
    eventually(lambda: runner.is_leader, 15)
    scene.desk.send("note", [1], run_in=0.1)
    scene.fleet.wait_ran(1, timeout=10)  # polling alone would take twice as long
    scene.wait_settled()
    assert scene.ran() == [(1, 1)]
    scene.assert_no_wrong_error()


def test_lease_and_name_are_kept_when_a_renewal_is_cut(scene: Scene) -> None:
    """One lost renewal of the lease or the presence key changes nothing."""
    runner = scene.start()
    host = runner.host
    rule = scene.cut("keep", times=2)
    eventually(lambda: rule.hits == 2, 15)
    eventually(lambda: runner.is_leader, 15)
    scene.desk.send("note", [1], run_in=0.2)
    scene.fleet.wait_ran(1)
    scene.wait_settled()
    assert runner.host == host
    scene.assert_no_wrong_error()


@pytest.mark.parametrize("call", ["release", "remove_consumer"])
def test_stop_is_in_order_when_a_farewell_is_cut(scene: Scene, call: str) -> None:
    """Nothing is pending after it, and it takes no longer than it may."""
    runner = scene.start()
    scene.desk.send("note", range(3))
    scene.fleet.wait_ran(*range(3))
    scene.wait_settled()
    rule = scene.cut(call)
    started = time.monotonic()
    assert runner.stop()
    assert time.monotonic() - started < 7
    assert rule.hits == 1
    assert scene.desk.held() == []
