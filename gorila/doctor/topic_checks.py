"""Topics as the topology says, records that decode, dead letters, clocks."""

from __future__ import annotations

from collections.abc import Iterator

from gorila.doctor.evidence import Evidence
from gorila.doctor.finding import Finding
from gorila.run_state import duration
from gorila.topics import TOPOLOGY, full_name

# Other values of these break a promise; the rest is space and time, an operator's to choose.
PROMISES = frozenset({"cleanup.policy", "message.timestamp.type", "max.message.bytes"})
SKEW_ADVICE_S, SKEW_WRONG_S = 2.0, 60.0
RECENT_S = 3600.0


def topic_findings(evidence: Evidence) -> Iterator[Finding]:
    """All of this file."""
    yield from _topics(evidence)
    yield from _records(evidence)
    yield from _dead_letters(evidence)
    yield from _clocks(evidence)


def _topics(evidence: Evidence) -> Iterator[Finding]:
    seen = 0
    for topic in TOPOLOGY:
        name, facts = full_name(evidence.run, topic.name), evidence.topics.get(topic.name)
        if facts is None:
            yield Finding(
                "topics",
                "wrong",
                f"{name} does not exist",
                f"gorila topics create {evidence.run} makes what is missing",
            )
            continue
        seen += 1
        wanted = topic.partitions(evidence.config)
        if facts.partitions != wanted:
            more = facts.partitions > wanted
            yield Finding(
                "topics",
                "advice" if more else "wrong",
                f"{name} has {facts.partitions} partitions, the run's configuration says {wanted}",
                "those added are never written or read: start a new run to have more"
                if more
                else "delete the run and create it again",
            )
        for key, value in sorted(topic.topic_config(evidence.config).items()):
            yield from _setting(name, key, value, facts.settings.get(key))
    if seen == len(TOPOLOGY):
        yield Finding("topics", "fine", f"{seen} topics, partitions as configured")


def _setting(topic: str, key: str, wanted: str, has: str | None) -> Iterator[Finding]:
    if has == wanted or (key == "cleanup.policy" and has is not None and set(has.split(",")) == set(wanted.split(","))):
        return
    roomier = has is not None and key in ("max.message.bytes", "retention.bytes", "retention.ms") and _more(has, wanted)
    if roomier:
        return
    yield Finding(
        "topics",
        "wrong" if key in PROMISES else "advice",
        f"{topic}: {key} is {has or 'the broker default'}, the topology says {wanted}",
        f"gorila kafka configs --alter --entity-type topics --entity-name {topic} --add-config {key}="
        + (f"[{wanted}]" if "," in wanted else wanted),
    )


def _more(has: str, wanted: str) -> bool:
    """Whether it keeps or takes at least as much; -1 is without a limit."""
    try:
        return int(has) == -1 or (int(wanted) != -1 and int(has) >= int(wanted))
    except ValueError:
        return False


def _records(evidence: Evidence) -> Iterator[Finding]:
    for topic, why in evidence.unreadable:
        yield Finding(
            "schemas",
            "wrong",
            f"newest record of {full_name(evidence.run, topic)} does not decode: {why}",
            "its writer is of another version, or no writer of ours: see its headers and producer; "
            "kafka.schema_registry_url must be the writer's",
        )
    if evidence.decoded:
        yield Finding(
            "schemas", "fine", f"newest records decode, their schema ids are known: {', '.join(evidence.decoded)}"
        )


def _dead_letters(evidence: Evidence) -> Iterator[Finding]:
    total = evidence.second.dead_letters
    if not total:
        yield Finding("dead letters", "fine", "none")
        return
    newest = evidence.dead_newest_ms
    age_s = (evidence.second.time_ms - newest) / 1000 if newest else None
    recent = age_s is not None and age_s < RECENT_S
    worst = "; ".join(f"{d.count} from {d.topic}: {d.reason}" for d in evidence.dead[:3])
    when = f", the newest {duration(max(0.0, age_s))} ago" if age_s is not None else ""
    yield Finding(
        "dead letters",
        "wrong" if recent else "advice",
        f"{total}{when}; {worst}" if worst else f"{total}{when}",
        f"look at them: gorila cat {full_name(evidence.run, 'dead-letters')} --from latest --max 5",
    )


def _clocks(evidence: Evidence) -> Iterator[Finding]:
    measured = {"the broker's": evidence.append_delay_ms, "replay's": evidence.writer_delay_ms}
    judged = False
    for whose, delay_ms in measured.items():
        if delay_ms is None:
            continue
        judged = True
        skew_s = delay_ms / 1000
        if abs(skew_s) < SKEW_ADVICE_S:
            continue
        side = "behind" if skew_s > 0 else "ahead"
        yield Finding(
            "clocks",
            "wrong" if abs(skew_s) >= SKEW_WRONG_S else "advice",
            f"{whose} clock is {duration(abs(skew_s))} {side} of this machine's",
            "keep clocks with NTP (chrony); data is safe, ages and times shown are wrong by as much",
        )
    future = [
        (t, p)
        for (t, p), ms in evidence.second.newest_ms.items()
        if ms and ms > evidence.second.time_ms + SKEW_WRONG_S * 1000
    ]
    for topic, partition in future[:3]:
        yield Finding(
            "clocks",
            "advice",
            f"{full_name(evidence.run, topic)} partition {partition} holds a record from the future",
            "a writer's clock is wrong: keep clocks with NTP; retention by time keeps such a segment longer",
        )
    if not judged:
        yield Finding("clocks", "note", "not measurable: nothing is written now")
    elif not future and all(abs(d or 0) < SKEW_ADVICE_S * 1000 for d in measured.values()):
        shown = ", ".join(f"{whose} {max(0.0, d):.0f} ms" for whose, d in measured.items() if d is not None)
        yield Finding("clocks", "fine", f"within delivery time of this machine's: {shown}")
