"""Newest weights for those who need only some of them: actors and the evaluator. A thread of its own, so that a step loop never waits.

A learner reads every snapshot (weights_follower.py). Actors may be hundreds of updates old without harm (rules.md 11); if they read every snapshot too,
a small network's weights would be most of what the broker sends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gorila.errors import BrokerError
from gorila.service import Service
from gorila.weights_follower import WeightsFollower


@dataclass(frozen=True)
class WeightsSample:
    """One version of all shards; `version` is -1 before the first."""

    version: int
    weights: NDArray[np.float32]

    def flat(self) -> NDArray[np.float32]:
        """float32 (P,), never changed by anybody."""
        return self.weights


class WeightsSampler:
    """Looks for newer weights every `interval_s`, in the background.

    poll() → whether `view` is another one than at the last poll; never waits, never raises.
    """

    def __init__(self, service: Service, interval_s: float) -> None:
        self._service, self._interval_s = service, max(0.01, interval_s)
        self._sample = self._polled = WeightsSample(-1, np.zeros(0, np.float32))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="weights-sampler", daemon=True)
        self._thread.start()

    @property
    def view(self) -> WeightsSample:
        """As of the last `poll`."""
        return self._polled

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Take the newest sample. `timeout_s` is there for the follower's signature: this one never waits."""
        newest = self._sample
        changed = newest is not self._polled
        self._polled = newest
        return changed

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        self._thread.join(2.0)

    def _look(self) -> None:
        follower: WeightsFollower | None = None
        while not self._closed.is_set() and not self._service.stop.is_set():
            try:
                follower = follower or WeightsFollower(self._service, targets=False, jump=True)
                if follower.poll() and follower.view.version > self._sample.version:
                    # One reference is swapped: the step loop sees the old sample or the new one, never a mixture.
                    self._sample = WeightsSample(follower.view.version, follower.view.flat().copy())
            except BrokerError as error:
                self._service.log.warning("weights.unreachable", reason=str(error))
            self._closed.wait(self._interval_s)
        if follower is not None:
            follower.close()
