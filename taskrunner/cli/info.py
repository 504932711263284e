"""Floor 5. `taskrunner info`: what a group does now, in one screen.

Waiting is what nobody runs yet; pending is what a consumer holds: run, buffered, or parked for a
retry (consumer number 0). Predicted wait and tasks a second follow from the mean run times, for the
number of workers that is shown.
"""

import argparse
import time
from typing import Any, Final

import attrs

from taskrunner import keys
from taskrunner.cli.locate import Target, add_target, locate
from taskrunner.cli.table import duration, emphasis, instant, pairs, printable, show_json, table
from taskrunner.errors import InvalidTaskPayloadError
from taskrunner.message import Message, decode
from taskrunner.stats import Stats
from taskrunner.store.group import added_at
from taskrunner.store.instances import Instances
from taskrunner.store.stream import QueueMetrics, RedisStreamQueue

HELP: Final = "what a group does now"

_UNKNOWN: Final = " (not there: no worker of it has run on this queue)"


@attrs.frozen(kw_only=True)
class Consumer:
    """One consumer; `host` None where the name is no instance's, `alive` by its presence key."""

    name: str
    host: str | None
    parking: bool
    pending: int
    idle: float
    alive: bool


@attrs.frozen(kw_only=True)
class Oldest:
    """The oldest entry that a consumer holds and doesn't park; `age` in the stream, in seconds."""

    task: str | None
    entry_id: str
    consumer: str
    age: float


@attrs.frozen(kw_only=True)
class Leader:
    """Who holds the lease; `host` None where no living instance has the id, `lease` in seconds,
    None without expiry."""

    instance_id: str
    host: str | None
    lease: float | None


@attrs.frozen(kw_only=True)
class Group:
    """Everything `info` shows."""

    address: str
    server: str
    stream: str
    group: str
    stats: Stats
    pending: int
    delayed: int
    next_due: float | None
    next_task: str | None
    dead: int
    leader: Leader | None
    instances: dict[str, str]  # instance id by host
    consumers: list[Consumer]
    groups: list[str]
    metrics: QueueMetrics
    workers_known: bool
    oldest: Oldest | None

    @property
    def exists(self) -> bool:
        """Whether the stream has the group."""
        return self.group in self.groups


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `taskrunner info`."""
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    group = look(locate(arguments))
    if arguments.json:
        show_json(_as_dict(group))
    else:
        _show(group)
    return 0


def look(target: Target) -> Group:
    """Ask Redis for everything about the group."""
    runner = target.runner
    group, queue = runner.config.consumer_group, runner.queue
    connections = queue.connections
    info, lease, left, capacity = connections.calls(
        [
            ("INFO", "server"),
            ("GET", keys.leader(group)),
            ("PTTL", keys.leader(group)),
            ("GET", keys.capacity(group)),
        ]
    )
    published = _number(capacity)
    if published is not None and (target.application is None or runner.config.tuning):
        runner.config = attrs.evolve(runner.config, num_workers=max(1, published))
    metrics = queue.get_metrics()
    own = next((one for one in metrics.groups if one.name == group), None)
    named = [(one, keys.parse_consumer(group, one.name)) for one in own.consumers] if own else []
    instances = Instances(connections, queue.for_group(group)).living(
        found[0] for _, found in named if found
    )
    following = runner.delayed.list(1)
    consumers = [
        Consumer(
            name=one.name,
            host=found[0] if found else None,
            parking=found is not None and found[1] == keys.PARKING,
            pending=one.pending,
            idle=one.idle,
            alive=found is not None and found[0] in instances,
        )
        for one, found in named
    ]
    return Group(
        address=connections.address,
        server=server_name(info),
        stream=queue.stream,
        group=group,
        stats=runner.stats(),
        pending=own.pending if own else 0,
        delayed=len(runner.delayed),
        next_due=following[0].run_at if following else None,
        next_task=following[0].task_name if following else None,
        dead=len(runner.dead_letters),
        leader=_leader(lease, left, instances),
        instances=instances,
        consumers=consumers,
        groups=[one.name for one in metrics.groups],
        metrics=metrics,
        workers_known=published is not None or target.application is not None,
        oldest=_oldest(queue, group, consumers),
    )


def _oldest(queue: RedisStreamQueue, group: str, consumers: list[Consumer]) -> Oldest | None:
    """Where workers hang in a task, it is this one or began like it."""
    deliveries = queue.for_group(group)
    held = [
        row
        for one in consumers
        if one.pending and not one.parking
        for row in deliveries.pending_of(one.name, b"-", 1)
    ]
    if not held:
        return None
    first = min(held, key=lambda row: [int(part) for part in row.entry_id.split(b"-")])
    rows, now = queue.connections.calls(
        [("XRANGE", queue.stream, first.entry_id, first.entry_id), ("TIME",)]
    )
    message = message_of(rows[0][1])[0] if rows else None
    return Oldest(
        task=message.task_name if message else None,
        entry_id=first.entry_id.decode(),
        consumer=first.consumer,
        age=max(0.0, int(now[0]) - added_at(first.entry_id)),
    )


def message_of(values: list[bytes]) -> tuple[Message | None, str]:
    """The message in the fields of an entry, or None and what is wrong with it."""
    body = dict(zip(values[::2], values[1::2], strict=True)).get(b"payload")
    if body is None:
        return None, "no field named payload"
    try:
        return decode(body), ""
    except InvalidTaskPayloadError as error:
        return None, str(error)


def fields(info: bytes) -> dict[str, str]:
    """The fields of an INFO reply."""
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def server_name(info: bytes | Exception) -> str:
    """Name and version of the server, from its INFO, which not every user may ask for."""
    found = fields(info) if isinstance(info, bytes) else {}
    if "valkey_version" in found:
        return f"Valkey {found['valkey_version']}"
    return f"Redis {found.get('redis_version', 'of unknown version')}"


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _leader(lease: Any, left: Any, instances: dict[str, str]) -> Leader | None:
    if not isinstance(lease, bytes):
        return None
    instance_id = lease.decode(errors="replace")
    hosts = [host for host, found in instances.items() if found == instance_id]
    return Leader(
        instance_id=instance_id,
        host=hosts[0] if hosts else None,
        lease=int(left) / 1000 if int(left) >= 0 else None,
    )


def _show(group: Group) -> None:
    stats, now = group.stats, time.time()
    wait = duration(stats.predicted_wait_time / 1000) + (" (too long)" if stats.long else "")
    print(
        pairs(
            [
                ("server", f"{group.server} at {group.address}"),
                ("stream", group.stream),
                ("group", group.group + ("" if group.exists else _UNKNOWN)),
                ("entries", f"{stats.queue_length:,}"),
                ("waiting", f"{stats.waiting:,}"),
                ("pending", f"{group.pending:,}{_held(group.oldest)}"),
                ("delayed", f"{group.delayed:,}{_following(group, now)}"),
                ("dead", f"{group.dead:,}"),
                ("leader", _led_by(group.leader)),
                ("instances", ", ".join(sorted(group.instances)) or "none"),
                (
                    "workers",
                    f"{stats.workers} an instance{'' if group.workers_known else ' (assumed)'}",
                ),
                ("predicted wait", wait),
                ("tasks a second", f"{stats.tps:,.0f}" if stats.tps else "-"),
                ("mean run time", _mean(stats)),
            ]
        )
    )
    if group.consumers:
        rows = [
            (
                one.name,
                f"{one.pending:,}",
                duration(one.idle),
                ("parked" if one.parking else "alive") if one.alive else "dead",
            )
            for one in sorted(group.consumers, key=lambda one: one.name)
        ]
        print()
        print(table(("CONSUMER", "PENDING", "IDLE", "HOST IS"), rows))
    if stats.per_task_timing:
        timings = sorted(stats.per_task_timing.items())
        print()
        rows_of_tasks = [(name, f"{ms:,} ms" if ms else "<1 ms") for name, ms in timings]
        print(table(("TASK", "MEAN"), rows_of_tasks, cut=("TASK",)))
    others = [name for name in group.groups if name != group.group]
    if others:
        print()
        print(f"{emphasis('other groups on the stream')}: {printable(', '.join(others))}")


def _held(oldest: Oldest | None) -> str:
    if oldest is None:
        return ""
    return (
        f" (oldest: {oldest.task or '-'}, for {duration(oldest.age)} in the queue, "
        f"held by {oldest.consumer}, entry {oldest.entry_id})"
    )


def _following(group: Group, now: float) -> str:
    if group.next_due is None:
        return ""
    left = group.next_due - now
    when = f"in {duration(left)}" if left >= 0 else f"due {duration(-left)} ago"
    return f" (next: {group.next_task or '-'} {when}, {instant(group.next_due)})"


def _led_by(leader: Leader | None) -> str:
    if leader is None:
        return "none"
    lease = "without expiry" if leader.lease is None else f"lease {duration(leader.lease)}"
    return f"{leader.host or f'unknown instance {leader.instance_id}'} ({lease})"


def _mean(stats: Stats) -> str:
    return duration(stats.avg_timing.total_seconds()) if stats.per_task_timing else "-"


def _as_dict(group: Group) -> dict[str, Any]:
    """Durations in seconds, as everywhere; the names are those of `Stats` without their units."""
    stats = group.stats
    return {
        "server": group.server,
        "address": group.address,
        "stream": group.stream,
        "group": group.group,
        "queue_length": stats.queue_length,
        "waiting": stats.waiting,
        "pending": group.pending,
        "oldest_pending": attrs.asdict(group.oldest) if group.oldest else None,
        "delayed": group.delayed,
        "next_due": group.next_due,
        "dead": group.dead,
        "leader": attrs.asdict(group.leader) if group.leader else None,
        "instances": group.instances,
        "workers": stats.workers,
        "replications": stats.replications,
        "predicted_wait": stats.predicted_wait_time / 1000,
        "tps": stats.tps,
        "per_task": {name: ms / 1000 for name, ms in stats.per_task_timing.items()},
        "consumers": [attrs.asdict(one) for one in group.consumers],
        "groups": group.groups,
    }
