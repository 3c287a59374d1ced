"""The report: one file, nothing fetched, everything escaped, no secret, whatever a run's folder holds."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorila.doctor import Finding
from gorila.errors import RunError
from gorila.report import gather, page
from gorila.report.charts import bars, svg, thinned, ticks
from gorila.report.content import Chart, Content
from gorila.report.events import scalars
from gorila.report.page import HIDDEN, without_secrets

EVIL = "<script>alert(1)</script>&\"'"
NO_KAFKA = "none in this test"


class Reader(HTMLParser):
    """Tags that are opened, and whether they are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def events(folder: Path) -> None:
    from consumers.monitor import Charts

    charts = Charts(folder)
    for step in range(50):
        charts.scalar("evaluation/screen", step * 2.0, step, 1_000_000 + 1000 * step)
        charts.scalar("return_by_epsilon/0.1", step * 1.0, step, 1_000_000 + 1000 * step)
        charts.scalar("lag/replay", step % 7, step, 1_000_000 + 1000 * step)
        charts.scalar("rate/updates_per_s", 30.0, step, 1_000_000 + 1000 * step)
    charts.close()


def test_a_folder_alone_makes_a_whole_report(tmp_path: Path):
    run = tmp_path / "demo"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"run": "demo", "solved": True, "eval_return_mean": 499.5}))
    (run / "config.json").write_text(
        json.dumps({"run": {"preset": "p", "seed": 1}, "env": {"id": "CartPole-v1"}, "evaluator": {"threshold": 475}})
    )
    events(run / "tensorboard")
    text = page(gather("demo", tmp_path, "", why_no_kafka=NO_KAFKA))
    reader = read(text)
    assert text.count("<svg") >= 3 and "polyline" in text and "499.5" in text and "CartPole-v1" in text
    assert "Kafka was not asked: none in this test" in text
    assert ">evaluation<" in text and "solved at 475" in text
    assert "nothing could be counted" in text and "no gradient was applied" not in text
    assert reader.addresses == [] and "script" not in reader.tags and "link" not in reader.tags


def test_nothing_is_fetched_and_the_page_itself_forbids_it():
    text = page(Content("demo"))
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://", text)


def test_what_comes_from_a_run_is_escaped_everywhere():
    content = Content(
        EVIL,
        [EVIL],
        {EVIL: EVIL},
        {"env": {"id": EVIL, "kwargs": {EVIL: EVIL}}, "run": {"preset": EVIL, "seed": EVIL}},
        [Chart(EVIL, EVIL, EVIL, {EVIL: [(0, 1), (1, 2)]}, {EVIL: [(0, 1)]})],
        [1, 2],
        [(EVIL, EVIL, 1, 2)],
        [Finding(EVIL, "wrong", EVIL, EVIL)],
    )
    text = page(content)
    assert "<script" not in text
    assert "script" not in read(text).tags


def test_secrets_in_a_configuration_are_hidden():
    config = {
        "env": {"kwargs": {"api_key": "S3CRET", "password": "S3CRET", "url": "https://ann:S3CRET@host/x", "level": 3}},
        "kafka": {"sasl.jaas.config": "S3CRET", "list": ["http://u:S3CRET@h"]},
    }
    shown = without_secrets(config)
    assert "S3CRET" not in json.dumps(shown) + page(Content("demo", config=config, summary=config))
    assert shown["env"]["kwargs"]["level"] == 3 and HIDDEN in shown["env"]["kwargs"]["url"]
    assert without_secrets({"replay": {"priority_floor": 0.1}, "token": ""}) == {
        "replay": {"priority_floor": 0.1},
        "token": "",
    }


@pytest.mark.parametrize("damage", [b"", b"\x00" * 8, b"\xff" * 40, b"not an event file at all, but long enough"])
def test_damaged_event_files_and_json_cost_nothing_but_their_content(tmp_path: Path, damage: bytes):
    run = tmp_path / "demo"
    events(run / "tensorboard")
    [file] = (run / "tensorboard").iterdir()
    whole = scalars(run / "tensorboard")
    file.write_bytes(file.read_bytes()[:-7])
    cut = scalars(run / "tensorboard")
    assert sum(map(len, whole.values())) - 1 == sum(map(len, cut.values()))
    file.write_bytes(damage)
    (run / "summary.json").write_bytes(damage)
    text = page(gather("demo", tmp_path, "", why_no_kafka=NO_KAFKA))
    read(text)
    assert "nothing was recorded" in text


def test_a_run_nobody_knows_is_one_line(tmp_path: Path):
    with pytest.raises(RunError, match="run 'demo' is unknown: there is no "):
        gather("demo", tmp_path, "", why_no_kafka=NO_KAFKA)


values = st.floats(-1e12, 1e12) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(st.tuples(values, values), max_size=60), st.none() | st.floats(-1e6, 1e6))
def test_any_points_make_sound_svg_inside_its_frame(points: list[tuple[float, float]], level: float | None):
    text = svg(
        Chart("t", "x", "y", {"line": sorted(points, key=lambda p: (math.isnan(p[0]), p))}, {"dots": points}, level)
    )
    if "<svg" not in text:
        return
    root = ElementTree.fromstring(text[: text.index("</svg>") + 6])
    for line in root.iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert -1 <= x <= 561 and -1 <= y <= 251


@given(st.lists(st.integers(0, 10**9), max_size=80))
def test_any_histogram_makes_sound_svg(counts: list[int]):
    text = bars(counts, "updates")
    if sum(counts):
        assert len(list(ElementTree.fromstring(text).iter("rect"))) == min(len(counts), 41)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_inside(low: float, span: float):
    marks = ticks(low, low + span)
    assert 1 <= len(marks) <= 12 or low + span == low


def test_thinning_keeps_the_ends_and_the_mean():
    points = [(float(i), float(i % 2)) for i in range(10_000)]
    few = thinned(points, 100)
    assert len(few) == 100 and few[0][0] < 100 and few[-1][0] > 9_900
    assert sum(y for _, y in few) / 100 == pytest.approx(0.5, abs=0.01)
