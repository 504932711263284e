"""Floor 5. `doctor --locks`: unique locks that no message holds any more.

The one place that walks the keyspace, by hand and in small steps (SCAN). A lock is a task's only by
its name, and the server may be shared: so only locks of the application's own unique tasks are
looked at, and one is without a task when no message on the stream or in the delayed set carries its
token.
"""

from collections.abc import Iterator
from typing import Final

from taskrunner import keys
from taskrunner.cli.findings import Facts, Finding
from taskrunner.errors import InvalidTaskPayloadError
from taskrunner.message import Message, decode_delayed

_STEP: Final = 500
_PAGE: Final = 16  # bodies of up to 10 MiB are read
_MOST_NAMED: Final = 10
_MOST_FREED: Final = 100


def locks_without_task(facts: Facts) -> Iterator[Finding]:
    """Locks that keep a unique task from being dispatched until they run out."""
    suspects = dict(_locks(facts))
    if suspects:
        _acquit(facts, suspects)
    # One that was just taken belongs to a message that came after we had looked.
    suspects = {key: token for key, token in suspects.items() if _holder(facts, key) == token}
    if suspects:
        _acquit(facts, suspects)
    if not suspects:
        return
    found = sorted(suspects)
    named = ", ".join(found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    yield Finding(
        check="lock-without-task",
        severity="warning",
        text=f"{len(found)} unique locks are held by no message: their tasks can't be dispatched",
        evidence=f"{named}{more}",
        cure="they run out by themselves after unique_for; this frees them at once, but first see "
        "that no other queue on this server has unique tasks of these names",
        command=facts.redis_cli("DEL", *found[:_MOST_FREED]),
    )


def _locks(facts: Facts) -> Iterator[tuple[str, str]]:
    """Key and token of every lock of the application's unique tasks."""
    for task in facts.runner.registry:
        if task.unique_for is None:
            continue
        pattern = _literal(keys.unique(task.name))
        for wanted in (pattern, f"{pattern}:*"):
            cursor = 0
            while True:
                cursor, rows = facts.connections.call(
                    "SCAN", cursor, "MATCH", wanted, "COUNT", _STEP
                )
                for row in rows:
                    key = row.decode(errors="replace")
                    token = _holder(facts, key)
                    if token is not None:
                        yield key, token
                if int(cursor) == 0:
                    break


def _literal(name: str) -> str:
    return "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in name)


def _holder(facts: Facts, key: str) -> str | None:
    value = facts.connections.call("GET", key)
    return None if value is None else str(value, "utf-8", "replace")


def _acquit(facts: Facts, suspects: dict[str, str]) -> None:
    """Take out every lock whose token a message carries. Delayed ones first: a message moves from
    there to the stream, so it can't pass behind us."""
    cursor = 0
    while True:
        cursor, rows = facts.connections.call(
            "ZSCAN", facts.runner.delayed.key, cursor, "COUNT", _PAGE
        )
        for member in rows[::2]:
            try:
                _clear(suspects, decode_delayed(member))
            except InvalidTaskPayloadError:
                continue
        if int(cursor) == 0:
            break
    for _, message, _ in facts.stream():
        if not suspects:
            return
        if message is not None:
            _clear(suspects, message)


def _clear(suspects: dict[str, str], message: Message) -> None:
    if message.lock_name is None:
        return
    key = keys.unique(message.lock_name)
    if suspects.get(key) == message.unique_lock_value:
        del suspects[key]
