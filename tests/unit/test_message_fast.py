"""The extra `fast`: another decoder, and no difference that anyone could see but the time."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from taskrunner import message
from taskrunner.errors import InvalidTaskPayloadError

pytest.importorskip("msgspec")

WIRE = Path(__file__).parents[1] / "wire"
HEAD = (
    '{"unique":false,"unique_for":0,"unique_key":"","unique_lock_value":"",'
    '"reservation_timeout":5,"task_name":"fast","payload":'
)
TAIL = ',"id":"an-id","enqueued_at":1795958926.85}'

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.integers(-(10**400), 10**400),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=30,
)
pieces = st.sampled_from(
    [
        *("{", "}", "[", "]", ",", ":", " ", "\n", "\v", "\xa0", "\ufeff", '"', "\\", "\x00", "\x1f"),
        *("1", "01", "-", "-0", "+1", ".5", "1.", "1e5", "1E+400", "1e-400", "0.1", "9" * 25, "9" * 4301),
        *("null", "true", "fals", "NaN", "Infinity", "-Infinity", '"a"', '"é"', "'a'", "//", "1_0", "0x1"),
        *('"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"\\x"', '"\\/"', '{"a":1,"a":2}', "[" * 400, "]" * 400),
        *(TAIL, ',"id":"', '"payload":', '{"id":"'),
    ]
)  # fmt: skip
junk = st.lists(pieces, max_size=12).map("".join)


def both(read: Callable[[], Any]) -> tuple[str, str]:
    """What is read, or why not, with Python's decoder and with msgspec's."""
    found = message._faster()
    assert found is not None
    told = []
    for decoder in (None, found):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message, "_LONG", 0)
            patch.setattr(message, "_faster", lambda decoder=decoder: decoder)
            try:
                told.append(repr(read()))
            except InvalidTaskPayloadError as error:
                told.append(f"refused: {error}")
    return told[0], told[1]


def assert_same(payload_text: str) -> None:
    """As a message that is read the quick way, as one that is not, and by itself."""
    plain = f"{HEAD}{payload_text}{TAIL}".encode("utf-8", "surrogatepass")
    other = f'{{"task_name":"fast","payload":{payload_text}}}'.encode("utf-8", "surrogatepass")
    message.decode(f"{HEAD}0{TAIL}".encode())  # from here on the head is known
    for read in (
        lambda: message.decode(plain),
        lambda: message.decode(other),
        lambda: message.canonical(payload_text),
    ):
        one, two = both(read)
        assert one == two


@settings(max_examples=300, deadline=None)
@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_any_value_is_read_the_same(value: Any, ascii_only: bool, indent: int | None) -> None:
    """Types and all: 1 is not 1.0, -0.0 not 0.0, and integers are exact."""
    assert_same(json.dumps(value, ensure_ascii=ascii_only, indent=indent))


@settings(max_examples=1000, deadline=None)
@given(junk)
@example("[1,]")
@example("1" + TAIL.removesuffix("}"))
def test_what_is_no_json_is_refused_the_same(text: str) -> None:
    """With the same words."""
    assert_same(text)


@pytest.mark.parametrize("file", ["stream_entries.json", "foreign_entries.json"])
def test_recorded_messages_are_read_the_same(file: str) -> None:
    """Those of the Go library, and those that it refuses."""
    bodies = [body.encode() for body in _texts(json.loads((WIRE / file).read_text()))]
    assert len(bodies) > 10
    for body in bodies:
        one, two = both(lambda body=body: message.decode(body))
        assert one == two


def _texts(value: Any) -> list[str]:
    """Every text that begins like an object, wherever it stands."""
    if isinstance(value, str):
        return [value] if value.lstrip().startswith("{") else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for each in inner for text in _texts(each)]


def test_a_long_payload_goes_to_msgspec_and_a_short_one_does_not() -> None:
    """Where the call would cost more than it saves, nothing is called."""
    seen: list[str] = []

    def decode(text: str) -> Any:
        seen.append(text)
        return json.loads(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message, "_faster", lambda: decode)
        for payload_text in ("1", json.dumps("x" * 500)):
            body = f"{HEAD}{payload_text}{TAIL}".encode()
            assert message.decode(body).payload == json.loads(payload_text)

    assert seen == [json.dumps("x" * 500)]


def test_without_the_package_python_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "msgspec.json", None)
    monkeypatch.setattr(message, "_faster", message._faster.__wrapped__)

    assert message._faster() is None
    assert message.decode(f"{HEAD}{json.dumps('x' * 500)}{TAIL}".encode()).payload == "x" * 500
