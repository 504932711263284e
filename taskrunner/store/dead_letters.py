"""Floor 2: the dead letters of a group: what failed for good and had no handler."""

import os
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import attrs

from taskrunner import keys, scripts
from taskrunner.clock import LONGEST
from taskrunner.errors import InvalidTaskPayloadError, TaskAlreadyDispatchedError, TaskRunnerError
from taskrunner.message import Message, decode, rewrite
from taskrunner.store.connection import Arg, Connections
from taskrunner.store.group import is_entry_id, next_id

_REQUEUE: Final = scripts.load("requeue")
_PAGE: Final = 100


@attrs.frozen(kw_only=True)
class DeadLetter:
    """One message that failed for good. `failed_at` in unix seconds; `payload` None where it could
    not be decoded.

    `id` names the letter, `message_id` the message over all its attempts.
    """

    id: str
    task_name: str
    payload: Any = attrs.field(repr=False)
    error_type: str
    error: str
    traceback: str = attrs.field(repr=False)
    attempts: int
    failed_at: float
    message_id: str
    message: str = attrs.field(repr=False)  # the message's whole text


_Args: TypeAlias = list[Arg]
_Letters: TypeAlias = list[DeadLetter]  # in the class below `list` is a method


class DeadLetters:
    """The dead letters of one group; oldest first."""

    def __init__(self, connections: Connections, stream: str, group: str) -> None:
        self._connections = connections
        self._stream = stream
        self._group = group
        self._key = keys.dead_letters(group)

    def list(self, limit: int = 100, after: str | None = None) -> _Letters:
        """At most `limit` letters, oldest first, from behind the letter `after`."""
        if limit < 1:
            return []
        start = b"-" if after is None else next_id(after.encode())
        rows = self._connections.call("XRANGE", self._key, start, "+", "COUNT", limit)
        return [_letter(row) for row in rows]

    def get(self, id: str) -> DeadLetter | None:
        """One letter, or None."""
        if not is_entry_id(id):
            return None
        rows = self._connections.call("XRANGE", self._key, id, id)
        return _letter(rows[0]) if rows else None

    def requeue(self, id: str) -> str:
        """Put a letter's message back on the stream with fresh attempts; returns the entry id.

        Raises KeyError where there is no such letter, TaskAlreadyDispatchedError where another
        message holds its unique lock, InvalidTaskPayloadError where no message can be read from it.
        The letter stays in each case.
        """
        letter = self.get(id)
        if letter is None:
            raise KeyError(id)
        message = self._message(letter)
        changes: dict[str, Any] = {
            "attempt": None,
            "unknown": None,
            "id": message.id or letter.message_id or letter.id,
            "only_group": self._group,
        }
        names, token = [self._key, self._stream], ""
        if message.lock_name is not None:
            token = b64encode(os.urandom(16)).decode()
            changes["unique_lock_value"] = token
            names.append(keys.unique(message.lock_name))
        args: _Args = [
            letter.id, rewrite(message.text, changes), token, min(max(1, message.unique_for), LONGEST) * 1000,
        ]  # fmt: skip
        reply = self._connections.run(_REQUEUE, names, args)
        if reply == 0:
            raise TaskAlreadyDispatchedError(
                f"task {message.task_name!r}: another message holds the unique lock {message.lock_name!r}; "
                f"dead letter {id} stays"
            )
        if reply == -1:
            raise KeyError(id)
        return bytes(reply).decode()

    def requeue_all(self) -> tuple[int, int]:
        """Requeue every letter that is there now: (how many were requeued, how many stayed)."""
        requeued = skipped = 0
        for letter in self._walk():
            try:
                self.requeue(letter.id)
                requeued += 1
            except (TaskRunnerError, KeyError):
                skipped += 1
        return requeued, skipped

    def delete(self, id: str) -> bool:
        """Delete one letter; whether it was there."""
        return is_entry_id(id) and bool(self._connections.call("XDEL", self._key, id))

    def purge(self) -> int:
        """Delete all letters; returns how many."""
        return int(self._connections.call("XTRIM", self._key, "MAXLEN", 0))

    def __len__(self) -> int:
        return int(self._connections.call("XLEN", self._key))

    def __bool__(self) -> bool:
        return True

    def _walk(self) -> Iterator[DeadLetter]:
        after: str | None = None
        newest = self._connections.call("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        last = bytes(newest[0][0]).decode() if newest else ""
        while letters := self.list(_PAGE, after):
            for letter in letters:
                yield letter
                if letter.id == last:
                    return
            after = letters[-1].id

    def _message(self, letter: DeadLetter) -> Message:
        try:
            return decode(letter.message.encode())
        except InvalidTaskPayloadError as error:
            raise InvalidTaskPayloadError(
                f"dead letter {letter.id} holds no message that could be run: {error}"
            ) from None


def _letter(row: Any) -> DeadLetter:
    fields = {
        name.decode(): value.decode(errors="replace")
        for name, value in zip(row[1][::2], row[1][1::2], strict=True)
    }
    text = fields.get("message", "")
    try:
        payload = decode(text.encode()).payload
    except InvalidTaskPayloadError:
        payload = None
    return DeadLetter(
        id=row[0].decode(),
        task_name=fields.get("task_name", ""),
        payload=payload,
        error_type=fields.get("error_type", ""),
        error=fields.get("error", ""),
        traceback=fields.get("traceback", ""),
        attempts=int(fields.get("attempts", "0")),
        failed_at=float(fields.get("failed_at", "0")),
        message_id=fields.get("message_id", ""),
        message=text,
    )
