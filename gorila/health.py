"""Whether a role process is well, as a probe may ask: ready once it takes part in the run, healthy while its loop turns.

starting  healthy, not ready: until the role says `ready` (a start may read minutes of log; give a start-up probe that long)
ready     while the newest beat is at most BEAT_S old
stuck     neither: the loop has not turned for longer. Kafka being away is not being stuck: loops turn while they wait
leaving   healthy, not ready: told to stop
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from gorila.errors import LocalError

BEAT_S = 30.0
FILE_S = 1.0


class Health:
    """Of one process. `beat` is called at every turn of a loop and costs two comparisons.

    Args:
        stop: the process's stop event.
        file: written at the first `beat` and then once a second while the loop turns: "ready", or "starting". For probes that cannot speak HTTP:
            it is healthy while the file is younger than BEAT_S. Removed by `close`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stop: threading.Event | None = None,
        file: str | Path = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stop, self._clock = stop, clock
        self._file = Path(file) if file else None
        self._ready = False
        self._beat_s = self._started_s = clock()
        self._file_due_s = self._started_s

    def ready(self) -> None:
        """The role takes part in the run from here on. Raises LocalError when the health file cannot be written."""
        self._ready = True
        self._file_due_s = self._beat_s
        self.beat()

    def beat(self) -> None:
        """The loop turned. Raises LocalError when the health file cannot be written."""
        self._beat_s = now_s = self._clock()
        if self._file is not None and now_s >= self._file_due_s:
            self._file_due_s = now_s + FILE_S
            try:
                self._file.write_text("ready\n" if self._ready else "starting\n")
            except OSError as error:
                raise LocalError(f"monitor.health_file = {self._file}: cannot be written: {error.strerror}") from None

    @property
    def is_ready(self) -> bool:
        """Whether it takes part in the run and its loop turns."""
        return self._ready and self.is_healthy and not self._leaving

    @property
    def is_healthy(self) -> bool:
        """Whether a supervisor should leave it alone."""
        return not self._ready or self.beat_age_s <= BEAT_S

    @property
    def beat_age_s(self) -> float:
        """Seconds since the loop last turned."""
        return max(0.0, self._clock() - self._beat_s)

    @property
    def _leaving(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def __str__(self) -> str:
        """One word and the beat's age, for people."""
        if not self.is_healthy:
            return f"stuck: its loop last turned {self.beat_age_s:.0f} s ago, bound {BEAT_S:.0f}"
        return "leaving" if self._leaving else "ready" if self._ready else "starting"

    def close(self) -> None:
        """The process ends: nobody shall take an old file for a living process."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
