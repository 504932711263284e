"""Every move of a message in any order, on a real server: each message stays in exactly one place.

Three instances without threads share a group. Hypothesis decides what happens next: dispatches,
deliveries, ends, lost replies, refusals, crashes, takeovers (also in the midst of a run), due
times, lapsing locks, a server that forgets its scripts. Time is never waited for: an entry is made
idle, a member due, a lock gone. The decisions are the product's own (`Executor`, `Settler`,
`DelayedPoller`); what is missing is only who calls them when.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import pytest
import redis
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from taskrunner import (
    RedisStreamQueue,
    Registry,
    Reject,
    Retry,
    TaskAlreadyDispatchedError,
    TaskRunner,
    TaskRunnerConfig,
    current_task,
    keys,
    task,
)
from taskrunner.clock import monotonic
from taskrunner.delivery import Delivery
from taskrunner.executor import Executor
from taskrunner.in_flight import InFlight
from taskrunner.observer import Observers
from taskrunner.reports import Health, Reports
from taskrunner.services.delayed_poller import DelayedPoller
from taskrunner.services.elector import Elector
from taskrunner.settler import Settler, hand_back, lock_of
from taskrunner.store import connection
from taskrunner.store.connection import Connections
from taskrunner.store.delayed_set import DelayedSet
from taskrunner.store.group import Claimed
from taskrunner.store.instances import OwnedKey
from taskrunner.timings import Timings
from tests.support import Names, OwnServer

RECLAIM = 300.0
LONGER = 1000.0  # a retry this late waits in the delayed set
EXAMPLES = int(os.environ.get("TASKRUNNER_TEST_EXAMPLES", "60"))

INSTANCES = st.integers(0, 2)
WHICH = st.integers(0, 30)  # taken modulo of what there is
LOCKS = st.sampled_from(["a", "b"])
KINDS = st.sampled_from(["plain", "once", "unique", "nokey", "absent"])
OUTCOMES = st.sampled_from(["success", "success", "error", "short", "long", "reject"])
FAULTS = st.sampled_from(["none", "none", "none", "lost", "never", "oom", "noscript"])
MEANWHILE = st.sampled_from(["nothing", "nothing", "taken over", "renewed", "lock lapses", "due"])
BETWEEN = st.sampled_from(["nothing", "nothing", "another moves", "cancelled", "lease lost"])


def number_of(entry_id: bytes) -> tuple[int, int]:
    ms, _, sequence = entry_id.partition(b"-")
    return int(ms), int(sequence)


class Faulty(Connections):
    """Connections whose next step may go wrong in a given way."""

    fault = "none"
    client: Any

    def run(self, *args: Any, **kwargs: Any) -> Any:
        fault, self.fault = self.fault, "none"
        if fault == "never":
            raise redis.ConnectionError("the request never arrived")
        if fault == "noscript":
            self.client.script_flush()
        if fault == "oom":
            self.client.config_set("maxmemory", 1)
        try:
            reply = super().run(*args, **kwargs)
        finally:
            if fault == "oom":
                self.client.config_set("maxmemory", 0)
        if fault == "lost":
            raise redis.ConnectionError("the reply was lost")
        return reply


class NoLimits:
    """Time limits have tests of their own."""

    def run(self, seconds: float, call: Callable[[], object]) -> None:
        call()


class Instance:
    """What one process holds, and its decisions; consumer 1 fetches, 2 reclaims."""

    def __init__(self, machine: "Life", host: str, registry: Registry, handler: Any) -> None:
        self.host = host
        queue = RedisStreamQueue(machine.url, prefix=machine.names.prefix, reclaim_delay=RECLAIM)
        self.connections = Faulty(machine.url)
        self.connections.client = machine.client
        queue.connections = self.connections
        self.group = queue.for_group(machine.names.group)
        self.link = self.connections.open(read_timeout=10)
        self.in_flight = InFlight()
        self.held: list[Delivery] = []  # in the buffer, not started
        reports = Reports()
        health = Health(reports, connection.lost)
        self.settler = Settler(
            health,
            in_flight=self.in_flight,
            deliveries=self.group,
            reports=reports,
            busy=lambda: False,
            host=lambda: host,
            parked=lambda entry_id, due: None,
            settled_alone=lambda: None,
            most_waiting=1000,
            dead_letter_limit=1000,
        )
        self.executor = Executor(
            registry=registry,
            config=TaskRunnerConfig(
                consumer_group=machine.names.group,
                failed_task_handler=handler,
                unknown_task_deliveries=3,
            ),
            group=machine.names.group,
            reclaim_delay=RECLAIM,
            in_flight=self.in_flight,
            settler=self.settler,
            deliveries=self.group,
            limits=NoLimits(),
            timings=Timings(),
            reports=reports,
            health=health,
            confirm=lambda: None,
            renew_early=lambda: None,
            stopping=lambda: False,
        )

    def consumer(self, number: int) -> str:
        return keys.consumer(self.group.name, self.host, number)

    def take(self, deliveries: list[Delivery]) -> None:
        self.held += [each for each in deliveries if self.in_flight.add(each)]

    def settle(self) -> None:
        """Send what is ready, and what was refused before, without waiting for its time."""
        if self.settler.unsettled:
            self.settler._again_at = 0.0
            self.settler.tick()

    def close(self) -> None:
        self.link.close()
        self.connections.close()


@attrs.frozen
class Sight:
    """All that Redis holds of this group, by the number in each payload."""

    stream: list[tuple[bytes, dict[str, Any]]]  # entry id, message
    delayed: list[dict[str, Any]]
    letters: list[dict[str, Any]]
    pending: list[tuple[bytes, str, int, int]]  # entry id, consumer, idle ms, count

    @property
    def live(self) -> list[dict[str, Any]]:
        return [message for _, message in self.stream] + self.delayed

    @property
    def unique(self) -> list[dict[str, Any]]:
        return [message for message in self.live if message.get("unique")]

    @property
    def overdue(self) -> bool:
        return any(idle >= RECLAIM * 1000 for _, _, idle, _ in self.pending)


@attrs.frozen
class Move:
    """What may happen next: how often, when it is possible, and what else is drawn for it."""

    name: str
    weight: int
    possible: Callable[["Life"], object]
    arguments: list[str]


MOVES: list[Move] = [
    Move("dispatch", 3, lambda life: True, ["kind", "lock", "delayed", "fault"]),
    Move("go_schedules", 1, lambda life: True, ["kind", "lock"]),
    Move("go_dispatches", 1, lambda life: True, []),
    Move("time_passes_for_delayed", 4, lambda life: life.sight.delayed, ["which", "everything"]),
    Move("due", 6, lambda life: life.sight.delayed, ["between", "fault", "which"]),
    Move("cancel", 1, lambda life: life.sight.delayed, ["which"]),
    Move("fetch", 8, lambda life: life.unread(), ["who", "most"]),
    Move("run", 16, lambda life: life.holders(), ["who", "which", "outcome", "meanwhile", "fault", "raises"]),
    Move("settle_again", 2, lambda life: life.unsettled(), ["who", "fault"]),
    Move("hand_back", 2, lambda life: life.holders(), ["who", "which", "fault"]),
    Move("renew", 2, lambda life: life.sight.pending, ["who"]),
    Move("crash", 1, lambda life: life.holders(), ["who"]),
    Move("time_passes_for_pending", 7, lambda life: life.sight.pending, ["which", "everything"]),
    Move("reclaim", 12, lambda life: life.sight.overdue, ["who", "most", "fault", "everything"]),
    Move("requeue", 2, lambda life: life.sight.letters, ["which"]),
    Move("delete_letter", 1, lambda life: life.sight.letters, ["which"]),
    Move("delete_entry", 1, lambda life: life.sight.stream, ["which"]),
    Move("lapse", 1, lambda life: life.sight.unique, ["which"]),
    Move("forget_scripts", 1, lambda life: True, []),
]  # fmt: skip
DRAWN = {
    "who": INSTANCES,
    "which": WHICH,
    "kind": KINDS,
    "lock": LOCKS,
    "delayed": st.booleans(),
    "everything": st.booleans(),
    "raises": st.booleans(),
    "fault": FAULTS,
    "between": BETWEEN,
    "outcome": OUTCOMES,
    "meanwhile": MEANWHILE,
    "most": st.integers(1, 5),
}


class Drawn(dict[str, Any]):
    """What was drawn for a step, of which its move uses a part: that is told in a note."""

    def __repr__(self) -> str:
        return "..."


class Life(RuleBasedStateMachine):
    """One queue, one group, three instances."""

    url: str  # set by the test
    client: Any

    def __init__(self) -> None:
        super().__init__()
        self.names = Names()
        self.numbers = itertools.count(1)
        self.accepted: dict[int, str] = {}  # number -> kind
        self.ended: set[int] = set()  # succeeded, handled, or taken out by hand
        self.gone: set[int] = set()  # seen in no place: must never come back
        self.complaints: list[BaseException] = []
        self.attempts: dict[int, int] = {}  # the last one that ran
        self.over: set[int] = set()  # its code failed for good
        self.lapsed: set[str] = set()  # tokens whose lock ran out before their message's end
        self.outcome = "success"
        self.meanwhile: Callable[[], None] = lambda: None
        self.between: Callable[[], None] = lambda: None
        self.handler_raises = False
        self.sight = Sight([], [], [], [])  # after the last step, for choosing the next
        self.suffix = self.names.group[-8:]
        self.everything = self.registry(with_absent=True)
        self.little = self.registry(with_absent=False)
        self.connections = Faulty(self.url)
        self.connections.client = self.client
        queue = RedisStreamQueue(self.url, prefix=self.names.prefix, reclaim_delay=RECLAIM)
        queue.connections = self.connections
        self.runner = TaskRunner(
            consumer_group=self.names.group, queue=queue, registry=self.everything
        )
        self.births = itertools.count(1)
        self.instances = [self.birth(number) for number in range(3)]
        self.lease = OwnedKey(self.connections, keys.leader(self.names.group), "leader")
        self.lease.take(600)
        self.pollers = [self.poller(), self.poller()]
        # The delayed tasks of the first poller are promoted only after `between` had its turn.
        promote = self.pollers[0]._delayed.promote

        def promote_later(*args: Any) -> Any:
            between, self.between = self.between, lambda: None
            between()
            return promote(*args)

        self.pollers[0]._delayed.promote = promote_later  # type: ignore[method-assign]

    # --- what there is ---

    def registry(self, *, with_absent: bool) -> Registry:
        registry = Registry()
        key = {"unique_for": 600, "unique_key": lambda payload: payload["lock"]}
        options: dict[str, dict[str, Any]] = {
            "plain": {"max_retry": 3, "max_lost": 1},
            "once": {"max_retry": 1, "max_lost": 0},
            "unique": {"max_retry": 2, "max_lost": 1, **key},
            "nokey": {"max_retry": 1, "max_lost": 2, "unique_for": 600},
            "absent": {"max_retry": 2, "max_lost": 1, **key},
        }
        for kind, chosen in options.items():
            if with_absent or kind != "absent":
                named = task(
                    name=f"{kind}-{self.suffix}", registry=registry, retry_delay=5, **chosen
                )
                named(self.body)
        return registry

    def birth(self, number: int) -> Instance:
        registry = self.little if number == 2 else self.everything
        handler = self.handler if number == 1 else None
        return Instance(self, f"h{number}-{next(self.births)}", registry, handler)

    def poller(self) -> DelayedPoller:
        elector = Believer(self.lease)
        return DelayedPoller(
            Health(Reports(), connection.lost),
            delayed=DelayedSet(self.connections, self.names.stream, self.names.group),
            elector=elector,
            registry=self.everything,
            reports=Reports(),
            timings=Timings(),
            reclaim_delay=RECLAIM,
            poll=1.0,
            dead_letter_limit=1000,
            observers=Observers(),
        )

    def body(self, payload: Any) -> None:
        """What every task does: nothing, but as this step wants it."""
        try:
            self.check_run(payload["n"])
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()
        except BaseException as complaint:  # to a worker it would be the task that failed
            self.complaints.append(complaint)
        if self.outcome == "error":
            raise ValueError("as wanted")
        if self.outcome == "short":
            raise Retry(5)
        if self.outcome == "long":
            raise Retry(LONGER)
        if self.outcome == "reject":
            raise Reject("as wanted")
        self.ended.add(payload["n"])

    def check_run(self, number: int) -> None:
        """Whether this message may be run now, and under this attempt."""
        context = current_task()
        found = self.everything.get(context.name)
        assert found is not None
        assert number in self.accepted
        assert 1 <= context.attempt <= found.max_retry + found.max_lost
        if self.client.xrange(self.names.stream, context.entry_id, context.entry_id):
            # Not the late run of one that another has ended meanwhile.
            assert context.attempt > self.attempts.get(number, 0), "an attempt was given twice"
            assert number not in self.over, "run after its final failure"
            self.attempts[number] = context.attempt
        message = json.loads(context.message.raw)
        if message["unique"]:
            held = self.client.get(keys.unique(message["unique_key"]))
            assert held == message["unique_lock_value"].encode(), "run without its lock"

    def handler(self, message: Any, error: Exception) -> None:
        if self.handler_raises:
            raise RuntimeError("as wanted")
        self.ended.add(message.payload["n"])

    def look(self) -> Sight:
        client, names = self.client, self.names
        rows: Any = client.xrange(names.stream)
        letters: Any = client.xrange(names.dead)
        try:
            pending: Any = client.xpending_range(names.stream, names.group, "-", "+", 10_000)
        except redis.ResponseError:
            pending = []
        return Sight(
            [(entry_id, json.loads(fields[b"payload"])) for entry_id, fields in rows],
            [json.loads(member) for member in client.zrange(names.delayed, 0, -1)],
            [json.loads(fields[b"message"]) for _, fields in letters],
            [
                (
                    row["message_id"],
                    row["consumer"].decode(),
                    row["time_since_delivered"],
                    row["times_delivered"],
                )
                for row in pending
            ],
        )

    def holders(self) -> list[Instance]:
        """The instances that hold something unstarted."""
        return [one for one in self.instances if one.held]

    def unsettled(self) -> list[Instance]:
        """Those with settlements that Redis has not accepted."""
        return [one for one in self.instances if one.settler.unsettled]

    # --- dispatch ---

    @initialize(kinds=st.lists(st.tuples(KINDS, LOCKS, st.booleans()), min_size=2, max_size=6))
    def begin(self, kinds: list[tuple[str, str, bool]]) -> None:
        for kind, lock, delayed in kinds:
            self.dispatch(kind, lock, delayed, "none")

    @rule(chance=st.integers(0, 9999), drawn=st.fixed_dictionaries(DRAWN).map(Drawn))
    def step(self, chance: int, drawn: Drawn) -> None:
        """One of the moves that are possible now; a rule for each would mostly be the idle ones.

        What is drawn is the same for all, so that an example means the same when it is repeated.
        """
        moves = [move for move in MOVES if move.possible(self) for _ in range(move.weight)]
        move = moves[chance % len(moves)]
        arguments = {name: drawn[name] for name in move.arguments}
        note(f"{move.name} {arguments}")
        getattr(self, move.name)(**arguments)

    def members(self) -> list[bytes]:
        """The delayed set in the order of the dispatches."""
        found: list[bytes] = self.client.zrange(self.names.delayed, 0, -1)
        return sorted(found, key=lambda member: int(json.loads(member)["payload"]["n"]))

    def new(self, kind: str, lock: str) -> tuple[str, dict[str, Any]]:
        return f"{kind}-{self.suffix}", {"n": next(self.numbers), "lock": lock}

    def lock_of_new(self, kind: str, lock: str) -> str | None:
        if kind in ("unique", "absent"):
            return keys.unique(f"{kind}-{self.suffix}:{lock}")
        return keys.unique(f"nokey-{self.suffix}") if kind == "nokey" else None

    def dispatch(self, kind: str, lock: str, delayed: bool, fault: str) -> None:
        """Accepted, refused as a duplicate, or of unknown fate: then what is there counts."""
        name, payload = self.new(kind, lock)
        key = self.lock_of_new(kind, lock)
        locked = key is not None and bool(self.client.exists(key))
        plain = not delayed and key is None  # XADD itself, which this kind of fault doesn't meet
        self.connections.fault = "none" if plain else fault
        try:
            sent = self.runner.dispatch(name, payload, run_in=LONGER if delayed else None)
        except TaskAlreadyDispatchedError:
            assert locked
            assert not self.present(payload["n"])
        except redis.RedisError:
            assert fault in ("lost", "never", "oom")
            there = self.present(payload["n"])
            # A unique one whose reply was lost would have found its own lock.
            assert not there or (fault == "lost" and key is None)
            if there:
                self.accepted[payload["n"]] = kind
        else:
            assert not locked
            assert fault not in ("never", "oom") or plain
            assert (sent.entry_id is None) == delayed or fault == "lost"
            self.accepted[payload["n"]] = kind
            assert self.present(payload["n"])
        assert self.connections.fault == "none"

    def go_schedules(self, kind: str, lock: str) -> None:
        """A member of four fields, which takes no lock."""
        name, payload = self.new(kind, lock)
        text = json.dumps(
            {"id": f"go-{payload['n']}", "task": name, "time": 4_000_000_000, "payload": payload},
            separators=(",", ":"),
        )
        self.client.zadd(self.names.delayed, {text: 4e9})
        self.accepted[payload["n"]] = kind

    def go_dispatches(self) -> None:
        """An entry without an id."""
        name, payload = self.new("plain", "a")
        fields = {
            "unique": False,
            "unique_for": 0,
            "unique_key": "",
            "unique_lock_value": "",
            "reservation_timeout": 10**9,
            "task_name": name,
            "payload": payload,
        }
        self.client.xadd(self.names.stream, {"payload": json.dumps(fields)})
        self.accepted[payload["n"]] = "plain"

    def present(self, number: int) -> bool:
        sight = self.look()
        return any(m["payload"]["n"] == number for m in (*sight.live, *sight.letters))

    # --- due ---

    def time_passes_for_delayed(self, which: int, everything: bool) -> None:
        """Members become due."""
        members = self.members()
        if members:
            due = members if everything else [members[which % len(members)]]
            # All were due long ago; in the order of the dispatches, so that examples can be repeated.
            scores = {member: json.loads(member)["payload"]["n"] for member in due}
            self.client.zadd(self.names.delayed, scores, xx=True)

    def due(self, between: str, fault: str, which: int) -> None:
        """A leader moves what is due, while something comes between its reading and its move."""

        before: list[Sight] = []

        def act() -> None:
            self.connections.fault = "none"
            if between == "another moves":
                self.pollers[1].tick()
            elif between == "cancelled":
                self.cancel(which)
            elif between == "lease lost":
                self.client.set(self.lease.key, "another", px=600_000)
            before.append(self.look())
            self.connections.fault = fault

        self.between = act
        with suppress(redis.RedisError):
            self.pollers[0].tick()
        self.between = lambda: None
        self.connections.fault = "none"
        if before and between == "lease lost":
            after = self.look()
            assert (after.stream, after.delayed) == (before[0].stream, before[0].delayed)
        self.client.set(self.lease.key, self.lease.value, px=600_000)

    def cancel(self, which: int) -> None:
        """By hand: what was cancelled is nowhere."""
        members = self.members()
        if members:
            message = json.loads(members[which % len(members)])
            if self.runner.delayed.cancel(message["id"]):
                self.ended.add(message["payload"]["n"])
                assert not self.present(message["payload"]["n"])

    # --- deliveries ---

    def fetch(self, who: int, most: int) -> None:
        """Read new entries."""
        one = self.instances[who]
        one.group.create()  # does nothing where it exists
        one.take(one.group.read(one.link, one.consumer(1), most, 1))

    def unread(self) -> bool:
        newest: Any = self.client.xrevrange(self.names.stream, count=1)
        return bool(newest) and self.is_unread(newest[0][0])

    def is_unread(self, entry_id: bytes) -> bool:
        """Whether the group has not been given this entry yet."""
        groups: Any = []
        with suppress(redis.ResponseError):
            groups = self.client.xinfo_groups(self.names.stream)
        return not groups or number_of(groups[0]["last-delivered-id"]) < number_of(entry_id)

    def run(
        self, who: int, which: int, outcome: str, meanwhile: str, fault: str, raises: bool
    ) -> None:
        """Execute one that is held and settle it, while something happens in the midst of the run."""
        one = self.holders()[who % len(self.holders())]
        delivery = one.held[which % len(one.held)]
        if delivery.waiting:  # set aside until its ownership is known
            self.renew(self.instances.index(one))
            return
        one.held.remove(delivery)
        other = self.instances[(self.instances.index(one) + 1) % 3]

        def act() -> None:
            if meanwhile == "taken over" and delivery.entry_id not in other.in_flight:
                self.silence(delivery.entry_id)
                self.claim_by(other, [delivery.entry_id])
            elif meanwhile == "renewed":
                self.renew(self.instances.index(one))
            elif meanwhile == "lock lapses":
                self.lapse(which)
            elif meanwhile == "due":
                self.time_passes_for_delayed(which, True)
                self.pollers[1].tick()

        self.meanwhile, self.outcome, self.handler_raises = act, outcome, raises
        one.executor(delivery)
        self.meanwhile, self.handler_raises = (lambda: None), False
        if self.complaints:
            raise self.complaints[0]
        if fault == "none" and self.is_final(delivery, outcome):
            number = delivery.message.payload["n"]
            self.over.add(number)
        if delivery.waiting:
            one.held.append(delivery)
        self.settle(one, fault)

    def is_final(self, delivery: Delivery, outcome: str) -> bool:
        """Whether this run has failed for good, while the delivery was ours."""
        message = delivery.message
        rows = {row[0]: (row[1], row[3]) for row in self.look().pending}
        if message is None or rows.get(delivery.entry_id) != (delivery.consumer, delivery.count):
            return False
        attempt = message.attempt + delivery.count
        found = self.everything.get(message.task_name)
        assert found is not None
        ran = self.attempts.get(message.payload["n"]) == attempt
        return ran and (
            outcome == "reject" or (outcome != "success" and attempt >= found.max_retry)
        )

    def settle(self, one: Instance, fault: str) -> None:
        """Send an instance's settlements: those of deliveries that it lost change nothing.

        But for a success, which may end a message that another holds: the work is done.
        """
        before = {row[0]: (row[1], row[3]) for row in self.look().pending}
        foreign = {
            each.entry_id: before.get(each.entry_id)
            for each in one.settler.queued()
            if each.settlement is not None
            and before.get(each.entry_id) != (each.consumer, each.count)
        }
        one.connections.fault = fault
        one.settle()
        one.connections.fault = "none"
        after = {row[0]: (row[1], row[3]) for row in self.look().pending}
        for entry_id, row in foreign.items():
            assert after.get(entry_id) == row, "moved what another holds"

    def settle_again(self, who: int, fault: str) -> None:
        """What Redis did not take, or whose reply was lost."""
        one = self.unsettled()[who % len(self.unsettled())]
        self.settle(one, fault)

    def hand_back(self, who: int, which: int, fault: str) -> None:
        """Unstarted, uncounted."""
        one = self.holders()[who % len(self.holders())]
        delivery = one.held[which % len(one.held)]
        if delivery.waiting:
            return
        one.held.remove(delivery)
        delivery.settlement = hand_back(delivery)
        one.settler.put(delivery)
        self.settle(one, fault)

    def renew(self, who: int) -> None:
        """The heartbeat: never steals back, never renews what isn't ours."""
        one = self.instances[who]
        held = one.in_flight.snapshot()
        if not held:
            return
        before = {row[0]: row for row in self.look().pending}
        statuses = one.group.renew(
            [(each, lock_of(each.message, 600_000 if each.message else 0)) for each in held]
        )
        after = {row[0]: row for row in self.look().pending}
        for delivery, status in zip(held, statuses, strict=True):
            ours = before.get(delivery.entry_id)
            owned = ours is not None and ours[1:4:2] == (delivery.consumer, delivery.count)
            assert (status == 1) == owned
            if delivery.entry_id in before:
                assert after[delivery.entry_id][1] == before[delivery.entry_id][1]
                assert after[delivery.entry_id][3] == before[delivery.entry_id][3]
            delivery.confirmed = monotonic()
            if status == 1:
                delivery.waiting = False
            elif delivery.settlement is None and (status == 0 or not delivery.started):
                delivery.lost = True
                one.in_flight.remove(delivery)
                one.held = [each for each in one.held if each is not delivery]

    def crash(self, who: int) -> None:
        """All it held in memory is gone; another process comes, under another name."""
        self.instances[who].close()
        self.instances[who] = self.birth(who)

    def time_passes_for_pending(self, which: int, everything: bool) -> None:
        """Entries are overdue: their holder is silent, or their retry is due."""
        pending = self.look().pending
        if pending:
            for row in pending if everything else [pending[which % len(pending)]]:
                self.silence(row[0])

    def silence(self, entry_id: bytes) -> None:
        row = next((row for row in self.look().pending if row[0] == entry_id), None)
        if row is not None:
            self.client.xclaim(
                self.names.stream, self.names.group, row[1], 0, [entry_id],
                idle=int(RECLAIM * 1000), justid=True,
            )  # fmt: skip
        for one in self.instances:  # for them the same time has passed
            for delivery in one.in_flight.snapshot():
                if delivery.entry_id == entry_id:
                    delivery.confirmed -= RECLAIM + 1

    def reclaim(self, who: int, most: int, fault: str, everything: bool) -> None:
        """Take over what is overdue, never what is in the own table; or try with all there is.

        What isn't overdue any more was renewed, or taken by another since it was looked at.
        """
        one = self.instances[who]
        rows, _ = one.group.overdue(b"-", 100)
        overdue = {row.entry_id for row in rows}
        seen = [row[0] for row in self.look().pending if everything or row[0] in overdue]
        ids = [entry_id for entry_id in seen if entry_id not in one.in_flight][:most]
        if ids:
            one.connections.fault = fault
            with suppress(redis.RedisError):
                for claimed in self.claim_by(one, ids):
                    assert (claimed.delivery is not None) == (claimed.entry_id in overdue)
            one.connections.fault = "none"

    def claim_by(self, one: Instance, ids: list[bytes]) -> list[Claimed]:
        claimed = one.group.claim(ids, one.consumer(2))
        assert [each.entry_id for each in claimed] == ids
        one.take([each.delivery for each in claimed if each.delivery is not None])
        return claimed

    # --- by hand ---

    def requeue(self, which: int) -> None:
        """A dead letter goes back with fresh attempts, or stays."""
        letters = self.runner.dead_letters.list(limit=1000)
        if letters:
            letter = letters[which % len(letters)]
            try:
                self.runner.dead_letters.requeue(letter.id)
            except TaskAlreadyDispatchedError:
                assert self.runner.dead_letters.get(letter.id) is not None
            else:
                assert self.runner.dead_letters.get(letter.id) is None
                self.over.discard(letter.payload["n"])
                self.attempts.pop(letter.payload["n"], None)

    def delete_letter(self, which: int) -> None:
        letters = self.runner.dead_letters.list(limit=1000)
        if letters:
            letter = letters[which % len(letters)]
            assert self.runner.dead_letters.delete(letter.id)
            self.ended.add(letter.payload["n"])

    def delete_entry(self, which: int) -> None:
        """From the stream, whoever holds it."""
        stream = self.look().stream
        if stream:
            entry_id, message = stream[which % len(stream)]
            assert self.runner.queue.delete(entry_id.decode())
            self.ended.add(message["payload"]["n"])

    def lapse(self, which: int) -> None:
        """A lock runs out before its message's end."""
        locks = sorted(self.locks())
        if locks:
            key = locks[which % len(locks)]
            self.lapsed.add(self.client.get(key).decode())
            self.client.delete(key)

    def forget_scripts(self) -> None:
        self.client.script_flush()

    # --- what must be true after every step ---

    def locks(self) -> Iterator[str]:
        names = [f"{kind}-{self.suffix}:{lock}" for kind in ("unique", "absent") for lock in "ab"]
        for key in map(keys.unique, [*names, f"nokey-{self.suffix}"]):
            if self.client.exists(key):
                yield key

    @invariant()
    def each_message_is_in_exactly_one_place(self) -> None:
        """Or in none, once it has ended: and then for good."""
        sight = self.sight = self.look()
        found = [m["payload"]["n"] for m in (*sight.live, *sight.letters)]
        assert len(found) == len(set(found)), f"in two places: {sight}"
        missing = self.accepted.keys() - set(found)
        assert missing <= self.ended, f"lost: {missing - self.ended}"
        assert not self.gone & set(found), "came back after its end"
        self.gone |= missing
        entries = {entry_id for entry_id, _ in sight.stream}
        pending = {row[0] for row in sight.pending}
        assert pending <= entries, "pending without a body"
        stuck = {each for each in entries - pending if not self.is_unread(each)}
        assert not stuck, "delivered, and pending for nobody"

    @invariant()
    def each_lock_is_a_live_message_s_and_expires(self) -> None:
        """And each live unique message holds its lock, unless that has run out on the way."""
        sight = self.look()
        tokens = {m["unique_lock_value"]: m for m in sight.live if m.get("unique")}
        for key in self.locks():
            value = self.client.get(key).decode()
            assert value in tokens, f"{key} outlived its message"
            assert keys.unique(tokens[value]["unique_key"]) == key
            assert self.client.pttl(key) > 0
        for token, message in tokens.items():
            if token not in self.lapsed:
                key = keys.unique(message["unique_key"])
                assert self.client.get(key) == token.encode(), f"no lock for {message}"
                if "time" in message:
                    # Not past its due time yet, unless time was made to pass for it.
                    left = self.client.pttl(key) / 1000
                    assert left > message["time"] - time.time() + 500

    def teardown(self) -> None:
        for one in self.instances:
            one.close()
        self.connections.close()
        names = self.names
        self.client.delete(names.stream, names.delayed, names.dead, self.lease.key)
        for key in list(self.locks()):
            self.client.delete(key)


class Believer(Elector):
    """An elector that takes itself for the leader, whatever it is told."""

    def __init__(self, lease: OwnedKey) -> None:
        self.lease = lease

    def is_leader(self) -> bool:
        return True

    def lose(self) -> None:
        """Believe on."""


@contextmanager
def quiet() -> Iterator[None]:
    import logging

    log = logging.getLogger("taskrunner")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


@pytest.mark.slow
@pytest.mark.timeout(600 + 2 * EXAMPLES)
def test_every_message_is_in_one_place_whatever_happens_in_whatever_order(
    own_server: Callable[..., OwnServer],
) -> None:
    """More examples: TASKRUNNER_TEST_EXAMPLES=2000."""
    own = own_server()

    class Here(Life):
        url = own.url
        client = own.client()

    with quiet():
        run_state_machine_as_test(
            Here,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=60,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate, Phase.shrink],
                database=None,
                print_blob=False,
            ),
        )
