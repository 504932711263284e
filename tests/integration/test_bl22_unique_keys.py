"""BL-22: equal payloads have one key, unequal ones never meet; in every process, in any order."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskrunner import InvalidTaskPayloadError, Task
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Names
from tests.support.fleet import Fleet
from tests.support.label import label

ROOT = Path(__file__).resolve().parents[2]

PRODUCER = """
    import itertools, json, sys
    from taskrunner import Registry, RedisStreamQueue, TaskAlreadyDispatchedError, TaskRunner, task

    url, prefix, group = sys.argv[1:4]
    registry = Registry()

    @task(name=f"keyed-{group}", unique_for=60, unique_key="payload", registry=registry)
    def keyed(payload): ...

    TaskRunner(consumer_group=group, registry=registry, queue=RedisStreamQueue(url, prefix=prefix))
    accepted = 0
    inner = [dict(order) for order in itertools.permutations({"c": 2, "d": 3}.items())]
    for members in itertools.permutations(["a", "b", "e"]):
        for nested in inner:
            whole = {"a": 1, "b": nested, "e": "é"}
            try:
                keyed.delay({name: whole[name] for name in members})
                accepted += 1
            except TaskAlreadyDispatchedError:
                pass
    print(accepted, len({hash("x"), 1}))
"""


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


@pytest.fixture
def keyed(fleet: Fleet) -> Iterator[Task[Any]]:
    name = f"keyed-{fleet.names.group}"
    yield fleet.task(name=name, unique_for=60, unique_key="payload")
    for key in fleet.locks(name):
        fleet.client.delete(key)


def test_bl22_every_order_of_keys_is_one_message_in_every_process(
    fleet: Fleet, keyed: Task[Any]
) -> None:
    """Three hash seeds, all orders of two levels: one task is accepted."""
    accepted = 0
    for seed in ("0", "1", "4294967295"):
        found = subprocess.run(
            [
                sys.executable,
                "-c",
                textwrap.dedent(PRODUCER),
                fleet.url,
                fleet.names.prefix,
                fleet.names.group,
            ],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert found.returncode == 0, found.stderr
        accepted += int(found.stdout.split()[0])
    assert accepted == 1
    assert len(fleet.bodies()) == 1
    assert len(fleet.locks(keyed.name)) == 1


PAIRS = {
    "number and text": (1, "1", False),
    "number and true": (1, True, False),
    "zero and false": (0, False, False),
    "whole and fraction": (1, 1.0, False),
    "none and missing": ({"a": None}, {}, False),
    "none and empty": (None, "", False),
    "list and tuple": ([1, 2], (1, 2), True),
    "order of a list": ([1, 2], [2, 1], False),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
    "composed and decomposed": ("é", "e\u0301", False),
    "empty list and map": ([], {}, False),
    "nested": ([[1], [2]], [[1, 2]], False),
    "big integers": (2**53, 2**53 + 1, False),
    "text that looks like json": ('{"a":1}', {"a": 1}, False),
    "escaped and plain": ("<&>", "\u003c\u0026\u003e", True),
    "minus zero": (0.0, -0.0, False),
    "exponents": (1e3, 1000.0, True),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_bl22_what_is_equal_as_stored_is_equal(fleet: Fleet, keyed: Task[Any], pair: str) -> None:
    """JSON decides, typed and unnormalised: a documented answer for each pair."""
    one, other, same = PAIRS[pair]
    first, second = keyed.delay_many([one, other])
    assert first is not None
    assert (second is None) == same
    assert len(fleet.locks(keyed.name)) == (1 if same else 2)


@pytest.mark.parametrize(
    "payload", [{1, 2}, object(), {"a": b"x"}, {1: 2}, float("nan")], ids=label
)
def test_bl22_what_has_no_canonical_form_is_refused(
    fleet: Fleet, keyed: Task[Any], payload: Any
) -> None:
    """At the call, before any lock is taken."""
    with pytest.raises(InvalidTaskPayloadError):
        keyed.delay(payload)
    assert fleet.locks(keyed.name) == {}


def test_bl22_two_tasks_never_share_a_hashed_key(fleet: Fleet, keyed: Task[Any]) -> None:
    """The task's name is part of the lock's."""
    other = fleet.task(name=f"{keyed.name}-other", unique_for=60, unique_key="payload")
    keyed.delay({"a": 1})
    other.delay({"a": 1})
    assert len(fleet.bodies()) == 2
    assert other.unlock({"a": 1})


def test_bl22_the_key_is_that_of_the_payload_as_stored(fleet: Fleet, keyed: Task[Any]) -> None:
    """What the worker reads hashes to the same: so a Go member takes the same lock."""
    payload = {"z": [1, 2.50, 1e20, "\u2028"], "a": {"ü": None}}
    keyed.delay(payload)
    (lock,) = fleet.locks(keyed.name)
    fleet.producer.queue.purge()
    text = json.dumps(payload, ensure_ascii=True, indent=1)
    member = f'{{"id":"go","task":"{keyed.name}","time":1,"payload":{text}}}'
    fleet.client.zadd(fleet.names.delayed, {member: 1})
    fleet.believer().tick()
    assert list(fleet.locks(keyed.name)) == [lock]
    assert len(fleet.bodies()) == 1
