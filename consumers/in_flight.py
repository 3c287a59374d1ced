"""The in-flight window: gradients that are out and that no snapshot read covers yet (rules.md 10)."""

from __future__ import annotations

from collections.abc import Sequence


class InFlight:
    """Batches by identity, each with {shard: offset in gradients, once acknowledged}."""

    def __init__(self, shards: int, window: int) -> None:
        """`window`: batches out at most; 0: no bound."""
        self._shards, self.window = shards, window
        self._out: dict[object, dict[int, int]] = {}
        self._sent_s: dict[object, float] = {}

    def __len__(self) -> int:
        return len(self._out)

    def add(self, identity: object, sent_s: float | None = None) -> None:
        """Its gradients are about to be produced, one a shard; `sent_s` where somebody wants to know how long it takes."""
        self._out[identity] = {}
        if sent_s is not None:
            self._sent_s[identity] = sent_s

    def acknowledged(self, identity: object, shard: int, offset: int) -> None:
        """A shard's gradient is in the log."""
        if identity in self._out:
            self._out[identity][shard] = offset

    def covered_by(self, gradient_offsets: Sequence[int]) -> list[float]:
        """Forget what snapshots of every shard include (or say was dropped); when those were sent. One acknowledged on some shards only stays."""
        sent_s: list[float] = []
        for identity, offsets in list(self._out.items()):
            if len(offsets) == self._shards and all(gradient_offsets[shard] >= at for shard, at in offsets.items()):
                del self._out[identity]
                if identity in self._sent_s:
                    sent_s.append(self._sent_s.pop(identity))
        return sent_s

    @property
    def full(self) -> bool:
        """Whether another gradient would break the bound."""
        return bool(self.window) and len(self._out) >= self.window

    @property
    def unacknowledged(self) -> int:
        """Batches of which some shard's gradient is not in the log yet."""
        return sum(len(offsets) < self._shards for offsets in self._out.values())
