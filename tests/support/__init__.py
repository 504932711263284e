"""What tests share: servers, worker processes, ledgers, faults and waiting with a deadline.

`from tests.support import eventually, Ledger, Proxy, faults`; fixtures are in `tests/conftest.py`.
"""

from tests.support import faults
from tests.support.desk import Desk, Held
from tests.support.ledger import Ledger, Run, record
from tests.support.names import Names
from tests.support.proxy import Proxy, Rule
from tests.support.recovery import assert_recovered, assert_said_once, service_threads
from tests.support.server import OwnServer
from tests.support.waiting import busy, eventually, stays
from tests.support.worker import WorkerProcess

__all__ = [
    "Desk",
    "Held",
    "Ledger",
    "Names",
    "OwnServer",
    "Proxy",
    "Rule",
    "Run",
    "WorkerProcess",
    "assert_recovered",
    "assert_said_once",
    "busy",
    "eventually",
    "faults",
    "record",
    "service_threads",
    "stays",
]
