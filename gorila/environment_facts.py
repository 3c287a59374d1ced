"""What every role may know of the environment without making one: shapes, actions, and the settings a recording was made under.

An actor's host describes the environment once (gorila/environments.py: `describe`); the `run` topic carries the text, so that the
learner builds its network, and a replay of a mismatching environment is refused (cases.md 19).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from gorila.errors import RunError


@dataclass(frozen=True)
class EnvironmentFacts:
    """One environment of a run.

    Attributes:
        id: as configured (`env.id`).
        observation_shape: of one observation, without lanes and without stack.
        observation_dtype: numpy name.
        actions: size of the discrete action space; actions are 0 .. actions - 1 on the wire.
        stack: observations a state is made of.
        max_episode_steps: the actor truncates after this many steps; 0 where only the environment itself ends an episode.
        settings: what else decides what a frame or a reward means: kwargs, wrappers, frame skip, sticky actions, ... JSON values only.
    """

    id: str
    observation_shape: tuple[int, ...]
    observation_dtype: str
    actions: int
    stack: int
    max_episode_steps: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of one state as `gather_stack` makes it: (stack, ...), or (...) when stack is 1."""
        return self.observation_shape if self.stack == 1 else (self.stack, *self.observation_shape)

    def to_json(self) -> str:
        """Canonical text: equal facts give equal bytes."""
        return json.dumps(
            {
                "id": self.id,
                "observation_shape": list(self.observation_shape),
                "observation_dtype": self.observation_dtype,
                "actions": self.actions,
                "stack": self.stack,
                "max_episode_steps": self.max_episode_steps,
                "settings": self.settings,
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> EnvironmentFacts:
        """Raises RunError when the text is not one of ours."""
        try:
            plain = json.loads(text)
            return cls(
                id=str(plain["id"]),
                observation_shape=tuple(int(side) for side in plain["observation_shape"]),
                observation_dtype=str(plain["observation_dtype"]),
                actions=int(plain["actions"]),
                stack=int(plain["stack"]),
                max_episode_steps=int(plain["max_episode_steps"]),
                settings=dict(plain["settings"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"the run's environment record cannot be read: {type(error).__name__}: {error}") from None

    def refuse_mismatch(self, other: EnvironmentFacts) -> None:
        """Raises RunError naming the first fact in which `other` differs (cases.md 19)."""
        mine, theirs = json.loads(self.to_json()), json.loads(other.to_json())
        for name in (*(key for key in mine if key != "settings"),):
            if mine[name] != theirs[name]:
                raise RunError(f"environment {name} is {theirs[name]!r}, the recording was made with {mine[name]!r}")
        for name in sorted({*self.settings, *other.settings}):
            ours, given = mine["settings"].get(name), theirs["settings"].get(name)
            if ours != given:
                raise RunError(f"environment setting {name} is {given!r}, the recording was made with {ours!r}")
