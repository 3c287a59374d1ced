"""Beam's own Python job server, which says it knows Flink's options: as near to Flink's as can be had without one.

python beam_job_server.py PORT FOLDER
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from apache_beam.portability.api import beam_job_api_pb2 as jobs
from apache_beam.runners.portability.local_job_service import LocalJobServicer

NUMBER, TEXT = jobs.PipelineOptionType.INTEGER, jobs.PipelineOptionType.STRING
# From FlinkPipelineOptions.java (get… in snake case, as Beam's job server describes them): those our job sets. No Flink job server could be run here.
FLINKS = {
    "flink_master": TEXT,
    "parallelism": NUMBER,
    "checkpointing_interval": NUMBER,
    "max_bundle_time_mills": NUMBER,
}


class JobServer(LocalJobServicer):
    """Runs jobs with FnApiRunner, on workers of whatever environment they name. Says it knows the options `described`."""

    def __init__(self, staging: str, described: dict[str, Any]) -> None:
        super().__init__(staging)
        self.described = described

    def DescribePipelineOptions(self, request: Any, context: Any = None, timeout: Any = None) -> Any:
        """Beam's call."""
        options = [jobs.PipelineOptionDescriptor(name=name, type=kind) for name, kind in self.described.items()]
        return jobs.DescribePipelineOptionsResponse(options=options)


if __name__ == "__main__":
    JobServer(sys.argv[2], FLINKS).start_grpc_server(int(sys.argv[1]))
    threading.Event().wait()
