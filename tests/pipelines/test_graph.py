"""What the runner is given: read off the pipeline's own graph (../shared/runners.md says why each of these matters)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2 as api
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.utils import proto_utils
from hypothesis import given
from hypothesis import strategies as st

from gorila.engines import Engine
from gorila.kafka import Received
from pipelines import replay_fns
from pipelines.elements import AssignmentCoder, Chunk, ChunkCoder, Drawn, DrawnCoder
from pipelines.portable import portable_flags, portable_pipeline
from pipelines.runner import local_options, local_runner
from pipelines.split_registry import Address
from pipelines.split_room import EACH_CHECKPOINT

STEPS = ["Impulse", "Splits", "ReadReplayInputs", "Replay", "WriteBatches"]


ADDRESS = Address("run", "localhost:9", ("learner.torch_threads=1",))
SPLITS = ["replay-0", "replay-1"]


def local_graph() -> api.Pipeline:
    pipeline = beam.Pipeline(runner=local_runner(), options=local_options())
    replay_fns.build(pipeline, ADDRESS, SPLITS)
    return pipeline.to_runner_api()


def portable_graph(engine: Engine) -> api.Pipeline:
    """What the job server is sent."""
    flags = portable_flags(engine, engine.worker_pool or "localhost:7", engine.job_endpoint)
    pipeline = portable_pipeline(engine, flags, dataclasses.replace(ADDRESS, commits=EACH_CHECKPOINT), SPLITS)
    return PortableRunner.get_proto_pipeline(pipeline, PipelineOptions(flags))


@pytest.fixture(scope="module", params=["fn-api", "prism", "flink"])
def graph(request: pytest.FixtureRequest) -> api.Pipeline:
    if request.param == "fn-api":
        return local_graph()
    master = "jobmanager:8081" if request.param == "flink" else ""
    return portable_graph(Engine.asked(request.param, flink_master=master))


def leaves(graph: api.Pipeline) -> dict[str, api.PTransform]:
    return {t.unique_name: t for t in graph.components.transforms.values() if not t.subtransforms}


def pardo(transform: api.PTransform) -> api.ParDoPayload:
    return proto_utils.parse_Bytes(transform.spec.payload, api.ParDoPayload)


def test_the_graph_is_an_impulse_and_pardos_named_stably(graph: api.Pipeline) -> None:
    found = leaves(graph)
    assert sorted(found) == sorted(STEPS)
    allowed = {common_urns.primitives.IMPULSE.urn, common_urns.primitives.PAR_DO.urn}
    assert {t.spec.urn for t in found.values()} == allowed, "no GroupByKey, Combine, Reshuffle, Flatten or window"


def test_no_timer_and_no_side_input_anywhere(graph: api.Pipeline) -> None:
    for name, transform in leaves(graph).items():
        if transform.spec.urn == common_urns.primitives.PAR_DO.urn:
            assert not pardo(transform).timer_family_specs, name
            assert not pardo(transform).side_inputs, name


def test_only_the_global_window(graph: api.Pipeline) -> None:
    for strategy in graph.components.windowing_strategies.values():
        assert strategy.window_fn.urn == common_urns.global_windows.urn


def test_the_source_is_unbounded_and_asks_for_finalisation(graph: api.Pipeline) -> None:
    payload = pardo(leaves(graph)["ReadReplayInputs"])
    assert payload.restriction_coder_id
    assert payload.requests_finalization
    (output,) = leaves(graph)["ReadReplayInputs"].outputs.values()
    collection = graph.components.pcollections[output]
    assert collection.is_bounded == api.IsBounded.UNBOUNDED


def test_replay_is_stateful_and_its_state_has_our_coder(graph: api.Pipeline) -> None:
    payload = pardo(leaves(graph)["Replay"])
    assert list(payload.state_specs) == ["assignment"]


def test_no_element_restriction_or_state_goes_through_a_pickle_coder(graph: api.Pipeline) -> None:
    used = {c.coder_id for c in graph.components.pcollections.values() if not c.unique_name.startswith("Impulse")}
    for transform in leaves(graph).values():
        if transform.spec.urn == common_urns.primitives.PAR_DO.urn:
            payload = pardo(transform)
            if payload.restriction_coder_id:
                # The pair's second half is Beam's own watermark state: None, one byte.
                used.add(graph.components.coders[payload.restriction_coder_id].component_coder_ids[0])
            used |= {spec.read_modify_write_spec.coder_id for spec in payload.state_specs.values()}
    waiting, seen = list(used), set()
    while waiting:
        coder_id = waiting.pop()
        seen.add(coder_id)
        waiting += graph.components.coders[coder_id].component_coder_ids
    for coder_id in seen:
        coder = graph.components.coders[coder_id]
        if coder.spec.urn == "beam:coder:pickled_python:v1":
            # How Beam ships one of ours by value: the coder itself is an instruction, not an element.
            assert any(name in coder.spec.payload for name in (b"ChunkCoder", b"DrawnCoder", b"AssignmentCoder")), coder
        else:
            assert "pickle" not in coder.spec.urn and b"Pickle" not in coder.spec.payload, coder
            assert b"FastPrimitives" not in coder.spec.payload, coder


def test_workers_are_ours_wherever_the_runner_is_not() -> None:
    graph = portable_graph(Engine.asked("flink", flink_master="jobmanager:8081"))
    used = {pardo(t).do_fn.urn and t.environment_id for t in leaves(graph).values() if t.environment_id}
    (environment,) = [graph.components.environments[name] for name in used]
    assert environment.urn == common_urns.environments.EXTERNAL.urn
    payload = proto_utils.parse_Bytes(environment.payload, api.ExternalPayload)
    assert payload.endpoint.url == "localhost:50000"


def test_source_memory_and_sink_are_fused_into_one_stage() -> None:
    graph = local_graph()
    _, stages = local_runner().create_stages(graph)
    busy = [stage for stage in stages if any("Replay" in t.unique_name for t in stage.transforms)]
    (last,) = [s for s in busy if any("WriteBatches" in t.unique_name for t in s.transforms)]
    names = " ".join(t.unique_name for t in last.transforms)
    assert "ReadReplayInputs" in names and "Replay" in names
    assert translations.Stage is type(last)


def test_the_pipeline_never_imports_torch() -> None:
    code = "import sys, pipelines.replay_fns, pipelines.main, pipelines.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


texts = st.text(max_size=5)
blobs = st.binary(max_size=20)
numbers = st.integers(0, 2**62)
records = st.builds(
    Received,
    texts,
    st.integers(0, 1000),
    numbers,
    st.integers(-1, 2**42),
    st.none() | blobs,
    st.none() | blobs,
    st.lists(st.tuples(texts, blobs), max_size=2).map(tuple),
)
several = st.lists(records, max_size=3)
assignments = st.dictionaries(st.integers(0, 100), numbers, max_size=4)
chunks = st.builds(Chunk, numbers, numbers, st.none() | assignments, several, several, several)


@given(chunks)
def test_a_chunk_survives_its_coder(chunk: Chunk) -> None:
    assert ChunkCoder().decode(ChunkCoder().encode(chunk)) == chunk


@given(st.builds(Drawn, texts, st.integers(0, 1000), st.none() | blobs, st.lists(blobs, max_size=4)))
def test_drawn_records_survive_their_coder(drawn: Drawn) -> None:
    assert DrawnCoder().decode(DrawnCoder().encode(drawn)) == drawn


@given(assignments)
def test_equal_assignments_are_equal_bytes_in_whatever_order_they_came(assignment: dict[int, int]) -> None:
    coder = AssignmentCoder()
    turned = dict(reversed(assignment.items()))
    assert coder.decode(coder.encode(assignment)) == assignment
    assert coder.encode(turned) == coder.encode(assignment)
