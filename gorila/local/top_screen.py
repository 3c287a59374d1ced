"""What `gorila top` shows: figures in, one panel out. Nothing here asks Kafka or the clock."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gorila.config import Config
from gorila.local.live_view import Rates, short, sparkline
from gorila.messages import Episode, Evaluation, Message, Priorities
from gorila.run_progress import RunProgress
from gorila.run_state import PartitionLag, RoleState, RunState, duration, role_states, waits

WIDEST_COLUMNS = 100
MOST_LAGS = 8
HISTORY = 60
RECENT_BATCHES = 50
_STYLES = {"up": "green", "waits": "yellow", "idle": "dim", "down": "bold red"}
_BARE = {"up": "", "waits": "~", "idle": "-", "down": "!"}


@dataclass
class TopState:
    """Everything on the screen, gathered record by record and look by look."""

    config: Config
    kafka: str
    progress: RunProgress = field(default_factory=RunProgress)
    state: RunState | None = None
    problem: str = ""
    rates: dict[str, float] = field(default_factory=dict)
    newest_evaluation_ms: int = 0
    _meter: Rates = field(default_factory=Rates)
    _busy: dict[str, deque[float]] = field(default_factory=dict)
    _evaluations: dict[int, float] = field(default_factory=dict)
    _returns: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _history: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=HISTORY)))
    _episodes_at: int = 0

    def take(self, message: Message, time_ms: int) -> None:
        """One record, beside RunProgress."""
        if isinstance(message, Priorities):
            recent = self._busy.setdefault(message.learner_id, deque(maxlen=RECENT_BATCHES))
            if math.isfinite(message.busy_fraction):
                recent.append(message.busy_fraction)
        elif isinstance(message, Evaluation):
            self.newest_evaluation_ms = max(self.newest_evaluation_ms, time_ms)
            self._evaluations[message.weights_version] = message.return_mean
        elif isinstance(message, Episode) and message.role == "actor":
            self._returns.append(message.episode_return)

    def look(self, state: RunState, now_s: float) -> None:
        """What the administration said; call it at a steady pace, the sparklines are of these moments."""
        self.state, self.problem = state, ""
        progress = self.progress
        counters = {"steps": progress.env_steps, "updates": progress.updates, "samples": progress.samples}
        ends: dict[str, int] = defaultdict(int)
        for lag in state.lags:
            if not lag.group.startswith("parameter-server") or lag.group.endswith("-0"):
                ends[lag.topic] += lag.end
        counters |= dict(ends)
        self.rates = self._meter.take(now_s, {name: float(value) for name, value in counters.items()})
        for name in ("steps", "updates", "samples"):
            self._history[name].append(self.rates[name])
        for group, topic in {(lag.group, lag.topic) for lag in state.lags}:
            self._history[f"{group} {topic}"].append(
                sum(lag.records for lag in state.lags if (lag.group, lag.topic) == (group, topic))
            )
        if progress.episodes > self._episodes_at and math.isfinite(progress.episode_return_mean):
            self._episodes_at = progress.episodes
            self._history["return"].append(progress.episode_return_mean)

    @property
    def busy(self) -> dict[str, float]:
        """Mean utilisation of each learner over its newest batches."""
        return {name: float(np.mean(recent)) for name, recent in sorted(self._busy.items()) if recent}

    def history(self, name: str, width: int = 20) -> str:
        """As a sparkline."""
        return sparkline(list(self._history[name]), width)

    @property
    def evaluations(self) -> list[float]:
        """Mean returns by version."""
        return [self._evaluations[version] for version in sorted(self._evaluations)]

    @property
    def roles(self) -> list[RoleState]:
        """Empty before the first look."""
        return role_states(self.state, self.config, self.progress, self.newest_evaluation_ms) if self.state else []


def screen(top: TopState, width: int) -> Panel:
    """The whole frame, at most WIDEST_COLUMNS wide."""
    width = min(WIDEST_COLUMNS, width)
    state = top.state
    parts: list[RenderableType] = []
    if top.problem:
        parts.append(Text(top.problem, style="bold red"))
    parts.append(_numbers(top))
    if state is not None:
        parts += [Text(""), _lags(top, state, width), Text(""), _roles(top.roles)]
        for sentence in waits(state, top.config, top.progress, top.busy):
            parts.append(Text(sentence, style="yellow"))
    return Panel(Group(*parts), title=_title(top, width), title_align="left", width=width)


def _title(top: TopState, width: int) -> Text:
    state = top.state
    name = state.run if state else "…"
    quiet = state.quiet_s if state else None
    if state is None:
        how = "looking"
    elif state.running:
        how = "running"
    else:
        how = "not running" + (f", last record {duration(quiet)} ago" if quiet is not None else "")
    title = Text(f"{name} · {how} · {top.kafka}", style="bold")
    title.truncate(width - 6, overflow="ellipsis")
    return title


def _numbers(top: TopState) -> Table:
    progress, rates = top.progress, top.rates
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]

    def rate(name: str) -> str:
        return f"{short(rates[name])}/s" if name in rates else ""

    table.add_row("environment steps", f"{progress.env_steps:,}", rate("steps"), top.history("steps"))
    table.add_row("updates", f"{progress.updates:,}", rate("updates"), top.history("updates"))
    table.add_row("samples", f"{progress.samples:,}", rate("samples"), top.history("samples"))
    table.add_row(
        "return, exploring", short(progress.episode_return_mean), f"ε {short(progress.epsilon)}", top.history("return")
    )
    best = f"best {short(progress.best.return_mean)}" if progress.best else ""
    shown = short(progress.evaluation.return_mean) if progress.evaluation else "–"
    table.add_row("return, evaluation", shown, best, sparkline(top.evaluations, 20))
    busy = "  ".join(f"{name} {share:.0%}" for name, share in list(top.busy.items())[:2])
    table.add_row("loss", short(progress.loss), f"|g| {short(progress.gradient_norm)}", f"busy {busy}" if busy else "")
    p50, p99 = progress.staleness_percentile(50), progress.staleness_percentile(99)
    stale = ("–", "") if p50 is None or p99 is None else (f"p50 {p50:g}", f"p99 {p99:g}")
    dead = top.state.dead_letters if top.state else 0
    table.add_row("staleness, updates", *stale, Text(f"dead letters {dead}", style="bold red" if dead else ""))
    return table


def _lags(top: TopState, state: RunState, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_row(*(Text(word, style="dim") for word in ("group", "topic/partition", "lag", "bound", "in/s", "")))
    shown, hidden = _worst_first(state.lags)
    # The longest row is what the width leaves to the curve.
    curve = max(6, min(20, width - 66))
    for lag in shown:
        style = "bold red" if lag.records > 2 * lag.bound else "yellow" if lag.records >= lag.bound else ""
        alone = sum(1 for other in state.lags if (other.group, other.topic) == (lag.group, lag.topic)) == 1
        whole = f"{lag.group} {lag.topic}"
        table.add_row(
            lag.group.replace("parameter-server", "server"),
            f"{lag.topic}/{lag.partition}",
            Text(f"{lag.records:,}", style=style),
            f"{lag.bound:,}",
            short(top.rates.get(lag.topic, math.nan)) if alone else "",
            top.history(whole, curve) if alone else "",
        )
    for group, topic, count, records in hidden:
        rate = short(top.rates.get(topic, math.nan))
        table.add_row(group, f"{topic}, {count} more", f"{records:,}", "", rate, top.history(f"{group} {topic}", curve))
    return table


def _worst_first(lags: Iterable[PartitionLag]) -> tuple[list[PartitionLag], list[tuple[str, str, int, int]]]:
    """Every group's worst partitions, as many as there is room for; and what was left out, summed by group."""
    by_group: dict[tuple[str, str], list[PartitionLag]] = defaultdict(list)
    for lag in lags:
        by_group[lag.group, lag.topic].append(lag)
    each = max(1, MOST_LAGS // max(1, len(by_group)))
    shown: list[PartitionLag] = []
    hidden: list[tuple[str, str, int, int]] = []
    for (group, topic), partitions in by_group.items():
        if len(shown) >= 2 * MOST_LAGS:
            hidden.append((group, topic, len(partitions), sum(p.records for p in partitions)))
            continue
        worst = sorted(partitions, key=lambda lag: (-lag.records, lag.partition))
        shown += worst[:each] if len(worst) > each + 1 else worst
        left = worst[each:] if len(worst) > each + 1 else []
        if left:
            hidden.append((group, topic, len(left), sum(p.records for p in left)))
    return shown, hidden[:MOST_LAGS]


def _roles(roles: list[RoleState]) -> Group:
    """Names in a colour a state, with a mark where there is no colour; and why those that are down are thought to be."""
    names = Text("roles ")
    # Those in trouble first: a hundred healthy actors must not hide one that is down.
    order = {"down": 0, "waits": 1, "idle": 2, "up": 3}
    for role in sorted(roles, key=lambda role: order[role.state])[:24]:
        names.append(" ")
        names.append(f"{_BARE[role.state]}{role.name.replace('parameter-server', 'server')}", style=_STYLES[role.state])
    if len(roles) > 24:
        names.append(f" and {len(roles) - 24} more", style="dim")
    lines: list[RenderableType] = [names]
    reasons = [role for role in roles if role.state == "down"][:4]
    lines += [Text(f"{role.name} is down: {role.why}", style="red") for role in reasons]
    return Group(*lines)
