"""`gorila train --resume RUN`: a run that ended, was stopped or killed goes on, on its own topics.

Nothing is cut and nothing copied: every role starts at the end of its log (design section 7). What depends on progress (ε, β, target, warm-up of the
learning rate) is a function of the version, which the parameter servers find in their checkpoints and gradients.

Order: everything that can be refused is refused first; then the `run` record is written again, if a limit was raised; then `train` goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gorila.codec import Schemas
from gorila.config import LOCAL_KEYS, Config
from gorila.errors import BadRecord, RunError
from gorila.local.summary import Summary
from gorila.local.train import kafka, train
from gorila.log_ranges import bounds, read_range
from gorila.run_observer import RunObserver, open_spectator
from gorila.run_progress import RunProgress
from gorila.run_record import write_record
from gorila.run_state import RunState
from gorila.service import Service
from gorila.settings import canonical_json, config_of_run, local_kafka, validate

LEFT_WITHIN_S = 30.0
"""A role that was killed stays in its group for 10 s (its session), one that lost its supervisor goes on for a second or two."""
LOOK_S = 0.5
NEWEST_PRIORITIES = 64


@contextmanager
def run_on_kafka(what: str, run: str, sets: Sequence[str]) -> Iterator[Service]:
    """The run as a spectator has it, on the Kafka of `sets` and environment, or the local embedded one, started if need be. Raises RunError, BrokerError."""
    local = Config(kafka=local_kafka(sets))
    with kafka(local) as (bootstrap_servers, _):
        yield open_spectator(what, run, bootstrap_servers, sets)


def resume(
    run: str, *, sets: Sequence[str], steps: int, updates: int, root: Path, say: Callable[[str], None] = print
) -> Summary:
    """Go on with a run.

    Args:
        sets: `--set` strings: local sections, and keys as the run has them.
        steps, updates: new limits of the whole run; 0: as it was.
        root: where run folders are; the run's is made when it is not there (the learners' outboxes are then lost).

    Raises:
        RunError: unknown, still running, finished, synchronous, from a recording, or a key contradicts it (naming the key).
        LocalError, UsageError, BrokerError.
    """
    with run_on_kafka("resume", run, sets) as service:
        config = resumed_config(service.config, sets, steps, updates)
        refuse_unfit(service)
        wait_until_left(run, RunObserver(service).look, say)
        refuse_finished(run, config, progress_of(service))
        if config.run != service.config.run:
            write_record(service.cluster, run, config, service.facts.to_json(), Schemas())
        return train(config, run=run, root=root, there=True)


def resumed_config(published: Config, sets: Sequence[str], steps: int, updates: int) -> Config:
    """The run's configuration with this machine's local sections and new limits. Raises RunError naming a key that contradicts it."""
    told = config_of_run(canonical_json(published), sets)
    for key in sorted(LOCAL_KEYS):
        section, _, name = key.partition(".")
        has, wanted = getattr(getattr(published, section), name), getattr(getattr(told, section), name)
        if has != wanted:
            raise RunError(
                f"{key} = {wanted!r} contradicts the run, which has {has!r}: leave it out, or fork the run (--at-version, --as)"
            )
    tree = told.model_dump()
    if steps:
        tree["run"]["max_env_steps"] = steps
    if updates:
        tree["run"]["max_updates"] = updates
    return validate(tree)


def refuse_unfit(service: Service) -> None:
    """Raises RunError for a run that cannot be gone on with: a synchronous one, and one that learned from a recording."""
    run = service.run
    if service.config.run.synchronous:
        raise RunError(
            f"run {run} is synchronous (run.synchronous): the same seed gives the same run again, so start it anew"
        )
    actors = range(service.config.actor.count)
    begun = bounds(service.cluster, service.topic("gradients"), 0)[1]
    if begun and not any(bounds(service.cluster, service.topic("transitions"), p)[1] for p in actors):
        raise RunError(
            f"run {run} learned from a recording and has no actors: `gorila train --offline` with more --updates starts anew"
        )


def wait_until_left(run: str, look: Callable[[], RunState], say: Callable[[str], None]) -> None:
    """Return when nobody works for the run any more. Raises RunError: somebody still does after LEFT_WITHIN_S."""
    deadline_s, said = time.monotonic() + LEFT_WITHIN_S, False
    while (state := look()).running:
        if time.monotonic() >= deadline_s:
            raise RunError(f"run {run} is still running: {_who(state)}; stop it first")
        if not said:
            said = True
            say(f"waiting until nobody works for {run} any more: {_who(state)}")
        time.sleep(LOOK_S)


def _who(state: RunState) -> str:
    members = [
        f"{member.instance_id or member.client_id} in group {name}"
        for name, group in sorted(state.groups.items())
        for member in group.members
    ]
    return ", ".join(members) or f"something was written {state.quiet_s or 0:.0f} s ago"


def progress_of(service: Service) -> RunProgress:
    """What the run's small topics say it has come to. Raises BrokerError."""
    progress = RunProgress()
    for topic in ("replay-stats", "episodes", "priorities"):
        low, end = bounds(service.cluster, service.topic(topic), 0)
        start = max(low, end - NEWEST_PRIORITIES) if topic == "priorities" else low
        for received in read_range(service.cluster, service.topic(topic), 0, start, end):
            try:
                progress.take(service.schemas.decode(received.value), received.timestamp_ms)
            except BadRecord:
                continue
    return progress


def refuse_finished(run: str, config: Config, progress: RunProgress) -> None:
    """Raises RunError for a run that would end at once, saying what would let it go on."""
    limits = config.run
    if progress.solved and progress.confirmed is not None:
        raise RunError(
            f"run {run} is finished: version {progress.confirmed.weights_version} solved it with a mean return of {progress.confirmed.return_mean:.4g};"
            f" fork it to go on (--resume {run} --at-version N --as NEW)"
        )
    if limits.max_updates and progress.updates >= limits.max_updates:
        raise RunError(
            f"run {run} is finished: {progress.updates} updates of run.max_updates = {limits.max_updates}; --updates N above it goes on"
        )
    if limits.max_env_steps and progress.env_steps >= limits.max_env_steps:
        raise RunError(
            f"run {run} is finished: {progress.env_steps} steps of run.max_env_steps = {limits.max_env_steps}; --steps N above it goes on"
        )
