"""What `docs/deployment.md` gives to copy: commands that exist, and patience above our own."""

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

from taskrunner import TaskRunnerConfig
from taskrunner.cli import _parser, supervisor

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deployment.md").read_text()
LONGEST = TaskRunnerConfig(consumer_group="g").shutdown_timeout + supervisor.BEYOND
"""Seconds from a SIGTERM until the supervisor has killed what did not end."""


def block(language: str) -> str:
    """The one block of that language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser()
    parsed.read_string(block("ini"))
    return parsed


def manifest_command() -> list[str]:
    found = re.search(r"command: \[(.*)\]", block("yaml"))
    assert found is not None
    return [word.strip().strip('"') for word in found[1].split(",")]


def commands() -> list[list[str]]:
    """Every command line of ours on the page, without the program's path."""
    lines = [*re.findall(r"`(taskrunner\s[^`]+)`", PAGE), unit()["Service"]["ExecStart"]]
    found = [shlex.split(line.replace("\n", " "))[1:] for line in lines]
    (listed,) = re.findall(r"^CMD (\[.*\])$", block("dockerfile"), re.MULTILINE)
    return [*found, json.loads(listed)[1:], manifest_command()[1:]]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_one(words: list[str]) -> None:
    """Options are renamed, and pages forgotten."""
    _parser().parse_args(words)


def test_systemd_waits_longer_than_an_orderly_stop_can_take() -> None:
    """Else SIGKILL comes amid running tasks."""
    service = unit()["Service"]

    assert int(service["TimeoutStopSec"]) > LONGEST
    assert service["KillMode"] == "mixed"


def test_kubernetes_waits_longer_than_an_orderly_stop_can_take() -> None:
    """The same."""
    found = re.search(r"terminationGracePeriodSeconds: (\d+)", block("yaml"))

    assert found is not None
    assert int(found[1]) > LONGEST


def test_the_probes_ask_what_the_worker_serves() -> None:
    """On the port that it was given; liveness does not depend on Redis."""
    arguments = _parser().parse_args(manifest_command()[1:])
    probes = re.findall(r"(\w+)Probe:\n\s+httpGet: \{path: (/\w+), port: (\d+)\}", block("yaml"))

    assert {(kind, path) for kind, path, _ in probes} == {
        ("startup", "/live"),
        ("liveness", "/live"),
        ("readiness", "/ready"),
    }
    assert {int(port) for _, _, port in probes} == {arguments.health_port}
