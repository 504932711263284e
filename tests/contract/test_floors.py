"""The house rules of the source: who may import what, and where a thing may be done.

Read from the syntax trees, so that nobody has to remember them. What a rule has to leave open is
listed here by name and reason; a new exception is a decision, made in this file.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "taskrunner"
FILES = sorted(PACKAGE.rglob("*.py"))
LUA = sorted(PACKAGE.rglob("*.lua"))

PUBLIC = "taskrunner"
"""The package root: it gives the public names, stands above all floors, and nobody imports it."""

COMMAND_LINE = "taskrunner.cli"
"""Starts and watches processes; the rules about clocks are for what runs tasks."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def floor(module: str) -> int | None:
    """The floor that the docstring's first line gives."""
    found = re.match(r"Floor (\d)[:.] \S", ast.get_docstring(tree(module)) or "")
    return int(found[1]) if found else None


def imports(module: str, *, for_checkers: bool = False) -> Iterator[tuple[ast.stmt, str]]:
    """Every import of the module, wherever it stands, as (statement, full name).

    Those below `if TYPE_CHECKING` never run: they are left out, or given alone.
    """
    unrun = {
        node
        for block in ast.walk(tree(module))
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree(module)):
        if (node in unrun) != for_checkers:
            continue
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node, full if full in MODULES else node.module


def inner(module: str) -> set[str]:
    """The modules of the package that this one imports."""
    return {name for _, name in imports(module) if name.split(".")[0] == PUBLIC}


def where(module: str, node: ast.AST) -> str:
    return f"{module}:{getattr(node, 'lineno', '?')}"


def calls(module: str) -> Iterator[tuple[ast.Call, str]]:
    """Every call, as (node, dotted name of what is called)."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


# --- floors ---


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {PUBLIC}))
def test_every_module_says_its_floor_in_its_first_line(module: str) -> None:
    """Who opens a file knows at once what it may lean on."""
    assert floor(module) is not None, "the docstring must begin with 'Floor N: '"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_imports_from_a_higher_floor(module: str) -> None:
    """Otherwise a change upstairs breaks the ground floor."""
    mine = floor(module)
    if mine is None:
        return
    higher = {name for name in inner(module) if (there := floor(name)) is None or there > mine}

    assert not higher, f"{module} (floor {mine}) imports from above: {sorted(higher)}"


def test_imports_on_one_floor_go_in_one_direction() -> None:
    """Neighbours may know each other, but never in a circle: one of them can be read first."""
    graph = {module: inner(module) & MODULES.keys() for module in MODULES if module != PUBLIC}
    done: set[str] = set()
    while ready := {name for name, needs in graph.items() if needs <= done} - done:
        done |= ready

    assert graph.keys() <= done, f"circles among {sorted(graph.keys() - done)}"


SIDEWAYS = {
    # A delivery carries its message, a service has a health to report to.
    ("taskrunner.delivery", "taskrunner.message"),
    ("taskrunner.service", "taskrunner.reports"),
    # Small rules and tables of floor 3 that have a file of their own.
    ("taskrunner.dispatcher", "taskrunner.unique_key"),
    ("taskrunner.settler", "taskrunner.in_flight"),
    ("taskrunner.unseen", "taskrunner.in_flight"),
    # The poller times its own work as the executor times tasks, by the executor's protocol.
    ("taskrunner.services.delayed_poller", "taskrunner.executor"),
    # The public face and what it is made of.
    ("taskrunner.runner", "taskrunner.parts"),
    ("taskrunner.runner", "taskrunner.signals"),
    # Users' tests run the public face's own parts, without its threads.
    ("taskrunner.testing", "taskrunner.runner"),
    ("taskrunner.testing.inline", "taskrunner.runner"),
    # What watches a runner, for Prometheus and for traces.
    ("taskrunner.tally", "taskrunner.runner"),
    ("taskrunner.group_figures", "taskrunner.runner"),
    ("taskrunner.prometheus", "taskrunner.runner"),
    ("taskrunner.prometheus", "taskrunner.tally"),
    ("taskrunner.prometheus", "taskrunner.group_figures"),
    ("taskrunner.otel", "taskrunner.runner"),
}
"""Imports between two modules of one floor, each with its reason."""


def test_imports_on_one_floor_are_few_and_listed() -> None:
    """The fewer sideways imports, the more of the house can be understood floor by floor.

    A package (`store`, `services`, `testing`) is a room of its own: inside it modules may build on one
    another. The command line stands on top of everything and is free.
    """
    found = {
        (module, name)
        for module in MODULES
        for name in inner(module)
        if floor(module) is not None and floor(module) == floor(name)
    }
    rooms = ("taskrunner.store", "taskrunner.services", "taskrunner.testing")
    between = {
        (one, other)
        for one, other in found
        if not any(one.startswith(room) and other.startswith(room) for room in rooms)
        and not one.startswith((COMMAND_LINE, "taskrunner.__main__"))
    }

    assert between == SIDEWAYS


LATE = {
    # A producer never runs a worker's parts, and is imported in a third less time without them.
    ("taskrunner.runner", "taskrunner.parts"),
    # Where the extra is installed, and a message is long.
    ("taskrunner.message", "msgspec.json"),
    # For the text of an error only.
    ("taskrunner.config", "difflib"),
}
"""Imports that wait until they are needed, each with its reason."""


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_stand_at_the_top_and_never_name_the_root(module: str) -> None:
    """An import in a function hides a dependency, and the root is above everyone.

    A `try` at the top may hold the imports of an extra: its error names what to install.
    """
    top = set(tree(module).body)
    top |= {inner for node in top if isinstance(node, ast.Try) for inner in node.body}
    hidden = [
        where(module, node)
        for node, name in imports(module)
        if node not in top and (module, name) not in LATE
    ]
    root = [where(module, node) for node, name in imports(module) if name == PUBLIC]

    assert not hidden
    assert not root


def test_types_of_higher_floors_are_named_in_one_module_only() -> None:
    """What hooks are handed; elsewhere the wish to name one is a sign of the wrong floor."""
    naming = {
        module
        for module in MODULES
        for _, name in imports(module, for_checkers=True)
        if name in MODULES and (floor(name) or 0) > (floor(module) or 0)
    }

    assert naming == {"taskrunner.config"}


# --- one place for a thing ---

REDIS = {
    "taskrunner.runner",  # its constructor takes a redis.Redis: the public type
}


def test_redis_is_imported_in_the_store_only() -> None:
    """What Redis answers, and how redis-py says it, is known in one room."""
    users = {
        module
        for module in MODULES
        for _, name in imports(module)
        if name.split(".")[0] in ("redis", "hiredis") and not module.startswith("taskrunner.store.")
    }

    assert users <= REDIS | {"taskrunner.scripts"}


THREADS = {"taskrunner.service", "taskrunner.worker_pool"}


def test_threads_are_made_in_two_places_only() -> None:
    """A thread of unknown origin has no name, no stop and nobody who notices its death."""
    made = {
        where(module, node)
        for module in MODULES
        for node, name in calls(module)
        if name.rpartition(".")[2]
        in ("Thread", "Timer", "start_new_thread", "ThreadPoolExecutor", "ProcessPoolExecutor")
        and module not in THREADS
    }
    subclassed = {
        where(module, node)
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("Thread") for base in node.bases)
    }

    assert not made
    assert not subclassed


def test_now_and_randomness_come_from_the_clock_only() -> None:
    """Tests hand in a clock; a second source of time could not be replaced."""
    users = {
        (module, name)
        for module in MODULES
        for _, name in imports(module)
        if name in ("time", "random") and not module.startswith(COMMAND_LINE)
    }

    assert {module for module, _ in users} <= {"taskrunner.clock"}


def test_nobody_asks_datetime_for_now() -> None:
    """The same, by the back door."""
    asked = {
        where(module, node)
        for module in MODULES
        for node, name in calls(module)
        if re.search(r"(^|\.)(datetime|date)\.(now|utcnow|today)$", name)
        and not module.startswith(COMMAND_LINE)
    }

    assert not asked


def comments(module: str) -> dict[int, str]:
    source = MODULES[module].read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_where_everything_is_caught_a_comment_says_why(module: str) -> None:
    """Catching all hides faults; the reason must be a better one than convenience."""
    said = comments(module)
    silent = []
    for node in ast.walk(tree(module)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = {ast.unparse(part) for part in _parts(node.type)}
        if caught & {"Exception", "BaseException"} and not _passes_on(node):
            first = node.body[0].lineno
            if not any(line in said for line in range(node.lineno, first + 1)):
                silent.append(where(module, node))
    for node, name in calls(module):
        if (
            name.rpartition(".")[2] == "suppress"
            and any(
                ast.unparse(argument) in ("Exception", "BaseException") for argument in node.args
            )
            and not any(line in said for line in range(node.lineno - 1, node.lineno + 2))
        ):
            silent.append(where(module, node))

    assert not silent


def _passes_on(handler: ast.ExceptHandler) -> bool:
    """Whether it only tidies up: the error goes on to whoever it concerns."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _parts(caught: ast.expr | None) -> list[ast.expr]:
    if caught is None:
        return [ast.Name("BaseException")]
    return list(caught.elts) if isinstance(caught, ast.Tuple) else [caught]


LOCK_AUDIT = "taskrunner.cli.lock_audit"
"""`doctor --locks`, run by hand: no index says which locks there are."""

SCANNING = {"KEYS", "SCAN", "RANDOMKEY", "FLUSHALL", "FLUSHDB"}


def test_no_command_walks_the_keyspace() -> None:
    """On a large server KEYS blocks everyone, and providers forbid it (D37, BL-25)."""
    texts = {
        where(module, node)
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.upper() in SCANNING
        and node.value.isupper()
        and (module, node.value) != (LOCK_AUDIT, "SCAN")
    }
    methods = {
        where(module, node)
        for module in MODULES
        for node, name in calls(module)
        if re.search(r"(client|redis|connections?|link)\.(keys|scan|scan_iter|flushall)$", name)
    }
    steps = {
        path.name
        for path in LUA
        for command in re.findall(r"redis\.p?call\('(\w+)'", path.read_text(encoding="utf-8"))
        if command.upper() in SCANNING
    }

    assert not texts | methods | steps


def test_key_names_are_spelled_in_one_module_only() -> None:
    """One table of names: what Go shares can't drift, and an ACL can be written from it."""
    spelled = re.compile(r"^(taskrunner|ring):\S|:(delayed_tasks|dead_tasks|metrics)\b|:unique:")
    found = {
        where(module, node)
        for module in MODULES.keys() - {"taskrunner.keys"}
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value not in _docstrings(module)
        and spelled.search(node.value)
    }
    steps = {path.name for path in LUA if re.search(r"['\"](taskrunner|ring):", path.read_text())}

    assert not found | steps


@cache
def _docstrings(module: str) -> frozenset[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        ast.get_docstring(node, clean=False) or ""
        for node in ast.walk(tree(module))
        if isinstance(node, kinds)
    )


def test_nothing_prints_outside_of_the_command_line() -> None:
    """A library speaks through logging, which the application owns."""
    printing = {
        where(module, node)
        for module in MODULES
        for node, name in calls(module)
        if name == "print" and not module.startswith(COMMAND_LINE)
    }

    assert not printing


def test_loggers_are_named_after_their_part() -> None:
    """`taskrunner.<part>` can be turned up or down by itself, and nobody configures the root."""
    found = 0
    for module in MODULES:
        for node, name in calls(module):
            if name == "logging.getLogger":
                found += 1
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), where(module, node)
                if module == "taskrunner.cli.reload" and argument.value == "watchfiles":
                    continue  # turned down there, for we say the same
                assert re.fullmatch(r"taskrunner(\.[a-z_]+)?", argument.value), where(module, node)
            if not module.startswith(COMMAND_LINE):
                assert name not in ("logging.basicConfig", "logging.config.dictConfig")
    assert found > 10
