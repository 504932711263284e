"""The faults of a run, drawn from its seed: the same seed and length give the same list."""

import random
from typing import Final

import attrs

INSTANCE_FAULTS: Final = {"kill": 3.0, "terminate": 3.0, "freeze": 3.0}
SHARED_FAULTS: Final = {
    "server-kill": 1.0,
    "client-kill": 2.0,
    "pause-all": 0.7,
    "pause-write": 1.0,
    "script-flush": 2.0,
    "proxy-cut": 2.0,
    "proxy-refuse": 1.0,
    "proxy-swallow": 1.5,
    "proxy-delay": 1.0,
    "proxy-cut-command": 4.0,
}
COMMANDS: Final = ("EVALSHA", "XADD", "XREADGROUP", "XACK", "XDEL", "XPENDING", "XCLAIM", "ZADD")


@attrs.frozen
class Fault:
    """One fault: from `at`, for `seconds` (0: a moment), `target` the number of an instance."""

    at: float
    kind: str
    target: int = 0
    seconds: float = 0.0
    detail: str = ""


def draw(seed: int, seconds: float, instances: int) -> list[Fault]:
    """Return the faults of a run in order. Instance 0 is watched for its memory: it isn't ended."""
    chance = random.Random(f"faults-{seed}")
    kinds = {**INSTANCE_FAULTS, **SHARED_FAULTS}
    faults: list[Fault] = []
    at = 3.0
    while at < seconds:
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        first = 0 if kind == "freeze" else 1
        target = chance.randrange(first, instances) if kind in INSTANCE_FAULTS else 0
        lasts = 0.0
        detail = ""
        if kind == "freeze":
            lasts = chance.choice([0.3, 1.0, 2.5, 4.0, 6.0])
        elif kind in ("server-kill", "proxy-refuse", "proxy-swallow", "proxy-delay"):
            lasts = chance.choice([0.1, 0.5, 1.5, 4.0])
        elif kind.startswith("pause"):
            lasts = chance.choice([0.2, 1.0, 2.0])
        if kind in ("proxy-swallow", "proxy-delay"):
            detail = chance.choice(["request", "reply", "both"])
        elif kind == "proxy-cut-command":
            detail = f"{chance.choice(COMMANDS)} {chance.choice(['cut_before', 'cut_after'])}"
        faults.append(Fault(round(at, 2), kind, target, lasts, detail))
        at += chance.choice([0.1, 0.4, 0.8, 1.5, 2.5])
    return faults
