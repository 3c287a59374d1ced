"""What `gorila top` and `gorila doctor` conclude from what Kafka says: roles up and down, who waits for whom, findings and their advice."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gorila.config import ActorSection, Config, LearnerSection, ReplaySection, RunSection
from gorila.doctor import Evidence, Finding, findings_of, worst_first
from gorila.doctor.evidence import DeadLetter
from gorila.doctor.examine import cosines
from gorila.doctor.reach import why_unreachable
from gorila.kafka import GroupFacts, Member, TopicFacts
from gorila.local.doctor_view import table
from gorila.local.top_screen import TopState, screen
from gorila.messages import Evaluation, Priorities, Weights
from gorila.run_progress import RunProgress
from gorila.run_state import PartitionLag, RunState, readers, role_states, waits
from gorila.topics import TOPOLOGY, full_name

NOW_MS = 1_800_000_000_000
RUN = "demo"


def member(name: str, topic: str) -> Member:
    return Member(f"{RUN}-{name}-consumer", name, "/10.0.0.1", ((full_name(RUN, topic), 0),))


def healthy(config: Config, lag: int = 3) -> RunState:
    """Everything wrote 0.2 s ago, every group has its members."""
    newest: dict[tuple[str, int], int | None] = {
        (topic.name, p): NOW_MS - 200 for topic in TOPOLOGY for p in range(topic.partitions(config))
    }
    newest["dead-letters", 0] = None
    groups = {
        "replay": GroupFacts(f"{RUN}.replay", "Stable", (member("replay-0", "transitions"),)),
        "learner": GroupFacts(
            f"{RUN}.learner", "Stable", tuple(member(f"learner-{i}", "batches") for i in range(config.learner.count))
        ),
    }
    lags = tuple(
        PartitionLag(group, topic, p, 100, 0, 100 + lag, bound)
        for group, topic, partitions, bound in readers(config)
        for p in partitions
    )
    return RunState(RUN, NOW_MS, lags, groups, newest)


def topics(config: Config) -> dict[str, TopicFacts]:
    return {
        t.name: TopicFacts(full_name(RUN, t.name), t.partitions(config), t.topic_config(config), {}) for t in TOPOLOGY
    }


def evidence(config: Config | None = None, **changes: Any) -> Evidence:
    """Of a healthy run, with changes."""
    config = config or Config()
    progress = RunProgress(staleness={0: np.array([100, 5], np.int32)}, new_share=0.15)
    first = healthy(config)
    moved = tuple(dataclasses.replace(lag, committed=110, end=113) for lag in first.lags)
    plain: dict[str, Any] = {
        "run": RUN,
        "config": config,
        "first": first,
        "second": dataclasses.replace(first, lags=moved, time_ms=NOW_MS + 100),
        "topics": topics(config),
        "progress": progress,
        "append_delay_ms": 3.0,
        "writer_delay_ms": 4.0,
        "decoded": ("transitions",),
        "busy": {"learner-0": 0.9},
        "server_cpu": {"parameter-server-0": 0.2},
        "cosine": {"learner-0": 0.9999},
        "applied": 105,
        "newest_evaluation_ms": NOW_MS - 1000,
    }
    return Evidence(**{**plain, **changes})


def levels(findings: list[Finding]) -> set[str]:
    return {finding.level for finding in findings}


def one(findings: list[Finding], level: str) -> Finding:
    [found] = [finding for finding in findings if finding.level == level]
    return found


def test_a_healthy_run_has_nothing_wrong_and_nothing_to_improve():
    findings = findings_of(evidence())
    assert levels(findings) == {"fine", "note"}, findings
    notes = [f.check for f in findings if f.level == "note"]
    assert notes == ["new:old as set"]


def test_every_finding_that_is_wrong_or_could_be_better_says_what_to_do():
    config = Config(actor=ActorSection(count=2), replay=ReplaySection(target_new_share=0.8))
    state = healthy(config)
    stuck = tuple(dataclasses.replace(lag, end=lag.committed + 2 * lag.bound) for lag in state.lags if lag.committed)
    sick = dataclasses.replace(state, lags=stuck, groups={}, dead_letters=4)
    broken = topics(config)
    del broken["run"]
    broken["transitions"] = dataclasses.replace(broken["transitions"], partitions=1)
    broken["gradients"] = dataclasses.replace(broken["gradients"], settings={"cleanup.policy": "compact"})
    findings = findings_of(
        evidence(
            config,
            first=sick,
            second=sick,
            topics=broken,
            append_delay_ms=-90_000.0,
            writer_delay_ms=5_000.0,
            unreadable=(("episodes", "unknown schema id 7"),),
            dead=(DeadLetter("batches", "not ours", 4),),
            dead_newest_ms=NOW_MS - 60_000,
            busy={"learner-0": 0.1},
            server_cpu={"parameter-server-0": 0.95},
            cosine={"learner-0": 0.5},
            applied=50,
            dropped_stale=50,
        )
    )
    bad = [f for f in findings if f.level in ("wrong", "advice")]
    assert all(f.do for f in bad)
    wrong = {f.check for f in findings if f.level == "wrong"}
    assert wrong == {"topics", "schemas", "dead letters", "clocks", "roles", "lag"}
    advised = {f.check for f in findings if f.level == "advice"}
    reference = {
        "PS CPU < 60 %",
        "learner utilisation > 85 %",
        "new:old as set",
        "cosine similarity > .99",
        "staleness",
    }
    assert reference <= advised


def test_stale_gradients_are_met_with_fewer_learners_or_a_smaller_window_not_with_more():
    found = one(findings_of(evidence(applied=90, dropped_stale=10)), "advice")
    assert found.check == "staleness"
    assert "fewer learners" in found.do and "learner.max_in_flight" in found.do and "more learners" not in found.do


@pytest.mark.parametrize(
    ("key", "value", "level"),
    [
        ("cleanup.policy", "compact", "wrong"),
        ("message.timestamp.type", "CreateTime", "wrong"),
        ("max.message.bytes", "1000", "wrong"),
        ("max.message.bytes", "99999999", None),
        ("retention.ms", "5", "advice"),
        ("retention.bytes", "-1", None),
        ("retention.bytes", "5", "advice"),
    ],
)
def test_a_setting_that_breaks_a_promise_is_wrong_more_room_is_not(key: str, value: str, level: str | None):
    changed = topics(Config())
    settings = {**changed["transitions"].settings, key: value}
    changed["transitions"] = dataclasses.replace(changed["transitions"], settings=settings)
    bad = [f for f in findings_of(evidence(topics=changed)) if f.level in ("wrong", "advice")]
    assert [f.level for f in bad] == ([level] if level else [])
    if level:
        assert f"--entity-name demo.transitions --add-config {key}=" in bad[0].do


def test_partitions_added_by_somebody_are_advice_missing_ones_are_wrong():
    more, fewer = topics(Config()), topics(Config(actor=ActorSection(count=2)))
    more["transitions"] = dataclasses.replace(more["transitions"], partitions=5)
    fewer["transitions"] = dataclasses.replace(fewer["transitions"], partitions=1)
    assert one(findings_of(evidence(topics=more)), "advice").check == "topics"
    config = Config(actor=ActorSection(count=2))
    assert one(findings_of(evidence(config, topics=fewer)), "wrong").check == "topics"


def test_a_reader_that_stands_still_is_wrong_one_at_its_bound_that_moves_is_not():
    state = healthy(Config())
    full = tuple(dataclasses.replace(lag, committed=100, end=100 + lag.bound) for lag in state.lags)
    moved = tuple(dataclasses.replace(lag, committed=150, end=150 + lag.bound) for lag in state.lags)
    first, still = dataclasses.replace(state, lags=full), dataclasses.replace(state, lags=full, time_ms=NOW_MS + 3000)
    going = dataclasses.replace(state, lags=moved)
    assert "wrong" not in levels(findings_of(evidence(first=first, second=going)))
    wrong = [f for f in findings_of(evidence(first=first, second=still)) if f.level == "wrong"]
    assert len(wrong) == 3 and all(f.check == "lag" and "stands still" in f.found for f in wrong)


def test_gradients_deleted_before_they_were_read_are_wrong_batches_are_advice():
    state = healthy(Config())
    gone = tuple(dataclasses.replace(lag, start=102) for lag in state.lags)
    findings = findings_of(evidence(first=state, second=dataclasses.replace(state, lags=gone)))
    assert "gradients" in one(findings, "wrong").found
    assert len([f for f in findings if f.level == "advice"]) == 2


def test_a_run_that_does_not_run_is_a_note_and_its_roles_are_not_missed():
    state = dataclasses.replace(healthy(Config()), groups={}, time_ms=NOW_MS + 3_600_000)
    findings = findings_of(evidence(first=state, second=state, append_delay_ms=None, writer_delay_ms=None))
    assert not {f.check for f in findings if f.level == "wrong"}
    assert any("does not run: newest record 60 min ago" in f.found for f in findings)


def test_each_role_that_is_gone_is_named_with_the_command_that_starts_it():
    config = Config(actor=ActorSection(count=3), learner=LearnerSection(count=2))
    state = healthy(config)
    newest = {
        **state.newest_ms,
        ("transitions", 1): NOW_MS - 60_000,
        ("transitions", 2): None,
        ("weights", 0): NOW_MS - 60_000,
    }
    groups = {**state.groups, "learner": GroupFacts("demo.learner", "Stable", (member("learner-1", "batches"),))}
    sick = dataclasses.replace(state, newest_ms=newest, groups=groups)
    down = {r.name: r.why for r in role_states(sick, config, RunProgress(), NOW_MS) if r.state == "down"}
    assert set(down) == {"actor-1", "actor-2", "learner-0", "parameter-server-0"}
    assert down["actor-1"] == "last wrote 60 s ago" and down["actor-2"] == "nothing written yet"
    advice = [f.do for f in findings_of(evidence(config, first=sick, second=sick)) if f.check == "roles"]
    assert any("gorila learner --run demo --index 0" in do for do in advice)


def test_actors_that_are_done_are_not_missed():
    config = Config(run=RunSection(max_env_steps=100))
    state = healthy(config)
    quiet = dataclasses.replace(state, newest_ms={**state.newest_ms, ("transitions", 0): NOW_MS - 60_000})
    progress = RunProgress(env_steps=100)
    roles = [f for f in findings_of(evidence(config, second=quiet, progress=progress)) if f.check == "roles"]
    assert levels(roles) == {"fine"}


def test_an_actor_held_by_flow_control_waits_and_is_not_down():
    config = Config()
    state = healthy(config)
    full = tuple(dataclasses.replace(lag, end=100 + lag.bound) for lag in state.lags)
    held = dataclasses.replace(state, lags=full, newest_ms={**state.newest_ms, ("transitions", 0): NOW_MS - 60_000})
    [actor] = [r for r in role_states(held, config, RunProgress(), 0) if r.name == "actor-0"]
    assert actor.state == "waits" and actor.why == "waits for replay: 64 records behind, bound 64"
    assert waits(held, config, RunProgress(), {})[0].startswith(
        "actors wait for replay: 64 records behind on partition 0"
    )


def test_a_starved_learner_is_told_apart_from_one_that_waits_for_weights():
    config = Config()
    full = healthy(config, lag=5)
    empty = dataclasses.replace(full, lags=tuple(dataclasses.replace(lag, end=100) for lag in full.lags))
    assert "no batch is there" in waits(empty, config, RunProgress(), {"learner-0": 0.2})[-1]
    assert "weights that cover" in waits(full, config, RunProgress(), {"learner-0": 0.2})[-1]
    assert waits(full, config, RunProgress(), {"learner-0": 0.9}) == []


def test_lag_without_a_commit_is_counted_from_the_start_of_the_log():
    assert PartitionLag("replay", "transitions", 0, None, 40, 100, 64).records == 60
    assert PartitionLag("replay", "transitions", 0, 120, 40, 100, 64).records == 0


def snapshot(version: int, weights: list[float], shard: int = 0, kind: str = "key") -> Weights:
    payload = np.array(weights, np.float32).tobytes()
    return Weights(
        shard,
        version,
        kind,
        len(weights),
        -1,
        -1,
        0,
        0,
        version,
        "fp32",
        payload,
        0,
        0,
        version,
        0,
        0,
        0,
        np.empty(0, np.int32),
        0.1,
    )


def test_the_cosine_is_between_what_a_learner_held_and_the_newest_over_all_shards():
    frames = [snapshot(1, [1, 0]), snapshot(1, [1, 0], 1), snapshot(5, [0, 1]), snapshot(5, [1, 0], 1)]
    found = cosines(frames, {"old": 1, "new": 9}, 2)
    assert found["new"] == pytest.approx(1.0) and found["old"] == pytest.approx(0.5)
    assert cosines(frames[:1], {"old": 1}, 2) == {}


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        ("nowhere.invalid:9092", "does not resolve"),
        ("127.0.0.1:1", "nothing listens on port 1"),
        ("localhost", "not host:port"),
        ("", "no server was given"),
    ],
)
def test_an_unreachable_kafka_is_told_which_end_is_wrong(servers: str, says: str):
    assert says in why_unreachable(servers)


def big_system() -> TopState:
    config = Config(actor=ActorSection(count=100), learner=LearnerSection(count=16))
    state = healthy(config)
    newest = {**state.newest_ms, ("transitions", 77): NOW_MS - 60_000}
    top = TopState(config, "broker-with-a-long-name.example.org:9092")
    priorities = Priorities(
        "learner-3",
        0,
        0,
        9,
        *(np.zeros(0, t) for t in (np.int32, np.int64, np.int32, np.float32)),
        0.5,
        1.0,
        False,
        0.4,
    )
    for number in range(40):
        top.progress.take(priorities, NOW_MS)
        top.take(priorities, NOW_MS)
        top.take(Evaluation("e", number, "screen", 5, float(number), 0, 0, 0, 0.0, False, 0), NOW_MS)
        top.look(dataclasses.replace(state, newest_ms=newest), float(number))
    return top


def drawn(top: TopState, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(screen(top, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_screen_of_a_hundred_actors_fits_the_terminal_and_shows_the_one_that_is_down(width: int):
    lines = drawn(big_system(), width)
    assert max(map(len, lines)) <= min(100, width) and len(lines) <= 45
    text = "\n".join(lines)
    assert "!actor-77" in text and "actor-77 is down: last wrote 60 s ago" in text
    if width >= 80:
        assert "more" in text and "learner-3 40%" in text


def test_a_screen_before_anything_is_known_and_while_kafka_is_away_is_still_a_screen():
    top = TopState(Config(), "localhost:9092")
    assert "looking" in drawn(top, 80)[0]
    top.problem = "Kafka at localhost:9092 does not answer"
    assert any("does not answer" in line for line in drawn(top, 80))


def test_findings_from_kafka_are_never_read_as_markup():
    console = Console(file=io.StringIO(), width=100)
    console.print(table([Finding("dead letters", "wrong", "[bold]x[/nope] [link=file:///etc]y", "do")], "demo"))
    assert isinstance(console.file, io.StringIO)
    assert "[bold]x[/nope]" in console.file.getvalue()


@given(st.lists(st.sampled_from(["fine", "note", "advice", "wrong"])))
def test_the_worst_findings_come_first_and_none_is_lost(given_levels: list[Any]):
    findings = [Finding(str(i), level, "") for i, level in enumerate(given_levels)]
    ordered = worst_first(findings)
    assert sorted(f.check for f in ordered) == sorted(f.check for f in findings)
    ranks = [("wrong", "advice", "fine", "note").index(f.level) for f in ordered]
    assert ranks == sorted(ranks)


def test_a_learner_that_never_reported_its_share_is_left_out():
    top = TopState(Config(), "k")
    nan = Priorities(
        "learner-0",
        0,
        0,
        1,
        *(np.zeros(0, t) for t in (np.int32, np.int64, np.int32, np.float32)),
        0.5,
        1.0,
        False,
        math.nan,
    )
    top.take(nan, NOW_MS)
    assert top.busy == {}
