"""BL-06: the server forgets its scripts again and again; nobody notices."""

from collections.abc import Callable

import pytest

from tests.support import (
    Desk,
    Ledger,
    OwnServer,
    WorkerProcess,
    assert_recovered,
    eventually,
    faults,
    service_threads,
)

pytestmark = pytest.mark.chaos


def test_bl06_every_step_works_when_scripts_are_forgotten(
    own_server: Callable[..., OwnServer],
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    ledger: Ledger,
) -> None:
    """Dispatch of all kinds, retries, long and short, unique tasks, renewal, leadership: nothing is
    lost, doubled or refused, and no error is logged."""
    server = own_server()
    worker = make_worker(url=server.tcp_url, queue={"reclaim_delay": 1}, timings={"lease": 1})
    desk = make_desk(server.url, reclaim_delay=1)
    desk.define("unique", unique_for=60, unique_key="payload")
    eventually(lambda: worker.status()["is_leader"])
    threads = service_threads(worker)
    ids: list[str] = []
    with faults.scripts_forgotten(server.client(), every=0.02):
        desk.send("sleep", [{"id": "long", "seconds": 3}])
        for round_ in range(30):
            for kind in ("direct", "delayed", "unique", "unique-delayed", "failing"):
                ids.append(id_ := f"{kind}-{round_}")
                name = {"direct": "note", "delayed": "note", "failing": "fail-once-delay-half"}
                options = {"run_in": 0.3} if "delayed" in kind else {}
                sent = desk.send(
                    name.get(kind, "unique"), [id_, id_][: 1 + ("unique" in kind)], **options
                )
                assert len(sent) == 1 or None in sent, "the duplicate was refused"
            desk.send(
                "retry-once", [{"id": f"later-{round_}", "delay": 1.2}]
            )  # beyond reclaim_delay
            ids.append(f"later-{round_}")
        desk.strand("note", ["stranded"], idle=5)
        ledger.wait_finished([*ids, "long", "stranded"], 20)
        eventually(desk.is_empty, 10, message=lambda: worker.log()[-3000:])
        assert worker.status()["is_leader"]
    counts = ledger.counts()
    assert {id_ for id_, n in counts.items() if n == 2} == {
        id_ for id_ in ids if id_.startswith(("failing", "later"))
    }
    assert set(counts.values()) == {1, 2}
    assert len(worker.log_lines("this instance leads")) == 1
    assert not worker.log_lines("NOSCRIPT")
    assert not worker.log_lines(" ERROR ")
    assert_recovered(worker, desk, ledger, threads)
