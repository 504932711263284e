"""Floor 1: loads the atomic steps from `store/lua`.

A step is one Lua file with its purpose, KEYS, ARGV and return value on top. A line `-- uses: name`
puts the file `name.lua` in front: that is how the ownership check stays one piece of text. What a
step may do is the server's business; when a call may be sent again is decided in
`store/connection.py`.
"""

import hashlib
import re
from importlib import resources
from typing import Final

import attrs

_USES: Final = re.compile(r"^-- uses: (.+)$", re.MULTILINE)


@attrs.frozen
class Script:
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
    path = resources.files("taskrunner").joinpath("store", "lua", f"{name}.lua")
    return path.read_text(encoding="utf-8")
