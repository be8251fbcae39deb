"""What a node writes to its log: lines of text, or of JSON, on standard error."""

from __future__ import annotations

import datetime as dt
import logging
import sys
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (ISO 8601, UTC), `level`, `logger`, `message`, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        time = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def start_logging(level: str, form: LogFormat) -> None:
    """Write this process's log to standard error.

    A log that cannot be written, for example to a full disk, is lost; nothing else fails.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.raiseExceptions = False
