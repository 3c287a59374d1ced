"""Whoever waits says for whom, once a change of state, in log and metric. Pure but for the log."""

from __future__ import annotations

from gorila.event_log import EventLogger
from gorila.metrics import Metrics

# A learner waits a millisecond at every update by design: only a wait a person could notice is worth a line.
NOTICEABLE_S = 1.0
NOBODY = "nobody"


class WaitLog:
    """Watches a role's `waiting_for()`. Two waits are the same state when they agree up to the first colon (what follows are figures)."""

    def __init__(self, log: EventLogger, metrics: Metrics) -> None:
        self._log, self._metrics = log, metrics
        self._whom, self._since_s, self._said = "", 0.0, False
        self._show(NOBODY, waits=False)

    def _show(self, whom: str, waits: bool) -> None:
        self._metrics.gauge("waiting", float(waits))
        self._metrics.gauge("waiting_for", float(not waits), whom=NOBODY)
        if whom != NOBODY:
            self._metrics.gauge("waiting_for", float(waits), whom=whom)

    def now(self, waiting_for: str, now_s: float) -> None:
        """What the role says at this turn; "" when it does not wait."""
        whom = waiting_for.split(":", 1)[0]
        if whom != self._whom:
            if self._said:
                self._log.info("waiting.over", whom=self._whom, seconds=now_s - self._since_s)
                self._show(self._whom, waits=False)
            if self._whom:
                self._metrics.count("waiting_seconds_total", max(0.0, now_s - self._since_s))
            self._whom, self._since_s, self._said = whom, now_s, False
        if whom and not self._said and now_s - self._since_s >= NOTICEABLE_S:
            self._said = True
            self._log.warning("waiting.began", whom=waiting_for)
            self._show(whom, waits=True)
