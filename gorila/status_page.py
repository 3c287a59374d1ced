"""What a role process shows over HTTP: /metrics for Prometheus, /healthz and /readyz for probes. On loopback unless monitor.metrics_host says otherwise.

The pages are read-only, take no parameters and show no configuration. Served by daemon threads: a page never keeps a process from its end.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gorila.errors import LocalError
from gorila.health import Health
from gorila.metrics import CONTENT_TYPE, Metrics

TEXT = "text/plain; charset=utf-8"
REQUEST_S = 10.0


class StatusPage:
    """Serves one process until `close`.

    Args:
        host, port: where; port 0 asks the system for a free one (`port` says which).

    Raises:
        LocalError: the address cannot be listened on.
    """

    def __init__(self, metrics: Metrics, health: Health, host: str, port: int) -> None:
        handler = type("Handler", (_Handler,), {"metrics": metrics, "health": health})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise LocalError(f"monitor.metrics_port = {port}: cannot listen on {host}: {error.strerror}") from None
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="status-page", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class _Handler(BaseHTTPRequestHandler):
    metrics: Metrics
    health: Health
    timeout = REQUEST_S
    server_version = "gorila"
    sys_version = ""

    def do_GET(self) -> None:
        """One of three pages."""
        path = self.path.split("?", 1)[0]
        if path == "/metrics":
            self.metrics.show_process(self.health.is_ready, self.health.beat_age_s)
            self._answer(200, CONTENT_TYPE, self.metrics.page())
        elif path == "/healthz":
            self._answer(200 if self.health.is_healthy else 503, TEXT, f"{self.health}\n".encode())
        elif path == "/readyz":
            self._answer(200 if self.health.is_ready else 503, TEXT, f"{self.health}\n".encode())
        else:
            self._answer(404, TEXT, b"/metrics, /healthz or /readyz\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 — the base class's name
        """Nothing: a scrape every 15 s is no event."""
