"""How the server's log looks."""

import json
import logging
from datetime import UTC, datetime

FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger and message, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_logging(kind: str) -> None:
    """Log to standard error from now on, in one of `FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if kind == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
