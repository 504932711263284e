"""Floor 5. A worker's log: to standard error, as text for people or as JSON for collectors.

Set up before the application is imported, so that an application with a configuration of its own
has the last word.
"""

import json
import logging
import sys
import time
from typing import Any, Final

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
FORMATS: Final = ("text", "json")

_USUAL: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and the extras such as `action`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            line["process"] = self._process
        line |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, form: str, process: str = "") -> None:
    """Send the log to standard error; `process` names one of several."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        mark = f" [{process}]" if process else ""
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)-7s{mark} %(name)s: %(message)s")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler])
