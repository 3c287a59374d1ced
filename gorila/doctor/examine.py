"""Gathers the evidence: two looks with records read in between. Joins no group, commits nothing."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from pathlib import Path

import numpy as np
import psutil

from gorila.doctor.evidence import DeadLetter, Evidence
from gorila.doctor.flow_checks import flow_findings
from gorila.errors import BadRecord, BrokerError
from gorila.kafka import Received
from gorila.messages import Evaluation, Message, Priorities, ReplayStats, Weights
from gorila.run_follower import RunFollower
from gorila.run_observer import RunObserver
from gorila.run_progress import RunProgress
from gorila.run_state import RunState
from gorila.service import Service
from gorila.topics import TOPOLOGY, full_name

WATCH_S = 3.0
LONGEST_WATCH_S = 12.0
NEWEST = 1000
CATCH_UP_S = 5.0
DEAD_READ = 200
SNAPSHOTS = 8
SNAPSHOT_BYTES = 64 * 1024**2
RECENT_BATCHES = 100


class _Watcher:
    """What only records seen as they come can tell."""

    def __init__(self) -> None:
        self.live = False
        self.busy: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_BATCHES))
        self.versions: dict[str, int] = {}
        self.newest_evaluation_ms = 0
        self.append_delay_ms: float | None = None
        self.writer_delay_ms: float | None = None

    def take(self, message: Message, time_ms: int) -> None:
        """A record and the broker's time of it."""
        now_ms = time.time() * 1000
        if isinstance(message, Priorities):
            self.versions[message.learner_id] = message.version
            if math.isfinite(message.busy_fraction):
                self.busy[message.learner_id].append(message.busy_fraction)
            if self.live:  # LogAppendTime: the broker's clock
                self.append_delay_ms = _nearer(self.append_delay_ms, now_ms - time_ms)
        elif isinstance(message, ReplayStats) and self.live:
            self.writer_delay_ms = _nearer(self.writer_delay_ms, now_ms - message.time_ms)
        elif isinstance(message, Evaluation):
            self.newest_evaluation_ms = max(self.newest_evaluation_ms, time_ms)


def _nearer(known: float | None, seen: float) -> float:
    """Of delays the least is nearest to the clocks' difference: waiting only adds."""
    return seen if known is None else min(known, seen)


def examine(service: Service) -> Evidence:
    """Takes a few seconds. Raises BrokerError."""
    progress, watcher = RunProgress(), _Watcher()
    observer = RunObserver(service)
    there = observer.admin.describe([service.topic(topic.name) for topic in TOPOLOGY])
    complete = len(there) == len(TOPOLOGY)
    follower = RunFollower(service, progress, watcher.take, newest=NEWEST) if complete else None
    try:
        until_s = time.monotonic() + CATCH_UP_S
        while follower is not None and follower.poll(0.5) >= 20 and time.monotonic() < until_s:
            pass
        watcher.live = True
        first, cpu_before, began_s = observer.look(), _server_seconds(service.run), time.monotonic()
        while True:
            _watch(follower, WATCH_S)
            second, passed_s = observer.look(), time.monotonic() - began_s
            glimpse = Evidence(
                service.run,
                service.config,
                first,
                second,
                progress=progress,
                newest_evaluation_ms=watcher.newest_evaluation_ms,
            )
            # A machine that was held up for some seconds is not a role that is down: what looks wrong is watched longer.
            if passed_s > LONGEST_WATCH_S or all(f.level != "wrong" for f in flow_findings(glimpse)):
                break
        cpu = {
            name: max(0.0, seconds - cpu_before[name]) / passed_s
            for name, seconds in _server_seconds(service.run).items()
            if name in cpu_before
        }
        snapshots: list[Weights] = []
        if follower is not None:
            follower.look_at_weights()
            snapshots = _snapshots(service, second)
        decoded, unreadable = _newest_records(service, second)
        dead, dead_newest_ms = _dead_letters(service, second)
        newest = {w.shard_id: w for w in snapshots}
        return Evidence(
            run=service.run,
            config=service.config,
            first=first,
            second=second,
            topics={name.removeprefix(full_name(service.run, "")): facts for name, facts in there.items()},
            progress=progress,
            append_delay_ms=watcher.append_delay_ms,
            writer_delay_ms=watcher.writer_delay_ms,
            unreadable=tuple(unreadable),
            decoded=tuple(decoded),
            dead=tuple(dead),
            dead_newest_ms=dead_newest_ms,
            newest_evaluation_ms=watcher.newest_evaluation_ms,
            busy={name: float(np.mean(shares)) for name, shares in sorted(watcher.busy.items()) if shares},
            server_cpu=dict(sorted(cpu.items())),
            cosine=cosines(snapshots, watcher.versions, service.config.parameter_server.shards),
            applied=sum(w.applied for w in newest.values()),
            dropped_stale=sum(w.dropped_stale for w in newest.values()),
        )
    finally:
        if follower is not None:
            follower.close()


def _watch(follower: RunFollower | None, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        if follower is None:
            time.sleep(left_s)
        else:
            follower.poll(min(0.25, left_s))


def _server_seconds(run: str) -> dict[str, float]:
    """CPU seconds of the run's parameter servers on this machine."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "parameter-server" in words and run in words and any("gorila" in Path(w).name for w in words[:3]):
            index = words[words.index("--index") + 1] if "--index" in words[:-1] else "0"
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            found[f"parameter-server-{index}"] = times.user + times.system
    return found


def _read_newest(service: Service, places: dict[tuple[str, int], int]) -> list[Received]:
    """From these offsets to the ends as they are now; a gap at an end (control records) is waited for a moment only."""
    if not places:
        return []
    consumer = service.cluster.consumer(ends=True)
    try:
        consumer.assign(places)
        found: list[Received] = []
        until_s, waiting = time.monotonic() + 5.0, set(places)
        while waiting and time.monotonic() < until_s:
            came = consumer.poll_many(500, 0.2)
            found += came
            waiting -= {place for place in waiting if consumer.end_reached(*place) is not None}
        return found
    finally:
        consumer.close()


def _ends(service: Service, state: RunState, topic: str) -> dict[tuple[str, int], tuple[int, int]]:
    """{place: (start, end)} of a topic's partitions that hold something."""
    admin = service.cluster.admin()
    places = [(service.topic(name), p) for name, p in state.newest_ms if name == topic]
    starts, ends = admin.offsets(places, "earliest"), admin.end_offsets(places)
    return {place: (starts[place], ends[place]) for place in places if ends[place] > starts[place]}


def _newest_records(service: Service, state: RunState) -> tuple[list[str], list[tuple[str, str]]]:
    """(topics whose newest record decodes, those whose does not and why); of the first partition that holds something."""
    start: dict[tuple[str, int], int] = {}
    for topic in TOPOLOGY:
        if topic.schemas:
            for place, (low, high) in list(_ends(service, state, topic.name).items())[:1]:
                start[place] = max(low, high - 2)
    newest = {r.topic: r for r in _read_newest(service, start)}
    decoded, unreadable = [], []
    for full, record in newest.items():
        topic_name = full.removeprefix(full_name(service.run, ""))
        try:
            service.schemas.decode(record.value)
        except BadRecord as error:
            unreadable.append((topic_name, str(error)))
        else:
            decoded.append(topic_name)
    order = [topic.name for topic in TOPOLOGY]
    return sorted(decoded, key=order.index), unreadable


def _dead_letters(service: Service, state: RunState) -> tuple[list[DeadLetter], int | None]:
    """Reasons of the newest, most frequent first; time of the newest."""
    places = {place: max(low, high - DEAD_READ) for place, (low, high) in _ends(service, state, "dead-letters").items()}
    records = _read_newest(service, places)
    counts: Counter[tuple[str, str]] = Counter()
    for record in records:
        headers = {name: value.decode(errors="replace") for name, value in record.headers}
        topic = headers.get("__connect.errors.topic", "?").removeprefix(full_name(service.run, ""))
        counts[topic, headers.get("__connect.errors.exception.message", "no reason given")[:80]] += 1
    dead = [DeadLetter(topic, reason, count) for (topic, reason), count in counts.most_common()]
    return dead, max((r.timestamp_ms for r in records), default=None)


def _snapshots(service: Service, state: RunState) -> list[Weights]:
    """The newest key frames of every shard, oldest first."""
    found = []
    for place, (low, high) in _ends(service, state, "weights").items():
        for record in _read_newest(service, {place: max(low, high - 1)})[-1:]:
            size = len(record.value or b"") or 1
            back = max(2, min(SNAPSHOTS, SNAPSHOT_BYTES // size))
            for received in _read_newest(service, {place: max(low, high - back)}):
                try:
                    found.append(service.schemas.expect(received.value, Weights))
                except (BadRecord, BrokerError):
                    continue
    return sorted(found, key=lambda w: w.version)


def cosines(snapshots: list[Weights], versions: dict[str, int], shards: int) -> dict[str, float]:
    """Of each learner's weights (the newest snapshot not above the version it used; the oldest at hand where all are) and the newest, over all shards."""
    kept: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)  # type: ignore[type-arg]
    for weights in snapshots:
        if weights.kind == "key" and weights.codec == "fp32" and len(weights.payload) == 4 * weights.num_parameters:
            kept[weights.shard_id].append((weights.version, np.frombuffer(weights.payload, np.float32)))
    if len(kept) < shards:
        return {}
    found = {}
    for learner, version in sorted(versions.items()):
        dot = newest_square = held_square = 0.0
        for frames in kept.values():
            newest = frames[-1][1]
            held = next((values for at, values in reversed(frames) if at <= version), frames[0][1])
            dot += float(np.dot(newest, held))
            newest_square += float(np.dot(newest, newest))
            held_square += float(np.dot(held, held))
        if newest_square > 0 and held_square > 0:
            found[learner] = dot / math.sqrt(newest_square * held_square)
    return found
