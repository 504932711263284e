"""Floor 5. Standard input, output and error: that they are there, and what a failed write means."""

import errno
import os
import sys
from typing import Final

_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_missing() -> None:
    """Open what the caller has closed, as `<&-` and some service managers do, on /dev/null.

    Else the next pipe or socket would get its number, and be taken for it by this process and by
    its children.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def unwritable(error: BaseException) -> str | None:
    """Why output could not be written, if that is what failed: a full disk, a lost terminal."""
    return error.strerror if isinstance(error, OSError) and error.errno in _UNWRITABLE else None


def drop_output() -> None:
    """Send what is printed from now on to /dev/null: the interpreter would try what failed again
    at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
