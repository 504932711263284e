"""Wire formats by themselves: what is refused, what is kept, and properties over any JSON."""

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from taskrunner import message
from taskrunner.errors import InvalidTaskPayloadError, PayloadTooLargeError

BIG = 10_000_000
SEVEN = (
    '"unique":false,"unique_for":0,"unique_key":"","unique_lock_value":""'
    ',"reservation_timeout":7,"task_name":"echo","payload":1'
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=200)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=10
)
fuzz = settings(max_examples=100, deadline=None)


@pytest.fixture(scope="module", autouse=True, params=["json", "msgspec"])
def decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    """All that is said here holds with the extra `fast` and without it, for texts of any length."""
    if request.param == "msgspec":
        pytest.importorskip("msgspec")
    found = message._faster() if request.param == "msgspec" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message, "_LONG", 0)
        patch.setattr(message, "_faster", lambda: found)
        yield


def encoded(payload: Any = 1, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "id": "an-id",
        "enqueued_at": 1795958926.85,
        "reservation_timeout_ns": 7,
    }
    text = message.encode_payload(payload, BIG)
    return message.encode("echo", text, **(arguments | changes))


def decoded(text: str) -> message.Message:
    return message.decode(text.encode())


def delayed(text: str, **changes: Any) -> str:
    head, tail = message.to_delayed(text, **({"id": "an-id"} | changes))
    return f"{head}5{tail}"


class Point(NamedTuple):
    x: int
    y: int


class Colour(IntEnum):
    RED = 1


class Word(StrEnum):
    YES = "yes"


# --- encode_payload ---


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (datetime.now(UTC), "payload: datetime is not JSON: send its isoformat()"),
        (
            {"user": {"created": datetime.now(UTC)}},
            "payload.user.created: datetime is not JSON: send its isoformat()",
        ),
        ({"items": [1, {"a b": {1, 2}}]}, "payload.items[1]['a b']: set"),
        ({"a": b"bytes"}, "payload.a: bytes"),
        ({"a": (1, object())}, "payload.a[1]: object"),
        ({"a": math.nan}, "payload.a: float (NaN and Infinity)"),
        ([-math.inf], "payload[0]: float (NaN and Infinity)"),
        ({"a": {1: "x"}}, "payload.a: a key of type int"),
        ([{None: 1}], "payload[0]: a key of type NoneType"),
        ({"a": {True: 1}}, "payload.a: a key of type bool"),
        ({(1, 2): 1}, "payload: a key of type tuple"),
        ({"a": "\ud800"}, "payload.a: str (with a lone surrogate)"),
        ({"a": {"\udfff": 1}}, "payload.a['\\udfff']: str (with a lone surrogate)"),
        ([10**5000], "payload[0]: int (of more digits than Python writes)"),
        ([1, {2: 3}], "payload[1]: a key of type int"),
        ({"k" * 81: b""}, f"payload.{'k' * 80}: bytes is not JSON"),
        ({" " * 81: b""}, f"payload['{' ' * 80}']: bytes is not JSON"),
    ],
)
def test_encode_payload_names_the_path_of_what_json_cannot_hold(payload: Any, fault: str) -> None:
    """The error says where in the payload the fault is, and what it is."""
    with pytest.raises(InvalidTaskPayloadError) as caught:
        message.encode_payload(payload, BIG)

    assert str(caught.value) in (fault, f"{fault} is not JSON", f"{fault}, JSON has only str")
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (None, "null"),
        ((1, (2,)), "[1,[2]]"),
        (Point(1, 2), "[1,2]"),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
        (Colour.RED, "1"),
        ({Word.YES: Word.YES}, '{"yes":"yes"}'),
        (2**53 + 1, "9007199254740993"),
        (-(10**40), "-1" + "0" * 40),
        ("é\u2028\x00😀</>", '"é\u2028\\u0000😀</>"'),
        ({"": []}, '{"":[]}'),
    ],
)
def test_encode_payload_writes_compact_utf8(payload: Any, text: str) -> None:
    """No spaces, no escapes that JSON does not ask for, integers exact, tuples as lists."""
    assert message.encode_payload(payload, BIG) == text


def test_encode_payload_refuses_what_is_too_deep_or_contains_itself() -> None:
    """Neither ends the process; both are payload faults."""
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(200_000):
        deep = [deep]

    for payload in (loop, deep):
        with pytest.raises(InvalidTaskPayloadError, match=r"^payload: nested too deeply, or it "):
            message.encode_payload(payload, BIG)


def test_encode_payload_refuses_an_odd_key_at_any_depth() -> None:
    """Also where the way there is too deep to be told."""
    payload: Any = {1: 2}
    told = set[str]()
    for _ in range(sys.getrecursionlimit()):
        payload = [payload]
        with pytest.raises(InvalidTaskPayloadError) as caught:
            message.encode_payload(payload, BIG)
        told.add(str(caught.value).replace("[0]", ""))

    assert told <= {
        "payload: a key of type int, JSON has only str",
        "payload: a key is not a str",
        "payload: nested too deeply, or it contains itself",
    }


@pytest.mark.parametrize(("payload", "size"), [("x" * 8, 10), ("é" * 4, 10), ([1, 2, 3, 44], 10)])
def test_encode_payload_counts_bytes_of_utf8_against_the_limit(payload: Any, size: int) -> None:
    """The limit itself is allowed, one byte less is not; the error names both numbers."""
    message.encode_payload(payload, size)

    with pytest.raises(PayloadTooLargeError, match=f"{size} bytes.*max_payload_bytes={size - 1}"):
        message.encode_payload(payload, size - 1)


def test_encode_payload_holds_integers_up_to_the_digits_python_reads() -> None:
    """Python refuses to turn more than 4300 digits into a number: both sides say so."""
    limit = sys.get_int_max_str_digits()
    longest = 10**limit - 1

    assert decoded(encoded(longest)).payload == longest
    with pytest.raises(InvalidTaskPayloadError, match="digits"):
        message.encode_payload(longest + 1, BIG)
    with pytest.raises(InvalidTaskPayloadError, match="digits"):
        decoded('{"task_name":"echo","payload":' + "9" * (limit + 1) + "}")


# --- encode, decode ---


def test_encode_writes_ours_after_the_seven_fields() -> None:
    """The whole text of a plain message."""
    text = encoded({"a": 1}, extra={"traceparent": 'a"b', "x": "y"})

    assert text == (
        '{"unique":false,"unique_for":0,"unique_key":"","unique_lock_value":""'
        ',"reservation_timeout":7,"task_name":"echo","payload":{"a":1}'
        ',"id":"an-id","enqueued_at":1795958926.85,"traceparent":"a\\"b","x":"y"}'
    )


def test_encode_writes_the_lock_of_a_unique_message() -> None:
    """Lock name and token travel with the message."""
    found = decoded(encoded(unique_for=60, lock_name='echo:"k"', token="tok"))

    assert (found.unique, found.unique_for) == (True, 60)
    assert (found.lock_name, found.unique_lock_value) == ('echo:"k"', "tok")


@pytest.mark.parametrize("key", ["id", "attempt", "Payload", "TASK_NAME", "time", "Task", "ID"])
def test_encode_refuses_an_extra_key_that_is_a_field(key: str) -> None:
    """Go reads names in any case, and the last wins: an extra could replace the payload."""
    with pytest.raises(ValueError, match="is a field of the message"):
        encoded(extra={key: "x"})


def test_decode_reads_the_keys_of_ours() -> None:
    """What the seven fields do not say."""
    text = "{" + SEVEN + ',"id":"i","attempt":3,"unknown":2,"only_group":"g","enqueued_at":1.5}'

    found = decoded(text)

    assert (found.id, found.attempt, found.unknown) == ("i", 3, 2)
    assert (found.only_group, found.enqueued_at, found.text) == ("g", 1.5, text)


@pytest.mark.parametrize(
    "member",
    [
        '"id":7',
        '"id":""',
        '"id":null',
        '"only_group":[]',
        '"only_group":null',
        '"attempt":null',
        '"enqueued_at":"now"',
        '"enqueued_at":true',
        '"enqueued_at":null',
        '"x":{"y":1}',
        f'"id":"{"x" * 201}"',
        f'"enqueued_at":{10**400}',
    ],
)
def test_decode_ignores_an_optional_key_of_a_wrong_type(member: str) -> None:
    """Another producer may use the names for something else; the message is good all the same."""
    found = decoded("{" + SEVEN + "," + member + "}")

    assert (found.id, found.attempt, found.only_group) == (None, 0, None)
    assert (found.enqueued_at, found.payload) == (None, 1)


def test_decode_reads_enqueued_at_as_a_float_when_it_is_an_integer() -> None:
    """Whole seconds are a time as well."""
    found = decoded("{" + SEVEN + ',"enqueued_at":1795958926}')

    assert type(found.enqueued_at) is float
    assert found.enqueued_at == 1795958926.0


@pytest.mark.parametrize(
    "member",
    [
        '"attempt":-1',
        '"attempt":1.0',
        '"attempt":"1"',
        '"attempt":true',
        '"attempt":1000000001',
        '"unknown":-1',
        '"unknown":[]',
        '"unique":"true"',
        '"unique":0',
        '"unique_key":1',
        '"unique_for":9223372036854775808',
        '"reservation_timeout":-9223372036854775809',
        '"unique_lock_value":{}',
        '"Task_Name":1',
        '"TASK_NAME":[]',
        '"UNIQUE":0',
        '"re\u017fervation_timeout":1.5',
        '"payload":Infinity',
        '"payload":-Infinity',
        '"x":NaN',
        '"payload":-1e999',
    ],
)
def test_decode_refuses_a_field_of_a_wrong_type(member: str) -> None:
    """A count that a hostile producer made up, or what Go's types do not hold."""
    with pytest.raises(InvalidTaskPayloadError):
        decoded("{" + SEVEN + "," + member + "}")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"task_name":"a","TASK_NAME":"b"}', "b"),
        ('{"TASK_NAME":"b","task_name":"a"}', "a"),
        ('{"task_name":"a","task_name":null}', "a"),
        ('{"tas\\u006b_name":"a"}', "a"),
        ('{"ta\u017f\u212a_name":"a"}', "a"),
        ('{"task_name":"a","Task Name":"b","task":"c","time":1.5}', "a"),
        ('\t{\r\n"task_name" :\t"a"}\n', "a"),
    ],
)
def test_decode_finds_a_name_as_go_does(body: str, name: str) -> None:
    """In any letter case (as Unicode folds it), the last one wins, a null changes nothing."""
    assert decoded(body).task_name == name


def test_decode_reads_a_null_payload_as_one_when_it_comes_last() -> None:
    """Null is a value for the payload; only for the other fields it says nothing."""
    assert decoded('{"Task_Name":"a","payload":1,"payload":null}').payload is None
    assert decoded('{"task_name":"a","payload":1,"payload":null}').payload is None


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"\ud800", "\ufffd"),
        (r"\uDFFFx", "\ufffdx"),
        (r"\ud83d\ude00", "😀"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\\ud800", r"\ud800"),
        (r"\\\ud800", "\\\ufffd"),
        (r"\ud83d\\ude00", "\ufffd\\ude00"),
    ],
)
def test_decode_makes_lone_surrogates_replacement_characters(escaped: str, text: str) -> None:
    """What the task gets can be written as UTF-8 again, in keys too; pairs stay what they are."""
    found = decoded('{"task_name":"%s","payload":{"%s":["%s"]}}' % ((escaped,) * 3))

    assert found.payload == {text: [text]}
    assert found.task_name == text


@pytest.mark.parametrize("cut", range(len(encoded({"a": [1.5, "é"]}).encode())))
def test_decode_refuses_each_truncated_message(cut: int) -> None:
    """A message that was cut short is never taken for another one."""
    with pytest.raises(InvalidTaskPayloadError):
        message.decode(encoded({"a": [1.5, "é"]}).encode()[:cut])


@fuzz
@given(values)
@example(-0.0)
def test_decode_gives_back_what_encode_was_given(payload: Any) -> None:
    """Any JSON value makes the way unchanged, type by type."""
    found = decoded(encoded(payload))

    assert found.payload == payload
    assert repr(found.payload) == repr(payload)


@fuzz
@given(names.filter(bool), texts, names, st.integers(1, 2**40), st.integers(1, 2**63 - 1))
def test_decode_gives_back_the_fields_that_encode_was_given(
    name: str, lock: str, token: str, unique_for: int, timeout: int
) -> None:
    """Keys may hold anything that is Unicode, names and tokens all but control characters."""
    text = message.encode(
        name,
        "null",
        id="i",
        enqueued_at=0.5,
        reservation_timeout_ns=timeout,
        unique_for=unique_for,
        lock_name=lock,
        token=token,
    )

    found = decoded(text)

    assert (found.task_name, found.reservation_timeout, found.id) == (name, timeout, "i")
    assert found.unique is bool(token)
    if token:
        assert (found.unique_for, found.unique_key) == (unique_for, lock)
        assert found.unique_lock_value == token


json_like = st.lists(
    st.sampled_from(
        [
            *'{}[]":,\\ 0-1.eE',
            *("task_name", '"payload"', "null", "true", "NaN", "\\ud800", "\\u00", "1e999"),
            *('"task_name":"a"', '"unique":', '"attempt":1', "\ufeff", "\x00", '"TASK":"b"'),
        ]
    )
).map(lambda parts: "".join(parts).encode())
bodies = (
    st.binary()
    | json_like
    | json_like.map(lambda body: b'{"task_name":"a",' + body + b"}")
    | values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(
        st.sampled_from([*message.Message.__annotations__, "task", "time", "Payload"]), values
    ).map(lambda value: json.dumps(value).encode())
)


@settings(max_examples=500, deadline=None)
@given(bodies)
@example(b"\xff{")
@example(b'{"":0}')
@example(b'{"task":"a","id":"b","id":5,"task_name":"a"}')
@example(b'{"task_name":"a","id":{}}')
def test_readers_raise_nothing_but_invalid_payload(body: bytes) -> None:
    """Whatever the bytes: a message, or the one error."""
    salvaged = message.salvage(body)
    try:
        found = message.decode(body)
    except InvalidTaskPayloadError:
        found = None
    else:
        assert salvaged == found
        assert decoded(found.text).payload == found.payload
        waiting = message.decode_delayed(delayed(found.text).encode())
        assert (waiting.task_name, waiting.payload) == (found.task_name, found.payload)
    try:
        waiting = message.decode_delayed(body)
    except InvalidTaskPayloadError:
        return
    promoted = decoded(message.from_delayed(waiting.text, reservation_timeout_ns=1))
    assert promoted.task_name == waiting.task_name
    assert promoted.payload == waiting.payload


# --- moves ---


def test_members_gives_texts_in_order() -> None:
    """Values are text, exactly as they stand, duplicates included."""
    text = '{ "a" : 1e2 , "b":[1, 2],"a":"\\u0041" ,"":{}}'

    assert message.members(text) == [
        ("a", "1e2"),
        ("b", "[1, 2]"),
        ("a", '"\\u0041"'),
        ("", "{}"),
    ]
    assert message.members(" {\n} ") == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", '{"a"}', '{"a":1,}', '{"a":1}}', "{a:1}", '{"a":1 "b":2}', "{,}"],
)
def test_members_refuses_what_is_no_object(text: str) -> None:
    """One error for all of it."""
    with pytest.raises(InvalidTaskPayloadError):
        message.members(text)


def test_rewrite_replaces_adds_and_removes() -> None:
    """A replaced member keeps its place, a new one comes last, None removes."""
    text = '{"task_name":"a", "payload" : 1.50 ,"id":"x","attempt":1,"n":12345678901234567890}'

    assert message.rewrite(text, {"attempt": 2, "id": None, "only_group": "g"}) == (
        '{"task_name":"a","payload" : 1.50,"attempt":2,"n":12345678901234567890,"only_group":"g"}'
    )


def test_rewrite_finds_fields_in_any_case_and_every_repetition() -> None:
    """After it the reader sees the new value, whatever spelling came before or after."""
    text = '{"TASK_NAME":"a","payload":1,"task_name":"b","Id":"x"}'

    moved = message.rewrite(text, {"task_name": "c", "id": "y"})

    assert moved == '{"task_name":"c","payload":1,"Id":"x","id":"y"}'
    assert message.rewrite(text, {"payload": None, "task_name": None}) == '{"Id":"x"}'


@fuzz
@given(
    st.dictionaries(texts.filter(lambda key: key.casefold() != "task_name"), values),
    st.dictionaries(st.sampled_from(["attempt", "unknown", "task_name"]), st.none() | values),
    st.booleans(),
)
def test_rewrite_keeps_the_text_of_all_other_members(
    members: dict[str, Any], changes: dict[str, Any], spaced: bool
) -> None:
    """Member by member, text for text; the changes are there and nothing else is."""
    text = json.dumps(members, separators=None if spaced else (",", ":"))
    changes = {key: value for key, value in changes.items() if key not in members}

    moved = message.rewrite(text, changes)

    kept = [pair for pair in message.members(moved) if pair[0] not in changes]
    assert kept == message.members(text)
    wanted = {key: value for key, value in changes.items() if value is not None}
    assert json.loads(moved) == members | wanted


def test_to_delayed_makes_a_member_of_a_plain_message() -> None:
    """Two halves around the time; nothing about uniqueness where there is none."""
    assert delayed(encoded([1.0])) == (
        '{"id":"an-id","task":"echo","time":5,"payload":[1.0],"reservation_timeout":7'
        ',"enqueued_at":1795958926.85}'
    )


@pytest.mark.parametrize("text", ["[]", "{}", '{"task_name":1}', '{"task_name":"a","unique":1}'])
def test_to_delayed_refuses_what_decode_refuses(text: str) -> None:
    """A fault stays where it was found; no member is made of it."""
    with pytest.raises(InvalidTaskPayloadError):
        message.to_delayed(text, id="i")
    with pytest.raises(InvalidTaskPayloadError):
        message.from_delayed(text.replace("task_name", "task"), reservation_timeout_ns=1)


def test_to_delayed_keeps_the_lock_and_replaces_counts() -> None:
    """The token travels; attempt, unknown and only_group are what this move says."""
    text = encoded(unique_for=60, lock_name="echo:k", token="tok", extra={"trace": "t"})
    text = message.rewrite(text, {"attempt": 1, "unknown": 4})

    member = delayed(text, id="new", attempt=2, only_group="g")

    assert member == (
        '{"id":"new","task":"echo","time":5,"payload":1,"unique":true,"unique_for":60'
        ',"unique_key":"echo:k","unique_lock_value":"tok","reservation_timeout":7'
        ',"enqueued_at":1795958926.85,"trace":"t","unknown":4,"attempt":2,"only_group":"g"}'
    )
    found = message.decode_delayed(member.encode())
    assert (found.lock_name, found.unique_lock_value) == ("echo:k", "tok")
    assert (found.attempt, found.unknown, found.only_group) == (2, 4, "g")
    assert message.decode_delayed(delayed(text, unknown=5).encode()).unknown == 5


def test_moves_drop_an_extra_key_that_the_other_shape_would_read() -> None:
    """`task` means nothing in a stream message and everything in a delayed member."""
    member = delayed('{"task_name":"a","payload":1,"Task":"b","time":"x","ID":3,"note":4}')
    assert member == '{"id":"an-id","task":"a","time":5,"payload":1,"note":4}'

    text = message.from_delayed(
        '{"task":"a","time":5,"payload":1,"Task_Name":"b","note":4}', reservation_timeout_ns=9
    )
    assert text == (
        '{"unique":false,"unique_for":0,"unique_key":"","unique_lock_value":""'
        ',"reservation_timeout":9,"task_name":"a","payload":1,"note":4}'
    )


def test_from_delayed_takes_the_lock_of_the_leader_when_the_member_has_none() -> None:
    """A member from Go knows nothing of its task's options."""
    lock = (60, "echo:k", "tok")
    plain = '{"id":"i","task":"echo","time":5,"payload":{"a":1.50}}'
    own = delayed(encoded(unique_for=9, lock_name="echo", token="mine"))

    text = message.from_delayed(plain, reservation_timeout_ns=3, unique=lock)
    assert text == (
        '{"unique":true,"unique_for":60,"unique_key":"echo:k","unique_lock_value":"tok"'
        ',"reservation_timeout":3,"task_name":"echo","payload":{"a":1.50},"id":"i"}'
    )
    kept = decoded(message.from_delayed(own, reservation_timeout_ns=3, unique=lock))
    assert (kept.unique_for, kept.unique_key, kept.unique_lock_value) == (9, "echo", "mine")
    assert kept.reservation_timeout == 7


def test_from_delayed_makes_what_says_that_it_is_not_unique_as_unique_as_its_task() -> None:
    """Fields that say nothing don't stand in the lock's way; without a lock they stay."""
    member = '{"task":"echo","payload":1,"unique":false,"unique_for":9,"unique_key":"k"}'

    locked = decoded(
        message.from_delayed(member, reservation_timeout_ns=3, unique=(60, "echo", "tok"))
    )
    plain = decoded(message.from_delayed(member, reservation_timeout_ns=3))

    assert (locked.unique, locked.unique_for, locked.unique_lock_value) == (True, 60, "tok")
    assert locked.unique_key == "echo"
    assert (plain.unique, plain.unique_for, plain.unique_key) == (False, 9, "k")


def test_from_delayed_never_leaves_a_reservation_timeout_of_zero() -> None:
    """A Go worker that gets 0 renews without a pause."""
    member = '{"task":"echo","payload":1,"reservation_timeout":0}'

    assert decoded(message.from_delayed(member, reservation_timeout_ns=3)).reservation_timeout == 3


@fuzz
@given(values, st.dictionaries(texts.map(lambda key: "x" + key), values), st.booleans())
def test_moves_there_and_back_change_nothing_but_the_order(
    payload: Any, extras: dict[str, Any], unique: bool
) -> None:
    """Payload and extra keys keep their text through the delayed set, the lock its values."""
    lock = {"unique_for": 60, "lock_name": "echo:k", "token": "tok"} if unique else {}
    text = message.rewrite(encoded(payload, **lock), {**extras, "attempt": 3})

    back = message.from_delayed(delayed(text), reservation_timeout_ns=1)

    assert sorted(message.members(back)) == sorted(message.members(text))


def test_decode_delayed_takes_a_payload_that_is_not_there_for_null() -> None:
    """A lock is made of its text."""
    found = message.decode_delayed(b'{"task":"echo"}')

    assert (found.payload, found.payload_text) == (None, "null")


# --- canonical ---


def test_canonical_tells_true_from_one_and_from_text() -> None:
    """Payloads that differ are different locks, and so are two spellings of one letter."""
    payloads = [True, 1, 1.0, "1", None, "", [], {}, [1], ["1"], False, 0, "é", "e\u0301"]

    texts = [message.canonical(message.encode_payload(payload, BIG)) for payload in payloads]

    assert len(set(texts)) == len(payloads)


def test_canonical_is_sorted_compact_utf8() -> None:
    """The bytes themselves: locks outlive a release of this library."""
    assert (
        message.canonical(' {"b": [1.50, 10], "a": "\\u00e9<"} ')
        == '{"a":"é<","b":[1.5,10]}'.encode()
    )


@fuzz
@given(st.dictionaries(texts, values), st.randoms())
def test_canonical_does_not_depend_on_the_order_of_keys(
    payload: dict[str, Any], random: Any
) -> None:
    """Nor on white space: it is what is stored that counts."""
    keys = list(payload)
    random.shuffle(keys)
    shuffled = {key: payload[key] for key in keys}

    assert message.canonical(json.dumps(payload)) == message.canonical(
        json.dumps(shuffled, indent=1, ensure_ascii=False)
    )


@pytest.mark.parametrize("text", ["", "NaN", "[" * 200_000 + "]" * 200_000, "9" * 5000, "1 2"])
def test_canonical_refuses_what_is_no_payload(text: str) -> None:
    """One error for all of it."""
    with pytest.raises(InvalidTaskPayloadError):
        message.canonical(text)


# --- the quick way and the close look ---

_EXTRA_TAILS = st.sampled_from(
    [
        "",
        ',"id":"a"',
        ',"id":"a","enqueued_at":1.5',
        ',"id":"a","enqueued_at":1e400',
        ',"id":"a","enqueued_at":3',
        ',"id":"","enqueued_at":1.5',
        ',"id":7,"enqueued_at":1.5',
        ',"attempt":2,"id":"a"',
        ',"attempt":-1',
        ',"unknown":3,"only_group":"g"',
        ',"payload":2',
        ',"PAYLOAD":2',
        ',"task_name":"other"',
        ',"Task_Name":"other"',
        ',"unique":true',
        ',"x":{"payload":[1e400]}',
        ',"x":NaN',
        ', "id" : "a"',
        ',"id":"a"} x',
        ',"id":"a"',
        ',"id":"\\ud800"',
    ]
)


@settings(deadline=None)
@given(
    payload=st.one_of(
        st.sampled_from(
            ["1", "null", '"\\ud800"', "1e400", "[1,{}]", '{"payload":1}', "", " 2", "x"]
        ),
        st.integers().map(str),
        st.text().map(json.dumps),
    ),
    tail=_EXTRA_TAILS,
    name=st.sampled_from(["quick", "é", 'a\\",\\"payload\\":', "b"]),
)
def test_decode_says_the_same_the_second_time(payload: str, tail: str, name: str) -> None:
    """A head that was seen before is not read again; nothing else may differ for it."""
    head = (
        '{"unique":false,"unique_for":0,"unique_key":"","unique_lock_value":"",'
        f'"reservation_timeout":5,"task_name":"{name}","payload":'
    )
    message.decode(f"{head}0}}".encode())  # from here on the head is known
    body = f"{head}{payload}{tail}}}".encode("utf-8", "surrogatepass")

    def outcome(read: Callable[[bytes], Any]) -> Any:
        try:
            return read(body)
        except InvalidTaskPayloadError:
            return "refused"

    assert outcome(message.decode) == outcome(message._decode)  # pyright: ignore[reportPrivateUsage]


def test_decode_looks_closely_once_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its messages have in common is known from the first one on."""
    text = encoded([1]).replace('"echo"', '"known"')
    decoded(text)

    def closely(body: bytes) -> message.Message:
        raise AssertionError(body)

    monkeypatch.setattr(message, "_decode", closely)
    found = decoded(text)

    assert (found.task_name, found.payload, found.reservation_timeout) == ("known", [1], 7)
    assert (found.id, found.enqueued_at, found.text) == ("an-id", 1795958926.85, text)


def test_decode_does_not_read_twice_what_is_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token makes it begin like no other: there is nothing to learn for the next one."""

    def learn(start: bytes) -> None:
        raise AssertionError(start)

    monkeypatch.setattr(message, "_learn", learn)

    assert decoded(encoded([1], unique_for=60, lock_name="k", token="t")).unique


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"task_name":"a","payload":NaN}', "not JSON: NaN"),
        ('{"task_name":"a","payload":-Infinity}', "not JSON: -Infinity"),
        ('{"task_name":"a","payload":1e999}', "not JSON: the number 1e999 is out of range"),
        ('{"task_name":"a","payload":%s}' % ("9" * 5000), "an integer of more digits than "),
        ('{"task_name":"a"', "not JSON: Expecting ',' delimiter: line 1 column 17 (char 16)"),
        ("[1]", "list where an object belongs"),
        ("{}", "no task_name"),
    ],
)
def test_decode_says_what_is_wrong(body: str, told: str) -> None:
    """The text of a dead letter: it has to be enough to find the producer's fault."""
    with pytest.raises(InvalidTaskPayloadError) as caught:
        message.decode(body.encode())

    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task_name", "x" * 1001),
        ("task_name", "a\nb"),
        ("only_group", "g" * 1001),
        ("unique_key", "k" * 5001),
        ("unique_lock_value", "t" * 201),
    ],
)
def test_decode_refuses_what_would_fill_logs_and_keys(field: str, value: str) -> None:
    """A hostile producer can make a worker log and dead-letter, nothing else; only_group is ignored."""
    body = json.dumps(json.loads(encoded()) | {"unique": True, field: value}).encode()

    if field == "only_group":
        assert message.decode(body).only_group is None
    else:
        with pytest.raises(InvalidTaskPayloadError, match=field):
            message.decode(body)
        assert getattr(message.salvage(body), field) == ""


def test_messages_are_told_apart_by_what_they_say() -> None:
    """In a set, and in a log of a debugger's session."""
    one, same, other = (decoded(encoded(payload)) for payload in ([1], [1], [2]))

    assert len({one, same, other}) == 2
    for part in ("Message(", "task_name='echo'", "payload=[1]", "id='an-id'"):
        assert part in repr(one)
