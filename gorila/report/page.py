"""The report as HTML: everything inline, everything escaped, nothing fetched (its own Content-Security-Policy forbids it)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gorila.report.charts import bars, svg
from gorila.report.content import Content

HIDDEN = "(hidden)"
_SECRET = re.compile(r"passw|secret|token|credential|api_?key|private_?key|sasl|jaas|\bkey$", re.IGNORECASE)
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#57606a;--line:#d8dee4;--paper:#fff;--box:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--line:#30363d;--paper:#0d1117;--box:#161b22}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1180px;margin:0 auto;padding:20px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:28px 0 8px}h3{font-size:14px;margin:0 0 6px}
p.sources{color:var(--dim);margin:0}p.none{color:var(--dim)}
.cards{display:flex;flex-wrap:wrap;gap:10px;margin:16px 0}.card{background:var(--box);border:1px solid var(--line);border-radius:6px;padding:8px 14px}
.card b{display:block;font-size:20px}.card span{color:var(--dim);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:14px}
figure{margin:0;border:1px solid var(--line);border-radius:6px;padding:10px}
svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--dim)}svg .axis{font-style:italic}
.grid{stroke:var(--line);stroke-width:1}.level{stroke:#e03131;stroke-dasharray:4 3}.dots{stroke-width:3;stroke-linecap:round;opacity:.45}
rect{fill:#1f6feb}.legend{font-size:12px;color:var(--dim)}.legend span{margin-right:12px;white-space:nowrap}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:4px}.legend i.mark{height:0;border-radius:0;border-top:2px dashed #e03131;vertical-align:middle}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.fine{color:#2b8a3e}.advice{color:#e67700}.wrong{color:#e03131;font-weight:bold}.note{color:var(--dim)}
details{border:1px solid var(--line);border-radius:6px;padding:8px 12px}pre{overflow-x:auto;font-size:12.5px}
"""


def without_secrets(value: Any, name: str = "") -> Any:
    """A value with what looks like a secret hidden: by its key's name, or user:password in an address."""
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if name and _SECRET.search(name) and value not in (None, "", [], ()):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    if isinstance(value, str):
        return _USERINFO.sub(rf"\g<1>{HIDDEN}@", value)
    return value


def page(content: Content) -> str:
    """The whole file."""
    config, summary = without_secrets(content.config), without_secrets(content.summary)
    body = [
        f"<h1>{escape(content.run)}</h1>",
        f'<p class="sources">{escape(" ".join(content.sources))}</p>',
        _cards(summary, config),
        "<h2>Curves</h2>",
        '<div class="charts">',
        *(
            f"<figure><h3>{escape(c.title)} <small>({escape(c.y)})</small></h3>{svg(c)}</figure>"
            for c in content.charts
        ),
        f"<figure><h3>staleness of applied gradients <small>(gradients)</small></h3>{_staleness(content)}</figure>",
        "</div>",
        "<h2>Checklist</h2>",
        _checklist(content),
        "<h2>Lag</h2>",
        _lags(content),
        "<h2>Summary</h2>",
        _table(summary)
        if summary
        else '<p class="none">the run has no summary.json: it has not ended, or ran elsewhere</p>',
        "<h2>Configuration</h2>",
        f"<details><summary>every key of the run</summary><pre>{escape(json.dumps(config, indent=2))}</pre></details>",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escape(content.run)}</title><style>{_STYLE}</style></head>'
    )
    return f"{head}\n<body>\n" + "\n".join(body) + "\n</body></html>\n"


def _cards(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    cards: list[tuple[str, str]] = []
    if summary:
        cards = [
            ("yes" if summary.get("solved") else "no", "solved"),
            (_value(summary.get("eval_return_mean")), f"mean return, {_value(summary.get('eval_episodes'))} episodes"),
            (_value(summary.get("env_steps")), "environment steps"),
            (_value(summary.get("updates")), "updates"),
            (_value(summary.get("train_wall_s")), "seconds of training"),
            (_value(summary.get("staleness_p99")), "staleness p99, updates"),
            (_value(summary.get("dead_letters")), "dead letters"),
            (_value(summary.get("restarts")), "restarts"),
        ]
    run, env = config.get("run", {}), config.get("env", {})
    if isinstance(run, Mapping) and isinstance(env, Mapping) and config:
        cards.append((_value(env.get("id")), f"preset {_value(run.get('preset'))}, seed {_value(run.get('seed'))}"))
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in cards)
        + "</div>"
    )


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _table(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(str(k))}</td><td class=n>{escape(_value(v))}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>"


def _staleness(content: Content) -> str:
    if not content.checklist and not content.staleness:
        return '<p class="none">Kafka was not reached: nothing could be counted</p>'
    return bars(content.staleness, "updates")


def _checklist(content: Content) -> str:
    if not content.checklist:
        return '<p class="none">Kafka was not reached: nothing could be measured</p>'
    rows = "".join(
        f"<tr><td class={f.level}>{f.level}</td><td>{escape(f.check)}</td><td>{escape(f.found)}</td><td>{escape(f.do)}</td></tr>"
        for f in content.checklist
    )
    return f"<table><tr><th></th><th>check</th><th>found</th><th>what to do</th></tr>{rows}</table>"


def _lags(content: Content) -> str:
    if not content.lags:
        return '<p class="none">Kafka was not reached; the curve above shows lag while the monitor ran</p>'
    rows: Sequence[str] = [
        f"<tr><td>{escape(group)}</td><td>{escape(where)}</td><td class=n>{lag:,}</td><td class=n>{bound:,}</td></tr>"
        for group, where, lag, bound in content.lags
    ]
    return f"<table><tr><th>group</th><th>partition</th><th class=n>lag</th><th class=n>bound</th></tr>{''.join(rows)}</table>"
