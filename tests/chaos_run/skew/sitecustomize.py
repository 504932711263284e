"""First on a process's path, it shifts the wall clock by CHAOS_SKEW seconds before anything runs."""

import os
import time

_shift = float(os.environ.get("CHAOS_SKEW", "0"))
_true = time.time


def _shifted() -> float:
    return _true() + _shift


time.time = _shifted
