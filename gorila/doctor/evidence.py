"""What the doctor looked at, as plain values: the checks judge these and ask nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gorila.config import Config
from gorila.kafka import TopicFacts
from gorila.run_progress import RunProgress
from gorila.run_state import RunState


@dataclass(frozen=True)
class DeadLetter:
    """Dead letters of one source topic with one reason."""

    topic: str
    reason: str
    count: int


@dataclass(frozen=True)
class Evidence:
    """Attributes:
    first, second: two looks, a few seconds apart.
    topics: by logical name, those that exist.
    append_delay_ms: this machine's clock minus the broker's append time, the least over records seen as they came; None: none came.
    writer_delay_ms: the same against the clock of the replay process.
    unreadable: (logical topic, why its newest record does not decode).
    decoded: logical topics whose newest record does.
    dead_newest_ms: time of the newest dead letter.
    busy: mean utilisation of each learner.
    server_cpu: share of one core each parameter server process of this machine used between the looks.
    cosine: of each learner's weights and the newest (its direction in parameter space).
    applied, dropped_stale: gradients, over all shards.
    """

    run: str
    config: Config
    first: RunState
    second: RunState
    topics: Mapping[str, TopicFacts] = field(default_factory=dict)
    progress: RunProgress = field(default_factory=RunProgress)
    append_delay_ms: float | None = None
    writer_delay_ms: float | None = None
    unreadable: tuple[tuple[str, str], ...] = ()
    decoded: tuple[str, ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    dead_newest_ms: int | None = None
    newest_evaluation_ms: int = 0
    busy: Mapping[str, float] = field(default_factory=dict)
    server_cpu: Mapping[str, float] = field(default_factory=dict)
    cosine: Mapping[str, float] = field(default_factory=dict)
    applied: int = 0
    dropped_stale: int = 0
