"""Floor 5. What `doctor` looks for: each check reads, none writes, and yields findings.

A finding has a severity, evidence, and either the command that mends it, where the cure lies in
Redis, or the name of the cure.
"""

import shlex
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import attrs

from taskrunner import keys
from taskrunner.cli.info import Consumer, Group, fields, look, message_of
from taskrunner.cli.locate import Target
from taskrunner.cli.table import duration
from taskrunner.errors import describe
from taskrunner.message import Message
from taskrunner.store import connection
from taskrunner.store.connection import Arg
from taskrunner.store.group import HAND_BACK_IDLE_MS, Pending, next_id
from taskrunner.store.instances import Instances

_SKEW: Final = 1.0
_FULL: Final = 0.9  # of maxmemory, from where on it is told
_PAGE: Final = 16  # bodies of up to 10 MiB are read
_MOST_READ: Final = 1000
_MOST_NAMED: Final = 10
_MOST_MOVED: Final = 100


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that is wrong: `error` loses or holds up work, `warning` may, `note` is good to
    know."""

    check: str
    severity: str
    text: str
    evidence: str
    cure: str
    command: str | None = None


class Facts:
    """What the checks read, each thing once; what Redis refuses to tell is in `skipped`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.runner = target.runner
        self.connections = target.runner.queue.connections
        self.group: Group = look(target)
        self.skipped: list[str] = []
        self.memory = self._info("memory")
        self.persistence = self._info("persistence")
        self.entries, self.undecodable = self._read_entries()

    def config(self, name: str) -> str | None:
        """A setting of the server, None where it may not be asked."""
        reply = self._ask("CONFIG", "GET", name)
        return str(reply[1], "utf-8", "replace") if reply else None

    def _info(self, section: str) -> dict[str, str]:
        reply = self._ask("INFO", section)
        return fields(reply) if reply is not None else {}

    def _ask(self, *command: Arg) -> Any:
        try:
            return self.connections.call(*command)
        except Exception as error:  # a refusal is told; anything else ends the audit
            if not connection.answered(error):
                raise
            self.skipped.append(f"{' '.join(str(word) for word in command)}: {describe(error)}")
            return None

    def redis_cli(self, *words: Arg) -> str | None:
        """The command line that sends this to the server; None where a name in it can't be shown,
        and what one could copy would mean another."""
        texts = [
            word.decode(errors="replace") if isinstance(word, bytes) else str(word)
            for word in words
        ]
        line = shlex.join(["redis-cli", *self.connections.cli_options(), *texts])
        return line if line.isprintable() and "\ufffd" not in line else None

    def pending_of(self, consumer: str) -> list[Pending]:
        """The oldest of what is pending for a consumer."""
        deliveries = self.runner.queue.for_group(self.group.group)
        return deliveries.pending_of(consumer, b"-", _MOST_MOVED)

    def entry(self, entry_id: bytes) -> Message | None:
        """The message of an entry, None where it is gone or can't be read."""
        if entry_id not in self.entries:
            rows = self.connections.call("XRANGE", self.group.stream, entry_id, entry_id)
            return message_of(rows[0][1])[0] if rows else None
        return self.entries[entry_id]

    def take_over(self, host: str, entry_ids: list[bytes]) -> str | None:
        """The command that hands deliveries to any worker, as an instance does that stops."""
        if not entry_ids:  # settled meanwhile, or the consumer's name is no text
            return None
        parking = keys.consumer(self.group.group, host, keys.PARKING)
        words: list[Arg] = ["XCLAIM", self.group.stream, self.group.group, parking, 0, *entry_ids]
        return self.redis_cli(*words, "IDLE", HAND_BACK_IDLE_MS, "JUSTID")

    def stream(self) -> Iterator[tuple[bytes, Message | None, str]]:
        """Each entry in order: its id, and its message, or None and what is wrong with it."""
        start = b"-"
        while True:
            rows = self.connections.call("XRANGE", self.group.stream, start, "+", "COUNT", _PAGE)
            for entry_id, values in rows:
                yield entry_id, *message_of(values)
            if len(rows) < _PAGE:
                return
            start = next_id(rows[-1][0])

    def _read_entries(self) -> tuple[dict[bytes, Message], dict[bytes, str]]:
        messages: dict[bytes, Message] = {}
        undecodable: dict[bytes, str] = {}
        for entry_id, message, reason in islice(self.stream(), _MOST_READ):
            if message is not None:
                messages[entry_id] = message
            else:
                undecodable[entry_id] = reason
        return messages, undecodable


Check = Callable[[Facts], Iterator[Finding]]


def nobody_works(facts: Facts) -> Iterator[Finding]:
    """Work waits, and no instance lives."""
    group = facts.group
    due = group.next_due is not None and group.next_due < time.time()
    if group.instances or not (group.stats.waiting or group.pending or due):
        return
    words = facts.target.application or "MODULE:RUNNER"
    yield Finding(
        check="nobody-works",
        severity="error",
        text="work waits, and no instance lives",
        evidence=f"{group.stats.waiting} waiting, {group.pending} pending, {group.delayed} delayed",
        cure=f"start a worker: taskrunner worker {words}",
    )


def dead_consumers(facts: Facts) -> Iterator[Finding]:
    """Deliveries of instances that live no more. A worker takes them over after reclaim_delay."""
    for consumer in facts.group.consumers:
        if consumer.alive or consumer.parking or not consumer.pending:
            continue
        held = facts.pending_of(consumer.name)
        idle = max((row.idle_ms for row in held), default=0) / 1000
        yield Finding(
            check="dead-consumer",
            severity="warning",
            text=f"{consumer.pending} entries are pending for {consumer.name}, behind which nobody is",
            evidence=f"untouched for {duration(idle)}; {_why_dead(consumer)}",
            cure="workers take them over after reclaim_delay; this lets them do so at once",
            command=facts.take_over(consumer.host or "doctor", [row.entry_id for row in held]),
        )


def _why_dead(consumer: Consumer) -> str:
    if consumer.host is None:
        return "the name is no instance's"
    return f"host {consumer.host} has no presence key"


def leader(facts: Facts) -> Iterator[Finding]:
    """A lease that runs out never, or too late, and is nobody's."""
    held, group = facts.group.leader, facts.group
    if held is None:
        return
    key = keys.leader(group.group)
    longest = facts.runner.config.timings.lease
    if held.lease is None:
        yield Finding(
            check="leader-without-expiry",
            severity="error",
            text="the leader's key has no expiry: after its end nobody would lead",
            evidence=f"{key} is held by {held.host or held.instance_id}",
            cure="delete it: an instance takes it at once",
            command=facts.redis_cli("DEL", key),
        )
    elif held.host is None and held.lease > longest:
        yield Finding(
            check="leader-unknown",
            severity="error",
            text="the leader is none of the living instances: nothing delayed becomes due",
            evidence=f"{key} is held by {held.instance_id} for another {duration(held.lease)}",
            cure="delete it: an instance takes it at once",
            command=facts.redis_cli("DEL", key),
        )


def several_groups(facts: Facts) -> Iterator[Finding]:
    """With delete_on_ack, entries leave only when every group is past them."""
    queue = facts.runner.queue
    for other in facts.group.metrics.groups:
        if other.name == facts.group.group or not queue.delete_on_ack:
            continue
        parsed = [keys.parse_consumer(other.name, one.name) for one in other.consumers]
        hosts = {found[0] for found in parsed if found}
        alive = Instances(facts.connections, queue.for_group(other.name)).living(hosts)
        yield Finding(
            check="several-groups",
            severity="note" if alive else "warning",
            text=f"group {other.name} is on the same stream: every message runs in each group"
            + ("" if alive else ", and this one has no living instance: the stream grows"),
            evidence=f"{other.pending} pending, instances: {', '.join(sorted(alive)) or 'none'}",
            cure="an application of its own wants a queue of its own, RedisStreamQueue(url, prefix=...); "
            "a group that nobody wants any more can be destroyed",
            command=facts.redis_cli("XGROUP", "DESTROY", facts.group.stream, other.name),
        )


def eviction(facts: Facts) -> Iterator[Finding]:
    """A full server that evicts keys loses tasks, locks and leases without a word."""
    policy = facts.memory.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return
    limit = facts.memory.get("maxmemory", "0")
    yield Finding(
        check="eviction-policy",
        severity="warning" if limit == "0" else "error",
        text="the server may evict keys, and with them the whole queue",
        evidence=f"maxmemory-policy is {policy}, maxmemory {limit}",
        cure="set noeviction, in the server's configuration file too",
        command=facts.redis_cli("CONFIG", "SET", "maxmemory-policy", "noeviction"),
    )


def full_memory(facts: Facts) -> Iterator[Finding]:
    """A full server that doesn't evict refuses every write."""
    limit = int(facts.memory.get("maxmemory", "0"))
    used = int(facts.memory.get("used_memory", "0"))
    if not limit or used < limit * _FULL:
        return
    full = used >= limit
    yield Finding(
        check="memory-full",
        severity="error" if full else "warning",
        text="the server's memory is full: it refuses tasks, retries and dead letters"
        if full
        else "the server's memory is nearly full, and then it refuses every task",
        evidence=f"used_memory is {used:,}, maxmemory {limit:,} bytes",
        cure="find what fills it (redis-cli --bigkeys), and raise the limit meanwhile, in the "
        "server's configuration file too",
        command=facts.redis_cli("CONFIG", "SET", "maxmemory", 2 * limit),
    )


def persistence(facts: Facts) -> Iterator[Finding]:
    """Tasks live as long as Redis keeps them."""
    known = facts.persistence
    if not known:
        return
    failing = [
        name
        for name in ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
        if known.get(name, "ok") != "ok"
    ]
    if failing:
        yield Finding(
            check="persistence-fails",
            severity="error",
            text="the server can't save its data, and may refuse every write",
            evidence=", ".join(f"{name} is {known[name]}" for name in failing),
            cure="look at the server's log and at its disk",
        )
    if known.get("aof_enabled") == "0" and facts.config("save") == "":
        yield Finding(
            check="no-persistence",
            severity="warning",
            text="the server keeps its data in memory only: its restart loses every task",
            evidence="appendonly is no, and save is empty",
            cure="turn the append-only file on, in the server's configuration file too",
            command=facts.redis_cli("CONFIG", "SET", "appendonly", "yes"),
        )


def clock_skew(facts: Facts) -> Iterator[Finding]:
    """Due times are judged by the server's clock, and written by this machine's."""
    before = time.time()
    seconds, micros = facts.connections.call("TIME")
    after = time.time()
    server = int(seconds) + int(micros) / 1e6
    skew = server - (before + after) / 2
    if abs(skew) - (after - before) / 2 <= _SKEW:
        return
    yield Finding(
        check="clock-skew",
        severity="warning",
        text="the clocks of this machine and of the server differ: a run_at made here is off",
        evidence=f"the server is {duration(abs(skew))} {'ahead' if skew > 0 else 'behind'}",
        cure="set both by NTP",
    )


def client_timeout(facts: Facts) -> Iterator[Finding]:
    """A server that hangs up on idle clients before a blocking read ends."""
    limit = facts.config("timeout")
    block = facts.runner.config.block_duration
    if limit is None or not 0 < int(limit) <= block:
        return
    yield Finding(
        check="client-timeout",
        severity="warning",
        text="the server hangs up on clients that are silent for less than a blocking read",
        evidence=f"timeout is {limit} s, block_duration {block:g} s",
        cure="set timeout to 0, in the server's configuration file too",
        command=facts.redis_cli("CONFIG", "SET", "timeout", "0"),
    )


def undecodable(facts: Facts) -> Iterator[Finding]:
    """Entries that are no messages: workers move them to the dead letters."""
    bad = facts.undecodable
    if not bad:
        return
    ids = [entry_id.decode() for entry_id in bad]
    yield Finding(
        check="undecodable",
        severity="warning",
        text=f"{len(ids)} entries are not messages: something else writes to {facts.group.stream}",
        evidence=f"{ids[0]}: {next(iter(bad.values()))}{_others(ids)}",
        cure="find who adds them; a worker moves them to the dead letters, this deletes them",
        command=facts.redis_cli("XDEL", facts.group.stream, *ids[:_MOST_MOVED]),
    )


def unknown_tasks(facts: Facts) -> Iterator[Finding]:
    """Messages that the application has no task for; needs MODULE:RUNNER."""
    if facts.target.application is None:
        return
    registry = facts.runner.registry
    names: dict[str, int] = {}
    for message in facts.entries.values():
        if message.task_name not in registry:
            names[message.task_name] = names.get(message.task_name, 0) + 1
    for one in facts.runner.delayed.list(_MOST_READ):
        if one.task_name and one.task_name not in registry:
            names[one.task_name] = names.get(one.task_name, 0) + 1
    if names:
        listed = [f"{name} ({count})" for name, count in sorted(names.items())]
        yield Finding(
            check="unknown-task",
            severity="error",
            text="messages wait whose task the application does not register",
            evidence=", ".join(listed[:_MOST_NAMED]) + _others(listed),
            cure="import the modules that define them where the TaskRunner is made, or deploy them",
        )


def beyond_attempts(facts: Facts) -> Iterator[Finding]:
    """Pending messages whose next delivery fails for good; needs MODULE:RUNNER."""
    if facts.target.application is None:
        return
    for consumer in facts.group.consumers:
        if consumer.alive and not consumer.parking:
            continue  # it runs there, or is about to be settled
        spent: list[bytes] = []
        for row in facts.pending_of(consumer.name) if consumer.pending else []:
            message = facts.entry(row.entry_id)
            task = facts.runner.registry.get(message.task_name) if message else None
            if message is None or task is None:
                continue
            if message.attempt + row.count >= task.max_retry + task.max_lost:
                spent.append(row.entry_id)
        if spent:
            ids = [entry_id.decode() for entry_id in spent]
            yield Finding(
                check="beyond-attempts",
                severity="warning",
                text=f"{len(ids)} messages pending for {consumer.name} have spent their attempts",
                evidence=f"{', '.join(ids[:_MOST_NAMED])}{_others(ids)}",
                cure="a worker sets them aside at their next delivery; this lets it do so at once",
                command=facts.take_over(consumer.host or "doctor", spent),
            )


def short_reclaim_delay(facts: Facts) -> Iterator[Finding]:
    """Only heartbeats keep a task that runs longer than reclaim_delay; needs MODULE:RUNNER."""
    if facts.target.application is None:
        return
    delay = facts.runner.queue.reclaim_delay
    slow = {
        name: ms / 1000
        for name, ms in facts.group.stats.per_task_timing.items()
        if ms > delay * 1000
    }
    if slow:
        listed = [f"{name} takes {duration(mean)}" for name, mean in sorted(slow.items())]
        yield Finding(
            check="short-reclaim-delay",
            severity="warning",
            text=f"reclaim_delay ({duration(delay)}) is shorter than what tasks take on average",
            evidence=", ".join(listed[:_MOST_NAMED]) + _others(listed),
            cure=f"set reclaim_delay to {max(slow.values()) * 2:.0f} or more, in every instance",
        )


def _others(listed: list[str]) -> str:
    return f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""


CHECKS: Final[tuple[Check, ...]] = (
    nobody_works,
    unknown_tasks,
    undecodable,
    dead_consumers,
    beyond_attempts,
    leader,
    several_groups,
    eviction,
    full_memory,
    persistence,
    client_timeout,
    clock_skew,
    short_reclaim_delay,
)
