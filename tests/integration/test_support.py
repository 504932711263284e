"""The test harness itself: a fault that isn't one would make every chaos test pass."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import (
    Desk,
    Ledger,
    Names,
    OwnServer,
    Proxy,
    WorkerProcess,
    busy,
    eventually,
    faults,
    record,
)
from tests.support.proxy import Framer


def plain_client(url: str, **options: object) -> redis.Redis:
    """A client that never repeats a command behind our back."""
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)


# --- waiting and ledger ---


def test_eventually_returns_the_first_truthy_value() -> None:
    """The value is handed back, so that a test can go on with it."""
    values = iter([0, None, "", "done"])
    assert eventually(lambda: next(values), 2) == "done"


def test_eventually_fails_with_the_last_error_when_time_is_up() -> None:
    """Errors of a server that is away count as not yet, and are shown at the end."""

    def away() -> bool:
        raise redis.ConnectionError("nobody there")

    with pytest.raises(AssertionError, match=r"not within 0\.05 s.*nobody there"):
        eventually(away, 0.05)


def test_ledger_shows_runs_that_started_and_never_ended(tmp_path: Path) -> None:
    """A killed run is seen as started; a raising one as not finished."""
    ledger = Ledger(tmp_path / "ledger")
    with record("whole", ledger.path):
        pass
    with pytest.raises(ValueError, match="no"), record("raising", ledger.path):
        raise ValueError("no")
    killed = record("killed", ledger.path)
    killed.__enter__()
    with ledger.path.open("ab") as file:
        file.write(b'{"run": "torn')
    assert ledger.counts() == {"whole": 1, "raising": 1, "killed": 1}
    assert ledger.finished() == {"whole": 1}
    assert ledger.runs("killed")[0].end is None
    assert ledger.runs("raising")[0].outcome == "ValueError"
    with pytest.raises(AssertionError, match="lost={'other'}"):
        ledger.assert_once(["whole", "raising", "killed", "other"])
    del killed  # closing the generator writes its end line; the file is read no more


# --- the relay ---


@pytest.mark.parametrize(
    ("frame", "name"),
    [
        (b"*1\r\n$4\r\nping\r\n", b"PING"),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\na\r\nb\r\n", b"SET"),
        (b"PING\r\n", b"PING"),
        (b"+OK\r\n", b"+OK"),
        (b"*-1\r\n", b""),
        (b"$-1\r\n", b"$-1"),
        (b"*2\r\n*2\r\n:1\r\n$0\r\n\r\n%1\r\n+a\r\n*0\r\n", b"*2"),
        (b"|1\r\n+ttl\r\n:3\r\n$2\r\nhi\r\n", b"|1"),
        (b">2\r\n+message\r\n_\r\n", b">2"),
    ],
)
def test_framer_splits_a_stream_at_any_cut(frame: bytes, name: bytes) -> None:
    """Frames come out whole, in order, wherever the bytes were cut."""
    stream = frame * 3
    for size in range(1, len(stream) + 1):
        framer = Framer()
        frames = [
            whole
            for start in range(0, len(stream), size)
            for whole in framer.feed(stream[start : start + size])
        ]
        assert frames == [frame] * 3
    if name and not frame.startswith(b"*-1"):
        assert name in (Framer.name_of(frame), frame.split(b"\r\n")[0])


@pytest.fixture
def proxy(server: EmbeddedServer, make_proxy: Callable[[str], Proxy]) -> Proxy:
    return make_proxy(server.tcp_url)


def test_proxy_passes_everything_unchanged(proxy: Proxy, names: Names) -> None:
    """Large and binary values, pipelines and pub/sub go through, in RESP2 and RESP3."""
    for protocol in (2, 3):
        with plain_client(proxy.url, protocol=protocol) as client:
            value = bytes(range(256)) * 20_000
            client.set(names.stream, value)
            assert client.get(names.stream) == value
            with client.pipeline(transaction=True) as pipe:
                for number in range(1000):
                    pipe.rpush(names.ring, number)
                assert pipe.execute() == list(range(1, 1001))
            with client.pubsub() as channel:
                channel.subscribe(names.delayed)
                eventually(lambda channel=channel: channel.get_message(timeout=1), 5)
                client.publish(names.delayed, "due")
                got = eventually(lambda channel=channel: channel.get_message(timeout=1), 5)
                assert got["data"] == b"due"
            client.delete(names.stream, names.ring)


def test_proxy_cuts_after_the_server_has_executed(
    proxy: Proxy, client: redis.Redis, names: Names
) -> None:
    """`cut_after`: the caller sees an error, the command took effect, once."""
    rule = faults.lose_reply(proxy, "XADD", containing=names.stream)
    with plain_client(proxy.url) as through:
        through.ping()
        with pytest.raises(redis.ConnectionError):
            through.xadd(names.stream, {"a": 1})
        assert rule.hits == 1
        assert client.xlen(names.stream) == 1
        through.xadd(names.stream, {"a": 2})
    assert client.xlen(names.stream) == 2


def test_proxy_cuts_before_the_server_has_seen_it(
    proxy: Proxy, client: redis.Redis, names: Names
) -> None:
    """`cut_before`: the caller sees an error, and nothing happened."""
    rule = faults.lose_request(proxy, "XADD")
    with plain_client(proxy.url) as through, pytest.raises(redis.ConnectionError):
        through.xadd(names.stream, {"a": 1})
    assert rule.hit.is_set()
    assert client.xlen(names.stream) == 0


def test_proxy_aims_at_the_reply_of_one_command_in_a_pipeline(
    proxy: Proxy, client: redis.Redis, names: Names
) -> None:
    """Replies are counted: what was sent before the rule's command is still answered."""
    rule = proxy.on("INCRBY", "hold_reply")
    with plain_client(proxy.url) as through:
        answers: list[object] = []
        with through.pipeline(transaction=False) as pipe:
            pipe.incr(names.ring)
            pipe.set(names.stream, 1)
            thread = threading.Thread(target=lambda: answers.extend(pipe.execute()))
            thread.start()
            assert rule.hit.wait(5)
            eventually(lambda: client.get(names.stream) == b"1", 5)
            assert answers == []
            rule.release()
            thread.join(5)
        assert answers == [1, True]


def test_proxy_holds_one_request_and_lets_other_connections_pass(
    proxy: Proxy, client: redis.Redis, names: Names
) -> None:
    """A held request waits until it is released; the rest of the world goes on."""
    rule = faults.hold_request(proxy, "SET", containing="held-value")
    with plain_client(proxy.url) as one, plain_client(proxy.url) as two:
        thread = threading.Thread(target=one.set, args=(names.stream, "held-value"))
        thread.start()
        assert rule.hit.wait(5)
        two.set(names.stream, "other-value")
        assert client.get(names.stream) == b"other-value"
        rule.release()
        thread.join(5)
        assert client.get(names.stream) == b"held-value"


def test_proxy_matches_scripts_by_sha_and_key(
    proxy: Proxy, client: redis.Redis, names: Names
) -> None:
    """A rule for EVALSHA may name the script's SHA, so that other scripts pass."""
    wanted = client.script_load("return 'wanted'")
    other = client.script_load("return 'other'")
    rule = faults.lose_reply(proxy, "EVALSHA", containing=wanted)
    with plain_client(proxy.url) as through:
        assert through.evalsha(other, 0) == b"other"
        assert rule.hits == 0
        with pytest.raises(redis.ConnectionError):
            through.evalsha(wanted, 0)


@pytest.mark.parametrize("direction", ["request", "reply", "both"])
def test_proxy_swallows_and_leaves_the_connection_open(
    proxy: Proxy, client: redis.Redis, names: Names, direction: str
) -> None:
    """Half-open: no error, no end-of-file, only the client's own timeout; and per direction."""
    with plain_client(proxy.url, socket_timeout=0.3) as through:
        through.ping()
        proxy.swallow(direction)  # type: ignore[arg-type]
        with pytest.raises(redis.TimeoutError):
            through.set(names.stream, 1)
        proxy.pass_through()
        assert through.ping()
    assert client.exists(names.stream) == (1 if direction == "reply" else 0)


def test_proxy_hold_keeps_order_and_release_lets_go(proxy: Proxy, names: Names) -> None:
    """What was held for all arrives in order afterwards."""
    with plain_client(proxy.url) as through:
        through.ping()
        proxy.hold("reply")
        answers: list[object] = []
        thread = threading.Thread(target=lambda: answers.append(through.rpush(names.ring, 1)))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        proxy.release()
        thread.join(5)
        assert answers == [1]


def test_proxy_delays_both_ways(proxy: Proxy) -> None:
    """A delay is added to each direction it is set for."""
    with plain_client(proxy.url) as through:
        through.ping()
        proxy.delay(0.1)
        start = time.monotonic()
        through.ping()
        assert 0.2 <= time.monotonic() - start < 1 + busy()


def test_proxy_refuses_until_it_passes_again(proxy: Proxy) -> None:
    """A refusing relay looks like a server that is away."""
    with plain_client(proxy.url) as through:
        through.ping()
        proxy.refuse()
        for _ in range(3):
            with pytest.raises(redis.ConnectionError):
                through.ping()
        proxy.pass_through()
        assert through.ping()


def test_proxy_leaves_no_thread_when_closed(server: EmbeddedServer) -> None:
    """Also with a held request and open connections."""
    before = set(threading.enumerate())
    with Proxy(server.tcp_url) as proxy, plain_client(proxy.url, socket_timeout=0.2) as through:
        rule = proxy.on("SET", "hold_request")
        with pytest.raises(redis.TimeoutError):
            through.set("x", 1)
        assert rule.hits == 1
    eventually(lambda: set(threading.enumerate()) <= before, 5)


# --- the recipes ---


def test_killed_server_is_away_and_comes_back(own_server: Callable[..., OwnServer]) -> None:
    """R-kill, with and without data."""
    for appendonly in (True, False):
        server = own_server(appendonly=appendonly)
        client = server.client(retry=Retry(NoBackoff(), 0))
        client.set("key", 1)
        with faults.killed(server), pytest.raises(redis.ConnectionError):
            client.ping()
        assert client.exists("key") == appendonly


def test_frozen_server_is_silent_and_goes_on(own_server: Callable[..., OwnServer]) -> None:
    """R-stop: no answer, no error; then everything is as before."""
    server = own_server()
    client = server.client(retry=Retry(NoBackoff(), 0), socket_timeout=0.2)
    with faults.frozen(server), pytest.raises(redis.TimeoutError):
        client.ping()
    assert client.ping()


def test_dropped_connections_are_counted(own_server: Callable[..., OwnServer]) -> None:
    """R-drop: others' connections are closed."""
    server = own_server()
    one, two = server.client(), server.client()
    one.ping()
    assert faults.drop_connections(two) >= 1


def test_paused_server_takes_no_writes(own_server: Callable[..., OwnServer]) -> None:
    """R-pause WRITE lets reads pass; the pause ends with the block."""
    server = own_server()
    client = server.client(retry=Retry(NoBackoff(), 0), socket_timeout=0.3)
    control = server.client()
    with faults.paused(control, "WRITE"):
        assert client.get("key") is None
        with pytest.raises(redis.TimeoutError):
            client.set("key", 1)
    client.set("key", 2)


def test_flush_takes_what_it_is_told(own_server: Callable[..., OwnServer]) -> None:
    """R-flush: the group, the stream, or all."""
    client = own_server().client()
    client.set("other", 1)
    client.xgroup_create("s", "g", "0", mkstream=True)
    faults.flush(client, "group", stream="s", group="g")
    assert client.xinfo_groups("s") == []
    faults.flush(client, "stream", stream="s")
    assert client.keys() == [b"other"]
    faults.flush(client, "all")
    assert client.keys() == []


def test_out_of_memory_refuses_writes(own_server: Callable[..., OwnServer]) -> None:
    """R-oom: writes are refused with OOM within the block only."""
    client = own_server().client()
    with faults.out_of_memory(client), pytest.raises(redis.ResponseError, match="maxmemory|OOM"):
        client.set("key", 1)
    client.set("key", 1)


def test_misconf_server_refuses_writes(
    own_server: Callable[..., OwnServer], tmp_path: Path
) -> None:
    """R-misconf: writes are refused with MISCONF within the block only."""
    misconf = faults.MisconfServer(own_server, tmp_path)
    client = misconf.server.client()
    with misconf.refusing(), pytest.raises(redis.ResponseError, match="MISCONF|RDB snapshots"):
        client.set("key", 1)
    client.set("key", 1)


def test_loading_server_says_so_for_a_while(own_server: Callable[..., OwnServer]) -> None:
    """R-loading: the server answers LOADING for seconds and then has its data."""
    server = own_server()
    faults.restart_loading(server)
    eventually(lambda: faults.is_loading(server), 5)
    client = server.client(retry=Retry(NoBackoff(), 0))
    with pytest.raises(redis.exceptions.BusyLoadingError):
        client.get("loading:0")
    eventually(lambda: client.get("loading:2999") == b"x", 15)


def test_scripts_are_forgotten_again_and_again(own_server: Callable[..., OwnServer]) -> None:
    """R-script: a loaded script is gone within the interval."""
    client = own_server().client()
    with faults.scripts_forgotten(client, every=0.05):
        for _ in range(3):
            sha = client.script_load("return 1")
            eventually(lambda sha=sha: client.script_exists(sha) == [False], 5)


def test_restricted_user_reaches_our_keys_only(
    own_server: Callable[..., OwnServer], names: Names
) -> None:
    """R-acl: other keys, INFO and KEYS are refused, and the server notes it."""
    server = own_server()
    admin = server.client()
    user = server.client(**faults.restricted_user(admin, names.prefix, "-xautoclaim"))
    user.xadd(names.stream, {"a": 1})
    for refused in (
        lambda: user.set("foreign", 1),
        user.info,
        user.keys,
        lambda: user.xautoclaim(names.stream, "g", "c", 0),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            refused()
    assert len(admin.acl_log()) >= 3


def test_cluster_server_refuses_keys_of_two_slots(own_server: Callable[..., OwnServer]) -> None:
    """R-cluster: CROSSSLOT shows."""
    server = faults.cluster_server(own_server)
    client = server.client()
    client.set("a", 1)
    with pytest.raises(redis.ResponseError, match="CROSSSLOT|same slot"):
        client.mget("a", "b")


def test_half_open_connections_are_cut_at_the_end(proxy: Proxy) -> None:
    """After the block, new connections work."""
    with plain_client(proxy.url, socket_timeout=0.2) as through:
        through.ping()
        with faults.half_open(proxy), pytest.raises(redis.TimeoutError):
            through.ping()
        with contextlib.suppress(redis.ConnectionError):
            through.ping()
        assert through.ping()


def test_proxy_reaches_a_unix_socket(server: EmbeddedServer) -> None:
    """The relay also stands before the shared server's Unix socket."""
    with Proxy(server.url) as proxy, plain_client(proxy.url) as through:
        assert through.ping()


# --- worker processes ---


def test_worker_process_runs_tasks_and_ends_in_order(
    make_worker: Callable[..., WorkerProcess], desk: Desk, ledger: Ledger
) -> None:
    """Started means ready; SIGTERM ends it with 0, and the ledger has each run."""
    worker = make_worker()
    desk.send("note", range(50))
    ledger.wait_finished(range(50))
    status = worker.status()
    assert status["state"] == "started"
    assert "test-control" in status["threads"]
    assert worker.stop() == 0
    ledger.assert_once(range(50))
    assert {run.pid for run in ledger.runs()} == {worker.pid}


def test_worker_process_can_be_frozen_killed_and_started_again(
    make_worker: Callable[..., WorkerProcess], desk: Desk, ledger: Ledger, tmp_path: Path
) -> None:
    """The handles of a chaos test; what a killed worker held runs in its next life."""
    worker = make_worker()
    gate = tmp_path / "gate"
    desk.send("wait-for-file", [{"id": "held", "path": str(gate)}])
    ledger.wait_started("held")
    worker.pause()
    worker.resume()
    assert worker.status()["state"] == "started"
    worker.kill()
    assert worker.returncode == -9
    gate.touch()
    worker.start()
    ledger.wait_finished(["held"])
    assert [run.outcome for run in ledger.runs("held")] == [None, "returned"]
    assert worker.stop() == 0


def test_worker_process_shows_its_log_when_it_cannot_start(
    make_worker: Callable[..., WorkerProcess], tasks_file: Callable[[str], Path]
) -> None:
    """A broken tasks module fails the test at once, with the traceback in the message."""
    with pytest.raises(RuntimeError, match="broken on purpose"):
        make_worker(tasks_file=tasks_file("raise SystemError('broken on purpose')"))


def test_worker_process_takes_tasks_and_hooks_from_a_file(
    make_worker: Callable[..., WorkerProcess],
    desk: Desk,
    ledger: Ledger,
    tasks_file: Callable[[str], Path],
) -> None:
    """A test's own tasks, and settings that JSON can't carry."""
    path = tasks_file("""
        @task(name="mine")
        def mine(payload):
            with record(payload):
                pass

        def before(context):
            print("hook before", context.name)

        SETTINGS = {"before_task": before}
    """)
    worker = make_worker(tasks_file=path)
    desk.send("mine", ["one"])
    ledger.wait_finished(["one"])
    assert worker.log_lines("hook before mine")
