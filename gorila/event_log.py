"""Logs are events with keys: `time level event key=value …`, the event first, silence in the hot loop.

`log.warning("retention.low", partition=3, rows=10)` → `2026-01-01T00:00:00.000Z WARNING retention.low role=replay run=x partition=3 rows=10`.
The keys given at the start (role, run, …) are on every line. Other libraries' lines come out in the same form.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STANDARD = {*vars(logging.makeLogRecord({})), "event_keys", "message", "asctime", "taskName"}
OUR_PACKAGES = ("gorila", "producers", "pipelines", "consumers")


class EventLogger(logging.Logger):
    """A stdlib logger whose methods also take keys: `log.info("event", version=7)`."""

    def _log(
        self,
        level: int,
        msg: object,
        args: Any,
        exc_info: Any = None,
        extra: Any = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        **keys: Any,
    ) -> None:  # type: ignore[override]
        super()._log(level, msg, args, exc_info, {**(extra or {}), "event_keys": keys}, stack_info, stacklevel + 1)

    def debug(self, msg: object, *args: object, **keys: Any) -> None:
        """For finding a fault."""
        if self.isEnabledFor(logging.DEBUG):
            self._log(logging.DEBUG, msg, args, **keys)

    def info(self, msg: object, *args: object, **keys: Any) -> None:
        """Something changed."""
        if self.isEnabledFor(logging.INFO):
            self._log(logging.INFO, msg, args, **keys)

    def warning(self, msg: object, *args: object, **keys: Any) -> None:
        """Something an operator may want to change."""
        if self.isEnabledFor(logging.WARNING):
            self._log(logging.WARNING, msg, args, **keys)

    def error(self, msg: object, *args: object, **keys: Any) -> None:
        """The process or a record is lost."""
        if self.isEnabledFor(logging.ERROR):
            self._log(logging.ERROR, msg, args, **keys)


def format_value(value: object) -> str:
    """A value as it stands behind `key=`: bare where that is unambiguous, else JSON."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text and text[0] != '"' and not any(c.isspace() or c == "=" or not c.isprintable() for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


class KeyValueFormatter(logging.Formatter):
    """One line a record."""

    def __init__(self, always: Mapping[str, object]) -> None:
        super().__init__()
        self._always = dict(always)

    def format(self, record: logging.LogRecord) -> str:
        """The line; an exception's traceback follows as further lines."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        keys = {**self._always, **extra, **getattr(record, "event_keys", {})}
        pairs = "".join(f" {key}={format_value(value)}" for key, value in keys.items())
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {record.getMessage()}{pairs}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _is_news(record: logging.LogRecord) -> bool:
    """Not so what Beam says at every import: that a client of Google's, which nothing here uses, is not installed."""
    return not record.getMessage().startswith("apitools not found")


def open_log(name: str, always: Mapping[str, object], folder: Path | None, *, terminal: bool = True) -> EventLogger:
    """The process's log: stderr, and `folder`/logs/`name`.log when a folder is given. Replaces what an earlier call set up.

    Args:
        name: file name without suffix.
        always: keys on every line.
        folder: the run's folder, or None.
        terminal: False where the terminal belongs to something else, such as the live view.
    """
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h.formatter, KeyValueFormatter)]:
        root.removeHandler(old)
        old.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)] if terminal else []
    if folder is not None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(folder / "logs" / f"{name}.log", delay=True))
    for handler in handlers:
        handler.setFormatter(KeyValueFormatter(always))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    root.addFilter(_is_news)
    for package in OUR_PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    log = EventLogger(f"gorila.{name}", logging.INFO)
    log.parent = root
    return log
