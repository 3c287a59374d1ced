"""What a role process is given: its run's configuration, Kafka, schemas, a log, and the event that ends it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gorila.client_statistics import ClientStatistics
from gorila.codec import Schemas
from gorila.config import Config
from gorila.dead_letters import DeadLetters
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import GorilaError, UsageError
from gorila.event_log import EventLogger, open_log
from gorila.health import Health
from gorila.kafka import Cluster, Received
from gorila.local.roles import supervised
from gorila.metrics import Metrics
from gorila.run_record import read_run
from gorila.settings import canonical_json, config_of_run, local_kafka
from gorila.status_page import StatusPage
from gorila.topics import full_name, group_name

LOGGED_DEAD_LETTERS = 100


@dataclass
class Service:
    """One role process of a run.

    Attributes:
        name: role and index, as in `learner-0`: log file, client id, static membership.
        stop: set to end the process; whoever waits looks at it at least twice a second.
        run_dir: the run's folder on this machine, or None.
        sets: `--set` strings this process was started with.
        metrics, health: the process's; `serve_status` shows them.
    """

    role: str
    run: str
    index: int
    config: Config
    facts: EnvironmentFacts
    cluster: Cluster
    schemas: Schemas
    log: EventLogger
    stop: threading.Event = field(default_factory=threading.Event)
    run_dir: Path | None = None
    sets: tuple[str, ...] = ()
    name: str = ""
    replica: int = 0

    def __post_init__(self) -> None:
        self.name = self.name or f"{self.role}-{self.index}"
        self.metrics = Metrics(self.role, self.run, self.name)
        self.health = Health(self.stop, self.config.monitor.health_file)
        self._page: StatusPage | None = None
        self._dead_letters = DeadLetters(self.cluster, self.topic("dead-letters"), self.role, self.index)

    def topic(self, name: str) -> str:
        """A topic's full name on the broker."""
        return full_name(self.run, name)

    @property
    def group(self) -> str:
        """The role's consumer group."""
        return group_name(self.run, self.role)

    @property
    def dead_letters(self) -> int:
        """Records this process sent to dead-letters."""
        return self._dead_letters.total

    def dead_letter(self, received: Received, reason: str | GorilaError, stage: str = "VALUE_CONVERTER") -> None:
        """Send a record's original bytes to dead-letters, acknowledged on return; its offset may then move on.

        Raises:
            RunError: too many (gorila/dead_letters.py); the service must stop.
        """
        where = {"topic": received.topic, "partition": received.partition, "offset": received.offset}
        if self._dead_letters.total < LOGGED_DEAD_LETTERS:
            self.log.warning("record.dead_letter", **where, reason=str(reason))
        self._dead_letters.send(received, reason, stage)
        self.metrics.count("dead_letters_total", topic=received.topic.removeprefix(full_name(self.run, "")))

    def serve_status(self) -> None:
        """Serve /metrics, /healthz and /readyz from here on, when monitor.metrics_port says so. Raises LocalError when the port is taken.

        Clients made afterwards report librdkafka's statistics.
        """
        monitor = self.config.monitor
        if monitor.metrics_port and self._page is None:
            self._page = StatusPage(self.metrics, self.health, monitor.metrics_host, monitor.metrics_port)
            self.cluster.on_statistics = ClientStatistics(self.metrics, full_name(self.run, "")).take

    def close(self) -> None:
        """Flush what is left. The role's own clients are its own to close."""
        self._dead_letters.close()
        self.health.close()
        if self._page is not None:
            self._page.close()
            self._page = None


def open_service(
    role: str,
    run: str,
    index: int = 0,
    bootstrap_servers: str = "",
    sets: Sequence[str] = (),
    run_dir: Path | None = None,
    *,
    replica: int = 0,
    terminal: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Service:
    """Read the run's record and make ready for its role.

    Args:
        bootstrap_servers: empty: from `kafka.bootstrap_servers` of the environment or `sets`.
        sets: `key=value` strings; keys that are the run's own must agree with it.
        terminal: whether the log goes to stderr too.
        environ: where GORILA__ variables are; None: this process's.

    Raises:
        RunError: unknown run (naming those that exist), or a key contradicts it (naming the key).
        UsageError, BrokerError.
    """
    local = local_kafka(sets, environ)
    servers = bootstrap_servers or local.bootstrap_servers
    if not servers and not local.client_properties:
        raise UsageError("no Kafka given: --bootstrap-servers, or kafka.bootstrap_servers in the environment or --set")
    stop = threading.Event()
    cluster = Cluster(
        servers, local.client_properties, client_id=f"{run}-{role}-{index}{f'-{replica}' * bool(replica)}", stop=stop
    )
    cluster.admin().ping()
    schemas = Schemas()
    if local.schema_registry_url:
        from gorila.registry import attach

        attach(schemas, local.schema_registry_url)
    record = read_run(cluster, run, schemas)
    for number, text in record.schemas.items():
        schemas.learn(int(number), text)
    config = config_of_run(record.config, sets, environ)
    name = f"{role}-{index}"
    if role == "parameter-server" and config.parameter_server.replicas > 1:
        name += f"-{replica}"
    # A supervisor keeps stderr in the very file that the log would be: one line, once.
    folder = None if terminal and supervised() else run_dir
    log = open_log(name, {"role": role, "run": run, "index": index}, folder, terminal=terminal)
    service = Service(
        role,
        run,
        index,
        config,
        EnvironmentFacts.from_json(record.environment),
        cluster,
        schemas,
        log,
        stop,
        run_dir,
        tuple(sets),
        name,
        replica,
    )
    # The full configuration once. It holds no secrets: they are in the client properties file, which is never read out.
    # A spectator (the live view) is no service: it says nothing.
    (log.debug if role == "train" else log.info)(
        "service.start", kafka=cluster.bootstrap_servers, config=canonical_json(config)
    )
    return service
