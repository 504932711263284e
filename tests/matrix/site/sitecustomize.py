"""Runs at the start of every Python process of a matrix run: gives clients the row's settings.

What the application's client is made with (protocol, parser, decode_responses) is laid under the
settings that a test gives by itself, in test and worker processes alike. Nothing is imported for
it: the change is made when `taskrunner.store.connection` is loaded.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TARGET = "taskrunner.store.connection"
OPTIONS: dict[str, Any] = json.loads(os.environ.get("TASKRUNNER_TEST_CLIENT", "{}"))


def change(module: ModuleType) -> None:
    """Let `_own_parameters` see the row's settings beside the given ones."""
    original = module._own_parameters
    options = dict(OPTIONS)
    if parser := options.pop("parser", None):
        parsers = importlib.import_module("redis._parsers")
        options["parser_class"] = getattr(parsers, parser)

    def own_parameters(given: dict[str, Any]) -> dict[str, Any]:
        return original({**options, **given})

    module._own_parameters = own_parameters


class Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as others would, and changes it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if OPTIONS:
    sys.meta_path.insert(0, Finder())
