"""Floor 5. Which runner a command is about: `MODULE:RUNNER`, or an address and a group.

The current directory is on the path, as with `python -m`. A typo is answered with what was found in
its place.
"""

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import attrs

from taskrunner.errors import ConfigurationError
from taskrunner.runner import DEFAULT_URL, TaskRunner
from taskrunner.store.stream import RedisStreamQueue
from taskrunner.task import Registry

_MOST_NAMED = 12


class WrongArgument(ConfigurationError):
    """An argument of the command line names nothing that is there."""


@attrs.frozen(kw_only=True)
class Target:
    """The runner a command is about, and whether it is the application's own, with its tasks."""

    runner: TaskRunner
    application: str | None  # MODULE:RUNNER as it was given


def add_target(parser: argparse.ArgumentParser) -> None:
    """Declare `[MODULE:RUNNER]` and the options that may stand in its place."""
    parser.add_argument(
        "application",
        nargs="?",
        metavar="MODULE:RUNNER",
        help="the TaskRunner of your application, or use --group",
    )
    group = parser.add_argument_group("instead of MODULE:RUNNER")
    group.add_argument(
        "--url",
        help=f"Redis (default: TASKRUNNER_REDIS_URL, or {DEFAULT_URL})",
    )
    group.add_argument("--group", help="the consumer group")
    group.add_argument("--prefix", help="prefix of the queue's name (default: default)")
    group.add_argument("--queue", help="name of the queue (default: queue)")


def locate(arguments: argparse.Namespace) -> Target:
    """Return the target that the arguments name; nothing is sent to Redis.

    Raises WrongArgument.
    """
    options = {name: getattr(arguments, name) for name in ("url", "group", "prefix", "queue")}
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if arguments.application is not None:
        if given:
            raise WrongArgument(
                f"{arguments.application} says where the queue is; {given[0]} can't be given too"
            )
        runner = find_runner(arguments.application)
        return Target(runner=runner, application=arguments.application)
    if options["group"] is None:
        raise WrongArgument(
            f"give MODULE:RUNNER, or --group (with --url, --prefix, --queue){_misread(arguments)}"
        )
    queue = RedisStreamQueue(
        options["url"] or os.environ.get("TASKRUNNER_REDIS_URL") or DEFAULT_URL,
        prefix=options["prefix"] or "default",
        queue=options["queue"] or "queue",
    )
    return Target(
        runner=TaskRunner(consumer_group=options["group"], queue=queue, registry=Registry()),
        application=None,
    )


def _misread(arguments: argparse.Namespace) -> str:
    """MODULE:RUNNER may be left out, so where another argument is missing it stands for that."""
    for name in ("id", "name"):
        text = getattr(arguments, name, None)
        if text is not None and ":" in text:
            return f"; if {text!r} is that, an argument behind it is missing: see --help"
    return ""


def find_runner(spec: str) -> TaskRunner:
    """Import `MODULE:RUNNER` and return the runner; WrongArgument says what was found instead."""
    module_name, colon, attribute = spec.partition(":")
    if not module_name or (colon and not attribute):
        raise WrongArgument(f"{spec!r} is not MODULE:RUNNER, as in app:runner")
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise WrongArgument(f"{module_name!r} is a file: name the module, {dotted}:RUNNER")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise WrongArgument(f"{module_name!r} is no module's name, as in app:runner")
    module = _import(module_name)
    if not colon:
        raise WrongArgument(
            f"{spec!r} names no runner: write MODULE:RUNNER; {_runners_of(module, spec, '')}"
        )
    found: object = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise WrongArgument(
                f"module {module_name!r} ({_place(module)}) has no {attribute!r}; "
                f"{_runners_of(module, module_name, attribute)}"
            ) from None
    if not isinstance(found, TaskRunner):
        raise WrongArgument(
            f"{spec} is a {type(found).__name__}, not a TaskRunner; "
            f"{_runners_of(module, module_name, attribute)}"
        )
    return found


def _import(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise WrongArgument(_no_module(name, error.name)) from None
        raise WrongArgument(_failed(name, error)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: what a module does when imported is its own
        raise WrongArgument(_failed(name, error)) from error


def _no_module(name: str, missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    if parent:
        package = sys.modules.get(parent)
        if hasattr(package, last):
            return f"{parent!r} is a module and no package: did you mean {parent}:{last}?"
        folders = [Path(folder) for folder in getattr(package, "__path__", [])]
        where = f"package {parent!r}"
    else:
        folders, where = [Path.cwd()], f"{Path.cwd()} and the rest of the path"
    return f"no module {missing!r} in {where}; {_suggest(last, _modules_in(folders), 'modules')}"


def _modules_in(folders: Iterable[Path]) -> list[str]:
    names: set[str] = set()
    for folder in folders:
        try:
            entries = list(folder.iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.suffix == ".py" and entry.stem.isidentifier() and entry.stem != "__init__":
                names.add(entry.stem)
            elif entry.name.isidentifier() and (entry / "__init__.py").is_file():
                names.add(entry.name)
    return sorted(names)


def _failed(name: str, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename][1:]  # not this file
    lines = "".join(traceback.format_list(own) + traceback.format_exception_only(error))
    return f"importing {name!r} failed:\n{lines.rstrip()}"


def _runners_of(module: ModuleType, spec: str, wanted: str) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, TaskRunner))
    if not names:
        return f"there is no TaskRunner at the top level of {module.__name__!r}"
    return _suggest(wanted, names, f"TaskRunners in {spec!r}")


def _suggest(wanted: str, names: list[str], what: str) -> str:
    if not names:
        return f"there are no {what}"
    near = difflib.get_close_matches(wanted, names, n=1)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{what}: {', '.join(names[:_MOST_NAMED])}{more}{hint}"


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "built in"
