"""Kafka's own command-line tools by the names of their scripts (kafka-topics.sh is `topics`)."""

from __future__ import annotations

import difflib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gorila.errors import UsageError
from gorila.local.broker import BOOTSTRAP_VARIABLE, DEFAULT_FOLDER, PROPERTIES_VARIABLE, Broker
from gorila.local.classpath import java_class_path


@dataclass(frozen=True)
class Tool:
    """A main class, where it takes --bootstrap-server (before its other words, after them, not at all), and its kind.

    heavy: runs long enough for the JVM's optimising compiler. bare: does its work without any words; the others
    answer with their help. config: whether it takes --command-config, a client.properties file.
    """

    main_class: str
    bootstrap: Literal["first", "last", "none"] = "first"
    heavy: bool = False
    bare: bool = False
    config: bool = True


_TOOLS = "org.apache.kafka.tools."
KAFKA_TOOLS: Mapping[str, Tool] = {
    "acls": Tool(_TOOLS + "AclCommand"),
    "broker-api-versions": Tool(_TOOLS + "BrokerApiVersionsCommand", bare=True),
    "client-metrics": Tool(_TOOLS + "ClientMetricsCommand"),
    "cluster": Tool(_TOOLS + "ClusterTool", bootstrap="last"),
    "configs": Tool("kafka.admin.ConfigCommand"),
    "console-consumer": Tool(_TOOLS + "consumer.ConsoleConsumer"),
    "console-producer": Tool(_TOOLS + "ConsoleProducer"),
    "consumer-groups": Tool(_TOOLS + "consumer.group.ConsumerGroupCommand"),
    "consumer-perf-test": Tool(_TOOLS + "ConsumerPerformance", heavy=True),
    "delegation-tokens": Tool(_TOOLS + "DelegationTokenCommand"),
    "delete-records": Tool(_TOOLS + "DeleteRecordsCommand"),
    "dump-log": Tool(_TOOLS + "DumpLogSegments", bootstrap="none"),
    "e2e-latency": Tool(_TOOLS + "EndToEndLatency", heavy=True, config=False),
    "features": Tool(_TOOLS + "FeatureCommand"),
    "get-offsets": Tool(_TOOLS + "GetOffsetShell"),
    "groups": Tool(_TOOLS + "GroupsCommand"),
    "jmx": Tool(_TOOLS + "JmxTool", bootstrap="none"),
    "leader-election": Tool(_TOOLS + "LeaderElectionCommand"),
    "log-dirs": Tool(_TOOLS + "LogDirsCommand"),
    "metadata-quorum": Tool(_TOOLS + "MetadataQuorumCommand"),
    "producer-perf-test": Tool(_TOOLS + "ProducerPerformance", heavy=True),
    "reassign-partitions": Tool(_TOOLS + "reassign.ReassignPartitionsCommand"),
    "replica-verification": Tool(_TOOLS + "ReplicaVerificationTool", config=False),
    "share-groups": Tool(_TOOLS + "consumer.group.ShareGroupCommand"),
    "storage": Tool("kafka.tools.StorageTool", bootstrap="none"),
    "topics": Tool(_TOOLS + "TopicCommand"),
    "transactions": Tool(_TOOLS + "TransactionsCommand"),
    "verifiable-consumer": Tool(_TOOLS + "VerifiableConsumer"),
    "verifiable-producer": Tool(_TOOLS + "VerifiableProducer"),
}

_JVM_OPTIONS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "--enable-native-access=ALL-UNNAMED",
)


def tool_names() -> str:
    """Every tool's name, for messages and help."""
    return ", ".join(KAFKA_TOOLS)


def run_kafka_tool(name: str, args: Sequence[str], *, folder: Path | str = DEFAULT_FOLDER) -> int:
    """Run a tool with the terminal's streams and return its exit code (128 + n if signal n ended it).

    Unless `args` name a broker, --bootstrap-server is added: the environment's, else the broker running in `folder`; and so is its
    --command-config, where that is a secured one (its administrator's, or the environment's).
    Raises UsageError for an unknown tool or when there is no broker to talk to, LocalError without the `local` extra.
    """
    tool = find_tool(name)
    words = tool_arguments(tool, args, folder=folder)
    # Short commands end before C2 pays; measurements are judged at full speed.
    options = _JVM_OPTIONS if tool.heavy else (*_JVM_OPTIONS, "-XX:TieredStopAtLevel=1")
    child = subprocess.Popen(java_class_path().command(tool.main_class, *words, options=options))
    while True:
        try:
            code = child.wait()
            return 128 - code if code < 0 else code
        except KeyboardInterrupt:
            continue  # the terminal sent Ctrl-C to the tool too: it ends by itself, and its exit code is wanted


def find_tool(name: str) -> Tool:
    """The tool called `name`, also as kafka-NAME or NAME.sh. Raises UsageError listing the names."""
    short = name.removesuffix(".sh").removeprefix("kafka-")
    if short in KAFKA_TOOLS:
        return KAFKA_TOOLS[short]
    close = difflib.get_close_matches(short, KAFKA_TOOLS, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise UsageError(f"{name!r} is not one of Kafka's tools{hint}: {tool_names()}")


def tool_arguments(tool: Tool, args: Sequence[str], *, folder: Path | str = DEFAULT_FOLDER) -> list[str]:
    """`args` with --bootstrap-server (and --command-config) added where the tool needs it and the user did not say. Raises UsageError."""
    words = list(args)
    names_broker = any(
        word.startswith(("--bootstrap-", "--broker-list")) or "bootstrap.servers=" in word for word in words
    )
    if (
        tool.bootstrap == "none"
        or not (words or tool.bare)
        or names_broker
        or {"--help", "-h", "--version"} & set(words)
    ):
        return words
    servers, properties = _broker(folder)
    option = ["--bootstrap-server", servers]
    own = ("--command-config", "--consumer.config", "--producer.config", "--admin.config")
    if properties and tool.config and not any(word.startswith(own) for word in words):
        option += ["--command-config", properties]
    return words + option if tool.bootstrap == "last" else option + words


def _broker(folder: Path | str) -> tuple[str, str]:
    """(bootstrap servers, client properties or nothing). Raises UsageError when there is no broker to talk to."""
    properties = os.environ.get(PROPERTIES_VARIABLE, "")
    if servers := os.environ.get(BOOTSTRAP_VARIABLE) or _servers_in(properties):
        return servers, properties
    status = Broker(folder).status()
    if status is None:
        raise UsageError(
            f"no broker runs in {folder}: start one (gorila broker start), set {BOOTSTRAP_VARIABLE}, or give --bootstrap-server"
        )
    return status.bootstrap_servers, properties or str(status.client_properties or "")


def _servers_in(properties: str) -> str:
    if not properties:
        return ""
    from gorila.kafka.client_properties import read_client_properties

    return read_client_properties(properties).get("bootstrap.servers", "")
