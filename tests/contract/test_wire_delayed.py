"""Delayed members: what Go programs wrote, and the entries that a Go leader made of them."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from taskrunner import message
from taskrunner.errors import InvalidTaskPayloadError

RECORDED = json.loads((Path(__file__).parent.parent / "wire" / "delayed_members.json").read_text())
MEMBERS = [
    pytest.param(each, id=each["name"])
    for each in RECORDED["members"]
    if "text" in each.get("member", {})
]
TIMEOUT = 30_000_000_000


def body_of(recorded: dict[str, Any]) -> bytes:
    body = base64.b64decode(recorded["member"]["base64"])
    assert hashlib.sha256(body).hexdigest() == recorded["member"]["sha256"]
    return body


def text_of_payload(text: str) -> str:
    return dict(message.members(text))["payload"]


def with_doubles(text: str) -> Any:
    """A JSON text as Go reads and writes it again: every number a double."""
    return json.loads(text, parse_int=float)


@pytest.mark.parametrize("recorded", MEMBERS)
def test_decode_delayed_reads_what_go_wrote(recorded: dict[str, Any]) -> None:
    """Id, task, time and payload of a Go member, the payload with its exact numbers."""
    body = body_of(recorded)
    plain = json.loads(body)

    found = message.decode_delayed(body)

    assert found.id == plain["id"]
    assert found.task_name == plain["task"] == recorded["task"]
    assert found.time == plain["time"] == int(recorded["score"])
    assert found.payload == plain["payload"]
    assert type(found.payload) is type(plain["payload"])
    assert found.text == body.decode()
    assert found.payload_text == text_of_payload(found.text)
    assert (found.lock_name, found.attempt, found.reservation_timeout) == (None, 0, 0)


@pytest.mark.parametrize("recorded", MEMBERS)
def test_from_delayed_moves_the_payload_text_unchanged(recorded: dict[str, Any]) -> None:
    """2^53 + 1 leaves as it came; the Go leader puts it through a double."""
    text = body_of(recorded).decode()

    moved = message.from_delayed(text, reservation_timeout_ns=TIMEOUT)

    assert text_of_payload(moved) == text_of_payload(text)
    found = message.decode(moved.encode())
    assert (found.task_name, found.id) == (recorded["task"], json.loads(text)["id"])
    assert found.reservation_timeout == TIMEOUT
    assert (found.unique, found.unique_for, found.unique_key) == (False, 0, "")


def test_from_delayed_makes_the_entries_that_the_go_leader_made() -> None:
    """Fields, order and values are Go's, apart from its rounding and from the id that we keep."""
    theirs = [
        base64.b64decode(each["value"]["base64"]).decode()
        for each in RECORDED["stream_values_after_the_scheduler_moved_them"]
        if "base64" in each["value"]
    ]
    assert len(theirs) > 40
    members = [body_of(recorded.values[0]).decode() for recorded in MEMBERS]

    for text in theirs:
        fields = with_doubles(text)
        lock = (fields["unique_for"], fields["unique_key"], fields["unique_lock_value"])
        made = [
            message.from_delayed(
                member,
                reservation_timeout_ns=json.loads(text)["reservation_timeout"],
                unique=(int(lock[0]), *lock[1:]) if fields["unique"] else None,
            )
            for member in members
        ]
        twins = [each for each in made if with_doubles(each).items() >= fields.items()]
        assert twins, text
        assert list(json.loads(twins[0])) == [*json.loads(text), "id"]


@pytest.mark.parametrize("recorded", MEMBERS)
def test_to_delayed_and_back_keeps_the_payload_text(recorded: dict[str, Any]) -> None:
    """A retry through the delayed set costs the payload not one digit."""
    first = message.from_delayed(body_of(recorded).decode(), reservation_timeout_ns=TIMEOUT)

    head, tail = message.to_delayed(first, id="an-id", attempt=3)
    member = f"{head}1795958932{tail}"
    second = message.from_delayed(member, reservation_timeout_ns=1)

    assert text_of_payload(member) == text_of_payload(first) == text_of_payload(second)
    found = message.decode(second.encode())
    assert (found.id, found.attempt, found.reservation_timeout) == ("an-id", 3, TIMEOUT)


@pytest.mark.parametrize("recorded", MEMBERS)
def test_to_delayed_writes_what_go_reads(recorded: dict[str, Any]) -> None:
    """Go's four fields come first and in its order, the time as plain digits."""
    first = message.from_delayed(body_of(recorded).decode(), reservation_timeout_ns=TIMEOUT)

    head, tail = message.to_delayed(first, id="an-id")
    member = f"{head}1795958932{tail}"

    assert list(json.loads(member))[:4] == ["id", "task", "time", "payload"]
    assert re.search('"time":1795958932,"payload":', member)
    assert message.decode_delayed(member.encode()).time == 1795958932


@pytest.mark.parametrize(
    "time", ["1795958932.0", "1e9", '"1795958932"', "true", "9223372036854775808", "NaN"]
)
def test_decode_delayed_refuses_a_time_that_go_refuses(time: str) -> None:
    """Go reads `time` as a 64-bit integer and nothing else."""
    body = b'{"id":"i","task":"echo","time":%s,"payload":1}' % time.encode()

    with pytest.raises(InvalidTaskPayloadError):
        message.decode_delayed(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"null",
        b"[]",
        b"{}",
        b'{"task":null}',
        b'{"task":""}',
        b'{"task":1}',
        b'{"task":"echo"} x',
        b'{"task":"echo",}',
        b'{"task":"echo","payload":[}',
        b'{"task":"echo","payload":' + b"[" * 200_000,
    ],
)
def test_decode_delayed_refuses_what_is_no_member(body: bytes) -> None:
    """A poison member is told from a good one by this error alone, so it can be put aside."""
    with pytest.raises(InvalidTaskPayloadError):
        message.decode_delayed(body)


def test_decode_delayed_reads_a_member_without_an_id() -> None:
    """A member made by hand may have no id, or fields in another case, or nulls."""
    found = message.decode_delayed(b' {"PAYLOAD":[1],"Task":"echo","Time":5,"unique":null} ')

    assert (found.id, found.task_name, found.time, found.payload) == (None, "echo", 5, [1])
