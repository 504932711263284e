"""Floor 1: loads the atomic steps from `store/lua`.

A step is one Lua file with its purpose, KEYS, ARGV and return value on top. A line `-- uses: name`
puts the file `name.lua` in front: that is how the ownership check stays one piece of text. What a
step may do is the server's business; when a call may be sent again is decided in
`store/connection.py`.
"""

import hashlib
import pkgutil
import re
from typing import Final, NamedTuple

_USES: Final = re.compile(r"^-- uses: (.+)$", re.MULTILINE)


class Script(NamedTuple):
    """One Lua step: its text, and the SHA-1 by which a server that has seen it knows it."""

    name: str
    text: str
    sha: str


def load(name: str) -> Script:
    """Read `store/lua/<name>.lua` with the parts it uses in front of it."""
    text = _read(name)
    used = _USES.search(text)
    parts = [_read(part.strip()) for part in used.group(1).split(",")] if used else []
    whole = "\n".join([*parts, text])
    return Script(name, whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    text = pkgutil.get_data("taskrunner", f"store/lua/{name}.lua")
    assert text is not None  # a missing file raises; None is for loaders that read no data
    return text.decode()
