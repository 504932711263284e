"""Floor 5. What commands print: tables, values, JSON; plain on a pipe, headings in bold on a
terminal."""

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

_NUMBER: Final = re.compile(r"-|[\d,.]+( ms)?")
_BOLD: Final = "\033[1m"
_PLAIN: Final = "\033[0m"
COLOURS: Final = {"error": "\033[31m", "warning": "\033[33m", "note": "\033[36m"}


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns under headings; columns of numbers are set to the right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [
        max([len(heading), *(len(row[i]) for row in cells)]) for i, heading in enumerate(headings)
    ]
    right = [
        bool(cells) and all(_NUMBER.fullmatch(row[i]) for row in cells)
        for i in range(len(headings))
    ]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([emphasis(line(headings)), *(line(row) for row in cells)])


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values, one pair a line."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {printable(value)}".rstrip() for name, value in rows)


def show_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2))


def printable(text: str) -> str:
    """The text without what would move a terminal's cursor: names and errors come from anyone."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def shortened(text: str, most: int) -> str:
    """The text in at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def duration(seconds: float) -> str:
    """A duration as people say it: 340 ms, 12.5 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole // 60} min {whole % 60} s"


def instant(seconds: float) -> str:
    """An instant of unix seconds, in UTC."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f}"


def emphasis(text: str, colour: str = _BOLD) -> str:
    """The text in bold or a colour, on a terminal that wants it (NO_COLOR, TERM=dumb)."""
    wanted = (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    return f"{colour}{text}{_PLAIN}" if wanted else text
