"""`gorila weights list|get|verify|trace`: a run's past versions (gorila/weights_history.py)."""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gorila.commands.options import Json, KafkaSets, NamedRun, Servers, refuse_folder, servers_asked
from gorila.errors import UsageError
from gorila.local.live_view import eta
from gorila.moments import milliseconds
from gorila.service import Service
from gorila.weights_history import Checked, History, Line, Moment, ShardWindow, TracedUpdate, history

weights_app = typer.Typer(
    help="A run's past versions: what can be rebuilt, a version as a file, proof that the log gives them, what a version was learned from.",
    no_args_is_help=True,
)

_Version = Annotated[int | None, typer.Option("--version", min=0, help="Each shard when it had made so many updates.")]
SHOWN_BLOCKS = 5
SHOWN_LINES = 3


def _open(run: str, servers: str, sets: list[str] | None) -> tuple[Service, History]:
    from gorila.run_observer import open_spectator

    service = open_spectator("weights", run, servers_asked(servers, sets), sets or ())
    return service, history(service, _Progress())


class _Progress:
    """Lines on stderr: how far the log is, and how long the rest takes."""

    def __init__(self) -> None:
        self._began: tuple[int, int, float] | None = None

    def __call__(self, shard: int, done: int, total: int, version: int) -> None:
        """See gorila.weights_history.Progress."""
        now_s = time.monotonic()
        if self._began is None or self._began[0] != shard or done < self._began[1]:
            self._began = (shard, done, now_s)
            left = ""
        else:
            rate = (done - self._began[1]) / max(1e-9, now_s - self._began[2])
            left = f", {rate:,.0f}/s, {eta((total - done) / rate)} left" if rate > 0 else ""
        print(f"shard {shard}: version {version:,}, {done:,} of {total:,} gradients{left}", file=sys.stderr, flush=True)


def _moment(version: int | None, offset: int | None, timestamp: str) -> Moment:
    if sum((version is not None, offset is not None, bool(timestamp))) != 1:
        raise UsageError("one of --version, --offset and --timestamp says which weights are meant")
    return Moment(version, offset, _milliseconds(timestamp) if timestamp else None)


def _milliseconds(text: str) -> int:
    """ISO 8601 (UTC without a zone) or milliseconds since 1970. Raises UsageError."""
    try:
        return milliseconds(text)
    except ValueError:
        raise UsageError(
            f"--timestamp {text[:40]!r} is not allowed: a time like 2026-01-31T12:00:00 (UTC), or milliseconds since 1970"
        ) from None


def _clock(time_ms: int) -> str:
    return f"{datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC):%Y-%m-%d %H:%M:%S}"


@weights_app.command("list")
def list_versions(
    run: NamedRun, as_json: Json = False, bootstrap_servers: Servers = "", sets: KafkaSets = None
) -> None:
    """Show which versions can be rebuilt: checkpoints, ledger entries and published snapshots, shard by shard.

    Example: gorila weights list RUN
    """
    _, past = _open(run, bootstrap_servers, sets)
    windows = [past.window(shard) for shard in past.shards]
    if as_json:
        typer.echo(json.dumps({"run": run, "shards": [asdict(window) for window in windows]}, indent=2))
        return
    for window in windows:
        typer.echo(window.describe())
        for line in _listed(window):
            typer.echo(line)


def _listed(window: ShardWindow) -> list[str]:
    rows = [
        _row("checkpoint", list(window.checkpoints)),
        _row("ledger", list(window.ledger)),
        *(_row(kind, [p for p in window.published if p.kind == kind]) for kind in ("target", "key", "delta")),
    ]
    lines = [f"  {'what':<12}{'how many':>8}  {'versions':<19}  newest (UTC)"]
    lines += [row for row in rows if row]
    unusable = [line for line in window.checkpoints if not line.usable]
    lines += [f"  checkpoint of version {line.version} cannot be used: {line.why}" for line in unusable[:SHOWN_LINES]]
    if len(unusable) > SHOWN_LINES:
        lines.append(f"  … and {len(unusable) - SHOWN_LINES} more")
    return lines


def _row(what: str, lines: list[Line]) -> str:
    if not lines:
        return ""
    versions = sorted({line.version for line in lines})
    span = f"{versions[0]} … {versions[-1]}"
    return f"  {what:<12}{len(versions):>8}  {span:<19}  {_clock(max(line.time_ms for line in lines))}"


@weights_app.command()
def get(
    run: NamedRun,
    version: _Version = None,
    offset: Annotated[
        int | None, typer.Option("--offset", min=0, help="Each shard after this offset of its gradients partition.")
    ] = None,
    timestamp: Annotated[
        str,
        typer.Option("--timestamp", help="Each shard after the gradients of that time: 2026-01-31T12:00:00, or ms."),
    ] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Default: RUN-vVERSION.safetensors.")] = None,
    bootstrap_servers: Servers = "",
    sets: KafkaSets = None,
) -> None:
    """Write the weights of a past version as a policy file, rebuilt bit for bit from a checkpoint and the gradients after it.

    Example: gorila weights get RUN --version 1200 --out past.safetensors
    """
    import numpy as np

    moment = _moment(version, offset, timestamp)
    refuse_folder(out)
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    service, past = _open(run, bootstrap_servers, sets)
    shards = [past.rebuild(shard, moment) for shard in past.shards]
    flat = np.concatenate([shard.weights for shard in shards])
    reached = min(shard.version for shard in shards)
    path = out or Path(f"{run}-v{reached}.safetensors")
    importlib.import_module("gorila.policy").save_weights(path, flat, reached, service.config, service.facts)
    typer.echo(f"{path}: run {run}, version {reached}, {len(flat):,} parameters")
    for shard in shards:
        typer.echo(
            f"  shard {shard.shard}: version {shard.version}, gradient offset {shard.gradient_offset},"
            f" state hash {shard.state_hash & 0xFFFFFFFF:08x}"
        )


@weights_app.command()
def verify(run: NamedRun, bootstrap_servers: Servers = "", sets: KafkaSets = None) -> None:
    """Recompute the log from the oldest checkpoint and compare every ledger entry, checkpoint and published snapshot. Exit code 1: the first mismatch.

    Example: gorila weights verify RUN
    """
    _, past = _open(run, bootstrap_servers, sets)
    for shard in past.shards:
        for line in _verdict(past.verify(shard)):
            typer.echo(line)


def _verdict(checked: Checked) -> list[str]:
    names = {"ledger": "ledger entries", "checkpoint": "checkpoints", "target": "targets", "key": "key frames"}
    agree = ", ".join(f"{checked.compared.get(kind, 0):,} {name}" for kind, name in names.items())
    return [
        f"shard {checked.shard}: versions {checked.first_version} to {checked.last_version} recomputed from {checked.gradients:,} gradients",
        f"  agree: {agree}, {checked.compared.get('delta', 0):,} deltas",
        *(f"  not compared: {count:,} {why}" for why, count in sorted(checked.skipped.items())),
    ]


@weights_app.command()
def trace(
    run: NamedRun,
    version: Annotated[int, typer.Option("--version", min=1, help="The newest update to trace.")],
    updates: Annotated[int, typer.Option("--updates", min=1, help="So many updates up to it.")] = 1,
    shard: Annotated[int, typer.Option("--shard", min=0, help="Whose gradients.")] = 0,
    as_json: Json = False,
    bootstrap_servers: Servers = "",
    sets: KafkaSets = None,
) -> None:
    """Name the gradient, the batch and the transitions (topic, partition, offset, rows) behind a version, and where retention has cut the trail.

    Example: gorila weights trace RUN --version 1200
    """
    service, past = _open(run, bootstrap_servers, sets)
    if shard not in past.shards:
        raise UsageError(f"--shard {shard} is not allowed: the run has {len(past.shards)}, 0 to {len(past.shards) - 1}")
    found = past.trace(shard, version, updates)
    if as_json:
        typer.echo(json.dumps({"run": run, "updates": [_as_json(update) for update in found]}, indent=2))
        return
    for update in found:
        for line in _described(service, update):
            typer.echo(line)


def _as_json(update: TracedUpdate) -> dict[str, Any]:
    rows = [{"partition": p, "offset": o, "rows": list(rows)} for (p, o), rows in update.rows.items()]
    return {**asdict(update), "rows": rows}


def _described(service: Service, update: TracedUpdate) -> list[str]:
    topic = service.topic
    batch = ", ".join(f"{topic('batches')}/{update.batch_partition}@{offset}" for offset in update.batch_offsets)
    count = sum(map(len, update.rows.values()))
    lines = [
        f"version {update.version} of shard {update.shard}",
        f"  gradient     {topic('gradients')}/{update.shard}@{update.gradient_offset} by {update.learner_id} on version {update.base_version},"
        f" {update.codec}, loss {update.loss:.4g}, norm {update.gradient_norm:.4g}",
        f"  batch        {batch}, {update.num_samples} samples",
    ]
    if update.rows_from:
        lines.append(
            f"  transitions  {count} rows of {len(update.rows)} blocks, as {topic(update.rows_from)} names them"
        )
    for (partition, offset), rows in list(update.rows.items())[:SHOWN_BLOCKS]:
        where = f"{topic('transitions')}/{partition}@{offset}"
        lines.append(f"               {where} row{'s' * (len(rows) > 1)} {' '.join(map(str, rows))}")
    if len(update.rows) > SHOWN_BLOCKS:
        lines.append(f"               … and {len(update.rows) - SHOWN_BLOCKS} more blocks (--json names all)")
    return lines + [f"  {line}" for line in update.cut]
