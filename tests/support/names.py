"""Random names, so that tests on one server never meet."""

import secrets
from dataclasses import dataclass, field

_QUEUE = "queue"


def _random(kind: str) -> str:
    return f"{kind}{secrets.token_hex(5)}"


@dataclass(frozen=True)
class Names:
    """A prefix, a group and a host of one test, and where its stream lies."""

    prefix: str = field(default_factory=lambda: _random("p"))
    group: str = field(default_factory=lambda: _random("g"))
    host: str = field(default_factory=lambda: _random("h"))

    @property
    def stream(self) -> str:
        return f"{self.prefix}:{_QUEUE}"

    @property
    def delayed(self) -> str:
        return f"taskrunner:{self.group}:delayed_tasks"

    @property
    def dead(self) -> str:
        return f"taskrunner:{self.group}:dead_tasks"

    @property
    def metrics(self) -> str:
        return f"taskrunner:{self.group}:metrics"

    @property
    def ring(self) -> str:
        return f"ring:{self.prefix}:metrics:{_QUEUE}"
