"""A burst against a pool that tunes itself, as a picture: queue, capacity and waits over time.

`python -m benchmarks.burst` runs it on a private server and draws docs/images/burst.png; the
picture needs matplotlib, from the dev extra. The tasks sleep, so one process shows the pool and not
the processor. `--json` keeps the samples.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import attrs

from taskrunner import RedisStreamQueue, Registry, TaskRunner, task
from taskrunner.cli.embedded import EmbeddedServer

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "burst.png"
_PAUSE = 0.05  # between two looks
_BEFORE = 1.0  # seconds drawn before the burst
_AFTER = 3.0  # and after the pool is back at its least
_LONGEST = 120.0


@attrs.frozen(kw_only=True)
class Setting:
    """The burst, and what the pool is asked for; durations in seconds."""

    tasks: int
    seconds: float
    least: int
    most: int
    wait: float
    tolerance: float
    tick: float
    cooldown: float


@attrs.frozen(kw_only=True)
class Sample:
    """The group at one instant; `at` in seconds since the burst, the predicted wait in ms."""

    at: float
    waiting: int
    workers: int
    predicted: float


@attrs.frozen(kw_only=True)
class Result:
    """All samples, and for each task when it started and how long it had waited, in ms."""

    samples: list[Sample]
    waits: list[tuple[float, float]]


def run(setting: Setting) -> Result:
    """Run one burst, from a pool at its least to a pool at its least."""
    samples: list[Sample] = []
    started: list[tuple[float, float]] = []  # (when it started, when it was sent)
    registry = Registry()

    def nap(sent: float) -> None:
        started.append((time.monotonic(), sent))
        time.sleep(setting.seconds)

    task(name="nap", registry=registry)(nap)
    with EmbeddedServer() as server:
        runner = TaskRunner(
            consumer_group="burst",
            queue=RedisStreamQueue(server.url),
            registry=registry,
            min_workers=setting.least,
            max_workers=setting.most,
            desired_wait_time=setting.wait,
            desired_wait_time_tolerance=setting.tolerance,
            tuning_cooldown_seconds=setting.cooldown,
            long_queue_threshold=2 * setting.tick,
        )
        with runner:
            burst = time.monotonic() + _BEFORE
            _watch(runner, samples, burst, until=burst)
            runner.dispatch_many("nap", [time.monotonic()] * setting.tasks)
            _watch(runner, samples, burst, until=burst + _LONGEST, least=setting.least)
            _watch(runner, samples, burst, until=time.monotonic() + _AFTER)
    waits = [(at - burst, (at - sent) * 1000) for at, sent in started]
    return Result(samples=samples, waits=waits)


def _watch(
    runner: TaskRunner,
    samples: list[Sample],
    burst: float,
    *,
    until: float,
    least: int | None = None,
) -> None:
    """Take samples until then, or until nothing is left to do for a pool at its least."""
    while (now := time.monotonic()) < until:
        stats = runner.stats()
        samples.append(
            Sample(
                at=now - burst,
                waiting=stats.waiting,
                workers=stats.workers,
                predicted=stats.predicted_wait_time,
            )
        )
        if stats.workers == least and stats.queue_length == 0:
            return
        time.sleep(_PAUSE)


def draw(setting: Setting, result: Result, output: Path) -> None:
    """Draw the result as a PNG."""
    pyplot = _pyplot()
    figure, (queue, pool, waits) = pyplot.subplots(
        3, 1, sharex=True, figsize=(9, 8), constrained_layout=True
    )
    at = [sample.at for sample in result.samples]

    queue.fill_between(
        at, [sample.waiting for sample in result.samples], color="tab:blue", alpha=0.5
    )
    queue.set_ylabel("waiting")
    queue.set_title(
        f"{setting.tasks:,} tasks of {setting.seconds * 1000:g} ms at once; "
        f"wanted wait {setting.wait * 1000:g} ± {setting.tolerance * 1000:g} ms, "
        f"tick {setting.tick:g} s, cooldown {setting.cooldown:g} s",
        fontsize=11,
    )

    pool.step(at, [sample.workers for sample in result.samples], where="post", color="tab:green")
    for bound, name in ((setting.least, "min_workers"), (setting.most, "max_workers")):
        pool.axhline(bound, color="grey", linewidth=0.8, linestyle="--")
        pool.annotate(name, (at[-1], bound), ha="right", va="bottom", fontsize=8, color="grey")
    pool.set_ylim(0, setting.most * 1.2)
    pool.set_ylabel("workers")

    waits.plot(
        [start for start, _ in result.waits],
        [wait for _, wait in result.waits],
        ".", markersize=2, alpha=0.4, color="tab:orange", label="real, task by task",
    )  # fmt: skip
    predicted = [(sample.at, sample.predicted) for sample in result.samples if sample.predicted > 0]
    waits.plot(*zip(*predicted, strict=True), color="tab:red", label="predicted for one added now")
    waits.axhspan(
        max(0.0, setting.wait - setting.tolerance) * 1000,
        (setting.wait + setting.tolerance) * 1000,
        color="tab:green", alpha=0.2, label="wanted",
    )  # fmt: skip
    waits.set_yscale("log")
    waits.set_ylabel("wait, ms")
    waits.set_xlabel("seconds since the burst")
    waits.legend(loc="upper right", fontsize=8)

    for axes in (queue, pool, waits):
        axes.grid(alpha=0.3)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            "drawing needs matplotlib, which the dev extra brings: pip install 'redis-taskrunner[dev]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def summary(setting: Setting, result: Result) -> str:
    """What happened, in a few lines."""
    risen = next((s.at for s in result.samples if s.workers > setting.least), None)
    last = max(start for start, _ in result.waits)
    down = next((s.at for s in result.samples if s.at > last and s.workers == setting.least), None)
    high = (setting.wait + setting.tolerance) * 1000
    above = max((s.at for s in result.samples if s.predicted > high), default=0.0)

    def seconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.1f} s"

    return "\n".join(
        [
            f"pool above its least after     {seconds(risen)}",
            f"most workers                   {max(s.workers for s in result.samples)}",
            f"last task started after        {last:.1f} s",
            f"predicted above the band until {above:.1f} s",
            f"pool at its least after        {seconds(down)}",
            f"longest real wait              {max(wait for _, wait in result.waits) / 1000:.1f} s",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.burst", description=__doc__)
    parser.add_argument("--tasks", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=0.02, help="what one task takes")
    parser.add_argument("--min", type=int, default=2, help="min_workers")
    parser.add_argument("--max", type=int, default=32, help="max_workers")
    parser.add_argument("--wait", type=float, default=0.2, help="desired_wait_time")
    parser.add_argument("--tolerance", type=float, default=0.08)
    parser.add_argument("--tick", type=float, default=1.0)
    parser.add_argument("--cooldown", type=float, default=1.0)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--json", type=Path, help="write the samples here too")
    given = parser.parse_args(arguments)
    _pyplot()  # says what is missing before the run, not after it
    setting = Setting(
        tasks=given.tasks,
        seconds=given.seconds,
        least=given.min,
        most=given.max,
        wait=given.wait,
        tolerance=given.tolerance,
        tick=given.tick,
        cooldown=given.cooldown,
    )
    result = run(setting)
    print(summary(setting, result))
    if given.json is not None:
        given.json.write_text(json.dumps(attrs.asdict(result)))
    draw(setting, result, given.output)
    print(given.output)


if __name__ == "__main__":
    main()
