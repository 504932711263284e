"""Stream entries: what Go programs wrote and read, against our reader and our writer."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from taskrunner import keys, message
from taskrunner.errors import InvalidTaskPayloadError

WIRE = Path(__file__).parent.parent / "wire"
GO_ORDER = [
    "unique",
    "unique_for",
    "unique_key",
    "unique_lock_value",
    "reservation_timeout",
    "task_name",
    "payload",
]
MEBIBYTE = "x" * 1048576
# What was too large to record: its text, told by its hash.
LARGE = {
    hashlib.sha256(body).hexdigest(): body
    for body in (
        b'{"unique":false,"unique_for":0,"unique_key":"","unique_lock_value":"",'
        b'"reservation_timeout":0,"task_name":"echo","payload":"%s"}' % MEBIBYTE.encode(),
        b'{"task_name":"echo","payload":' + b"[" * 9999 + b"]" * 9999 + b"}",
        b'{"task_name":"echo","payload":' + b"[" * 10001 + b"]" * 10001 + b"}",
    )
}
# Go hands a JSON null and a message without a task name on as "task not found"; here both are
# faults of the message itself. And Go reads 10,000 levels, Python as many as its own stack holds.
DEEP = {"depth_9999", "depth_10001"}
# A key or a time without uniqueness: Go writes them along, we write all of it or nothing.
HALF_UNIQUE = {"key_function_but_not_unique", "unique_for_but_not_unique"}


def body_of(recorded: dict[str, Any]) -> bytes:
    if "base64" in recorded:
        body = base64.b64decode(recorded["base64"])
    else:
        body = LARGE[recorded["sha256"]]
    assert hashlib.sha256(body).hexdigest() == recorded["sha256"]
    return body


def load(file: str) -> list[Any]:
    entries: list[Any] = json.loads((WIRE / file).read_text())["entries"]
    return [pytest.param(entry, id=entry["name"]) for entry in entries]


def field_of(entry: dict[str, Any]) -> bytes:
    return body_of(next(f["value"] for f in entry["fields"] if f["field"] == "payload"))


GO = [each for each in load("stream_entries.json") if "fields" in each.values[0]]
REFUSED_BY_GO = [each for each in load("stream_entries.json") if "fields" not in each.values[0]]
FOREIGN = load("foreign_entries.json")
RAN = [each for each in FOREIGN if each.values[0]["result"]["outcome"] == "action_ran"]
FAILED = [each for each in FOREIGN if each not in RAN]


def without_html_escapes(text: str) -> str:
    """Go's text with `<`, `>`, `&`, U+2028 and U+2029 as they are: the escapes only we don't write."""

    def plain(found: re.Match[str]) -> str:
        return chr(int(found[1], 16)) if found[1] else found[0]

    return re.sub(r"\\(?:u(003c|003e|0026|2028|2029)|.)", plain, text)


def as_go_sees(value: Any) -> Any:
    """A value after Go's reader: every number is a double."""
    if isinstance(value, dict):
        return {key: as_go_sees(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_go_sees(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def encoded(found: message.Message) -> str:
    """The same call, written by us."""
    return message.encode(
        found.task_name,
        message.encode_payload(found.payload, 2 * len(MEBIBYTE)),
        id="8ddcff0c-1369-493b-9490-5fbd3147b932",
        enqueued_at=1795958926.85,
        reservation_timeout_ns=found.reservation_timeout,
        unique_for=found.unique_for,
        lock_name=found.unique_key,
        token=found.unique_lock_value,
    )


@pytest.mark.parametrize("entry", GO)
def test_decode_reads_each_field_that_go_wrote(entry: dict[str, Any]) -> None:
    """Every field of a Go entry arrives, and the payload with its exact numbers."""
    body = field_of(entry)
    plain = json.loads(body)

    found = message.decode(body)

    assert {name: getattr(found, name) for name in GO_ORDER} == plain
    assert type(found.payload) is type(plain["payload"])
    assert found.text == body.decode()
    assert found.task_name == entry["task"]["name"]
    assert found.unique == entry["task"]["unique"]
    assert found.unique_for == entry["task"]["unique_for"]
    assert found.reservation_timeout == entry["task"]["reservation_timeout_ns"]
    assert (found.id, found.attempt, found.unknown) == (None, 0, 0)
    assert (found.only_group, found.enqueued_at) == (None, None)


@pytest.mark.parametrize("entry", GO)
def test_decode_gives_what_the_go_action_got(entry: dict[str, Any]) -> None:
    """The task gets what a Go action got, but for Go's rounding of large integers."""
    received = entry["go_action_received"]["json"]
    found = message.decode(field_of(entry))

    if "text" in received:
        assert as_go_sees(found.payload) == as_go_sees(json.loads(received["text"]))
    else:
        assert found.payload == MEBIBYTE


@pytest.mark.parametrize(
    "entry", [each for each in GO if "lock_keys_after_dispatch" in each.values[0]]
)
def test_lock_name_is_the_key_that_go_locked(entry: dict[str, Any]) -> None:
    """The lock of a Go entry can be released, also where Go left unique_key empty."""
    [lock] = entry["lock_keys_after_dispatch"]

    name = message.decode(field_of(entry)).lock_name

    assert name is not None
    assert keys.unique(name) == lock["key"]


@pytest.mark.parametrize("entry", [each for each in GO if not each.values[0]["task"]["unique"]])
def test_lock_name_is_none_when_the_entry_is_not_unique(entry: dict[str, Any]) -> None:
    """A unique_key or a unique_for alone makes no lock."""
    assert message.decode(field_of(entry)).lock_name is None


@pytest.mark.parametrize("entry", [each for each in GO if each.id not in HALF_UNIQUE])
def test_encode_writes_what_go_wrote(entry: dict[str, Any]) -> None:
    """Our text begins with Go's, byte for byte; only floats may be spelt in another way."""
    theirs = message.decode(field_of(entry))
    ours = encoded(theirs)

    expected = without_html_escapes(theirs.text)[:-1]
    if isinstance(theirs.payload, float) or entry["name"] == "float_neg_zero":
        start = expected.rindex(":") + 1
        assert ours.startswith(expected[:start])
        assert json.loads(ours)["payload"] == float(expected[start:])
    else:
        assert ours.startswith(expected + ',"id":')


@pytest.mark.parametrize("entry", GO)
def test_encode_writes_the_fields_in_order_and_integers_as_digits(entry: dict[str, Any]) -> None:
    """Go's order, all seven fields, then ours; Go refuses `3e10` and `1.0` for its integers."""
    ours = encoded(message.decode(field_of(entry)))

    assert list(json.loads(ours)) == [*GO_ORDER, "id", "enqueued_at"]
    texts = dict(message.members(ours))
    assert re.fullmatch("-?[0-9]+", texts["unique_for"])
    assert re.fullmatch("-?[0-9]+", texts["reservation_timeout"])


@pytest.mark.parametrize("entry", GO)
def test_encode_and_decode_agree_on_a_go_payload(entry: dict[str, Any]) -> None:
    """What Go dispatched survives being dispatched by us."""
    theirs = message.decode(field_of(entry))

    ours = message.decode(encoded(theirs).encode())

    assert ours.payload == theirs.payload
    assert ours.task_name == theirs.task_name
    assert ours.reservation_timeout == theirs.reservation_timeout


@pytest.mark.parametrize(
    "payload",
    [float("nan"), float("inf"), object()],
    ids=["nan", "inf", "unencodable"],
)
def test_encode_payload_refuses_what_go_refuses(payload: Any) -> None:
    """NaN, infinities and what is no data are errors at the call, as in Go."""
    assert {"nan", "inf", "unencodable"} <= {each.id for each in REFUSED_BY_GO}

    with pytest.raises(InvalidTaskPayloadError, match="payload"):
        message.encode_payload(payload, 100)


@pytest.mark.parametrize("entry", [each for each in RAN if each.id not in DEEP])
def test_decode_accepts_foreign_entries_that_go_ran(entry: dict[str, Any]) -> None:
    """The reader is as lenient as Go's: order, spaces, case, nulls, duplicates, bad Unicode."""
    body = field_of(entry)

    found = message.decode(body)

    assert found.task_name == "echo"
    assert as_go_sees(found.payload) == as_go_sees(json.loads(entry["result"]["json"]))
    found.text.encode()


@pytest.mark.parametrize("entry", [each for each in FAILED if each.id not in DEEP])
def test_decode_refuses_foreign_entries_that_go_refused(entry: dict[str, Any]) -> None:
    """The reader is as strict as Go's where Go is strict; an unknown task is no fault of the text."""
    body = field_of(entry)
    if entry["name"] == "unknown_task":
        assert message.decode(body).task_name == "nobody"
        return

    with pytest.raises(InvalidTaskPayloadError):
        message.decode(body)


def test_decode_keeps_the_digits_of_a_huge_integer() -> None:
    """Go rounds 123456789012345678901234567890 to a double; we hand on the integer."""
    [entry] = [each.values[0] for each in FOREIGN if each.id == "huge_int_payload"]

    assert message.decode(field_of(entry)).payload == 123456789012345678901234567890


@pytest.mark.parametrize(
    "body",
    [b"null", b"{}", b'{"payload":1}', b'{"task_name":null}', b'{"task_name":""}'],
)
def test_decode_refuses_a_message_without_a_task_name(body: bytes) -> None:
    """Go looks for a task of the name "" and finds none; here the message itself is at fault."""
    with pytest.raises(InvalidTaskPayloadError):
        message.decode(body)


@pytest.mark.parametrize("depth", [9_999, 10_001, 200_000])
def test_decode_refuses_or_reads_deep_nesting_but_survives_it(depth: int) -> None:
    """What Python's decoder cannot hold is a payload fault, never a crash of the worker."""
    body = b'{"task_name":"echo","payload":' + b"[" * depth + b"]" * depth + b"}"

    outcome: Exception | message.Message
    try:
        outcome = message.decode(body)
    except InvalidTaskPayloadError as error:
        outcome = error

    assert isinstance(outcome, message.Message) or str(outcome) == "nested too deeply"


def test_salvage_tells_the_task_of_what_go_tells_it() -> None:
    """The failed-task handler learns the task's name of each entry whose JSON could be read."""
    named = {
        each.id: each.values[0]["result"]["handler_task_name"]
        for each in FAILED
        if each.id not in DEEP and each.values[0]["result"]["error"] == "ErrInvalidTaskPayload"
    }
    # Go tells it for a number out of range too; our decoder stops there.
    named["overflow_number_payload"] = ""
    assert sum(map(bool, named.values())) >= 4

    for each in FAILED:
        if each.id in named:
            found = message.salvage(field_of(each.values[0]))
            assert (each.id, found.task_name) == (each.id, named[each.id])
            assert found.text == field_of(each.values[0]).decode()
