"""Floor 5. What commands print: tables, values, JSON; plain on a pipe, headings in bold on a
terminal."""

import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, Final

_NUMBER: Final = re.compile(r"-|<?[\d,.]+( ms)?")
_BOLD: Final = "\033[1m"
_PLAIN: Final = "\033[0m"
_GAP: Final = "  "
_NARROWEST: Final = 12  # of a column that may be cut
COLOURS: Final = {"error": "\033[31m", "warning": "\033[33m", "note": "\033[36m"}


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    cut: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> str:
    """Return aligned columns under headings; columns of numbers are set to the right.

    On a terminal that is too narrow, columns named in `spare` are left out, the first first, and
    those named in `cut` are cut. A pipe gets all of it.
    """
    columns = {heading: [printable(row[i]) for row in rows] for i, heading in enumerate(headings)}
    widths = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}
    _fit(widths, cut, spare)
    right = {name: bool(rows) and all(map(_NUMBER.fullmatch, columns[name])) for name in widths}

    def line(cells: Sequence[str]) -> str:
        parts = [
            shortened(cell, width).rjust(width)
            if right[name]
            else shortened(cell, width).ljust(width)
            for cell, (name, width) in zip(cells, widths.items(), strict=True)
        ]
        return _GAP.join(parts).rstrip()

    lines = [line([columns[name][i] for name in widths]) for i in range(len(rows))]
    return "\n".join([emphasis(line(list(widths))), *lines])


def _fit(widths: dict[str, int], cut: Sequence[str], spare: Sequence[str]) -> None:
    """Make the columns fit the terminal as far as they may be changed."""
    limit = _columns()
    if limit is None:
        return

    def excess(least: bool) -> int:
        used = [min(w, _NARROWEST) if least and name in cut else w for name, w in widths.items()]
        return sum(used) + len(_GAP) * (len(used) - 1) - limit

    for name in spare:
        if excess(least=True) > 0:
            del widths[name]
    while excess(least=False) > 0 and cut:
        widest = max(cut, key=lambda name: widths[name])
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values, one pair a line; long ones go on below themselves."""
    width = max(len(name) for name, _ in rows) + len(_GAP)
    return "\n".join(wrapped(value, f"{name:<{width}}").rstrip() for name, value in rows)


def wrapped(text: str, before: str) -> str:
    """The text behind `before`, on a terminal in lines that fit, indented by as much. Words, and
    with them what is to be copied, stay whole."""
    text, limit = printable(text), _columns()
    if limit is None or len(before) + len(text) <= limit:
        return before + text
    lines = textwrap.wrap(
        text,
        max(limit - len(before), _NARROWEST),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return before + f"\n{' ' * len(before)}".join(lines)


def _columns() -> int | None:
    """The terminal's width; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


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
