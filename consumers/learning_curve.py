"""curve.png: what a run learned, by updates and by seconds. Written whole or not at all."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path

from gorila.messages import Episode, Evaluation, Message


@dataclass
class LearningCurve:
    """Points of the curve, folded from `episodes` records."""

    title: str
    threshold: float | None
    screenings: list[tuple[int, float]] = field(default_factory=list)
    confirmations: list[tuple[int, float]] = field(default_factory=list)
    exploring: list[tuple[int, float]] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """Fold one record in. Exploring returns are thinned to every second point past 10,000: a picture needs no more."""
        if isinstance(message, Evaluation):
            points = self.confirmations if message.phase == "confirm" else self.screenings
            points.append((message.weights_version, message.return_mean))
        elif isinstance(message, Episode) and message.role == "actor":
            self.exploring.append((message.weights_version, message.episode_return))
            if len(self.exploring) > 10_000:
                self.exploring = self.exploring[::2]

    def draw(self, path: Path) -> None:
        """Raises OSError when the disk refuses."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        if self.exploring:
            axes.scatter(
                *_columns(self.exploring),
                s=4,
                alpha=0.25,
                color="tab:gray",
                label="actors' episodes (exploring)",
            )
        if self.screenings:
            axes.plot(*_columns(self.screenings), color="tab:blue", marker="o", markersize=3, label="evaluation")
        if self.confirmations:
            axes.scatter(
                *_columns(self.confirmations),
                color="tab:green",
                marker="*",
                s=140,
                zorder=3,
                label="confirmation",
            )
        if self.threshold is not None:
            axes.axhline(
                self.threshold, color="tab:red", linestyle=":", linewidth=1, label=f"solved at {self.threshold:g}"
            )
        axes.set(xlabel="updates (global version)", ylabel="episode return", title=self.title)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", fontsize="small")
        axes.grid(alpha=0.3)
        temporary = path.with_suffix(".tmp.png")
        figure.savefig(temporary, dpi=110)
        temporary.replace(path)
        figure.clear()
        del figure, axes
        gc.collect()  # a figure is a net of cycles, 1 MB each time it is drawn; by itself the collector comes for them too seldom


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [version for version, _ in points], [value for _, value in points]
