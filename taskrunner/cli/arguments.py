"""Floor 5. Kinds of values that options take, and what a wrong one is told; how help is laid out."""

import argparse
from typing import Any


def positive(text: str) -> int:
    """A whole number from 1 on."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def seconds(text: str) -> float:
    """So many seconds."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def tcp_port(text: str) -> int:
    """A TCP port; 0 where any will do."""
    value = _whole(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port: 0 to 65535")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


class Parser(argparse.ArgumentParser):
    """Complains itself of what it does not know: with the usage of the command that was typed, which
    names the right options, and not with that of the whole program."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Return what was found; nothing is ever left over."""
        found, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs to the terminal's width, and keeps them apart."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            super(HelpFormatter, self)._fill_text(p, width, indent) for p in paragraphs
        )
