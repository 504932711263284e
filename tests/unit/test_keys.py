"""Key names, against those recorded from the Go library."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskrunner import keys

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "wire" / "keys.json").read_text(encoding="utf-8")
)
RUNS = [pytest.param(run, id=repr(run["group"])) for run in RECORDED["groups"]]


@pytest.mark.parametrize(("group", "key"), RECORDED["leader_keys"].items())
def test_leader_is_the_go_key_for_any_group(group: str, key: str) -> None:
    """Go and Python instances elect one leader: both hash the UTF-8 bytes of the group."""
    assert keys.leader(group) == key


@pytest.mark.parametrize("run", RUNS)
def test_every_key_of_a_go_runner_has_a_name_here(run: dict[str, Any]) -> None:
    """A runner of either language finds the other's keys, in groups of any name."""
    group, host = run["group"], run["host"]
    named = {
        keys.stream(run["stream_prefix"], run["queue"]),
        keys.delayed(group),
        keys.leader(group),
        keys.metrics(group),
        keys.presence(host),
    }

    seen = {key["key"] for key in run["keys_while_running"]}

    locks = {key for key in seen if key.startswith(keys.unique(""))}
    assert seen - locks <= named
    assert run["leader_key_by_rule"] == keys.leader(group)
    assert set(run["keys_after_stop"]) <= named


@pytest.mark.parametrize("run", RUNS)
def test_consumer_names_are_those_of_a_go_runner(run: dict[str, Any]) -> None:
    """Names read from XINFO CONSUMERS tell host and number, whichever language made them."""
    names = {
        consumer["name"]
        for key in run["keys_while_running"]
        for group in key.get("groups", [])
        for consumer in group["consumers"]
    }

    expected = {keys.consumer(run["group"], run["host"], n + 1) for n in range(run["fetchers"])}

    assert names == expected
    assert {keys.parse_consumer(run["group"], name) for name in names} == {
        (run["host"], n + 1) for n in range(run["fetchers"])
    }


def test_ring_is_the_list_of_the_consume_loop() -> None:
    """Claim delays go where the Go library's queue metrics read them."""
    recorded = {key["key"] for key in RECORDED["consume_loop_keys"]}

    assert recorded == {keys.stream("pfx", "que"), keys.ring("pfx", "que")}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (keys.capacity("g"), "taskrunner:g:worker_tuning_capacity"),
        (keys.dead_letters("g"), "taskrunner:g:dead_tasks"),
        (keys.unique("send-email:a@example.com"), "taskrunner:unique:send-email:a@example.com"),
        (keys.channel("g"), "taskrunner:g:delayed_tasks"),
        (keys.consumer("g", "h", keys.PARKING), "g_h_0"),
    ],
)
def test_a_key_not_recorded_is_that_of_the_key_table(key: str, text: str) -> None:
    """These are ours alone, or depend on a payload; a change would orphan what they hold."""
    assert key == text


@given(group=st.text(), host=st.text(min_size=1), number=st.integers(0, 10**9 - 1))
def test_parse_consumer_undoes_consumer(group: str, host: str, number: int) -> None:
    """Hosts and groups may hold anything, underscores and digits too."""
    assert keys.parse_consumer(group, keys.consumer(group, host, number)) == (host, number)


@pytest.mark.parametrize(
    "name",
    [
        *["", "g", "g_", "g_h", "g__1", "h_1", "G_h_1", "other_h_1"],
        *["g_h_", "g_h_x", "g_h_01", "g_h_-1", "g_h_+1", "g_h_1 ", "g_h_\u0661", "g_h_1\n"],
        "g_h_" + "9" * 5000,
    ],
)
def test_parse_consumer_is_none_when_the_name_is_not_ours(name: str) -> None:
    """Anyone can add a consumer to the group: a foreign one is left alone."""
    assert keys.parse_consumer("g", name) is None


@given(name=st.text())
def test_parse_consumer_never_raises(name: str) -> None:
    """A strange consumer must not stop the janitor."""
    parsed = keys.parse_consumer("g", name)

    assert parsed is None or keys.consumer("g", *parsed) == name
