"""Every Beam option we set is known to whoever reads it: a wrong name is dropped with a warning (../shared/runners.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions, WorkerOptions
from beam_job_server import FLINKS, JobServer

from gorila.engines import Engine
from gorila.errors import RunError
from pipelines.portable import CheckedFlinkRunner, CheckedPortableRunner, portable_flags
from pipelines.replay_fns import NameSplits

FLINK = Engine.asked(
    "flink", flink_master="jobmanager:8081", parallelism=4, checkpointing_interval_ms=700, max_bundle_time_ms=60
)


@pytest.fixture
def job_server(tmp_path: Any) -> Iterator[tuple[JobServer, str]]:
    server = JobServer(str(tmp_path), FLINKS)
    port = server.start_grpc_server()
    yield server, f"localhost:{port}"
    server.stop(0)


def submitted(runner: type[CheckedPortableRunner], flags: list[str]) -> dict[str, Any]:
    """What the job server is sent, by option."""
    fields = runner(flags).create_job_service(PipelineOptions(flags)).get_pipeline_options().fields
    return {name.removeprefix("beam:option:").removesuffix(":v1"): value for name, value in fields.items()}


def test_flinks_job_server_gets_every_option_we_set(job_server: tuple[JobServer, str]) -> None:
    sent = submitted(CheckedFlinkRunner, portable_flags(FLINK, FLINK.worker_pool, job_server[1]))
    assert sent["checkpointing_interval"].string_value == "700"
    assert sent["max_bundle_time_mills"].string_value == "60"
    assert sent["parallelism"].string_value == "4"
    assert sent["flink_master"].string_value == "jobmanager:8081"
    assert sent["environment_type"].string_value == "EXTERNAL"
    assert sent["environment_config"].string_value == "localhost:50000"
    assert int(sent["max_cache_memory_usage_mb"].string_value) > 0
    assert sent["streaming"].bool_value is True


def test_an_option_the_job_server_does_not_know_stops_the_job(job_server: tuple[JobServer, str]) -> None:
    server, endpoint = job_server
    flags = portable_flags(FLINK, FLINK.worker_pool, endpoint)
    wrong = [flag.replace("_mills", "_millis") for flag in flags]
    with pytest.raises(RunError, match="does not know max_bundle_time_millis and would run without"):
        submitted(CheckedFlinkRunner, wrong)
    server.described = {}
    with pytest.raises(RunError, match="checkpointing_interval, max_bundle_time_mills"):
        submitted(CheckedFlinkRunner, flags)


def test_a_job_server_that_describes_nothing_knows_all_that_a_portable_job_sets(
    job_server: tuple[JobServer, str],
) -> None:
    server, endpoint = job_server
    server.described = {}  # as Prism's
    engine = Engine.asked("portable", job_endpoint=endpoint)
    sent = submitted(CheckedPortableRunner, portable_flags(engine, "localhost:1", endpoint))
    assert sent["environment_config"].string_value == "localhost:1"
    assert "checkpointing_interval" not in sent


def test_beams_own_parser_leaves_nothing_over_of_what_is_not_flinks() -> None:
    flags = portable_flags(FLINK, FLINK.worker_pool, "localhost:1")
    options = PipelineOptions(flags)
    known = options.get_all_options(drop_default=True, retain_unknown_options=False)
    asked = {flag.split("=")[0].removeprefix("--no_").removeprefix("--") for flag in flags}
    assert asked - set(known) == {"checkpointing_interval", "max_bundle_time_mills"}
    assert options.view_as(PortableOptions).environment_type == "EXTERNAL"
    assert options.view_as(WorkerOptions).max_cache_memory_usage_mb == FLINK.state_cache_mb


def test_the_source_gets_one_element_a_split_as_many_as_the_parallelism() -> None:
    assert list(NameSplits(FLINK.splits(0)).process(b"")) == ["replay-0", "replay-1", "replay-2", "replay-3"]
