"""The same pipeline through Beam's portable runners: Prism, Flink, or any job server (gorila/engines.py says which).

The command submits the job and stays with it: its end is the job's end. The workers are ours (pipelines/worker_pool.py), the graph is the local
runner's, and what the job server does not know of our options is refused: it would drop them with a warning.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import apache_beam as beam
import grpc
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.flink_runner import FlinkRunner
from apache_beam.runners.portability.portable_runner import JobServiceHandle, PortableRunner

from gorila.engines import FLINK, PRISM, Engine
from gorila.errors import GorilaError, RunError
from gorila.lag_bounds import refuse_narrow_transitions
from gorila.local.broker_process import free_port
from gorila.service import Service
from pipelines import replay_fns
from pipelines.prism import prism
from pipelines.split_registry import Address
from pipelines.split_room import EACH_BUNDLE, EACH_CHECKPOINT
from pipelines.worker_pool import WorkerPool, worker_pool

ANSWER_S = 5.0
LOOK_S = 0.1
DRAIN_S = 3.0


class _CheckedJob(JobServiceHandle):
    """Refuses to submit when the job server would drop one of our options."""

    flags: list[str]

    def get_pipeline_options(self) -> Any:
        """As Beam's own; raises RunError naming what is not known."""
        known = super().get_pipeline_options()
        asked = [flag.split("=")[0].removeprefix("--") for flag in self.flags]
        dropped = [name for name in asked if f"beam:option:{name.removeprefix('no_')}:v1" not in known.fields]
        if dropped:
            raise RunError(
                f"the Beam job server does not know {', '.join(dropped)} and would run without: is it Beam {beam.__version__}'s,"
                " and of the runner that was named?"
            )
        return known


class CheckedPortableRunner(PortableRunner):
    """Any job server, with the check above. `flags`: every option that was set."""

    def __init__(self, flags: list[str]) -> None:
        super().__init__()
        self._flags = flags

    def create_job_service_handle(self, job_service: Any, options: PipelineOptions) -> JobServiceHandle:
        """Beam's hook."""
        handle = _CheckedJob(job_service, options)
        handle.flags = self._flags
        return handle


class CheckedFlinkRunner(CheckedPortableRunner, FlinkRunner):
    """The same; without a job endpoint Beam starts Flink's job server: a jar it finds or fetches, and Java."""


def portable_flags(engine: Engine, worker_address: str, job_endpoint: str = "") -> list[str]:
    """Every Beam option of a portable job, as flags.

    Args:
        worker_address: HOST:PORT at which the runner finds the worker pool.
        job_endpoint: of the job server; empty: Beam's Flink runner finds one.
    """
    flags = ["--streaming", "--no_save_main_session", "--environment_type=EXTERNAL"]
    flags += [f"--environment_config={worker_address}", f"--max_cache_memory_usage_mb={engine.state_cache_mb}"]
    flags += [f"--job_endpoint={job_endpoint}"] if job_endpoint else []
    if engine.runner == FLINK:
        flags += [f"--flink_master={engine.flink_master}"] if engine.flink_master else []
        flags += [
            f"--parallelism={engine.parallelism}",
            f"--checkpointing_interval={engine.checkpointing_interval_ms}",
            # "mills" is how Beam spells it: max_bundle_time_millis is dropped.
            f"--max_bundle_time_mills={engine.max_bundle_time_ms}",
        ]
    return flags


def portable_pipeline(engine: Engine, flags: list[str], address: Address, splits: list[str]) -> beam.Pipeline:
    """The replay pipeline, ready to be submitted."""
    runner = (CheckedFlinkRunner if engine.runner == FLINK else CheckedPortableRunner)(flags)
    pipeline = beam.Pipeline(runner=runner, options=PipelineOptions(flags))
    replay_fns.build(pipeline, address, splits)
    return pipeline


def run_portable(service: Service, engine: Engine) -> None:
    """Submit the job, stay until it ends or `service.stop` is set; then drain it, or cancel what does not drain, within 5 s.

    Raises:
        RunError: the job failed, ended by itself, or the job server refuses it.
        LocalError: Prism is not here, a port is taken.
        ConfigError: an actor's bound is too small for the checkpointing interval.
    """
    commits = EACH_CHECKPOINT if engine.runner == FLINK else EACH_BUNDLE
    if engine.runner == FLINK:
        refuse_narrow_transitions(service.config, engine.checkpointing_interval_ms)
    with ExitStack() as stack:
        endpoint = engine.job_endpoint
        if engine.runner == PRISM:
            endpoint = stack.enter_context(prism(service.log, free_port()))
        elif endpoint:
            _refuse_deaf(endpoint)
        pool, workers = stack.enter_context(_workers(service, engine))
        flags = portable_flags(engine, workers, endpoint)
        splits = engine.splits(service.index)
        pipeline = portable_pipeline(engine, flags, Address.of(service, commits), splits)
        try:
            job = pipeline.run()
        except GorilaError:
            raise
        except (grpc.RpcError, grpc.FutureTimeoutError) as error:
            raise RunError(
                f"the Beam job server at {endpoint or 'its endpoint'} does not answer: {_first(error)}"
            ) from None
        except Exception as error:  # Beam raises RuntimeError, ValueError and what its job server raised
            raise RunError(f"the Beam job was refused: {_first(error)}") from None
        service.log.info("replay.submitted", runner=engine.runner, job_server=endpoint, workers=workers, splits=splits)
        _stay(service, job, pool)


def _refuse_deaf(endpoint: str) -> None:
    """Beam would try for five minutes."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError as error:
        raise RunError(f"the Beam job server at {endpoint} does not answer: {error.strerror or error}") from None


@contextmanager
def _workers(service: Service, engine: Engine) -> Iterator[tuple[WorkerPool | None, str]]:
    """(the pool of this command or None, where the runner finds workers)."""
    if engine.worker_pool:
        yield None, engine.worker_pool
        return
    address = f"127.0.0.1:{free_port()}"
    with worker_pool(service.log, address, engine.state_cache_mb, shows_pages=False) as pool:
        yield pool, address


def _stay(service: Service, job: Any, pool: WorkerPool | None) -> None:
    """Until the job has ended."""
    ended = threading.Event()
    failure: list[BaseException] = []

    def wait() -> None:
        try:
            job.wait_until_finish()
        except BaseException as error:
            failure.append(error)
        ended.set()

    threading.Thread(target=wait, name="beam-job", daemon=True).start()
    service.health.ready()
    while not ended.wait(LOOK_S) and not service.stop.is_set():
        service.health.beat()
    if not service.stop.is_set():
        raise RunError(f"the Beam job failed: {_first(failure[0])}" if failure else "the Beam job ended by itself")
    if pool is not None:
        pool.tell_to_stop()
    if pool is None or not ended.wait(DRAIN_S):
        try:
            job.cancel()
        except (grpc.RpcError, RuntimeError) as error:
            service.log.warning("replay.cancel_failed", reason=_first(error))
    service.log.info("replay.job_over", drained=ended.is_set() and not failure)


def _first(error: BaseException) -> str:
    """A failure's last line that says something: Beam hands on tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
