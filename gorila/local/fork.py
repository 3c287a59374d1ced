"""`gorila train --resume RUN --at-version V --as NEW`: back to a point in a run's past, as a run of its own (design section 7).

RUN is left as it is; nothing in its topics is cut. NEW begins with RUN's weights, optimiser moments and target of that point, and its version goes on
from there: Adam's bias correction, ε, β, the target's period and the learning rate's warm-up are functions of the version, so they go on too.
The memory is filled with what RUN had experienced by then (fork_memory.py), or begins empty. What is not carried over: learners' residuals
(error feedback), which were never in the log, and batches that were drawn and not learned.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gorila.config import LOCAL_SECTIONS, Config
from gorila.errors import RunError, UsageError
from gorila.kafka import Cluster
from gorila.local.fork_memory import copy_memory
from gorila.local.resume import run_on_kafka
from gorila.local.summary import Summary
from gorila.local.train import prepare_folder, train
from gorila.run_record import check_name, create_run
from gorila.service import Service
from gorila.settings import environment_values, parse_sets, validate
from gorila.topics import TOPOLOGY, full_name
from gorila.weights_history import Moment, history

KEPT_SECTIONS = ("env", "network")
KEPT_KEYS = ("parameter_server.shards", "parameter_server.optimizer", "run.synchronous")
FILE = "fork.json"


def fork(
    run: str,
    new: str,
    moment: Moment,
    *,
    sets: Sequence[str],
    steps: int,
    updates: int,
    empty_memory: bool,
    root: Path,
    say: Callable[[str], None] = print,
) -> Summary:
    """Make NEW out of RUN's past and train it.

    Args:
        sets: may change what a new run may be told, but not what the rebuilt state is made for (KEPT_SECTIONS, KEPT_KEYS).
        steps, updates: limits of NEW. Updates count from RUN's first; steps are NEW's own.
        empty_memory: whether the memory begins empty; else with RUN's transitions up to the point.

    Raises:
        RunError: RUN unknown or synchronous, NEW there already, a key that contradicts the state, or no transitions to fill the memory with.
        OffsetGone: the point is outside what can be rebuilt. UsageError, LocalError, BrokerError.
    """
    check_name(new)
    with run_on_kafka("fork", run, sets) as source:
        config = forked_config(source, sets, steps, updates, empty_memory)
        _refuse_taken(source.cluster, new)
        past = history(source)
        firsts = [past.first_checkpoint(shard, moment, config) for shard in past.shards]
        versions = [first.manifest.version for first in firsts]
        if 0 < config.run.max_updates <= min(versions):
            raise RunError(
                f"run.max_updates = {config.run.max_updates} is reached at version {min(versions)}: --updates N above it goes on"
            )
        folder = prepare_folder(root, new, config)
        try:
            say(f"forking {run} at version {min(versions)} as {new}")
            create_run(
                source.cluster,
                new,
                config,
                source.facts,
                np.zeros(
                    sum(len(part.data) // 4 for f in firsts for part in f.parts if part.tensor == "weights"), np.float32
                ),
                firsts=firsts,
                before_record=lambda: _fill(source, new, config, min(versions), folder, empty_memory, say),
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return train(config, run=new, root=root, there=True)


def forked_config(source: Service, sets: Sequence[str], steps: int, updates: int, empty_memory: bool) -> Config:
    """RUN's configuration with `sets`, limits and this machine's environment over it. Raises RunError naming a key that contradicts the state."""
    published = source.config
    if published.run.synchronous:
        raise RunError(
            f"run {source.run} is synchronous (run.synchronous): its rounds count from the run's first transition, so it cannot be forked"
        )
    tree = published.model_dump()
    layers = [environment_values(os.environ), parse_sets(sets)]
    limits = {"run.max_env_steps": steps, "run.max_updates": updates}
    for key, value in [
        *(pair for layer in layers for pair in layer.items()),
        *((k, v) for k, v in limits.items() if v),
    ]:
        section, _, name = key.partition(".")
        tree[section][name] = value
    config = validate(tree)
    for section in Config.model_fields:
        if section in LOCAL_SECTIONS:
            continue
        has, wanted = getattr(published, section).model_dump(), getattr(config, section).model_dump()
        for name, value in has.items():
            key = f"{section}.{name}"
            kept = section in KEPT_SECTIONS or key in KEPT_KEYS or (key == "actor.count" and not empty_memory)
            if kept and wanted[name] != value:
                why = (
                    "its transitions are by actor: --memory empty"
                    if key == "actor.count"
                    else "the state is made for it"
                )
                raise RunError(f"{key} = {wanted[name]!r} contradicts run {source.run}, which has {value!r} ({why})")
    return config


def _refuse_taken(cluster: Cluster, new: str) -> None:
    there = cluster.admin().topics()
    if any(full_name(new, topic.name) in there for topic in TOPOLOGY):
        raise UsageError(
            f"run {new} has topics on Kafka at {cluster.bootstrap_servers} already: choose another name for --as, or delete it"
        )


def _fill(
    source: Service,
    new: str,
    config: Config,
    version: int,
    folder: Path,
    empty_memory: bool,
    say: Callable[[str], None],
) -> None:
    rows = blocks = 0
    if not empty_memory:
        copied = copy_memory(source, new, config, version)
        rows, blocks = copied.rows, copied.blocks
        say(
            f"memory: {copied.rows:,} transitions of versions up to {version} in {copied.blocks:,} blocks, {copied.priorities:,} priority updates"
        )
    (folder / FILE).write_text(
        json.dumps({"run": source.run, "version": version, "memory_rows": rows, "memory_blocks": blocks}) + "\n"
    )
