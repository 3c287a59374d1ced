"""compose.yaml's topology without an engine: every service a process in a network namespace of its own, one a "host". `make cluster`.

    python -m deploy.cluster [--preset cartpole] [--updates N] [--minutes M]

What runs is what compose.yaml says: its commands, its environment, its host names (a role finds Kafka as kafka:19092), restarted when it ends. Not from there:
Kafka itself is the embedded one (on the host `kafka`, listening as compose's does), volumes are folders, Prometheus and Grafana are left out; that each role
answers a scrape is asked from another host. Ends when the run is solved or has made N updates; Ctrl-C ends it too. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deploy.hosts import Hosts, lan_listener, missing
from gorila.errors import GorilaError
from gorila.local.broker import Broker
from gorila.local.roles import SUPERVISOR_VARIABLE
from gorila.run_follower import RunFollower
from gorila.run_progress import RunProgress
from gorila.service import open_service

COMPOSE = Path(__file__).parent / "compose.yaml"
KAFKA, OPERATOR = "kafka", "operator"
CREATES = "topics"
STOP_S = 10.0  # compose's stop_grace_period
SHOW_EVERY_S = 5.0
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


@dataclass
class Service:
    """One of compose's services that runs an image of ours."""

    name: str
    command: list[str]
    environment: dict[str, str]
    starts: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def status_url(self) -> str:
        """Of its probes and metrics, as another host sees it."""
        return f"http://{self.name}:{self.environment['GORILA__MONITOR__METRICS_PORT']}"


def services(values: dict[str, str], text: str | None = None) -> dict[str, Service]:
    """Services of compose.yaml whose image is ours, by name.

    Args:
        values: of its variables; what is missing has the default written there.
    """
    filled = VARIABLE.sub(lambda found: values.get(found[1], found[2]), COMPOSE.read_text() if text is None else text)
    tree: dict[str, Any] = yaml.safe_load(filled)["services"]
    return {
        name: Service(
            name, [str(word) for word in spec["command"]], {k: str(v) for k, v in spec["environment"].items()}
        )
        for name, spec in tree.items()
        if spec["image"].startswith("gorila-")
    }


class Cluster:
    """The services on their hosts, seen from the host `operator`."""

    def __init__(self, hosts: Hosts, found: dict[str, Service], folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self.services = {name: service for name, service in found.items() if name != CREATES}
        self._creates = found[CREATES]
        self._broker: subprocess.Popen[bytes] | None = None

    def start_kafka(self, tag: str) -> None:
        """On its host. Returns once it answers from here."""
        words = [sys.executable, "-m", "deploy.cluster", "--kafka", str(self._folder / KAFKA), "--tag", tag]
        with (self._folder / "kafka.out").open("wb") as out:
            self._broker = subprocess.Popen(
                self._hosts.command_on(KAFKA, *words), stdout=out, stderr=out, start_new_session=True
            )

    def create_run(self) -> None:
        """The service that ends: topics, first weights, run record. Again until Kafka answers, as depends_on has it."""
        deadline_s = time.monotonic() + 120
        while True:
            done = subprocess.run(
                self._gorila(self._creates),
                env=self._environ(self._creates),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                print(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "created", flush=True)
                return
            if time.monotonic() > deadline_s or (self._broker is not None and self._broker.poll() is not None):
                raise SystemExit(f"{' '.join(self._creates.command)}: {(done.stderr or done.stdout).strip()[-500:]}")
            time.sleep(1.0)

    def look_after(self) -> None:
        """Start what does not run."""
        for service in self.services.values():
            if service.process is None or service.process.poll() is not None:
                if service.starts:
                    print(
                        f"{service.name} ended ({service.process.poll() if service.process else ''}); started again",
                        flush=True,
                    )
                service.starts += 1
                with (self._folder / f"{service.name}.out").open("ab") as out:
                    service.process = subprocess.Popen(
                        self._hosts.command_on(service.name, *self._gorila(service)),
                        env=self._environ(service), stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
                    )  # fmt: skip

    def _gorila(self, service: Service) -> list[str]:
        data = self._folder / f"{service.name}-data"
        words = [str(data) if word == "/data" else word for word in service.command]
        return [sys.executable, "-m", "gorila.cli", *words]

    def _environ(self, service: Service) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GORILA__")}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # Containers have a /tmp of their own, namespaces have not.
        own = {
            "GORILA__MONITOR__HEALTH_FILE": str(self._folder / f"{service.name}.health"),
            SUPERVISOR_VARIABLE: str(os.getpid()),
        }
        return {**kept, **threads, **service.environment, **own}

    def ready(self) -> list[str]:
        """Names of those whose /readyz says yes and whose /metrics answers, asked over the network."""
        return [
            name
            for name, service in self.services.items()
            if all(_answers(service.status_url + at) for at in ("/readyz", "/metrics"))
        ]

    def tail(self, name: str) -> str:
        """The end of what a service said."""
        return (self._folder / f"{name}.out").read_text(errors="replace")[-600:]

    def close(self) -> None:
        """SIGTERM to all, SIGKILL to those that do not end in time; Kafka last."""
        running = [service.process for service in self.services.values() if service.process is not None]
        for group in (running, [self._broker] if self._broker is not None else []):
            for process in group:
                process.terminate()
            deadline_s = time.monotonic() + STOP_S
            for process in group:
                try:
                    process.wait(max(0.1, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def watch(cluster: Cluster, run: str, servers: str, updates: int, minutes: float) -> dict[str, object]:
    """Until it is solved, or enough was done; the figures. Raises GorilaError."""
    view = open_service("train", run, 0, servers, terminal=False, environ={})
    progress = RunProgress()
    follower = RunFollower(view, progress)
    began_s = shown_s = time.monotonic()
    all_ready_s: float | None = None
    reason = ""
    try:
        while not reason:
            cluster.look_after()
            follower.poll(0.25)
            now_s = time.monotonic()
            if now_s - shown_s >= SHOW_EVERY_S:
                shown_s = now_s
                ready = cluster.ready()
                if len(ready) == len(cluster.services) and all_ready_s is None:
                    all_ready_s = now_s - began_s
                best = f", best {progress.best.return_mean:.1f}" if progress.best else ""
                print(
                    f"{now_s - began_s:5.0f} s  {progress.env_steps} steps, {progress.updates} updates, return {progress.episode_return_mean:.1f}{best};"
                    f" ready {len(ready)} of {len(cluster.services)}", flush=True,
                )  # fmt: skip
            if progress.solved:
                reason = "solved"
            elif updates and progress.updates >= updates and all_ready_s is not None:
                reason = f"{updates} updates done"
            elif now_s - began_s > minutes * 60:
                reason = "time is over"
    finally:
        follower.close()
    result = progress.result
    return {
        "ended_because": reason,
        "hosts": len(cluster.services) + 2,
        "all_ready_s": None if all_ready_s is None else round(all_ready_s, 1),
        "updates": progress.updates,
        "env_steps": progress.env_steps,
        "eval_return_mean": result.return_mean if result else None,
        "restarts": sum(service.starts - 1 for service in cluster.services.values()),
        "wall_s": round(time.monotonic() - began_s, 1),
    }


def serve_kafka(folder: Path, hosts: Hosts) -> None:
    """On the host `kafka`: the embedded broker, until SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Broker(folder, also=lan_listener(hosts.address(KAFKA), 19092, KAFKA)):
        while not stop.wait(1.0) and os.getppid() != 1:
            pass


def main() -> None:
    """See the file's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cartpole")
    parser.add_argument("--updates", type=int, default=0, help="end after this many; 0: when solved")
    parser.add_argument("--minutes", type=float, default=15.0, help="give up after this")
    parser.add_argument("--tag", default="", help=argparse.SUPPRESS)
    parser.add_argument("--kafka", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    run = "demo"
    found = services({"RUN": run, "PRESET": options.preset})
    names = [KAFKA, OPERATOR, *(name for name in found if name != CREATES)]
    if options.kafka:
        serve_kafka(Path(options.kafka), Hosts(names, options.tag))
        return
    if not options.tag:
        if lacking := missing():
            print(f"skipped: hosts are network namespaces, which need {lacking}")
            return
        with Hosts(names) as hosts:
            words = [sys.executable, "-m", "deploy.cluster", *sys.argv[1:], "--tag", hosts.tag]
            inner = subprocess.Popen(hosts.command_on(OPERATOR, *words))
            try:
                code = inner.wait()
            except KeyboardInterrupt:  # the terminal told it as well: it stops its roles first
                code = inner.wait()
        raise SystemExit(code)
    hosts = Hosts(names, options.tag)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(hosts, found, Path(folder))
        try:
            print(
                f"{len(names)} hosts on a bridge: {', '.join(f'{name} {hosts.address(name)}' for name in names)}",
                flush=True,
            )
            cluster.start_kafka(options.tag)
            cluster.create_run()
            servers = found[CREATES].environment["GORILA__KAFKA__BOOTSTRAP_SERVERS"]
            figures = watch(cluster, run, servers, options.updates, options.minutes)
        except GorilaError as error:
            raise SystemExit(str(error)) from None
        except KeyboardInterrupt:
            raise SystemExit("interrupted") from None
        finally:
            cluster.close()
    print(json.dumps(figures))
    raise SystemExit(0 if figures["ended_because"] != "time is over" else 1)


if __name__ == "__main__":
    main()
