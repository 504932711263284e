"""The page on metrics and the dashboard name what a runner really shows, and nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from taskrunner import Registry, TaskRunner, prometheus, task
from taskrunner.cli.embedded import EmbeddedServer
from tests.docs.test_pages import page, table
from tests.support import eventually

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "taskrunner.json"

METRIC = re.compile(r"\btaskrunner_\w+")


@attrs.frozen
class Shown:
    """A page as Prometheus reads it."""

    families: dict[str, str]
    """Type by name; a counter's with `_total`."""
    labels: dict[str, set[str]]
    samples: set[str]
    texts: dict[str, str]


@pytest.fixture(scope="module")
def shown(server: EmbeddedServer) -> Shown:
    """The page of a runner in this process that has run, retried, failed and delayed something."""
    registry = Registry()

    @task(name="page-works", registry=registry)
    def works(payload: Any) -> None:
        pass

    @task(name="page-fails", registry=registry, max_retry=2, retry_delay=0.01)
    def fails(payload: Any) -> None:
        raise ValueError

    runner = TaskRunner(consumer_group="docs-page", client=server.url, registry=registry)
    collectors = CollectorRegistry()
    prometheus.instrument(runner, collectors)

    def read() -> str:
        return generate_latest(collectors).decode()

    before = read()
    assert "taskrunner_processes" in before  # not started: a page all the same
    with runner:
        works.delay(1)
        works.delay(2, run_in=0.05)
        fails.delay(3)
        failed = 'failures_total{group="docs-page",reason="raised",task="page-fails"} 1.0'
        worked = 'attempts_total{group="docs-page",outcome="succeeded",task="page-works"} 2.0'
        eventually(lambda: failed in read() and worked in read(), 20, message=read)
        found = Shown({}, {}, set(), {})
        for family in text_string_to_metric_families(read()):
            name = family.name + "_total" * (family.type == "counter")
            found.families[name] = family.type
            found.texts[name] = family.documentation
            found.labels[name] = {label for one in family.samples for label in one.labels}
            found.samples.update(sample.name for sample in family.samples)
    return found


def rows() -> list[list[str]]:
    return table(page("observability.md"), "| metric | type | further labels | |")


def test_every_metric_is_in_the_table_with_its_type_and_labels(shown: Shown) -> None:
    """And the table has no other."""
    told = {row[0].strip("`"): (row[1], set(re.findall("`(.+?)`", row[2]))) for row in rows()}
    have = {
        name: (kind, shown.labels[name] - {"group", "le"}) for name, kind in shown.families.items()
    }
    assert told == have
    assert all("group" in labels for labels in shown.labels.values())


def test_names_follow_the_conventions(shown: Shown) -> None:
    """Base units, `_total` for counters alone, a text for each."""
    for name, kind in shown.families.items():
        assert name.startswith("taskrunner_")
        assert name.endswith("_total") is (kind == "counter"), name
        assert name.endswith("_seconds") or kind != "histogram", name
        assert not re.search(r"_(ms|milliseconds|minutes|count|sum|bucket)$", name), name
        assert shown.texts[name].endswith(".")


def expressions() -> list[str]:
    """Every expression of the dashboard, and the query of its variable."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(str(value[key]) for key in ("expr", "query") if key in value)
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(json.loads(DASHBOARD.read_text()))
    return [one for one in found if METRIC.search(one)]


def alerts() -> list[str]:
    return re.findall(r"^ +expr: (.+)$", page("observability.md"), re.MULTILINE)


@pytest.mark.parametrize("source", ["dashboard", "alerts"])
def test_every_expression_asks_for_what_is_there(shown: Shown, source: str) -> None:
    """By the names of samples, and by labels that they have."""
    asked = expressions() if source == "dashboard" else alerts()
    assert len(asked) >= 8
    for expression in asked:
        names = METRIC.findall(expression)
        assert names
        assert set(names) <= shown.samples, expression
        used = set(re.findall(r'(\w+)=~?"', expression))
        for inner in re.findall(r"\b(?:by|without) \(([^)]*)\)", expression):
            used |= {label.strip() for label in inner.split(",")}
        bases = [re.sub(r"_(bucket|sum|count)$", "", name) for name in names]
        for base in bases:
            name = base if base in shown.labels else f"{base}_total"
            assert used <= shown.labels[name], expression
        assert expression.count("(") == expression.count(")")


def test_the_dashboard_shows_every_metric(shown: Shown) -> None:
    """What is worth counting is worth a look."""
    asked = {name for one in expressions() for name in METRIC.findall(one)}
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert asked == set(shown.families)


def test_the_dashboard_is_laid_out_without_overlaps() -> None:
    """Grafana would push panels about; ids are unique, rows are whole."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
