"""Transport: TLS with a private CA, and passwords that appear nowhere.

The tests of the first half run against a server with TLS where one is at hand (those of distributions
have it, those of wheels don't), and everywhere against a relay that takes TLS before one without.
"""

import logging
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import pytest
import redis

from taskrunner import ConfigurationError, RedisStreamQueue, Registry, TaskRunner, task
from taskrunner.cli.embedded import ServerStartError, free_port
from tests.support import (
    Desk,
    Ledger,
    Names,
    OwnServer,
    WorkerProcess,
    assert_recovered,
    eventually,
    faults,
    service_threads,
)
from tests.support.binaries import servers_at_hand
from tests.support.tls_relay import TlsRelay

SECRET = "s3cr3t"


# --- TLS ---


@attrs.frozen
class Papers:
    """A private CA, and what it signed: the server's and a client's certificate with their keys."""

    directory: Path

    def path(self, name: str) -> str:
        return str(self.directory / name)

    @property
    def client(self) -> dict[str, str]:
        """The client's certificate, as arguments of `redis.Redis.from_url`."""
        return {"ssl_certfile": self.path("client.crt"), "ssl_keyfile": self.path("client.key")}


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    """Made with the openssl program."""
    openssl = shutil.which("openssl")
    assert openssl, "these tests need the openssl program"
    made = Papers(tmp_path_factory.mktemp("ca"))
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], check=True, capture_output=True)

    # What Python checks from 3.13 on (VERIFY_X509_STRICT); `req -x509` adds CA:TRUE and the rest.
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    for ca in ("ca", "stranger"):
        run(
            *("req", "-x509", *key, *usage, "-subj", f"/CN=private {ca}"),
            *("-keyout", made.path(f"{ca}.key"), "-out", made.path(f"{ca}.crt")),
        )
    leaf = "authorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\nbasicConstraints=CA:FALSE\n"
    for name, kind in (
        ("server", "serverAuth\nsubjectAltName=IP:127.0.0.1"),
        ("elsewhere", "serverAuth\nsubjectAltName=DNS:other"),
        ("client", "clientAuth"),
    ):
        csr, extensions = made.path(f"{name}.csr"), made.path(f"{name}.extensions")
        Path(extensions).write_text(f"{leaf}extendedKeyUsage={kind}\n")
        run("req", *key, "-subj", f"/CN={name}", "-keyout", made.path(f"{name}.key"), "-out", csr)
        run(
            *("x509", "-req", "-in", csr, "-days", "2", "-extfile", extensions),
            *("-CA", made.path("ca.crt"), "-CAkey", made.path("ca.key"), "-CAcreateserial"),
            *("-out", made.path(f"{name}.crt")),
        )
    return made


class TlsServer:
    """A server that takes TLS only, on a TCP port."""

    def __init__(self, server: OwnServer, port: int, relay: TlsRelay | None = None) -> None:
        self.server = server
        self.port = port
        self._relay = relay

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()

    def url(self, **options: str) -> str:
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
        return f"rediss://127.0.0.1:{self.port}/0?{query}"


Start = Callable[..., TlsServer]


@pytest.fixture(params=["server", "relay"])
def start_tls(
    request: pytest.FixtureRequest, own_server: Callable[..., OwnServer], papers: Papers
) -> Iterator[Start]:
    """Start one: `start_tls("server", clients="no")`, with that certificate."""
    made: list[TlsServer] = []

    def start(certificate: str, *, clients: str) -> TlsServer:
        port = free_port()
        ca = papers.path("ca.crt")
        paper, key = papers.path(f"{certificate}.crt"), papers.path(f"{certificate}.key")
        if request.param == "relay":
            server = own_server(tcp=False, appendonly=True)
            checked = ca if clients == "yes" else None
            relay = TlsRelay(server.socket_path, port, certificate=paper, key=key, clients=checked)
            made.append(TlsServer(server, port, relay))
            return made[-1]
        arguments = [
            *("--tls-port", str(port), "--tls-auth-clients", clients, "--tls-ca-cert-file", ca),
            *("--tls-cert-file", paper, "--tls-key-file", key),
        ]
        for command in servers_at_hand().values():
            try:
                server = own_server(
                    command=command, tcp=False, appendonly=True, arguments=arguments
                )
            except ServerStartError:
                continue
            made.append(TlsServer(server, port))
            return made[-1]
        pytest.skip(
            f"none of {', '.join(servers_at_hand())} was built with TLS; a relay takes its place"
        )

    yield start
    for one in made:
        one.close()


@pytest.fixture
def tls(start_tls: Start) -> TlsServer:
    return start_tls("server", clients="no")


@pytest.fixture
def mutual(start_tls: Start) -> TlsServer:
    """One that asks for the client's certificate."""
    return start_tls("server", clients="yes")


@pytest.fixture
def elsewhere(start_tls: Start) -> TlsServer:
    """One whose certificate is for another host."""
    return start_tls("elsewhere", clients="no")


def producer(client: "redis.Redis | str", names: Names) -> TaskRunner:
    registry = Registry()
    task(name="note", registry=registry)(print)
    return TaskRunner(
        consumer_group=names.group,
        host=names.host,
        queue=RedisStreamQueue(client, prefix=names.prefix, reclaim_delay=2),
        registry=registry,
        shutdown_timeout=2,
    )


@pytest.mark.chaos
def test_tls_worker_does_everything_over_it_and_outlives_a_restart(
    tls: TlsServer,
    papers: Papers,
    names: Names,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """Direct, delayed, unique, retried, buried; the server is killed and comes back; a clean stop,
    with a read blocked, is quick."""
    url = tls.url(ssl_ca_certs=papers.path("ca.crt"))
    worker = make_worker(url=url, client={"ssl_check_hostname": True})
    desk = make_desk(tls.server.url)
    threads = service_threads(worker)
    through = producer(url, names)
    through.dispatch("note", "direct")
    through.dispatch("note", "later", run_in=0.3)
    through.dispatch_many("note", [f"many-{n}" for n in range(200)])
    through.dispatch("note", "x" * 300_000)  # many TLS records
    desk.send("unique", ["unique"], run_in=0.1)
    desk.send("fail-below", [{"id": "retried", "attempt": 2}])
    desk.send("fail", ["buried"])
    wanted = ["direct", "later", *(f"many-{n}" for n in range(200)), "x" * 300_000]
    ledger.wait_finished([*wanted, "unique", "retried"], 15)
    eventually(lambda: len(through.dead_letters) == 1)
    assert all(count == 1 for id_, count in ledger.finished().items() if id_ in wanted)
    with faults.killed(tls.server):
        faults.down_for(0.5)
    assert_recovered(worker, desk, ledger, threads)
    assert worker.stop(5) == 0
    assert desk.held() == []
    through.queue.connections.close()


def test_tls_server_of_an_unknown_ca_is_refused_at_the_call_and_by_the_worker(
    tls: TlsServer, papers: Papers, names: Names, make_worker: Callable[..., WorkerProcess]
) -> None:
    """The caller is told at once; a worker waits for a better one, and says so once."""
    url = tls.url(ssl_ca_certs=papers.path("stranger.crt"))
    with pytest.raises(redis.ConnectionError, match="(?i)certificate"):
        producer(url, names).dispatch("note", 1)
    worker = make_worker(url=url)
    eventually(lambda: worker.log_lines("Redis is away"))
    faults.down_for(1)
    assert len(worker.log_lines("Redis is away")) == 1
    assert worker.stop(5) == 0
    assert tls.server.client().xlen(names.stream) == 0


def test_tls_certificate_of_another_host_is_refused_where_names_are_checked(
    elsewhere: TlsServer, papers: Papers, names: Names
) -> None:
    """The client's own setting holds for our connections too."""
    url = elsewhere.url(ssl_ca_certs=papers.path("ca.crt"))
    checked = redis.Redis.from_url(url, ssl_check_hostname=True)
    with pytest.raises(redis.ConnectionError, match="(?i)certificate"):
        producer(checked, names).dispatch("note", 1)
    unchecked = redis.Redis.from_url(url, ssl_check_hostname=False)
    assert producer(unchecked, names).dispatch("note", 1).entry_id


def test_tls_clients_certificate_is_shown_where_it_is_asked_for(
    mutual: TlsServer, papers: Papers, names: Names, make_worker: Callable[..., WorkerProcess],
    ledger: Ledger,
) -> None:  # fmt: skip
    """Mutual TLS: without the certificate nothing works, with it everything."""
    url = mutual.url(ssl_ca_certs=papers.path("ca.crt"))
    with pytest.raises((redis.ConnectionError, ssl.SSLError)):
        producer(url, names).dispatch("note", 1)
    client = redis.Redis.from_url(url, **papers.client)
    producer(client, names).dispatch("note", "through")
    worker = make_worker(url=url, client=papers.client)
    ledger.wait_finished(["through"])
    assert worker.stop(5) == 0


def test_tls_server_that_is_spoken_to_in_plain_is_an_outage(tls: TlsServer, names: Names) -> None:
    """No hang, no wrong error."""
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        producer(f"redis://127.0.0.1:{tls.port}/0?socket_timeout=2", names).dispatch("note", 1)


# --- passwords ---


def test_password_of_a_url_is_in_no_repr(names: Names) -> None:
    """Of the queue, the runner, its configuration and its connections."""
    urls = [
        f"redis://user:{SECRET}@localhost:1/0",
        f"rediss://:{SECRET}@localhost:1/0",
        f"unix://user:{SECRET}@/nowhere.sock",
        f"redis://localhost:1/0?password={SECRET}&username=user",
    ]
    for url in urls:
        runner = producer(url, names)
        things: list[Any] = [runner, runner.config, runner.queue, runner.queue.connections]
        things += [runner.queue.for_group("g"), runner.delayed, runner.dead_letters]
        things += [runner.queue.connections.open(), runner.queue.connections.address]
        for thing in things:
            assert SECRET not in f"{thing!r} {thing!s}"


@pytest.mark.parametrize(
    "url",
    [
        f"user:{SECRET}@host:6379",
        f"http://user:{SECRET}@host:6379",
        f"redis://user:{SECRET}@host:port",
        f"redis://user:{SECRET}@host:99999999",
        f"redis://user:{SECRET}@@host:port",
        f"redis://user:x@{SECRET}@host:port",
        f"redis:/user:{SECRET}@host",
        f"redis://host:port/0?password={SECRET}",
        f"redis://user:{SECRET}/slash@host:6379",
        f"redis://user:{SECRET}@[host:6379",
        f"redis://user:{SECRET}@host:6379/0?socket_timeout=soon",
    ],
)
def test_password_of_a_wrong_url_is_not_in_its_error(url: str) -> None:
    """Neither in the text nor in the exception it came from, if that is shown."""
    with pytest.raises(ConfigurationError) as caught:
        RedisStreamQueue(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error!r} {error}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize("fault", ["wrong password", "nobody there", "unknown host", "no rights"])
def test_password_is_in_no_log_line_report_or_error(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    names: Names,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    """At DEBUG, of a worker process and of a producer, whatever fails."""
    server = own_server(arguments=["--requirepass", "right"])
    address = f"127.0.0.1:{server.port}"
    if fault == "no rights":
        admin = redis.Redis.from_url(f"redis://:right@{address}/0")
        admin.execute_command("ACL", "SETUSER", "user", "on", f">{SECRET}", "-@all")
        admin.close()
    if fault == "nobody there":
        address = f"127.0.0.1:{free_port()}"
    if fault == "unknown host":
        address = "no-such-host.invalid:6379"
    url = f"redis://user:{SECRET}@{address}/0"
    with caplog.at_level(logging.DEBUG):
        runner = producer(url, names)
        with pytest.raises(redis.RedisError) as caught:
            runner.dispatch("note", 1)
        with pytest.raises(redis.RedisError):
            runner.stats()
    assert SECRET not in f"{caught.value!r} {caught.value}"
    assert SECRET not in caplog.text
    worker = make_worker(url=url, log_level="DEBUG")
    eventually(lambda: worker.status()["errors"], 15, message=worker.log)
    faults.down_for(0.3)
    assert SECRET not in str(worker.status())
    assert worker.stop(6) == 0
    assert SECRET not in worker.log()


def test_password_works_and_is_in_no_log_line(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    names: Names,
    ledger: Ledger,
) -> None:
    """The right one, from start to stop, at DEBUG; with characters that a URL must escape."""
    password = f"{SECRET}@:/?#é"
    server = own_server(arguments=["--requirepass", password])
    url = f"redis://:{quote(password, safe='')}@127.0.0.1:{server.port}/0"
    producer(url, names).dispatch("note", "through")
    worker = make_worker(url=url, log_level="DEBUG")
    ledger.wait_finished(["through"])
    assert SECRET not in str(worker.status())
    assert worker.stop(6) == 0
    assert SECRET not in worker.log()
