"""One worker process of a portable runner: Beam's SDK harness with a state cache, our signals, and rooms that are closed at its end.

    python -m pipelines.worker --id ID --control-endpoint HOST:PORT --state-cache-mb N

SIGTERM: every source stops after its poll; what it had read goes through the pipeline; the runner then ends the job and this process with it. A
runner that does not is left after STOP_WITHIN_S: what is in the memories is published and committed all the same.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from apache_beam.runners.worker.sdk_worker import SdkHarness

from gorila.event_log import open_log
from gorila.local.roles import stop_with_supervisor
from pipelines import split_registry
from pipelines.warm_up import warm_up

STOP_WITHIN_S = 2.0
SEND_WITHIN_MS = 20


def main(arguments: Sequence[str]) -> None:
    """Serve one runner until it has no more work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--id", required=True)
    parser.add_argument("--control-endpoint", required=True)
    parser.add_argument("--state-cache-mb", type=int, required=True)
    options = parser.parse_args(arguments)
    logging.getLogger().handlers.clear()  # Beam logs while it is imported, and logging makes it a handler of its own
    log = open_log("replay-worker", {"role": "replay-worker", "worker": options.id}, None)
    stop, ended = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop_with_supervisor(stop)
    threading.Thread(target=_stop_when_told, args=(stop, ended), name="stop-watch", daemon=True).start()
    warm_up()
    harness = SdkHarness(
        options.control_endpoint,
        worker_id=options.id,
        state_cache_size=options.state_cache_mb << 20,
        data_buffer_time_limit_ms=SEND_WITHIN_MS,
    )
    log.info("worker.start", control=options.control_endpoint, state_cache_mb=options.state_cache_mb)
    code = 0
    try:
        harness.run()
    except Exception as error:  # the runner went away: gRPC says so in its own words
        code = 0 if stop.is_set() else 1
        log.error("worker.runner_gone", reason=str(error).splitlines()[0] if str(error) else type(error).__name__)
    ended.set()
    _leave(code)


def _stop_when_told(stop: threading.Event, ended: threading.Event) -> None:
    stop.wait()
    split_registry.stop_all()
    if not ended.wait(STOP_WITHIN_S):
        _leave(0)


_leaving = threading.Lock()


def _leave(code: int) -> None:
    """Close the rooms and end, once."""
    with _leaving:
        split_registry.close_all()
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
