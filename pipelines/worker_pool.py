"""The worker pool a portable runner asks for Python processes (Beam's EXTERNAL environment).

Beam's own pool starts a literal `python` from PATH with a state cache of 0 and kills what it started. Ours starts this interpreter, sets the cache,
and lets a worker drain, commit and leave the group first (pipelines/worker.py).

Whoever reaches its port can have it run code of their own (that is what a worker is for): it listens on loopback unless told otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

from gorila.errors import LocalError
from gorila.event_log import EventLogger
from gorila.local.roles import SUPERVISOR_VARIABLE
from gorila.settings import ENV_PREFIX

STOP_WITHIN_S = 4.0
# One page a port: the pool's own process, or one worker, not both.
_PAGE_VARIABLES = (f"{ENV_PREFIX}MONITOR__METRICS_PORT", f"{ENV_PREFIX}MONITOR__HEALTH_FILE")


class WorkerPool(beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolServicer):
    """Starts and stops workers as a runner asks.

    Args:
        state_cache_mb: of each worker; must be above 0.
        shows_pages: whether workers may serve /metrics where their environment says; not when the process of the pool does.
    """

    def __init__(self, log: EventLogger, state_cache_mb: int, shows_pages: bool) -> None:
        self._log, self._state_cache_mb = log, state_cache_mb
        hidden = () if shows_pages else _PAGE_VARIABLES
        self._environ = {name: value for name, value in os.environ.items() if name not in hidden}
        self._environ[SUPERVISOR_VARIABLE] = str(os.getpid())
        self._lock = threading.Lock()
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def StartWorker(self, request: Any, context: Any) -> Any:
        """Beam's call: one worker process for a job."""
        command = [sys.executable, "-W", "ignore", "-m", "pipelines.worker", "--id", request.worker_id]
        command += ["--control-endpoint", request.control_endpoint.url, "--state-cache-mb", str(self._state_cache_mb)]
        try:
            worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=self._environ)
        except OSError as error:
            return beam_fn_api_pb2.StartWorkerResponse(error=f"worker not started: {error}")
        with self._lock:
            self._workers[request.worker_id] = worker
        self._log.info("pool.worker_started", worker=request.worker_id, pid=worker.pid)
        threading.Thread(target=self._see_off, args=(request.worker_id, worker), daemon=True).start()
        return beam_fn_api_pb2.StartWorkerResponse()

    def _see_off(self, name: str, worker: subprocess.Popen[bytes]) -> None:
        code = worker.wait()
        with self._lock:
            self._workers.pop(name, None)
        self._log.info("pool.worker_ended", worker=name, pid=worker.pid, code=code)

    def StopWorker(self, request: Any, context: Any) -> Any:
        """Beam's call: the job is over. The worker leaves by itself."""
        with self._lock:
            worker = self._workers.get(request.worker_id)
        if worker is not None and worker.poll() is None:
            worker.terminate()
        return beam_fn_api_pb2.StopWorkerResponse()

    def tell_to_stop(self) -> None:
        """SIGTERM to every worker: sources stop, the rest drains."""
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()

    def close(self) -> None:
        """Stop what still runs; whoever does not end in time is killed, and named."""
        self.tell_to_stop()
        deadline = time.monotonic() + STOP_WITHIN_S
        with self._lock:
            workers = dict(self._workers)
        for name, worker in workers.items():
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._log.error("pool.worker_killed", worker=name)
                worker.kill()
                worker.wait()


@contextmanager
def worker_pool(log: EventLogger, endpoint: str, state_cache_mb: int, shows_pages: bool = True) -> Iterator[WorkerPool]:
    """A pool that listens at HOST:PORT until the block is left, its workers with it. Raises LocalError when the port is taken."""
    pool = WorkerPool(log, state_cache_mb, shows_pages)
    # so_reuseport: gRPC would share a port with another server without a word.
    quiet = (("grpc.http2.max_pings_without_data", 0), ("grpc.http2.max_ping_strikes", 0), ("grpc.so_reuseport", 0))
    server = grpc.server(ThreadPoolExecutor(4, "worker-pool"), options=quiet)
    beam_fn_api_pb2_grpc.add_BeamFnExternalWorkerPoolServicer_to_server(pool, server)
    try:
        server.add_insecure_port(endpoint)
    except RuntimeError:
        raise LocalError(f"the worker pool cannot listen at {endpoint}: the port is taken, or not ours") from None
    server.start()
    log.info("pool.listens", endpoint=endpoint, state_cache_mb=state_cache_mb, python=sys.executable)
    try:
        yield pool
    finally:
        pool.close()
        server.stop(0).wait()
