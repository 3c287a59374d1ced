"""The doctor's findings as a table, and the whole visit from address to exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gorila.doctor import Finding, examine, findings_of, worst_first
from gorila.doctor.reach import why_unreachable
from gorila.errors import BrokerError, RunError
from gorila.kafka import Cluster
from gorila.run_observer import newest_run, open_spectator
from gorila.settings import local_kafka

_STYLES = {"fine": "green", "note": "dim", "advice": "yellow", "wrong": "bold red"}
PLAIN_COLUMNS = 100


def doctor(run: str, bootstrap_servers: str, sets: Sequence[str], console: Console | None = None) -> int:
    """Print the table; 0 when nothing is wrong, 1 when something is. Raises UsageError, and RunError for a run that was named and is not there."""
    console = console or Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    findings, title = _visit(run, bootstrap_servers, sets)
    console.print(table(findings, title))
    wrong = sum(finding.level == "wrong" for finding in findings)
    advice = sum(finding.level == "advice" for finding in findings)
    console.print(f"{wrong} wrong, {advice} to improve, {len(findings)} findings")
    return 1 if wrong else 0


def _visit(run: str, bootstrap_servers: str, sets: Sequence[str]) -> tuple[list[Finding], str]:
    logging.getLogger().addHandler(logging.NullHandler())  # the table says it all
    kafka = local_kafka(sets)
    cluster = Cluster(bootstrap_servers or kafka.bootstrap_servers, kafka.client_properties, client_id="gorila-doctor")
    try:
        admin = cluster.admin()
        admin.ping()
    except BrokerError as error:
        return [
            Finding("broker", "wrong", str(error), why_unreachable(cluster.bootstrap_servers))
        ], cluster.bootstrap_servers
    there = len(admin.topics())
    findings = [Finding("broker", "fine", f"Kafka at {cluster.bootstrap_servers} answers, {there} topics")]
    try:
        name = run or newest_run(cluster)
    except RunError as error:
        return [*findings, Finding("run", "note", str(error))], cluster.bootstrap_servers
    service = open_spectator("doctor", name, bootstrap_servers, sets)
    try:
        return [*findings, *findings_of(examine(service))], name
    except BrokerError as error:
        return [*findings, Finding("broker", "wrong", str(error), "Kafka went away meanwhile: its log says why")], name
    finally:
        service.close()


def table(findings: Sequence[Finding], title: str) -> Table:
    """What is wrong first, then what could be better; the rest as it was looked at."""
    shown = Table(title=title, title_justify="left", expand=True, show_lines=False)
    shown.add_column("", no_wrap=True)
    # Folded, not cut: a command with a long topic name must be whole.
    shown.add_column("check", ratio=2, overflow="fold")
    shown.add_column("found", ratio=5, overflow="fold")
    shown.add_column("what to do", ratio=4, overflow="fold")
    for finding in worst_first(findings):
        style = _STYLES[finding.level]
        # Text, not str: what comes from Kafka must not be read as markup.
        shown.add_row(Text(finding.level, style=style), Text(finding.check), Text(finding.found), Text(finding.do))
    return shown
