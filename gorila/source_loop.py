"""The runtime's twin for a role that reads nothing it must answer for: the actor. Same order, without poll, decode and commit.

One turn:
1. release   Acknowledgements are taken; records held behind a gate go out when their readers have caught up.
2. step      Only when nothing is held and the source does not pause; else tick, so that what grew old is sent.
3. produce   What came of it is sent, or held.
Stop: `finish` (partial blocks), everything held goes out, flush: within 5 s. What is not acknowledged then was never promised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from gorila.emission import Emission
from gorila.metrics import Metrics
from gorila.ports import Gate, ServicePort
from gorila.processor import Outgoing
from gorila.waiting import WaitLog

# Looked at this often while a gate is closed or the source pauses: a gate refreshes every 50 ms, an actor's step takes about one.
PAUSE_S = 0.005
STOP_FLUSH_S = 3.0
SHOW_S = 0.5


class Source(Protocol):
    """What `SourceLoop` drives. Pure: time comes in."""

    def step(self, now_s: float) -> Iterable[Outgoing]:
        """Go on by one step of every lane."""
        ...

    def tick(self, now_s: float) -> Iterable[Outgoing]:
        """Called instead of `step` while stepping is not allowed: what grew old meanwhile."""
        ...

    def pause_s(self, now_s: float) -> float:
        """Seconds until the next step is wanted; 0: now; inf: no more (a limit was reached)."""
        ...

    def finish(self) -> Iterable[Outgoing]:
        """The process ends: everything begun, as it is."""
        ...

    def waiting_for(self) -> str:
        """As Processor.waiting_for."""
        ...


class SourceLoop:
    """Runs one source until `service.stop`.

    Args:
        gates: by logical topic; their records must name their partition.
        clock: seconds, monotonic; tests move it by hand.
    """

    def __init__(
        self,
        service: ServicePort,
        source: Source,
        *,
        gates: Mapping[str, Gate] | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service, self.source, self._clock = service, source, clock
        self.metrics = metrics or service.metrics
        self._gates = dict(gates or {})
        self._waits = WaitLog(service.log, self.metrics)
        self._emission: Emission
        self._shown_s = -SHOW_S

    def run(self) -> None:
        """Turns until `service.stop`, then `drain`. Raises BrokerError, and whatever the source raises."""
        try:
            self.open()
            while not self.service.stop.is_set():
                self.turn()
            self.drain()
        finally:
            self.close()

    def open(self) -> None:
        """Make the producer."""
        service = self.service
        self._emission = Emission(
            service.cluster.producer(), service.schemas, service.topic, self._gates, _no_tags, self.metrics
        )
        service.health.ready()

    def turn(self) -> bool:
        """One turn; whether the source stepped."""
        emission, now_s = self._emission, self._clock()
        self.service.health.beat()
        # 1. Release.
        emission.serve()
        if emission.held:
            emission.release()
        self._waits.now(emission.waiting_for() or self.source.waiting_for(), now_s)
        if now_s - self._shown_s >= SHOW_S:
            self._shown_s = now_s
            emission.show()
        pause_s = self.source.pause_s(now_s)
        # 2. Step. 3. Produce.
        if emission.held or pause_s > 0:
            emission.emit(self.source.tick(now_s))
            self.service.stop.wait(PAUSE_S if emission.held else min(PAUSE_S, pause_s))
            return False
        emission.emit(self.source.step(now_s))
        return True

    def drain(self) -> None:
        """Send what was begun and wait for the broker, within 5 s."""
        self._emission.emit(self.source.finish())
        self._emission.release(anyway=True)
        if not self._emission.flush(STOP_FLUSH_S):
            self.service.log.warning("stop.unacknowledged", records=self._emission.outstanding)

    def close(self) -> None:
        """Give the producer back."""
        if hasattr(self, "_emission"):
            self._emission.close(0.2)


def _no_tags(record: Outgoing, partition: int, offset: int) -> None:
    raise ValueError(f"a source has nobody to tell where its {record.topic} record lies: leave `tag` empty")
