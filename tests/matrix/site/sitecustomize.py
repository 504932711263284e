"""Runs at the start of every Python process of a matrix run: makes it be its row.

The application's client is given the row's settings (protocol, parser, decode_responses) beneath
those that a test gives by itself, and a queue the row's `redis_version`; in test and worker
processes alike. Nothing is imported for it: a module is changed once something else loads it.
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

OPTIONS: dict[str, Any] = json.loads(os.environ.get("TASKRUNNER_TEST_CLIENT", "{}"))
VERSION = os.environ.get("TASKRUNNER_TEST_REDIS_VERSION")


def dress_clients(module: ModuleType) -> None:
    """Let each given client be as if the application had made it with the row's settings."""
    import redis
    import redis._parsers
    from redis.sentinel import SentinelConnectionPool

    options = dict(OPTIONS)
    if parser := options.pop("parser", None):
        options["parser_class"] = getattr(redis._parsers, parser)
    original = module.Connections.__init__

    def __init__(self: Any, client: Any) -> None:
        if isinstance(client, str):
            client = module._from_url(client)
        pool = getattr(client, "connection_pool", None)
        if isinstance(client, redis.Redis) and not isinstance(pool, SentinelConnectionPool):
            given = {
                name: value
                for name, value in pool.connection_kwargs.items()
                if value is not None
                and not name.startswith("maint_notifications")  # pools make these
            }
            client = redis.Redis(
                connection_pool=redis.ConnectionPool(pool.connection_class, **{**options, **given})
            )
        original(self, client)

    module.Connections.__init__ = __init__


def age_queues(module: ModuleType) -> None:
    """Let each queue that isn't told a version be told the row's."""
    original = module._has_idle_filter
    module._has_idle_filter = lambda version: original(VERSION if version is None else version)


CHANGES = {
    **({"taskrunner.store.connection": dress_clients} if OPTIONS else {}),
    **({"taskrunner.store.stream": age_queues} if VERSION else {}),
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules as others would, and changes each once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if CHANGES:
    sys.meta_path.insert(0, Finder())
