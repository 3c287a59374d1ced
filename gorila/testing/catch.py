"""Catch in pixels: the smallest game that needs frames, a stack and a convolution. `env.id = "gorila.testing.catch:make"`.

A ball falls down a board of 8 x 8 cells, one row a step, with a sideways drift that one frame does not show (hence stack 2); it bounces
off the walls. The paddle on the bottom row moves one cell left, stays, or moves right. After 7 steps the ball is on the bottom row: +1
caught, -1 missed, terminated. Every ball can be caught. A random player catches about one in five.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

CELLS = 8
CELL_PIXELS = 3
SIDE = CELLS * CELL_PIXELS  # 24
STEPS = CELLS - 1  # 7
BALL, PADDLE = 255, 170


class CatchPixels(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """Observations uint8 (24, 24); actions 0 left, 1 stay, 2 right; 7 steps an episode."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.render_mode = render_mode
        self._paddle = self._column = self._row = self._drift = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """A new ball in the top row, the paddle in the middle."""
        super().reset(seed=seed)
        column, drift, side = self.np_random.integers(0, (CELLS, 3, 2)).tolist()
        self._row, self._column, self._drift, self._paddle = 0, column, drift - 1, CELLS // 2 - side
        return self._frame(), {}

    def step(self, action: Any) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """One row down. Raises ValueError for an action outside 0 .. 2."""
        if not 0 <= action <= 2:
            raise ValueError(f"action {action} is not 0 (left), 1 (stay) or 2 (right)")
        self._paddle = min(max(self._paddle + int(action) - 1, 0), CELLS - 1)
        self._row += 1
        self._column += self._drift
        if not 0 <= self._column < CELLS:
            self._drift = -self._drift
            self._column += 2 * self._drift
        if self._row < STEPS:
            return self._frame(), 0.0, False, False, {}
        return self._frame(), 1.0 if self._column == self._paddle else -1.0, True, False, {}

    def _frame(self) -> NDArray[np.uint8]:
        frame = np.zeros((SIDE, SIDE), dtype=np.uint8)
        x = self._paddle * CELL_PIXELS
        frame[SIDE - CELL_PIXELS :, x : x + CELL_PIXELS] = PADDLE
        x, y = self._column * CELL_PIXELS, self._row * CELL_PIXELS
        frame[y : y + CELL_PIXELS, x : x + CELL_PIXELS] = BALL
        return frame

    def render(self) -> Any:
        """The frame as RGB (24, 24, 3)."""
        return np.repeat(self._frame()[:, :, None], 3, axis=2)


def make(**kwargs: Any) -> CatchPixels:
    """The environment, as `env.id = "gorila.testing.catch:make"` wants it."""
    return CatchPixels(**kwargs)
