"""SVG by hand: a chart is a few polylines, and a report must open without a library or a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from gorila.report.content import Chart, Points

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 14, 34
MOST_POINTS, MOST_DOTS, MOST_LINES = 400, 1500, 12
COLOURS = (
    "#1f6feb",
    "#d9480f",
    "#2b8a3e",
    "#9c36b5",
    "#e8590c",
    "#0b7285",
    "#c2255c",
    "#5c940d",
    "#495057",
    "#f08c00",
    "#364fc7",
    "#862e9c",
)


def thinned(points: Points, most: int) -> list[tuple[float, float]]:
    """At most `most` points: means of neighbours, so that no peak of a noisy line is drawn as its level."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(finite) <= most:
        return finite
    size = len(finite) / most
    groups = [finite[int(i * size) : int((i + 1) * size)] for i in range(most)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups if g]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two, at most about `most`."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next((m for m in (1, 2, 5) if span / (step * m) <= most), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, int(math.floor(high / step + 1e-9)) + 1)]


def short(value: float) -> str:
    """For an axis."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.4g}"


def svg(chart: Chart) -> str:
    """The chart as an <svg> element; a sentence when there is nothing to draw."""
    if chart.empty:
        return '<p class="none">nothing was recorded</p>'
    lines = {name: thinned(points, MOST_POINTS) for name, points in list(chart.lines.items())[:MOST_LINES] if points}
    dots = {name: _every(points, MOST_DOTS) for name, points in list(chart.dots.items())[:MOST_LINES] if points}
    every = [p for points in [*lines.values(), *dots.values()] for p in points]
    if not every:
        return '<p class="none">nothing finite was recorded</p>'
    ys = [y for _, y in every] + ([chart.level] if chart.level is not None else [])
    x_low, x_high = _range([x for x, _ in every], 0.0)
    y_low, y_high = _range(ys, 0.05)
    if min(ys) >= 0 and y_low < 0.3 * y_high:
        y_low = 0.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    for y in ticks(y_low, y_high):
        _, down = at(x_low, y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4}" text-anchor="end">{escape(short(y))}</text>')
    for x in ticks(x_low, x_high, 7):
        across, _ = at(x, y_low)
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{escape(short(x))}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(chart.x)}</text>')
    if chart.level is not None:
        _, down = at(x_low, chart.level)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}"/>')
    for number, points in enumerate(dots.values()):
        colour = COLOURS[(len(lines) + number) % len(COLOURS)] if len(dots) > 1 else "#868e96"
        marks = "".join("M{} {}h0".format(*at(x, y)) for x, y in points)
        parts.append(f'<path class="dots" stroke="{colour}" d="{marks}"/>')
    for number, points in enumerate(lines.values()):
        path = " ".join("{},{}".format(*at(x, y)) for x, y in points)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}"/>')
        if len(points) == 1:
            parts.append('<circle cx="{}" cy="{}" r="3" fill="{}"/>'.format(*at(*points[0]), colour))
    parts.append("</svg>")
    mark = f"{chart.level_name} {short(chart.level)}" if chart.level is not None and chart.level_name else ""
    return "".join(parts) + _legend(list(lines), list(dots), mark)


def _legend(lines: Sequence[str], dots: Sequence[str], mark: str) -> str:
    names = [(name, COLOURS[i % len(COLOURS)]) for i, name in enumerate(lines)]
    names += [
        (name, COLOURS[(len(lines) + i) % len(COLOURS)] if len(dots) > 1 else "#868e96") for i, name in enumerate(dots)
    ]
    keys = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in names)
    if mark:
        keys += f'<span><i class="mark"></i>{escape(mark)}</span>'
    return f'<div class="legend">{keys}</div>'


def bars(counts: Sequence[int], x: str) -> str:
    """A histogram of counts by 0, 1, 2, …; the last bar holds all from there on when there are many."""
    most = 40
    shown = list(counts[:most]) + ([sum(counts[most:])] if len(counts) > most else [])
    if not sum(shown):
        return '<p class="none">no gradient was applied</p>'
    room, tallest = (WIDTH - LEFT - RIGHT) / len(shown), max(shown)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="histogram">']
    for y in ticks(0, tallest):
        down = TOP + (tallest - y) / tallest * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{escape(short(y))}</text>')
    for i, count in enumerate(shown):
        height = count / tallest * (HEIGHT - TOP - BOTTOM)
        across = LEFT + i * room + min(0.1 * room, 4)
        width = min(0.8 * room, 60)
        parts.append(
            f'<rect x="{across:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        )
        if len(shown) <= 20 or i % 5 == 0:
            label = f"{i}+" if i == most else str(i)
            parts.append(
                f'<text x="{across + width / 2:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{label}</text>'
            )
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x)}</text></svg>')
    return "".join(parts)


def _every(points: Points, most: int) -> list[tuple[float, float]]:
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    return finite[:: max(1, math.ceil(len(finite) / most))]


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high <= low:
        return low - 0.5, high + 0.5
    return low - margin * (high - low), high + margin * (high - low)
