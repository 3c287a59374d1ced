"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gorila.config import Config
from gorila.local.roles import RoleProcess
from gorila.run_follower import Lag
from gorila.run_progress import RunProgress

PLAIN_LINES_EVERY_S = 10.0
WIDEST_COLUMNS = 100
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 30) -> str:
    """Newest values as bars; empty for none."""
    shown = [v for v in values if math.isfinite(v)][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(_BARS[int((v - low) / (high - low) * 7) if high > low else 0] for v in shown)


def lag_name(lag: Lag) -> str:
    """Short for the reader: `server-0` for the group `parameter-server-0-0`."""
    return f"server-{lag.group.split('-')[2]}" if lag.group.startswith("parameter-server-") else lag.group


def eta(seconds: float) -> str:
    """`95 s`, `12 min`, `3 h 5 min`."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def short(value: float) -> str:
    """A number for a narrow column."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


@dataclass
class Rates:
    """Change per second of counters over the last few seconds."""

    _seen: deque[tuple[float, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=12))

    def take(self, now_s: float, counters: dict[str, float]) -> dict[str, float]:
        """Rates since the oldest remembered reading."""
        self._seen.append((now_s, counters))
        then, before = self._seen[0]
        gone = now_s - then
        return {name: (value - before.get(name, 0)) / gone if gone > 0 else 0.0 for name, value in counters.items()}


class _Terminal(Console):
    """Standard output that remembers when nobody reads it any more, instead of ending the process in the middle of a run."""

    closed = False

    def on_broken_pipe(self) -> None:
        """Called by rich."""
        self.quiet = self.closed = True


class LiveView:
    """Use as a context manager; `show` as often as there is news."""

    def __init__(self, run: str, config: Config, console: Console | None = None) -> None:
        self._run, self._config = run, config
        self._console = console or _Terminal(file=sys.stdout, highlight=False)
        self._live: Live | None = None
        self._rates = Rates()
        self._curve: list[float] = []
        self._last_plain_s = 0.0
        self._events: deque[str] = deque(maxlen=4)

    @property
    def closed(self) -> bool:
        """Nobody reads the output any more (`gorila train | head`)."""
        return getattr(self._console, "closed", False)

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def event(self, line: str) -> None:
        """Something that happened: a restart, an evaluation."""
        self._events.append(line)
        if self._live is None:
            self._console.print(line, soft_wrap=True, markup=False)

    def show(
        self, now_s: float, progress: RunProgress, lags: list[Lag], roles: list[RoleProcess], elapsed_s: float
    ) -> None:
        """Draw the state of the run."""
        counters = {"steps": progress.env_steps, "updates": progress.updates, "samples": progress.samples}
        rates = self._rates.take(now_s, {k: float(v) for k, v in counters.items()})
        if self._live is not None:
            self._live.update(self._panel(progress, rates, lags, roles, elapsed_s))
        elif elapsed_s - self._last_plain_s >= PLAIN_LINES_EVERY_S:
            self._last_plain_s = elapsed_s
            for line in self.plain_lines(progress, rates, lags, elapsed_s):
                self._console.print(line, soft_wrap=True, markup=False)

    def goal(self, progress: RunProgress, rates: dict[str, float]) -> tuple[float, str]:
        """(fraction done, what it is measured by with an ETA)."""
        limits = [
            (self._config.run.max_env_steps, progress.env_steps, rates.get("steps", 0.0), "steps"),
            (self._config.run.max_updates, progress.updates, rates.get("updates", 0.0), "updates"),
        ]
        for limit, done, rate, unit in limits:
            if limit:
                left = (limit - done) / rate if rate > 0 else math.inf
                fraction = min(1.0, done / limit)
                return fraction, f"{fraction:.0%} of {limit:,} {unit}" + (f", {eta(left)} left" if rate > 0 else "")
        threshold = self._config.evaluator.threshold
        if threshold is not None:
            reached = progress.evaluation.return_mean if progress.evaluation else math.nan
            fraction = max(0.0, min(1.0, reached / threshold)) if math.isfinite(reached) and threshold > 0 else 0.0
            return fraction, f"evaluation {short(reached)} of {threshold:g}"
        return 0.0, "no limit: Ctrl-C ends the run"

    def plain_lines(
        self, progress: RunProgress, rates: dict[str, float], lags: list[Lag], elapsed_s: float
    ) -> list[str]:
        """For logs and pipes, no wider than 80 columns: what is done, how it goes, and who waits for whom."""
        _, goal = self.goal(progress, rates)
        done = [
            f"{elapsed_s:5.0f} s",
            f"steps {progress.env_steps:,} {short(rates['steps'])}/s",
            f"updates {progress.updates:,} {short(rates['updates'])}/s",
            f"return {short(progress.episode_return_mean)}",
        ]
        towards = [" " * 7, goal]
        if progress.evaluation is not None and "evaluation" not in goal:
            towards.append(f"evaluation {short(progress.evaluation.return_mean)}")
        behind = ", ".join(f"{lag_name(lag)} {lag.records}" for lag in lags[:4])
        lines = [" | ".join(done), " | ".join(towards), f"        | loss {short(progress.loss)} | lag {behind or '–'}"]
        if progress.replay_waits_for:
            lines.append(f"        | replay waits for {progress.replay_waits_for}")
        return lines

    def _panel(
        self,
        progress: RunProgress,
        rates: dict[str, float],
        lags: list[Lag],
        roles: list[RoleProcess],
        elapsed_s: float,
    ) -> Panel:
        if progress.evaluation is not None and (not self._curve or self._curve[-1] != progress.evaluation.return_mean):
            self._curve.append(progress.evaluation.return_mean)
        fraction, goal = self.goal(progress, rates)
        numbers = Table.grid(padding=(0, 2))
        stale = progress.staleness_percentile(50)
        evaluation = short(progress.evaluation.return_mean) if progress.evaluation else "–"
        rows = [
            ("environment steps", f"{progress.env_steps:,}", f"{short(rates['steps'])}/s"),
            ("updates", f"{progress.updates:,}", f"{short(rates['updates'])}/s"),
            ("samples", f"{progress.samples:,}", f"{short(rates['samples'])}/s"),
            ("return (exploring)", short(progress.episode_return_mean), f"epsilon {short(progress.epsilon)}"),
            ("return (evaluation)", evaluation, sparkline(self._curve)),
            ("loss", short(progress.loss), f"gradient norm {short(progress.gradient_norm)}"),
            ("staleness p50", "–" if stale is None else f"{stale:g}", "updates"),
        ]
        for row in rows:
            numbers.add_row(*row)
        lag = Text("lag  " + ("   ".join(f"{lag_name(item)} {item.records}" for item in lags) or "–"))
        up = Text("roles  ") + Text(" ").join(
            Text(role.name, style="green" if role.pid else "red") for role in roles[:24]
        )
        waits = (
            Text(f"replay waits for {progress.replay_waits_for}", style="yellow")
            if progress.replay_waits_for
            else Text("")
        )
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=1.0, completed=fraction, width=30), Text(goal))
        body = Group(
            bar,
            numbers,
            lag,
            up,
            waits,
            *(Text(e, style="dim") for e in self._events),
        )
        return Panel(body, title=f"{self._run} · {elapsed_s:.0f} s", width=min(WIDEST_COLUMNS, self._console.width))
