"""How often something may end before nobody starts it again: what dies for ever runs out of it, a kill now and then does not."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RestartBudget:
    """So many ends in a row; a life of `earned_in_s` seconds earns one more.

    Args:
        allowed: ends in a row.
        earned_in_s: seconds.
    """

    allowed: int
    earned_in_s: float
    _left: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.allowed

    def spend(self, lived_s: float) -> bool:
        """It ended after a life of `lived_s` seconds. Whether it may be started again."""
        self._left = min(self.allowed, self._left + lived_s / self.earned_in_s) - 1
        return self._left >= 0

    @property
    def in_a_row(self) -> int:
        """Ends before the newest that no life has made up for."""
        return round(self.allowed - 1 - self._left)
