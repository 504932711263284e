"""What must hold of `taskrunner.message` whatever bytes it is given; AssertionError where not."""

import json
import re
from collections.abc import Callable

from taskrunner import message
from taskrunner.errors import InvalidTaskPayloadError
from taskrunner.message import DelayedMessage, Message

Reader = Callable[[bytes], Message | DelayedMessage]

SECRET = "S3CR3T"
"""What a drawn payload may hold, and no refusal may repeat."""

_DUE = 1_700_000_000
_DEEP = 500
"""Nesting near Python's recursion limit may be read at one place and not at another, whose stack is
higher by a call; that such a message ends all the same is a test with a server."""


def told(read: Reader, body: bytes) -> tuple[Message | DelayedMessage | None, str]:
    """The message, or why it is none; nothing else is ever raised."""
    try:
        return read(body), ""
    except InvalidTaskPayloadError as error:
        return None, str(error)


def check(body: bytes) -> None:
    """All of them."""
    for read in (message.decode, message.decode_delayed, message.salvage):
        check_reader(read, body)
    if body.count(b"[") + body.count(b"{") < _DEEP:
        check_memory(body)
        check_moves(body)


def check_reader(read: Reader, body: bytes) -> None:
    """What is accepted has the types that the rest relies on; a refusal is short and quotes
    nothing of the payload."""
    found, refusal = told(read, body)
    if found is None:
        assert read is not message.salvage
        assert SECRET not in refusal
        assert len(refusal) < 300
        return
    assert type(found.task_name) is str
    assert found.task_name or read is message.salvage
    assert len(found.task_name) <= message.MAX_NAME
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029]", found.task_name)
    assert type(found.unique) is bool
    assert 0 <= found.attempt <= message.MAX_COUNT
    assert 0 <= found.unknown <= message.MAX_COUNT
    assert found.id is None or 0 < len(found.id) <= message.MAX_ID
    assert found.only_group is None or len(found.only_group) <= message.MAX_NAME
    assert len(found.unique_key) <= message.MAX_KEY
    assert len(found.unique_lock_value) <= message.MAX_ID
    for count in (found.unique_for, found.reservation_timeout):
        assert type(count) is int
        assert -(2**63) <= count < 2**63
    at = found.enqueued_at
    assert at is None or (type(at) is float and at - at == 0.0)
    found.text.encode()  # can be stored again
    for name in (found.task_name, found.unique_key, found.unique_lock_value, found.id or ""):
        name.encode()  # becomes part of a key, or a log line
    json.dumps(found.payload, allow_nan=False)


def check_memory(body: bytes) -> None:
    """What the reader remembers of earlier messages is a matter of speed only."""
    first = repr(told(message.decode, body))
    assert repr(told(message.decode, body)) == first
    heads = dict(message._heads)
    message._heads.clear()
    try:
        assert repr(told(message._decode, body)) == first
    finally:
        message._heads.update(heads)


def check_moves(body: bytes) -> None:
    """What was accepted keeps its payload, its name, its lock and its count on every move."""
    found, _ = told(message.decode, body)
    if found is not None:
        counted = message.rewrite(found.text, {"attempt": 7, "id": "i"})
        _same(found, message.decode(counted.encode()), attempt=7)
        head, tail = message.to_delayed(found.text, id="i", attempt=3, only_group="g")
        moved = message.decode_delayed(f"{head}{_DUE}{tail}".encode())
        _same(found, moved, attempt=3)
        assert (moved.time, moved.only_group) == (_DUE, "g")
        _same(moved, _promoted(moved), attempt=3)
    delayed, _ = told(message.decode_delayed, body)
    if isinstance(delayed, DelayedMessage):
        message.canonical(delayed.payload_text)
        _same(delayed, _promoted(delayed), attempt=delayed.attempt)


def _promoted(delayed: DelayedMessage) -> Message:
    return message.decode(message.from_delayed(delayed.text, reservation_timeout_ns=1).encode())


def _same(before: Message, after: Message, *, attempt: int) -> None:
    assert repr(after.payload) == repr(before.payload)
    assert after.task_name == before.task_name
    assert after.unique == before.unique
    if before.unique:
        assert after.lock_name == before.lock_name
        assert after.unique_lock_value == before.unique_lock_value
        assert after.unique_for == before.unique_for
    assert after.attempt == attempt
    assert after.unknown == before.unknown
