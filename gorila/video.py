"""One episode of a policy as a moving picture: GIF, WebP or animated PNG. The only door to pillow (extra `video`).

What is shown: what the environment renders, or, where it renders nothing, the frames it gives (Atari: what the network sees). Small pictures are enlarged, pixel by
pixel. Equal frames in a row may be stored as one that is shown longer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorila.environments import make_filmed
from gorila.errors import LocalError, UsageError
from gorila.policy import EvaluationRound, Policy
from gorila.seeds import generator, seed_number

SUFFIXES = (".gif", ".webp", ".png")
MOST_FRAMES = 3000
LEAST_SIDE = 192  # pixels


def film(weights: Path, out: Path, epsilon: float | None, seed: int) -> dict[str, Any]:
    """Play one episode and write it, whole or not at all; the numbers `gorila evaluate --video` adds.

    At most MOST_FRAMES frames: the rest of a longer episode is played and not shown.

    Raises:
        UsageError: another suffix, not a policy file, an environment that gives no pictures. LocalError: the disk refuses.
    """
    if out.suffix not in SUFFIXES:
        raise UsageError(f"{out}: the name of a video ends in {', '.join(SUFFIXES)}")
    policy = Policy.load(weights)
    # Before an environment imports pygame: no greeting on our output, no screen.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    filmed = make_filmed(policy.config, seed_number(seed, "evaluator", 0, 0), policy.config.evaluator.max_episode_steps)
    chosen = policy.config.evaluator.epsilon if epsilon is None else epsilon
    try:
        playing = EvaluationRound(policy, filmed.lanes, chosen, generator(seed, "policy"))
        frames = [_image(filmed.picture(playing.observations[0]))]
        episode_return, steps = 0.0, 0
        while not playing.done:
            for episode in playing.step():
                episode_return, steps = episode.episode_return, episode.steps
            if len(frames) < MOST_FRAMES:
                frames.append(_image(filmed.picture(playing.observations[0])))
    finally:
        filmed.lanes.close()
    _save(out, frames, filmed.fps)
    return {
        "file": str(out),
        "frames": len(frames),
        "frames_per_s": filmed.fps,
        "return": episode_return,
        "steps": steps,
    }


def _image(pixels: NDArray[np.uint8]) -> Any:
    """A palette image (a quarter of the memory) of grey (H, W) or RGB (H, W, 3)."""
    from PIL import Image

    grey = pixels.ndim == 2 or pixels.shape[2] == 1
    image = Image.fromarray(pixels.reshape(pixels.shape[:2]) if grey else np.ascontiguousarray(pixels))
    factor = max(1, -(-LEAST_SIDE // min(image.size)))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    return image if grey else image.quantize(256, dither=Image.Dither.NONE)


def _save(out: Path, frames: list[Any], fps: float) -> None:
    temporary = out.with_name(out.name + ".new")
    options: dict[str, Any] = {"duration": _duration_ms(fps), "loop": 0}
    if out.suffix == ".webp":
        options["lossless"] = True
    try:
        with temporary.open("wb") as opened:
            form = {".gif": "GIF", ".webp": "WEBP", ".png": "PNG"}[out.suffix]
            frames[0].save(opened, form, save_all=True, append_images=frames[1:], **options)
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise LocalError(f"cannot write {out}: {error.strerror or error}") from None


def _duration_ms(fps: float) -> int:
    """Of a frame: hundredths of a second, as GIF counts, and no less than browsers show."""
    return max(20, 10 * round(100 / fps))
