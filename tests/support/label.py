"""Names of parametrised tests that are the same in every process."""

import re


def label(value: object) -> str:
    """A value's repr without addresses: several processes have to agree on a test's name."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:60]
