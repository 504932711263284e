"""Floor 5. Progress that can be watched, on a terminal and in a log file alike."""

import sys
from typing import Final

_WIDTH: Final = 30


class Progress:
    """One line that changes on a terminal; elsewhere a line at each quarter of the way."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._live = sys.stdout.isatty()
        self._open = False  # the changing line is on the screen
        self._quarter = 1

    def show(self, done: int, note: str = "") -> None:
        """Show how much is done; the note is for terminals only."""
        if self._live:
            bar = "#" * (_WIDTH * done // self._total)
            print(f"\r[{bar:<{_WIDTH}}] {done:,}/{self._total:,} {note:<24}", end="", flush=True)
            self._open = True
        elif done >= self._total * self._quarter / 4 and self._quarter < 4:
            self._quarter = 4 * done // self._total + 1
            print(f"{done:,}/{self._total:,} done", flush=True)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self.end()
        print(text, flush=True)

    def end(self) -> None:
        """Leave the changing line."""
        if self._open:
            print(flush=True)
            self._open = False
