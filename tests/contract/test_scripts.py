"""The atomic steps: each says what it takes and gives, names every key, adds before it removes, and
runs on every server at hand."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import redis

import taskrunner
from taskrunner import scripts
from taskrunner.cli.embedded import EmbeddedServer
from tests.support.binaries import servers_at_hand
from tests.support.names import Names

LUA = Path(str(taskrunner.__file__)).parent / "store" / "lua"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(LUA.glob("*.lua"))}
PARTS = {name for name, text in TEXTS.items() if text.startswith("-- Part:")}
STEPS = sorted(TEXTS.keys() - PARTS)


def header(name: str) -> str:
    """The comment lines on top, as one text."""
    lines = []
    for line in TEXTS[name].splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return "\n".join(lines)


def section(name: str, title: str) -> str:
    """What the header says about KEYS, ARGV or Returns, over all its lines."""
    found = re.search(
        rf"^{title}\b(.*?)(?=^(?:uses:|KEYS|ARGV|Returns)\b|\Z)", header(name), re.M | re.S
    )
    return found[1] if found else ""


def code(name: str) -> str:
    """Without comments."""
    return re.sub(r"--.*", "", TEXTS[name])


# --- what is written on top ---


@pytest.mark.parametrize("name", STEPS)
def test_a_step_says_its_purpose_keys_arguments_and_answer(name: str) -> None:
    """A step is read by people who know neither its caller nor Lua well."""
    purpose = header(name).splitlines()[0]

    assert len(purpose) > 20
    assert purpose.endswith((".", ":")) or purpose[-1].isalnum() or purpose[-1] == ","
    for title in ("KEYS", "ARGV", "Returns"):
        assert section(name, title).strip(), f"{name}.lua: no {title} in its header"


@pytest.mark.parametrize("name", sorted(PARTS))
def test_a_part_says_what_each_of_its_functions_does(name: str) -> None:
    """Parts are put in front of steps; their functions are the steps' vocabulary."""
    functions = re.findall(r"^local function (\w+)\(", code(name), re.MULTILINE)

    assert functions
    for function in functions:
        assert f"{function}(" in header(name)
    assert "KEYS" not in code(name), "a part gets its keys from the step"


@pytest.mark.parametrize("name", STEPS)
def test_every_key_that_is_used_is_described_with_its_type(name: str) -> None:
    """From 1 without gaps; the type says which commands it can meet."""
    described = section(name, "KEYS")
    numbers = [int(number) for number in re.findall(r"(?:^|,)\s*(\d+)(?:\.\.)? ", described)]
    used = {int(number) for number in re.findall(r"\bKEYS\[(\d+)\]", code(name))}
    open_ended = bool(re.search(r"\d+\.\. ", described))

    assert numbers == list(range(1, len(numbers) + 1))
    assert len(re.findall(r"\((?:string|stream|zset|hash|list)\)", described)) >= len(numbers)
    assert used <= set(numbers)
    assert open_ended or not re.search(r"KEYS\[[a-z]", code(name))


@pytest.mark.parametrize("name", STEPS)
def test_every_argument_that_is_used_is_described(name: str) -> None:
    """By its number, or by what follows from it."""
    described = section(name, "ARGV")
    used = {int(number) for number in re.findall(r"\bARGV\[(\d+)\]", code(name))}
    numbers = {int(number) for number in re.findall(r"\b(\d+)(?:\.\.)?\b", described)}

    assert used <= numbers | ({1} if "per entry" in described else set())


@pytest.mark.parametrize("name", STEPS)
def test_the_parts_that_are_used_are_named_and_no_others(name: str) -> None:
    """A part that is not needed is sent with every EVAL all the same."""
    declared = re.search(r"^-- uses: (.+)$", TEXTS[name], re.MULTILINE)
    named = set(declared[1].split(", ")) if declared else set()
    provided = {
        function: part
        for part in PARTS
        for function in re.findall(r"^local function (\w+)\(", code(part), re.MULTILINE)
    }
    called = {provided[word] for word in re.findall(r"\b(\w+)\(", code(name)) if word in provided}

    assert named == called


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_known_by_the_hash_of_its_whole_text(name: str) -> None:
    """EVALSHA names it, EVAL brings it: both must be the same text."""
    script = scripts.load(name)

    assert script.name == name
    assert script.sha == hashlib.sha1(script.text.encode()).hexdigest()
    assert script.text.endswith(TEXTS[name])


def test_every_step_is_loaded_and_every_loaded_step_exists() -> None:
    """A file nobody loads is dead; a name without a file fails only when it is imported."""
    package = Path(str(taskrunner.__file__)).parent
    loaded = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"scripts\.load\(\"(\w+)\"\)", path.read_text(encoding="utf-8"))
    }

    assert loaded == set(STEPS)


# --- what is done ---

KEY_AT = {"XINFO": 1, "XGROUP": 1, "OBJECT": 1}  # a subcommand stands first
NO_KEY = {"TIME", "PUBLISH"}


def commands(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """(call or pcall, command, arguments as they stand) of every command in a text."""
    for found in re.finditer(r"redis\.(p?call)\(", text):
        depth, start, arguments = 1, found.end(), []
        at = start
        while depth:
            character = text[at]
            depth += (character in "([{") - (character in ")]}")
            if (character == "," and depth == 1) or depth == 0:
                arguments.append(text[start:at].strip())
                start = at + 1
            at += 1
        yield found[1], arguments[0].strip("'"), arguments[1:]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_every_key_comes_from_keys(name: str) -> None:
    """Managed servers and proxies route by KEYS, and an ACL is judged by them (BL-25)."""
    text = code(name)
    from_keys = set[str]()
    for names, values in re.findall(r"local ([\w, ]+) = (.+)", text):
        for variable, value in zip(names.split(","), values.split(","), strict=False):
            if re.fullmatch(r"KEYS\[\w+\]", value.strip()):
                from_keys.add(variable.strip())
    given = {
        parameter.strip()
        for parameters in re.findall(r"local function \w+\(([^)]*)\)", text)
        for parameter in parameters.split(",")
    }
    for _, command, arguments in commands(text):
        if command in NO_KEY:
            continue
        key = arguments[KEY_AT.get(command, 0)]
        assert re.fullmatch(r"KEYS\[\w+\]", key) or key in from_keys | given, f"{command} {key}"


FUNCTIONS_WITH_KEYS = ("deletes", "finish", "holder", "extend_lock", "release_lock")


def with_keys(text: str) -> list[tuple[str, str]]:
    """(function, first argument) of every call of a part's function that is given a key."""
    return re.findall(rf"\b({'|'.join(FUNCTIONS_WITH_KEYS)})\(([^,)]+)", text)


def test_each_of_the_parts_functions_is_called_by_a_step() -> None:
    """The next test looks at something."""
    called = {function for name in STEPS for function, _ in with_keys(code(name))}

    assert called == set(FUNCTIONS_WITH_KEYS)


@pytest.mark.parametrize("name", STEPS)
def test_parts_are_given_keys_from_keys(name: str) -> None:
    """The first argument of each of their functions is a key."""
    text = code(name)
    for function, first in with_keys(text):
        bound = re.search(rf"local (?:\w+, )*{first}\b.* = .*KEYS\[1\]", text)
        assert re.fullmatch(r"KEYS\[\w+\]", first) or bound, f"{function}({first}"


ADDS = {"XADD", "ZADD"}
REMOVES = {"ZREM", "XDEL", "XACK", "DEL", "XTRIM"}
TAKES = {"SET"}


def out_of_order(text: str) -> list[list[str]]:
    """The commands of each branch that adds after it has removed, in the order of the text."""
    text = text.replace("finish(", "redis.call('XACK', finish, ")
    found: list[list[str]] = []
    for branch in re.split(r"\belse(?:if\b.*?\bthen)?\b|\breturn\b[^\n]*\s+end\b", text):
        order = [command for _, command, _ in commands(branch)]
        adds = [at for at, command in enumerate(order) if command in ADDS]
        after = [at for at, command in enumerate(order) if command in REMOVES | TAKES]
        if adds and after and max(adds) > min(after):
            found.append(order)
    return found


@pytest.mark.parametrize("name", STEPS)
def test_what_is_added_is_added_before_anything_is_removed(name: str) -> None:
    """Lua rolls nothing back: an add that is refused (OOM, wrong type) must leave all as it was."""
    assert out_of_order(code(name)) == []


def test_a_step_that_removes_first_would_be_found() -> None:
    """In any of its branches."""
    text = "if x then redis.call('XADD', a) else finish(b) redis.call('ZADD', c) end"

    assert out_of_order(text) == [["XACK", "ZADD"]]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_step_uses_nothing_that_servers_forbid_or_that_outlives_it(name: str) -> None:
    """No keyspace walks, no globals, no old replication calls; a refused PUBLISH must not raise
    after the write was applied."""
    text = code(name)

    for kind, command, _ in commands(text):
        assert command.isupper(), "commands are written out, in capitals"
        assert command not in ("KEYS", "SCAN", "FLUSHALL", "FLUSHDB", "CONFIG", "INFO", "EVAL")
        assert (kind == "pcall") >= (command == "PUBLISH")
    assert "replicate_commands" not in text
    functions = re.findall(r"^(.*)\bfunction \w+", text, re.MULTILINE)
    assert all(before.strip() == "local" for before in functions)


# --- on every server ---


@pytest.fixture(scope="module", params=servers_at_hand().items(), ids=lambda item: item[0])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(command=request.param[1], tcp=True) as embedded:
        yield embedded


@attrs.define
class Stage:
    """A stream with one pending entry, and everything a step may meet."""

    client: Any
    names: Names
    entry: bytes = b""
    letter: bytes = b""

    def __attrs_post_init__(self) -> None:
        client, names = self.client, self.names
        self.entry = client.xadd(names.stream, {"payload": "body"})
        client.xgroup_create(names.stream, names.group, "0-0")
        client.xreadgroup(names.group, self.reader, {names.stream: ">"})
        self.letter = client.xadd(names.dead, {"message": "text"})
        client.zadd(names.delayed, {"member": 1.5})
        client.set(self.lease, "me")
        client.set(self.lock, "token", ex=60)
        client.hset(names.metrics, mapping={"t_sum": 5, "t_count": 2})

    @property
    def reader(self) -> str:
        return f"{self.names.group}_{self.names.host}_1"

    @property
    def parking(self) -> str:
        return f"{self.names.group}_{self.names.host}_0"

    @property
    def lease(self) -> str:
        return f"lease:{self.names.group}"

    @property
    def lock(self) -> str:
        return f"lock:{self.names.group}"

    @property
    def free_lock(self) -> str:
        return f"free:{self.names.group}"

    @property
    def presence(self) -> str:
        return f"presence:{self.names.host}"

    def run(self, name: str, keys: list[str], args: list[Any]) -> Any:
        script = scripts.load(name)
        return self.client.execute_command("EVAL", script.text, len(keys), *keys, *args)


def _is_entry_id(reply: Any) -> bool:
    return bool(re.fullmatch(rb"\d+-\d+", reply))


# step -> (keys, arguments, the right answer or a test of it), as functions of the stage
CASES: dict[str, Any] = {
    "ack": lambda s: ([s.names.stream], [s.names.group, "1", s.entry], 1),
    "ack_unique": lambda s: (
        [s.names.stream, s.lock], [s.names.group, "1", s.entry, "token"], 1,
    ),
    "add_unique": lambda s: (
        [s.names.stream, s.free_lock], ["body", "token", 5000], _is_entry_id,
    ),
    "bury": lambda s: (
        [s.names.stream, s.names.dead, s.lock],
        [s.names.group, "1", s.entry, s.reader, 1, 100, "token", "0", "task_name", "t"],
        1,
    ),
    "cancel": lambda s: ([s.names.delayed, s.lock], ["member", "token"], 1),
    "claim": lambda s: (
        [s.names.stream],
        [s.names.group, "other", 0, 1000, s.entry, "1-1"],
        [[s.entry, 2, s.reader.encode(), [b"payload", b"body"]], [b"1-1", -2]],
    ),
    "count_after": lambda s: ([s.names.stream], ["0-0", 1000], [1, s.entry]),
    "delete": lambda s: ([s.names.stream, s.lock], [s.entry, 2, "token", "1-1", 0, ""], 1),
    "due": lambda s: (
        [s.names.delayed],
        [10, 1000],
        lambda reply: reply[1:] == [b"", b"member", b"1.5"] and float(reply[0]) > 1e9,
    ),
    "keep": lambda s: ([s.lease], ["me", 5000], 1),
    "park": lambda s: (
        [s.names.stream, s.presence, s.lock],
        [s.names.group, s.parking, "", s.entry, s.reader, 1, 500, "0", 3, "token", 90_000],
        [1],
    ),
    "postpone": lambda s: (
        [s.names.stream, s.names.delayed, s.lock],
        [
            *(s.names.group, "1", s.entry, s.reader, 1, "60.000000"),
            *('{"time":', "}", "token", 90_000, "channel"),
        ],
        1,
    ),
    "promote": lambda s: (
        [s.lease, s.names.delayed, s.names.stream, s.names.dead, s.free_lock],
        [
            "me",
            *("member", "take", "body", 5, "token", 5000, "0.000000"),
            *("absent", "run", "body", 0, 0, 0, "0.000000"),
        ],
        [1, [1, 0]],
    ),
    "release": lambda s: ([s.lease], ["me", "channel", "lease"], 1),
    "remove_consumer": lambda s: (
        [s.names.stream, s.presence], [s.names.group, s.reader, 0, ""], 0,
    ),
    "renew": lambda s: (
        [s.names.stream, s.lock],
        [
            s.names.group,
            *(s.entry, s.reader, 1, 2, "token", 90_000),
            *("1-1", s.reader, 1, 0, "", 0),
        ],
        [1, -1],
    ),
    "requeue": lambda s: (
        [s.names.dead, s.names.stream, s.free_lock], [s.letter, "body", "token", 5000], _is_entry_id,
    ),
    "reset_metrics": lambda s: ([s.lease, s.names.metrics], ["me"], 1),
    "schedule": lambda s: (
        [s.names.stream, s.names.delayed, s.free_lock],
        ["in", "60.000000", "body", '{"time":', "}", "token", 5000, "channel"],
        lambda reply: reply[0] == 2 and float(reply[1]) > 1e9,
    ),
    "start_unique": lambda s: (
        [s.lock, s.names.stream], ["token", 5000, s.names.group, s.entry, s.reader, 1], 1,
    ),
    "take_name": lambda s: (
        [s.presence, s.names.stream], ["me", 5000, s.names.group, s.parking[:-1]], -1,
    ),
    "trim": lambda s: ([s.lease, s.names.stream], ["me", 1000], 0),
}  # fmt: skip


def test_every_step_has_a_case() -> None:
    """A new step is tried on every server too."""
    assert sorted(CASES) == STEPS


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_step_runs_and_answers_as_its_header_says(
    name: str, client: redis.Redis, names: Names
) -> None:
    """From the oldest server to the newest: their Lua, their replies and their errors differ."""
    stage = Stage(client, names)
    keys, args, right = CASES[name](stage)

    reply = stage.run(name, keys, args)

    assert right(reply) if callable(right) else reply == right


WITHOUT_STREAM = {
    "ack": 0,
    "ack_unique": 0,
    "bury": -1,
    "claim": None,
    "delete": 0,
    "park": [-1],
    "postpone": -1,
    "remove_consumer": 0,
    "renew": [-1, -1],
    "take_name": 1,
    "trim": 0,
}


@pytest.mark.parametrize("what", ["stream", "group"])
@pytest.mark.parametrize("name", sorted(WITHOUT_STREAM))
def test_a_step_finds_nothing_when_the_stream_or_the_group_is_gone(
    name: str, what: str, client: redis.Redis, names: Names
) -> None:
    """A flush or a failover is no fault of a step: it answers that there is nothing, so that its
    caller can go on, and creates nothing (BL-04)."""
    stage = Stage(client, names)
    keys, args, _ = CASES[name](stage)
    if what == "stream":
        client.delete(names.stream)
    else:
        client.xgroup_destroy(names.stream, names.group)
    length = client.xlen(names.stream)

    reply = stage.run(name, keys, args)

    if name == "claim":
        assert reply == [[stage.entry, -2], [b"1-1", -2]]
    elif name == "delete" and what == "group":
        assert reply == 1
    elif name in ("ack", "ack_unique") and what == "group":
        assert reply == 0
    else:
        assert reply == WITHOUT_STREAM[name]
        assert client.xlen(names.stream) == length
