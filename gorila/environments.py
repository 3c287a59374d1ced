"""Making environments and judging their spaces. The only door to gymnasium and ale_py; gorila/lanes.py steps them.

Here and not in producers/, because the evaluator and `gorila train` make environments too.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import ConfigError, LocalError, UsageError
from gorila.import_path import import_from_path, is_import_path
from gorila.lanes import AtariLanes, GymnasiumLanes, Lanes, LaneStep
from gorila.observations import MAX_INFLATED_BYTES, MAX_RANK

__all__ = ["Filmed", "LaneStep", "Lanes", "describe", "make_filmed", "make_lanes", "recorded_spaces", "recorded_spec"]

ATARI_PREFIX = "ale:"
ATARI_EPISODE_STEPS = 27_000  # 108,000 frames at action repeat 4, Mnih et al. 2015
# What the product decides about AtariVectorEnv, each for a reason in rules.md 4; `env.kwargs` may not overrule them.
ATARI_FIXED: dict[str, Any] = {
    "stack_num": 1,  # its own stack is zero-padded
    "reward_clipping": False,  # rewards are raw on the wire
    "episodic_life": False,  # would reset the whole game at a lost life
    "grayscale": True,
    "autoreset_mode": "NextStep",
    "max_num_frames_per_episode": 2**31 - 1,  # its own limit hands out a wrong final frame: AtariLanes counts
    "batch_size": 0,
    "continuous": False,
}
ATARI_MACHINE_KWARGS = frozenset({"num_threads", "thread_affinity_offset"})  # where it runs, not what it shows


def make_lanes(config: Config, seeds: Sequence[int], max_episode_steps: int = 0) -> Lanes:
    """The environments of one process, one lane a seed.

    Args:
        seeds: one a lane, non-negative, below 2**31 (gorila/seeds.py).
        max_episode_steps: overrides `env.max_episode_steps`; 0 leaves it.
    Raises:
        ConfigError: unknown id, an environment that cannot be made, spaces that are not taken.
        LocalError: Atari wanted where the `atari` extra is not installed.
    """
    if not seeds:
        raise ValueError("make_lanes needs at least one seed")
    if config.env.id.startswith(ATARI_PREFIX):
        return AtariLanes(_make_atari(config, len(seeds)), seeds, max_episode_steps or _atari_limit(config))
    environments = [_make_one(config) for _ in seeds]
    shape, dtype = _observation_space(environments[0])
    return GymnasiumLanes(environments, seeds, max_episode_steps or config.env.max_episode_steps, shape, dtype)


def describe(config: Config) -> EnvironmentFacts:
    """Makes the environment once, reads its facts and closes it. Raises as `make_lanes` does."""
    env = config.env
    if env.id.startswith(ATARI_PREFIX):
        settings = {key: value for key, value in _atari_settings(config).items() if key not in ATARI_MACHINE_KWARGS}
        settings |= ATARI_FIXED | {"interface": "AtariVectorEnv", "ale_py": str(_ale_module("ale_py").__version__)}
        limit = _atari_limit(config)
    else:
        settings = {
            "kwargs": _json_only("env.kwargs", env.kwargs),
            "wrappers": list(env.wrappers),
            "interface": "gymnasium",
        }
        limit = env.max_episode_steps
    lanes = make_lanes(config, [0])
    if not limit and isinstance(lanes, GymnasiumLanes):
        limit = lanes.own_limit
    facts = EnvironmentFacts(
        id=env.id,
        observation_shape=lanes.observation_shape,
        observation_dtype=lanes.observation_dtype.name,
        actions=lanes.actions,
        stack=env.stack,
        max_episode_steps=limit,
        settings={**settings, "reward_transform": env.reward_transform},
    )
    lanes.close()
    return facts


@dataclass(frozen=True)
class Filmed:
    """One lane whose every step has a picture.

    Attributes:
        picture: of an observation just made, uint8 (H, W), (H, W, 1) or (H, W, 3).
        fps: frames a second as the environment means them.
    """

    lanes: Lanes
    picture: Callable[[Any], Any]
    fps: float


def make_filmed(config: Config, seed: int, max_episode_steps: int = 0) -> Filmed:
    """One lane that shows what it renders (`render_mode="rgb_array"`), or its own frames where it renders nothing.

    Raises:
        UsageError: neither. LocalError: rendering needs a package that is not here. Else as `make_lanes`.
    """
    env = config.env
    if env.id.startswith(ATARI_PREFIX):
        lanes = make_lanes(config, [seed], max_episode_steps)
        return Filmed(lanes, np.copy, 60 / env.frame_skip)
    rendering = env.model_copy(update={"kwargs": {**env.kwargs, "render_mode": "rgb_array"}})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium says that there is no such mode: so do we, below
            lanes = make_lanes(config.model_copy(update={"env": rendering}), [seed], max_episode_steps)
    except ConfigError:
        lanes = make_lanes(config, [seed], max_episode_steps)
    made = lanes.only if isinstance(lanes, GymnasiumLanes) else None
    metadata = getattr(made, "metadata", None) or {}
    fps = float(metadata.get("render_fps") or 30)
    if "rgb_array" in metadata.get("render_modes", ()) and getattr(made, "render_mode", None) == "rgb_array":
        return Filmed(lanes, lambda _: _rendered(env.id, made), fps)
    shape = lanes.observation_shape
    if lanes.observation_dtype == np.uint8 and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))):
        return Filmed(lanes, np.copy, fps)
    lanes.close()
    raise UsageError(
        f'{env.id} cannot be filmed: it has no render mode "rgb_array", and observations {shape} are no pictures'
    )


def _rendered(name: str, made: Any) -> Any:
    import gymnasium

    try:
        return np.asarray(made.render(), dtype=np.uint8)
    except gymnasium.error.DependencyNotInstalled as error:
        raise LocalError(f"{name} cannot be filmed: {' '.join(str(error).split())}") from None


def recorded_spaces(facts: EnvironmentFacts) -> tuple[Any, Any]:
    """(observation space, action space) of a recording's rows, without making the environment: one observation, bounds as its dtype has them."""
    from gymnasium import spaces

    dtype = np.dtype(facts.observation_dtype)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, facts.observation_shape, dtype.type), spaces.Discrete(facts.actions)


def recorded_spec(facts: EnvironmentFacts) -> Any:
    """Gymnasium's spec of the environment a recording was made in, or None where an id alone does not make it again (Atari lanes, own code, wrappers)."""
    import gymnasium

    if (
        facts.settings.get("interface") != "gymnasium"
        or facts.settings.get("wrappers")
        or facts.id not in gymnasium.registry
    ):
        return None
    spec = copy.deepcopy(gymnasium.spec(facts.id))
    spec.kwargs = {**spec.kwargs, **facts.settings.get("kwargs", {})}
    spec.max_episode_steps = facts.max_episode_steps or spec.max_episode_steps
    return spec


def _json_only(key: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise ConfigError(key, value, "values that JSON can hold") from None


def _ale_module(name: str) -> Any:
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as error:
        raise LocalError(f"Atari needs the atari extra (pip install 'gorila[atari]'): {error}") from None


def _atari_limit(config: Config) -> int:
    return config.env.max_episode_steps or ATARI_EPISODE_STEPS


def _atari_game(config: Config) -> str:
    game = config.env.id.removeprefix(ATARI_PREFIX)
    known = sorted(_ale_module("ale_py.roms").get_all_rom_ids())
    if game not in known:
        snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in game).lstrip("_")
        close = difflib.get_close_matches(snake, known, 3)
        hint = (
            f"; did you mean {' or '.join(ATARI_PREFIX + name for name in close)}?" if close else ", such as ale:pong"
        )
        raise ConfigError(
            "env.id", config.env.id, f"ale:GAME with one of ale-py's {len(known)} games in snake_case{hint}"
        )
    return game


def _atari_settings(config: Config) -> dict[str, Any]:
    env = config.env
    if env.wrappers:
        raise ConfigError(
            "env.wrappers", list(env.wrappers), "none with ale:GAME; use the Gymnasium id ALE/Name-v5 to wrap a game"
        )
    for name in env.kwargs:
        if name in ATARI_FIXED:
            raise ConfigError(f"env.kwargs.{name}", env.kwargs[name], f"the product fixes it at {ATARI_FIXED[name]!r}")
    return {
        "img_height": env.frame_size,
        "img_width": env.frame_size,
        "frameskip": env.frame_skip,
        "maxpool": env.frame_skip
        > 1,  # one frame a step has nothing to pool with but the step before: a ghost (case 14)
        "noop_max": env.noop_max,
        "repeat_action_probability": env.repeat_action_probability,
        **_json_only("env.kwargs", env.kwargs),
    }


def _make_atari(config: Config, lanes: int) -> Any:
    game, settings = _atari_game(config), _atari_settings(config)
    try:
        # One thread: other roles live on the same cores; env.kwargs.num_threads raises it.
        return _ale_module("ale_py.vector_env").AtariVectorEnv(
            game, lanes, **{"num_threads": 1, **settings, **ATARI_FIXED}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError("env.kwargs", config.env.kwargs, f"keyword arguments of AtariVectorEnv: {error}") from None


def _make_one(config: Config) -> Any:
    import gymnasium

    env = config.env
    if env.id.startswith("ALE/"):
        _ale_module("ale_py")
    limit = {"max_episode_steps": env.max_episode_steps} if env.max_episode_steps else {}
    try:
        if is_import_path(env.id):
            made = import_from_path("env.id", env.id)(**env.kwargs)
        else:
            made = gymnasium.make(env.id, disable_env_checker=True, **limit, **env.kwargs)
    except ConfigError:
        raise
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound, gymnasium.error.VersionNotFound):
        close = difflib.get_close_matches(env.id, list(gymnasium.registry), 3, cutoff=0.5)
        hint = f"; near: {', '.join(close)}" if close else ""
        raise ConfigError("env.id", env.id, f"a Gymnasium id, ale:GAME, or package.module:make{hint}") from None
    except Exception as error:  # an environment's constructor may raise anything
        reason = " ".join(str(error).split())
        raise ConfigError("env.id", env.id, f"making it failed: {type(error).__name__}: {reason}") from None
    for wrapper in env.wrappers:
        wrap = import_from_path("env.wrappers", wrapper)
        try:
            made = wrap(made)
        except Exception as error:
            raise ConfigError("env.wrappers", wrapper, f"wrapping failed: {type(error).__name__}: {error}") from None
    if not hasattr(made, "observation_space") or not hasattr(made, "action_space"):
        raise ConfigError("env.id", env.id, f"a Gymnasium environment; it gave a {type(made).__name__}")
    _observation_space(made)
    _refuse_other_actions(made)
    return made


def _observation_space(env: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """(shape, dtype on the wire) of one observation. Raises ConfigError for what is not an array."""
    import gymnasium

    space = env.observation_space
    taken = (gymnasium.spaces.Box, gymnasium.spaces.MultiBinary, gymnasium.spaces.MultiDiscrete)
    if not isinstance(space, taken) or space.shape is None or not 0 < len(space.shape) <= MAX_RANK:
        raise ConfigError(
            "env.id observation space",
            type(space).__name__,
            f"an array (Box) of 1 to {MAX_RANK} dimensions; wrap the environment to give one",
        )
    dtype = np.dtype(np.uint8) if space.dtype == np.uint8 else np.dtype(np.float32)
    if math.prod(space.shape) * dtype.itemsize * 2 > MAX_INFLATED_BYTES:
        raise ConfigError(
            "env.id observation space", space.shape, f"observations of at most {MAX_INFLATED_BYTES // 2} bytes"
        )
    return tuple(int(side) for side in space.shape), dtype


def _refuse_other_actions(env: Any) -> None:
    """Raises ConfigError for an action space that is not discrete."""
    import gymnasium

    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(
            "env.id action space", type(space).__name__, "a Discrete action space; wrap the environment to give one"
        )
