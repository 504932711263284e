"""Floor 1: the bytes on the wire, and the only module that knows them.

Two shapes are read and written: the *message* (the `payload` field of a stream entry) and the
*delayed member* (in the delayed set). Both are JSON objects shared with Go programs. So the reader
is as lenient as theirs (any order, names in any letter case, absent, null, unknown and repeated
fields, of which the last wins) and the writer plain: compact, one order, integers as digits.

Moves rewrite text, never values: a payload leaves with the digits it came with. Which key a message
goes to, and when, is the business of the store.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeVar

from taskrunner.errors import InvalidTaskPayloadError, PayloadTooLargeError

MAX_COUNT = 10**9  # of `attempt` and `unknown`: bounds what a hostile producer may claim
MAX_ID = 200  # characters of `id`
MAX_NAME = 1000  # characters of a task's name
MAX_KEY = 5000  # characters of a unique lock's name

_UNIQUE = ("unique", "unique_for", "unique_key", "unique_lock_value")
_FIELDS = (*_UNIQUE, "reservation_timeout", "task_name", "payload")  # in Go's order
_EXTRAS = ("id", "attempt", "unknown", "only_group", "enqueued_at")
_OPTIONAL = ("id", "only_group", "enqueued_at")  # of a wrong type: as if absent
_MESSAGE = frozenset(_FIELDS)
_MEMBER = frozenset(("id", "task", "time", "payload", "reservation_timeout", *_UNIQUE))
_EXPECTED = frozenset((*_FIELDS, *_EXTRAS))
_LONGEST = {  # they end up in logs, keys and reports: nobody may fill those
    "id": MAX_ID,
    "task_name": MAX_NAME,
    "task": MAX_NAME,
    "only_group": MAX_NAME,
    "unique_key": MAX_KEY,
    "unique_lock_value": MAX_ID,
}
_control = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]").search
_INT64, _COUNT = range(-(2**63), 2**63), range(MAX_COUNT + 1)
_TYPES: dict[str, type] = {
    "unique": bool,
    **dict.fromkeys(("unique_for", "reservation_timeout", "time", "attempt", "unknown"), int),
    **dict.fromkeys(("unique_key", "unique_lock_value", "task_name", "task"), str),
    **dict.fromkeys(("id", "only_group"), str),
    "enqueued_at": float,
    "payload": object,  # anything
}
_RANGES = {key: _COUNT if key in _EXTRAS else _INT64 for key in _TYPES if _TYPES[key] is int}
_QUOTED = {f'"{name}"': name for name in _EXPECTED | _MEMBER}


class Head(NamedTuple):
    """What the messages of one task mostly have in common, so that most share one of these."""

    task_name: str
    unique: bool = False
    unique_for: int = 0  # seconds
    unique_key: str = ""
    unique_lock_value: str = ""
    reservation_timeout: int = 0  # nanoseconds
    attempt: int = 0  # deliveries spent before this entry
    unknown: int = 0  # moves of an unknown task
    only_group: str | None = None


def _of_head(field: str) -> Any:
    return property(attrgetter(f"head.{field}"))


class Message:
    """One call of a task as it lies in the stream, decoded; `text` is the whole JSON text.

    There is one for each task that runs, so it is small, and what few ask for (`id`,
    `enqueued_at`) is taken from the text when they do. Never changed once it is made.
    """

    __slots__ = ("_rest", "head", "payload", "text")

    def __init__(
        self, head: Head, payload: Any, text: str, rest: "int | tuple[str | None, float | None]"
    ) -> None:
        self.head = head
        self.payload = payload
        self.text = text
        self._rest = rest  # id and enqueued_at, or where in the text a usual tail begins

    task_name: str = _of_head("task_name")
    unique: bool = _of_head("unique")
    unique_for: int = _of_head("unique_for")
    unique_key: str = _of_head("unique_key")
    unique_lock_value: str = _of_head("unique_lock_value")
    reservation_timeout: int = _of_head("reservation_timeout")
    attempt: int = _of_head("attempt")
    unknown: int = _of_head("unknown")
    only_group: str | None = _of_head("only_group")

    @property
    def id(self) -> str | None:
        """The message's id, the same over all its moves; None where it has none yet."""
        return self._read_rest()[0]

    @property
    def enqueued_at(self) -> float | None:
        """When it was dispatched, in unix seconds."""
        return self._read_rest()[1]

    def _read_rest(self) -> tuple[str | None, float | None]:
        rest = self._rest
        if isinstance(rest, int):
            found = _usual_tail(self.text, rest)
            assert found is not None  # or `decode` would have read it
            rest = found[1], float(found[2])
        return rest

    @property
    def lock_name(self) -> str | None:
        """Name of the unique lock, or None; Go leaves `unique_key` empty without a key function."""
        return (self.unique_key or self.task_name) if self.unique else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (self.head, self.payload, self.text) == (other.head, other.payload, other.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        rest = f"id={self.id!r}, enqueued_at={self.enqueued_at!r}, text={self.text!r}"
        return f"{type(self).__name__}({self.head}, payload={self.payload!r}, {rest})"


class DelayedMessage(Message):
    """One call that waits in the delayed set; `payload_text` is for hashing (`canonical`)."""

    __slots__ = ("payload_text", "time")

    time: int  # due, in whole unix seconds
    payload_text: str


# --- JSON ---


def _finite(digits: str) -> float:
    value = float(digits)
    if value - value != 0.0:
        raise InvalidTaskPayloadError(f"not JSON: the number {digits[:40]} is out of range")
    return value


def _refuse(constant: str) -> NoReturn:
    raise InvalidTaskPayloadError(f"not JSON: {constant}")


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)
_scan = _decoder.raw_decode
_dumps = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
_quoted = lru_cache(maxsize=1024)(_dumps)
_space = re.compile(r"[ \t\n\r]*+")
_open = re.compile(r"[ \t\n\r]*+\{[ \t\n\r]*+(\}?)")
_key = re.compile(r'("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\n\r]*+:[ \t\n\r]*+', re.DOTALL)
_after = re.compile(r"[ \t\n\r]*+(?:(\})|,[ \t\n\r]*+)")
# Escapes in reading order, so that a backslash which is itself escaped starts none.
_escape = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def _text(body: bytes) -> str:
    """Bytes as text that can be stored again: what is not Unicode becomes U+FFFD, as in Go."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.decode(errors="replace")


def _paired(text: str) -> str:
    """The same JSON with each lone surrogate escape made U+FFFD: no UTF-8 text could hold it."""
    if "\\" in text and ("\\ud" in text or "\\uD" in text):
        return _escape.sub(lambda found: "\\ufffd" if found[1] else found[0], text)
    return text


def _refusal(error: Exception) -> InvalidTaskPayloadError:
    if isinstance(error, InvalidTaskPayloadError):
        return error
    if isinstance(error, json.JSONDecodeError):
        return InvalidTaskPayloadError(f"not JSON: {error}")
    if isinstance(error, RecursionError):
        return InvalidTaskPayloadError("nested too deeply")
    return InvalidTaskPayloadError("an integer of more digits than Python reads")


_LONG = 300  # characters from which on a faster decoder is worth its call


@cache
def _faster() -> Callable[[str], Any] | None:
    """msgspec's decoder, where the extra `fast` is installed.

    Whatever it refuses is left to Python's, so that errors are the same; what it takes has the same
    value. It encodes some floats and types differently, so it writes nothing.
    """
    try:
        from msgspec.json import Decoder  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    decode: Callable[[str], Any] = Decoder().decode
    return decode


def _load(text: str) -> Any:
    """The value of a whole JSON text."""
    if len(text) >= _LONG and (decode := _faster()) is not None:
        with suppress(Exception):  # Python's decoder says what is wrong, if anything is
            return decode(text)
    try:
        try:
            value, end = _scan(text)
            if end == len(text):
                return value
        except json.JSONDecodeError:
            pass
        return _decoder.decode(text)  # white space around it, or an error that says where
    except (ValueError, RecursionError) as error:
        raise _refusal(error) from None


def _spans(text: str) -> list[tuple[str, str, str, Any]]:
    """Top-level members in order: key, value text, member text (both as they stand), value."""
    spans: list[tuple[str, str, str, Any]] = []
    found = _open.match(text)
    if not found:
        raise InvalidTaskPayloadError("not a JSON object")
    try:
        while found[1] != "}":
            key = _key.match(text, found.end())
            if not key:
                raise json.JSONDecodeError("Expecting a key and ':'", text, found.end())
            value, end = _scan(text, key.end())
            name = _QUOTED.get(key[1]) or _scan(key[1])[0]
            spans.append((name, text[key.end() : end], text[key.start(1) : end], value))
            found = _after.match(text, end)
            if not found:
                raise json.JSONDecodeError("Expecting ',' or '}'", text, end)
        if not _space.fullmatch(text, found.end()):
            raise json.JSONDecodeError("Extra data", text, found.end())
    except (ValueError, RecursionError) as error:
        raise _refusal(error) from None
    return spans


# --- reading ---


class _Object(NamedTuple):
    """An object's members: those that Go reads into a field, and the others as they stand."""

    values: dict[str, Any]
    texts: dict[str, str]
    extras: list[tuple[str, str]]  # key, member text

    def checked(self, name: str) -> dict[str, Any]:
        """The values, all of the right type and with a task name under `name`."""
        complaint = _complaint(self.values)
        if complaint or not self.values.get(name):
            raise InvalidTaskPayloadError(complaint or f"no {name}")
        values = dict(self.values)
        return {"task_name": values.pop(name), **values}


def _read(text: str, fields: frozenset[str]) -> _Object:
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    extras: list[tuple[str, str]] = []
    for key, value_text, member, value in _spans(text):
        field = key.casefold()
        if field not in fields:
            extras.append((key, member))
            field = key
        if (field in fields or field in _EXTRAS) and (value is not None or field == "payload"):
            values[field] = value  # a null leaves a field as it was
            texts[field] = value_text
    if type(values.get("enqueued_at")) is int and values["enqueued_at"] in _INT64:
        values["enqueued_at"] = float(values["enqueued_at"])
    for key in _OPTIONAL:
        if key in values and _complaint({key: values[key]}):
            del values[key]
    return _Object(values, texts, extras)


def _complaint(fields: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields by Go's types: no fraction for an integer, no 1 for true."""
    for key, value in fields.items():
        kind = _TYPES[key]
        if type(value) is not kind and kind is not object:
            return f"{key}: {type(value).__name__} where {kind.__name__} belongs"
        if kind is int and value not in _RANGES[key]:
            return f"{key}: out of range"
    for key, most in _LONGEST.items():
        text = fields.get(key)
        if text is not None and (len(text) > most or (key != "unique_key" and _control(text))):
            return f"{key}: longer than {most} characters, or with control characters"
    if fields.get("id") == "":
        return "id: empty"
    return None


def _drop_strange(fields: dict[str, Any]) -> bool:
    """Leaves what this reader takes; False if one of the fields has its name in another case."""
    strange = fields.keys() - _EXPECTED
    for key in strange:
        del fields[key]
    return not any(key.casefold() in _MESSAGE for key in strange)


_heads: dict[bytes, Head] = {}
"""How a message begins, up to its payload, as seen so far, and what that decodes to. Messages of one
task that is not unique all begin alike, so only their payload and tail are left to read."""

_latest: tuple[bytes, Head] = (b"\xff", Head(task_name=""))  # which no text begins with
_MOST_HEADS = 1024
_BEFORE_PAYLOAD = b',"payload":'
_scan_once: Callable[[str, int], tuple[Any, int]] = vars(_decoder)["scan_once"]
_usual_tail = re.compile(
    r',"id":"([0-9A-Za-z-]{1,200})","enqueued_at":((?:0|[1-9]\d{0,11})\.\d{1,9})\}', re.ASCII
).fullmatch
"""What `encode` writes behind a payload."""


def decode(body: bytes) -> Message:
    """The message in a stream entry's `payload` field; InvalidTaskPayloadError if it is none."""
    global _latest  # noqa: PLW0603 - a memo: whichever thread was last
    start, head = _latest
    if not body.startswith(start):
        # The mark can't lie inside a string, for a quote in there is escaped.
        start = body[: body.find(_BEFORE_PAYLOAD) + len(_BEFORE_PAYLOAD)]
        if start not in _heads:
            message = _decode(body)
            if not message.head.unique:  # its token begins no other
                _learn(start)
            return message
        head = _heads[start]
        _latest = start, head
    try:
        text = body.decode()
        payload, end = (_scan_once if len(text) < _LONG else _scan_long)(text, len(start))
    except (ValueError, RecursionError, StopIteration):
        return _decode(body)
    if _usual_tail(text, end) is None or ("\\" in text and text is not _paired(text)):
        return _decode(body)
    return Message(head, payload, text, end)


def _scan_long(text: str, at: int) -> tuple[Any, int]:
    """The payload that begins there, and its end: taken to be where a usual tail begins, which is so
    if all before it is one value."""
    end = text.rfind(',"id":"')
    if end > at and (decode := _faster()) is not None:
        with suppress(Exception):  # then Python's decoder says where it ends
            return decode(text[at:end]), end
    return _scan_once(text, at)


def _learn(start: bytes) -> None:
    """Remember how a message begins: with the six fields in their plain form, of a task that is not
    unique."""
    if not start.endswith(_BEFORE_PAYLOAD) or not start.isascii():
        return
    if len(_heads) >= _MOST_HEADS or len(start) > 1024:
        return
    try:
        fields = _load(start.removesuffix(_BEFORE_PAYLOAD).decode() + "}")
    except InvalidTaskPayloadError:  # the mark stands inside another field
        return
    if list(fields) == list(_FIELDS[:6]) and not _complaint(fields) and not fields["unique"]:
        _heads[start] = Head(**fields)


def _decode(body: bytes) -> Message:
    text = _text(body)
    whole = _paired(text)
    fields = _load(whole)
    if type(fields) is not dict:
        raise InvalidTaskPayloadError(f"{type(fields).__name__} where an object belongs")
    if (
        (_EXPECTED.issuperset(fields) or _drop_strange(fields))
        and not _complaint(fields)
        and fields.get("task_name")
    ):
        return _made(Message, fields, text)
    # The slow way: a name in another case, a null, a key of ours of a wrong type, a real fault.
    return _made(Message, _read(whole, _MESSAGE).checked("task_name"), text)


_M = TypeVar("_M", bound=Message)


def _made(kind: type[_M], fields: dict[str, Any], text: str) -> _M:
    """A message of checked fields, which are used up."""
    payload, rest = (
        fields.pop("payload", None),
        (fields.pop("id", None), fields.pop("enqueued_at", None)),
    )
    return kind(Head(**fields), payload, text, rest)


def salvage(body: bytes) -> Message:
    """What can be known of a body that `decode` refuses; never raises, `task_name` may be empty."""
    text = _text(body)
    try:
        values = _read(_paired(text), _MESSAGE).values
    except InvalidTaskPayloadError:
        values = {}
    sound = {key: value for key, value in values.items() if _complaint({key: value}) is None}
    return _made(Message, {"task_name": "", **sound}, text)


def decode_delayed(member: bytes) -> DelayedMessage:
    """The call in a member of the delayed set; InvalidTaskPayloadError if it is none."""
    text = _text(member)
    found = _read(_paired(text), _MEMBER)
    fields = found.checked("task")
    time = fields.pop("time", 0)
    message = _made(DelayedMessage, fields, text)
    message.time, message.payload_text = time, found.texts.get("payload", "null")
    return message


def members(text: str) -> list[tuple[str, str]]:
    """Key and value text of each top-level member, in order, unchanged."""
    return [(key, value_text) for key, value_text, _, _ in _spans(text)]


# --- writing ---


def encode_payload(payload: Any, max_bytes: int) -> str:
    """A payload as compact JSON text, exact for integers of any size; tuples become lists.

    Raises InvalidTaskPayloadError with the path of what JSON cannot hold (`payload.user.created:
    datetime`), and PayloadTooLargeError above `max_bytes` of UTF-8. A key that is not a str is
    refused: 1 would come back as "1".
    """
    try:
        text = _dumps(payload)
        size = len(text) if text.isascii() else len(text.encode())
    except RecursionError:
        raise InvalidTaskPayloadError("payload: nested too deeply, or it contains itself") from None
    except (TypeError, ValueError) as error:
        raise InvalidTaskPayloadError(_fault(payload, "payload") or f"payload: {error}") from error
    if "{" in text and _has_odd_key(payload):
        raise InvalidTaskPayloadError(_fault(payload, "payload") or "payload: a key is not a str")
    if size > max_bytes:
        raise PayloadTooLargeError(f"payload: {size} bytes, above max_payload_bytes={max_bytes}")
    return text


_SCALARS = frozenset((str, int, float, bool, type(None)))
_FAULTS = {
    float: " (NaN and Infinity)",
    int: " (of more digits than Python writes)",
    str: " (with a lone surrogate)",
}


def _has_odd_key(payload: Any) -> bool:
    todo = [payload]
    for value in todo:  # grows meanwhile
        if type(value) in _SCALARS:
            continue
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    return True
            todo.extend(value.values())
        elif isinstance(value, list | tuple):
            todo.extend(value)
    return False


def _fault(value: Any, path: str) -> str | None:
    """Path and reason of the first thing that JSON cannot hold."""
    try:
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    return f"{path}: a key of type {type(key).__name__}, JSON has only str"
                step = f".{key[:80]}" if key.isidentifier() else f"[{key[:80]!a}]"
                if fault := _fault(key, path + step) or _fault(item, path + step):
                    return fault
        elif isinstance(value, list | tuple):
            for at, item in enumerate(value):
                if fault := _fault(item, f"{path}[{at}]"):
                    return fault
        else:
            _dumps(value).encode()
    except (TypeError, ValueError):
        cure = ": send its isoformat()" if hasattr(value, "isoformat") else ""
        return f"{path}: {type(value).__name__}{_FAULTS.get(type(value), '')} is not JSON{cure}"
    except RecursionError:
        pass
    return None


def encode(
    task_name: str,
    payload_text: str,
    *,
    id: str,
    enqueued_at: float,
    reservation_timeout_ns: int,
    unique_for: int = 0,
    lock_name: str = "",
    token: str = "",
    extra: Mapping[str, str] | None = None,
) -> str:
    """A new message: the seven fields in Go's order, then `id`, `enqueued_at` and `extra`.

    It is unique where a `token` is given. `reservation_timeout_ns` must not be 0: Go spins on it.
    """
    unique = '"unique":false,"unique_for":0,"unique_key":"","unique_lock_value":""'
    if token:
        values = (True, unique_for, lock_name, token)
        unique = ",".join(
            f'"{field}":{_dumps(value)}' for field, value in zip(_UNIQUE, values, strict=True)
        )
    return (
        f'{{{unique},"reservation_timeout":{reservation_timeout_ns:d}'
        f',"task_name":{_quoted(task_name)},"payload":{payload_text}'
        f',"id":{_dumps(id)},"enqueued_at":{enqueued_at!r}{_members(extra) if extra else ""}}}'
    )


def _members(extra: Mapping[str, str]) -> str:
    for key in extra:
        if key in _EXTRAS or key.casefold() in _MESSAGE | _MEMBER:
            raise ValueError(f"extra key {key!r} is a field of the message")
    return "".join(f",{_dumps(key)}:{_dumps(value)}" for key, value in extra.items())


def rewrite(text: str, changes: Mapping[str, Any]) -> str:
    """The same message with top-level members replaced, added, or (None) removed.

    Every other member keeps its text. The seven fields are found in any letter case, as the reader
    finds them; all other keys are taken as they stand.
    """
    left = {
        key: f"{_quoted(key)}:{_dumps(value)}"
        for key, value in changes.items()
        if value is not None
    }
    parts: list[str] = []
    for key, _, member, _ in _spans(text):
        name = key.casefold() if key.casefold() in _MESSAGE else key
        if name not in changes:
            parts.append(member)
        elif name in left:
            parts.append(left.pop(name))
    return "{" + ",".join((*parts, *left.values())) + "}"


def to_delayed(
    text: str,
    *,
    id: str,
    attempt: int | None = None,
    unknown: int | None = None,
    only_group: str | None = None,
) -> tuple[str, str]:
    """A stream message as a delayed member in two halves: head + str(time) + tail.

    Between them a script puts a time by the server's clock. The payload and the extra keys keep
    their text; `attempt`, `unknown` and `only_group` replace the message's where given.
    """
    found = _read(text, _MESSAGE)
    found.checked("task_name")
    texts = found.texts
    given = {"attempt": attempt, "unknown": unknown, "only_group": only_group}
    ours = {key: _dumps(value) for key, value in given.items() if value is not None}
    kept = _FIELDS[:5] if found.values.get("unique") else _FIELDS[4:5]
    parts = [f'"{field}":{texts[field]}' for field in kept if field in texts]
    parts += [
        member
        for key, member in found.extras
        if key not in ours and key.casefold() not in _MEMBER  # `Task` would be Go's `task` there
    ]
    parts += [f'"{key}":{value}' for key, value in ours.items()]
    head = f'{{"id":{_dumps(id)},"task":{texts["task_name"]},"time":'
    return head, f',"payload":{",".join((texts.get("payload", "null"), *parts))}}}'


def from_delayed(
    text: str,
    *,
    reservation_timeout_ns: int,
    unique: tuple[int, str, str] | None = None,
) -> str:
    """A due member as a stream message; its payload and its extra keys keep their text.

    `reservation_timeout_ns` and `unique` (unique_for, lock name, token) serve a member that brings
    none of its own, as one from Go does.
    """
    found = _read(text, _MEMBER)
    found.checked("task")
    given = (False, 0, "", "") if unique is None else (True, *unique)
    texts = {field: _dumps(value) for field, value in zip(_UNIQUE, given, strict=True)}
    if unique is None or found.values.get("unique"):
        texts |= {field: value for field, value in found.texts.items() if field in _UNIQUE}
    timeout = found.values.get("reservation_timeout") or reservation_timeout_ns
    parts = [f'"{field}":{texts[field]}' for field in _UNIQUE]
    parts.append(f'"reservation_timeout":{timeout:d},"task_name":{found.texts["task"]}')
    parts.append(f'"payload":{found.texts.get("payload", "null")}')
    if "id" in found.values:
        parts.append(f'"id":{found.texts["id"]}')
    parts += [member for key, member in found.extras if key.casefold() not in _MESSAGE]
    return "{" + ",".join(parts) + "}"


def canonical(payload_text: str) -> bytes:
    """Canonical JSON of a payload, for hashing: keys sorted, compact, UTF-8.

    true, 1, 1.0 and "1" stay different; nothing is normalised.
    """
    try:
        value = _load(_paired(payload_text))
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise InvalidTaskPayloadError("payload: nested too deeply") from None
    return text.encode()
