"""First on a process's path: shifts the wall clock by CHAOS_SKEW seconds before anything runs, and
lets the process end with the run whatever ends that, also while it is frozen."""

import os
import sys
import time

_shift = float(os.environ.get("CHAOS_SKEW", "0"))
_true = time.time


def _shifted() -> float:
    return _true() + _shift


time.time = _shifted

if sys.platform == "linux":
    import ctypes
    import signal

    # End-of-file on its input ends a process that runs; one that stands still reads nothing.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
