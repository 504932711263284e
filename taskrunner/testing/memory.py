"""Floor 5: what Redis would answer, from this process's memory: the store of eager mode.

Stands in for `Connections`, so that everything above it is the real thing. Knows the commands and
steps that dispatching, executing, settling and looking need, for one group on one stream; each step
does what the Lua file of its name does. Anything else is refused by name. Any thread may call.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Self

import attrs

from taskrunner import scripts
from taskrunner.scripts import Script
from taskrunner.store.connection import Arg
from taskrunner.store.group import BODY_GONE, HELD_BY_ANOTHER, MOVED, NOT_PENDING

_BY_HASH: Final = {
    key: script.name
    for script in map(scripts.load, ("add_unique", "schedule"))
    for key in (script.sha, script.text)
}
"""The steps that are also sent in one round trip with others, by what stands for them there."""


@attrs.define
class _Held:
    """A delivery: who holds it, since when untouched, and how often it was delivered."""

    consumer: bytes
    since: float
    count: int


class Memory:
    """Commands are methods `do_<command>`, steps `step_<script>`, with the arguments Redis gets."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._newest = (0, 0)
        self._streams: dict[str, dict[bytes, list[bytes]]] = {}
        self._fresh: dict[
            str, dict[bytes, int]
        ] = {}  # unread: entry id -> the thread that added it
        self._held: dict[bytes, _Held] = {}
        self._sets: dict[str, dict[bytes, float]] = {}
        self._strings: dict[str, tuple[bytes, float]] = {}  # value, when it runs out

    # --- as `Connections` ---

    def call(self, *args: Arg) -> Any:
        """One command."""
        do = getattr(self, f"do_{str(args[0]).lower()}", None)
        if do is None:
            raise _unknown(f"the command {args[0]!r}")
        with self._lock:
            return do(*args[1:])

    def calls(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Several commands."""
        return [self.call(*command) for command in commands]

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """One step."""
        return self._step(script.name, keys, args)

    def open(self, **limits: float | None) -> Self:
        """A link: memory needs none."""
        return self

    def close(self) -> None:
        """Nothing is open."""

    def _step(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        step = getattr(self, f"step_{name}", None)
        if step is None:
            raise _unknown(f"the step {name}")
        with self._lock:
            return step(list(keys), list(args))

    # --- for the one who runs what waits ---

    def adopt(self) -> None:
        """Let this thread read what others added; otherwise each reads its own."""
        with self._lock:
            for fresh in self._fresh.values():
                fresh.update(dict.fromkeys(fresh, threading.get_ident()))

    # --- streams ---

    def do_xadd(self, key: str, _: str, *fields: Arg) -> bytes:
        milliseconds = int(self._now() * 1000)
        last, number = self._newest
        self._newest = (milliseconds, 0) if milliseconds > last else (last, number + 1)
        entry_id = f"{self._newest[0]}-{self._newest[1]}".encode()
        self._streams.setdefault(key, {})[entry_id] = [_bytes(field) for field in fields]
        self._fresh.setdefault(key, {})[entry_id] = threading.get_ident()
        return entry_id

    def do_xreadgroup(self, *args: Any) -> Any:
        consumer, count, key = _bytes(args[2]), int(args[4]), args[-2]
        fresh, entries = self._fresh.get(key, {}), self._streams.get(key, {})
        mine = [one for one, thread in fresh.items() if thread == threading.get_ident()][:count]
        for entry_id in mine:
            del fresh[entry_id]
            self._held[entry_id] = _Held(consumer, self._now(), 1)
        return [[key, [[entry_id, entries[entry_id]] for entry_id in mine]]] if mine else None

    def do_xpending(self, key: str, group: str, *args: Any) -> list[Any]:
        least = 0
        if args[0] == "IDLE":
            least, args = int(args[1]), args[2:]
        start, end, count = args[:3]
        return [
            [entry_id, held.consumer, self._idle(held), held.count]
            for entry_id, held in sorted(self._held.items(), key=lambda item: _order(item[0]))
            if _between(entry_id, start, end) and self._idle(held) >= least
        ][: int(count)]

    def do_xlen(self, key: str) -> int:
        return len(self._streams.get(key, {}))

    def do_xrange(self, key: str, start: Arg, end: Arg, *count: Any) -> list[Any]:
        rows = [
            [entry_id, fields]
            for entry_id, fields in self._streams.get(key, {}).items()
            if _between(entry_id, start, end)
        ]
        return rows[: int(count[1])] if count else rows

    def do_xrevrange(self, key: str, end: Arg, start: Arg, *count: Any) -> list[Any]:
        rows = self.do_xrange(key, start, end)[::-1]
        return rows[: int(count[1])] if count else rows

    def do_xdel(self, key: str, *ids: Arg) -> int:
        entries, fresh = self._streams.get(key, {}), self._fresh.get(key, {})
        found = [one for one in map(_bytes, ids) if entries.pop(one, None) is not None]
        for entry_id in found:
            fresh.pop(entry_id, None)
        return len(found)

    def do_xtrim(self, key: str, _: str, most: Any) -> int:
        ids = list(self._streams.get(key, {}))
        return self.do_xdel(key, *ids[: max(0, len(ids) - int(most))])

    # --- sorted sets ---

    def do_zrange(self, key: str, start: Any, stop: Any, _: str) -> list[Any]:
        return _flat(self._ranked(key)[int(start) : int(stop) + 1])

    def do_zrangebyscore(self, key: str, _: str, most: Any, *args: Any) -> list[Any]:
        ranked = [one for one in self._ranked(key) if one[1] <= float(most)]
        return _flat(ranked[int(args[2]) :][: int(args[3])])

    def do_zcard(self, key: str) -> int:
        return len(self._sets.get(key, {}))

    def do_zscan(self, key: str, *args: Arg) -> list[Any]:
        return [b"0", _flat(self._ranked(key))]

    # --- strings and the clock ---

    def do_get(self, key: str) -> bytes | None:
        value, until = self._strings.get(key, (b"", 0.0))
        return value if until > self._now() else None

    def do_mget(self, *keys: str) -> list[bytes | None]:
        return [self.do_get(key) for key in keys]

    def do_set(self, key: str, value: Arg, _: str, ms: Any, *options: str) -> bytes | None:
        if "NX" in options and self.do_get(key) is not None:
            return None
        self._strings[key] = (_bytes(value), self._now() + float(ms) / 1000)
        return b"OK"

    def do_del(self, key: str) -> int:
        there = self.do_get(key) is not None
        self._strings.pop(key, None)
        return int(there)

    def do_pttl(self, key: str) -> int:
        if self.do_get(key) is None:
            return -2
        return round((self._strings[key][1] - self._now()) * 1000)

    def do_time(self) -> tuple[int, int]:
        now = self._now()
        return int(now), int(now % 1 * 1_000_000)

    # --- steps of the producer and the operator ---

    def do_evalsha(self, script: str, count: Any, *rest: Any) -> Any:
        return self._step(_BY_HASH[script], rest[: int(count)], rest[int(count) :])

    do_eval = do_evalsha

    def step_add_unique(self, keys: list[str], args: list[Any]) -> Any:
        body, token, ms = args
        if self.do_get(keys[1]) is not None:
            return 0
        self.do_set(keys[1], token, "PX", ms)
        return self.do_xadd(keys[0], "*", "payload", body)

    def step_schedule(self, keys: list[str], args: list[Any]) -> list[Any]:
        kind, when, body, head, tail, token, ms = args[:7]
        now, lock = self._now(), keys[2] if len(keys) > 2 else None
        if lock is not None and self.do_get(lock) is not None:
            return [0]
        due = now + float(when) if kind == "in" else float(when)
        if lock is not None:
            self.do_set(lock, token, "PX", max(0.0, due - now) * 1000 + ms)
        if due <= now:
            return [1, self.do_xadd(keys[0], "*", "payload", body)]
        self._delay(keys[1], due, head, tail)
        return [2, f"{due:.6f}".encode()]

    def step_cancel(self, keys: list[str], args: list[Any]) -> int:
        if self._sets.get(keys[0], {}).pop(_bytes(args[0]), None) is None:
            return 0
        self._unlock(keys[1:], args[1])
        return 1

    def step_requeue(self, keys: list[str], args: list[Any]) -> Any:
        letter_id, body, token, ms = args
        if not self.do_xrange(keys[0], letter_id, letter_id):
            return -1
        if len(keys) > 2:
            if self.do_get(keys[2]) is not None:
                return 0
            self.do_set(keys[2], token, "PX", ms)
        self.do_xdel(keys[0], letter_id)
        return self.do_xadd(keys[1], "*", "payload", body)

    def step_delete(self, keys: list[str], args: list[Any]) -> int:
        total = 0
        for entry_id, lock, token in _groups(args, 3):
            self._held.pop(_bytes(entry_id), None)
            deleted = self.do_xdel(keys[0], entry_id)
            total += deleted
            if deleted and lock:
                self._unlock([keys[lock - 1]], token)
        return total

    # --- steps of the consumer ---

    def step_ack(self, keys: list[str], args: list[Any]) -> int:
        return sum(self._finish(keys[0], entry_id, args[1]) for entry_id in args[2:])

    def step_ack_unique(self, keys: list[str], args: list[Any]) -> int:
        total = 0
        for lock, (entry_id, token) in zip(keys[1:], _groups(args[2:], 2), strict=True):
            if self._finish(keys[0], entry_id, args[1]):
                self._unlock([lock], token)
                total += 1
        return total

    def step_park(self, keys: list[str], args: list[Any]) -> list[int]:
        statuses = []
        for entry_id, consumer, count, idle, recount, lock, token, ms in _groups(args[3:], 8):
            status = self._status(entry_id, consumer, count)
            if status == MOVED:
                self._held[_bytes(entry_id)] = _Held(
                    _bytes(args[1]),
                    self._now() - int(idle) / 1000,
                    int(count if recount == "" else recount),
                )
                if lock:
                    self._extend(keys[lock - 1], token, ms)
            statuses.append(status)
        return statuses

    def step_postpone(self, keys: list[str], args: list[Any]) -> int:
        _, delete, entry_id, consumer, count, delay, head, tail, token, ms, _ = args
        status = self._status(entry_id, consumer, count)
        if status == MOVED:
            self._delay(keys[1], self._now() + float(delay), head, tail)
            self._finish(keys[0], entry_id, delete)
            for lock in keys[2:]:
                self._extend(lock, token, ms)
        return status

    def step_bury(self, keys: list[str], args: list[Any]) -> int:
        _, delete, entry_id, consumer, count, most, token, without_body, *fields = args
        status = self._status(entry_id, consumer, count)
        if status != MOVED:
            return status
        entry = self._streams.get(keys[0], {}).get(_bytes(entry_id))
        if entry is None:
            status = BODY_GONE
        elif most:
            body = dict(zip(entry[::2], entry[1::2], strict=True)).get(b"payload", b"")
            self._bury(keys[1], most, *fields, "message", b"" if without_body == "1" else body)
        self._finish(keys[0], entry_id, delete)
        self._unlock(keys[2:], token)
        return status

    def step_start_unique(self, keys: list[str], args: list[Any]) -> int:
        token, ms, _, entry_id, consumer, count = args
        if self._status(entry_id, consumer, count) != MOVED:
            return NOT_PENDING
        holder = self.do_get(keys[0])
        if holder not in (None, _bytes(token)):
            return HELD_BY_ANOTHER
        if holder is None or self.do_pttl(keys[0]) < ms:
            self.do_set(keys[0], token, "PX", ms)
        return MOVED

    def step_claim(self, keys: list[str], args: list[Any]) -> list[Any]:
        rows: list[Any] = []
        room = int(args[3])
        for entry_id in map(_bytes, args[4:]):
            if room <= 0:
                break
            held = self._held.get(entry_id)
            if held is None:
                rows.append([entry_id, -2])
            elif self._idle(held) < int(args[2]):
                rows.append([entry_id, -1, held.consumer, self._idle(held)])
            else:
                fields = self._streams.get(keys[0], {}).get(entry_id)
                if fields is None:
                    del self._held[entry_id]
                    rows.append([entry_id, 0, held.consumer, []])
                    continue
                self._held[entry_id] = _Held(_bytes(args[1]), self._now(), held.count + 1)
                rows.append([entry_id, held.count + 1, held.consumer, fields])
                room -= sum(map(len, fields))
        return rows

    def step_promote(self, keys: list[str], args: list[Any]) -> list[Any]:
        if self.do_get(keys[0]) != _bytes(args[0]):
            return [0]
        delayed = self._sets.setdefault(keys[1], {})
        statuses: list[int] = []
        for member, kind, body, lock, token, ms, put_off in _groups(args[1:], 7):
            if member not in delayed:
                statuses.append(0)
            elif kind == "take" and self.do_get(keys[lock - 1]) is not None:
                delayed[member] = float(put_off)
                statuses.append(2)
            else:
                if kind == "dead":
                    if token:
                        fields = ("error_type", "InvalidTaskPayloadError", "error", body)
                        at = ("failed_at", f"{self._now():.6f}")
                        self._bury(keys[3], token, *fields, *at, "message", member)
                else:
                    self.do_xadd(keys[2], "*", "payload", body)
                    if kind == "take":
                        self.do_set(keys[lock - 1], token, "PX", ms)
                del delayed[member]
                statuses.append(1)
        return [1, statuses]

    def step_keep(self, keys: list[str], args: list[Any]) -> int:
        value = self.do_get(keys[0])
        if value is None:
            return 0
        if value != _bytes(args[0]):
            return -1
        self.do_set(keys[0], value, "PX", args[1])
        return 1

    def step_release(self, keys: list[str], args: list[Any]) -> int:
        return self._unlock(keys, args[0])

    def step_remove_consumer(self, keys: list[str], args: list[Any]) -> int:
        return 0  # there are no consumers here, only their names

    # --- parts ---

    def _idle(self, held: _Held) -> int:
        return round((self._now() - held.since) * 1000)

    def _status(self, entry_id: Arg, consumer: Arg, count: Any) -> int:
        held = self._held.get(_bytes(entry_id))
        if held is None:
            return NOT_PENDING
        ours = held.consumer == _bytes(consumer) and held.count == int(count)
        return MOVED if ours else HELD_BY_ANOTHER

    def _finish(self, key: str, entry_id: Arg, delete: str) -> bool:
        acked = self._held.pop(_bytes(entry_id), None) is not None
        if delete == "1":
            self.do_xdel(key, entry_id)
        return acked

    def _bury(self, key: str, most: Any, *fields: Arg) -> None:
        self.do_xadd(key, "*", *fields)
        self.do_xtrim(key, "MAXLEN", most)

    def _delay(self, key: str, due: float, head: str, tail: str) -> None:
        member = f"{head}{-int(-due // 1)}{tail}".encode()
        self._sets.setdefault(key, {})[member] = round(due, 6)

    def _extend(self, lock: str, token: Arg, ms: Any) -> None:
        if self.do_get(lock) == _bytes(token) and self.do_pttl(lock) < ms:
            self.do_set(lock, token, "PX", ms)

    def _unlock(self, locks: Iterable[str], token: Arg) -> int:
        return sum(self.do_del(lock) for lock in locks if self.do_get(lock) == _bytes(token))

    def _ranked(self, key: str) -> list[tuple[bytes, float]]:
        return sorted(self._sets.get(key, {}).items(), key=lambda item: (item[1], item[0]))


def _unknown(what: str) -> RuntimeError:
    return RuntimeError(
        f"eager mode has no Redis, and its stand-in does not know {what}: "
        "use a server for this test (fixture taskrunner_runner, and taskrunner.testing.drain)"
    )


def _bytes(value: Arg) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


def _between(entry_id: bytes, start: Arg, end: Arg) -> bool:
    first, last = _bytes(start), _bytes(end)
    return (first == b"-" or _order(first) <= _order(entry_id)) and (
        last == b"+" or _order(entry_id) <= _order(last)
    )


def _flat(ranked: Iterable[tuple[bytes, float]]) -> list[Any]:
    return [part for member, score in ranked for part in (member, f"{score:.6f}".encode())]


def _groups(args: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [args[start : start + size] for start in range(0, len(args), size)]
