"""Floor 5. `taskrunner worker`: run the tasks of an application until SIGTERM or Ctrl-C.

The first signal stops in order: nothing more is fetched, what was not started goes back, running
tasks get shutdown_timeout. The second ends at once. With --processes, --max-tasks or --max-memory a
supervisor starts worker processes and renews them.

exit codes: 0 stopped in order, or --burst found nothing left; 1 given up; 2 wrong arguments;
128 + number of a second signal
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Final

import attrs

from taskrunner.cli import logs, metrics, probes
from taskrunner.cli.arguments import positive, tcp_port
from taskrunner.cli.info import server_name
from taskrunner.cli.locate import WrongArgument, find_runner
from taskrunner.cli.minders import Burst, Lifeline, MemoryLimit, Reporter, Sampler, counted
from taskrunner.cli.reload import Reloader
from taskrunner.cli.standard import drop_output
from taskrunner.cli.supervisor import BEYOND, RECYCLED, Supervisor
from taskrunner.cli.table import pairs
from taskrunner.cli.web import Page, WebServer
from taskrunner.errors import describe
from taskrunner.runner import TaskRunner
from taskrunner.service import Service
from taskrunner.tally import Cells, Tally

HELP: Final = "run the tasks of an application"

_ANSWERS_WITHIN: Final = 1.0
_MOST_NAMED: Final = 8
_PASSED_ON: Final = ("workers", "batch_size", "max_tasks", "max_memory")
_OWN: Final = ("processes", "health_port", "metrics_port")
"""Of a supervisor's own; a reloader passes them on too."""

log = logging.getLogger("taskrunner.worker")


@attrs.frozen
class _Child:
    """What a supervisor tells its child: its number, the lifeline, where to report and to count."""

    number: int
    lifeline: int
    status: int | None
    cells: int | None

    @classmethod
    def read(cls, text: str) -> "_Child":
        number, lifeline, *files = (int(part) for part in text.split(","))
        return cls(number, lifeline, *(None if file < 0 else file for file in files))

    def __str__(self) -> str:
        files = [-1 if file is None else file for file in (self.status, self.cells)]
        return ",".join(map(str, (self.number, self.lifeline, *files)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `taskrunner worker`."""
    add = parser.add_argument
    add("application", metavar="MODULE:RUNNER", help="the TaskRunner of your application")
    add("--processes", type=positive, default=1, metavar="N", help="worker processes (default: 1)")
    add("--workers", type=positive, metavar="N", help="threads that run tasks, in each process")
    add("--batch-size", type=positive, metavar="N", help="most messages a read takes")
    add("--max-tasks", type=positive, metavar="N", help="renew a process after so many tasks")
    add("--max-memory", type=positive, metavar="MB", help="renew a process that uses more")
    add("--burst", action="store_true", help="stop once nothing waits, is pending, or is due")
    add(
        "--log-level",
        type=str.lower,
        choices=logs.LEVELS,
        default="info",
        metavar="L",
        help=f"{', '.join(logs.LEVELS)} (default: info)",
    )
    add(
        "--log-format",
        choices=logs.FORMATS,
        default="text",
        help="text for people, JSON for collectors (default: text)",
    )
    add(
        "--reload",
        action="store_true",
        help="start anew when a Python file changes; in development",
    )
    add("--health-port", type=tcp_port, metavar="P", help="serve /live and /ready there (0: any)")
    add("--metrics-port", type=tcp_port, metavar="P", help="serve /metrics there (0: any)")
    add("--as-child", type=_Child.read, help=argparse.SUPPRESS)
    add("--lifeline", type=int, help=argparse.SUPPRESS)  # of a reloader


def run(arguments: argparse.Namespace) -> int:
    """Run a worker, a supervisor, a supervisor's child, or a reloader."""
    child: _Child | None = arguments.as_child
    logs.configure(
        arguments.log_level, arguments.log_format, f"p{child.number}" if child is not None else ""
    )
    if arguments.reload:
        return _reload(arguments)
    pipe = child.lifeline if child is not None else arguments.lifeline
    lifeline = Lifeline(pipe) if pipe is not None else None
    if lifeline is not None:
        lifeline.start()
    runner = find_runner(arguments.application)
    _set(runner, arguments, child)
    if child is None and (arguments.processes > 1 or arguments.max_tasks or arguments.max_memory):
        return _supervise(runner, arguments, lifeline)
    if lifeline is not None:
        lifeline.holds(lambda: _stop(runner), runner.config.shutdown_timeout)
    return _work(runner, arguments, child)


def _stop(runner: TaskRunner) -> None:
    if runner.state == "init":
        os._exit(0)
    runner.stop_soon()


def _reload(arguments: argparse.Namespace) -> int:
    if arguments.burst:
        raise WrongArgument("--reload and --burst: what stops by itself is not started anew")

    def command(lifeline: int) -> list[str]:
        return [*_command(arguments, _OWN), "--lifeline", str(lifeline)]

    return Reloader(command, arguments.application).run()


def _set(runner: TaskRunner, arguments: argparse.Namespace, child: _Child | None) -> None:
    """Have the runner be as the command line wants it."""
    changes: dict[str, object] = {}
    if arguments.workers is not None:
        if runner.config.tuning:
            raise WrongArgument(
                "--workers has no effect: the application sets min_workers and max_workers"
            )
        changes["num_workers"] = arguments.workers
    if arguments.batch_size is not None:
        changes["batch_size"] = arguments.batch_size
    if child is not None:
        changes["host"] = f"{runner.config.host}-p{child.number}"
    if changes:
        runner.config = attrs.evolve(runner.config, **changes)  # type: ignore[arg-type]


def _work(runner: TaskRunner, arguments: argparse.Namespace, child: _Child | None) -> int:
    renewed = False

    def renew(reason: str) -> None:
        nonlocal renewed
        if not renewed:
            log.info("%s: to be renewed", reason, extra={"action": "process_renewed"})
        renewed = True
        runner.stop_soon()

    services: list[Service] = []
    if child is not None and arguments.max_tasks:
        after = counted(arguments.max_tasks, renew, runner.config.after_task)
        runner.config = attrs.evolve(runner.config, after_task=after)
    if child is not None and arguments.max_memory:
        services.append(MemoryLimit(arguments.max_memory, renew))
    if arguments.burst:
        services.append(Burst(runner))
    if child is not None and child.status is not None:
        readiness = probes.Readiness(runner)
        services += (readiness, Reporter(child.status, readiness.why_not))
    if child is not None and child.cells is not None:
        services.append(Sampler(Tally(runner, Cells(child.cells)).sample))
    if child is None:
        pages: dict[str, dict[str, Page]] = {}
        if arguments.health_port is not None:
            readiness = probes.Readiness(runner)
            services.append(readiness)
            pages["--health-port"] = probes.pages(readiness.why_not)
        if arguments.metrics_port is not None:
            pages["--metrics-port"] = {"/metrics": metrics.page(runner)}
        servers = _servers(arguments, pages)
        services += servers
        _show_banner(runner, arguments, servers)
    for service in services:
        service.start()
    try:
        runner.run_forever()
    finally:
        for service in services:
            service.stop()
    return RECYCLED if renewed else 0


def _supervise(runner: TaskRunner, arguments: argparse.Namespace, lifeline: Lifeline | None) -> int:
    shared = metrics.SharedCells(0 if arguments.metrics_port is None else arguments.processes)

    def command(number: int, pipe: int, status: int | None) -> list[str]:
        cells = shared.files[number - 1] if shared.files else None
        return [*_command(arguments), "--as-child", str(_Child(number, pipe, status, cells))]

    supervisor = Supervisor(
        command,
        processes=arguments.processes,
        burst=arguments.burst,
        reports=arguments.health_port is not None,
        shared=shared.files,
        shutdown_timeout=runner.config.shutdown_timeout,
        block=runner.config.block_duration,
    )
    if lifeline is not None:
        lifeline.holds(supervisor.stop_soon, runner.config.shutdown_timeout + BEYOND)
    pages: dict[str, dict[str, Page]] = {}
    if arguments.health_port is not None:
        pages["--health-port"] = probes.pages(supervisor.why_not_ready)
    if arguments.metrics_port is not None:
        page = metrics.page(runner, lambda: shared.sources(supervisor.pids()))
        pages["--metrics-port"] = {"/metrics": page}
    servers = _servers(arguments, pages)
    for server in servers:
        server.start()
    _show_banner(runner, arguments, servers)
    try:
        return supervisor.run()
    finally:
        for server in servers:
            server.stop()


def _servers(arguments: argparse.Namespace, pages: dict[str, dict[str, Page]]) -> list[WebServer]:
    """A server for each port that was asked for, with the pages of all options that name it."""
    options = {"--health-port": arguments.health_port, "--metrics-port": arguments.metrics_port}
    by_port: dict[int, tuple[str, dict[str, Page]]] = {}
    for option, more in pages.items():
        by_port.setdefault(options[option], (option, {}))[1].update(more)
    return [WebServer(port, option, each) for port, (option, each) in by_port.items()]


def _command(arguments: argparse.Namespace, more: tuple[str, ...] = ()) -> list[str]:
    """The command line of a child: these arguments, without those of its parent's own."""
    words = [sys.executable, "-m", "taskrunner", "worker", arguments.application]
    words += ("--log-level", arguments.log_level, "--log-format", arguments.log_format)
    for name in (*_PASSED_ON, *more):
        value = getattr(arguments, name)
        if value is not None:
            words += (f"--{name.replace('_', '-')}", str(value))
    return [*words, "--burst"] if arguments.burst else words


def _show_banner(
    runner: TaskRunner, arguments: argparse.Namespace, servers: Sequence[WebServer]
) -> None:
    config, queue = runner.config, runner.queue
    names = runner.registry.names()
    if not names:
        log.warning("no tasks are registered: import the modules that define them")
    more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    several = f" in each of {arguments.processes} processes" if arguments.processes > 1 else ""
    workers = (
        f"{config.min_workers} to {config.max_workers}" if config.tuning else config.num_workers
    )
    rows = [
        ("group", config.consumer_group),
        ("stream", queue.stream),
        ("server", f"{queue.connections.address}, {_server(runner)}"),
        ("tasks", f"{len(names)}: {', '.join(names[:_MOST_NAMED])}{more}" if names else "none"),
        ("workers", f"{workers}{several}"),
        ("host", config.host),
    ]
    for server in servers:
        if "/live" in server.paths:
            rows.append(("probes", f"port {server.port}, /live and /ready"))
        if "/metrics" in server.paths:
            rows.append(("metrics", f"port {server.port}, /metrics"))
    if arguments.lifeline is not None:
        rows.append(("reload", "when a Python file changes; for development only"))
    if arguments.log_format == "json":
        log.info("taskrunner %s", version(), extra={"action": "worker_banner", **dict(rows)})
        return
    try:
        print(f"taskrunner {version()}")
        print(pairs(rows))
        print(f"Ctrl-C stops in order: running tasks get {config.shutdown_timeout:g} s", flush=True)
    except OSError as error:  # whoever read it has left, or the disk is full: tasks can run
        drop_output()
        log.warning("standard output can't be written: %s", error.strerror)


def _server(runner: TaskRunner) -> str:
    link = runner.queue.connections.open(
        read_timeout=_ANSWERS_WITHIN, connect_timeout=_ANSWERS_WITHIN
    )
    try:
        return server_name(*link.calls([("INFO", "server")]))
    except Exception as error:  # a worker waits for its server: the banner does not
        return f"which can't be used yet ({describe(error)})"
    finally:
        link.close()


def version() -> str:
    """Of the installed distribution."""
    try:
        return metadata.version("redis-taskrunner")
    except metadata.PackageNotFoundError:
        return "(not installed)"
