"""`gorila topics create|describe|delete|acls` and `gorila cat`."""

from __future__ import annotations

import importlib
import json
from enum import StrEnum
from typing import Annotated

import typer

from gorila.commands.options import Servers, Sets, cluster_asked
from gorila.errors import UsageError
from gorila.kafka import Cluster
from gorila.topics import TOPOLOGY, full_name

topics_app = typer.Typer(
    help="A run's topics: make them with everything a run needs, look at them, delete them.", no_args_is_help=True
)

_Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run: its topics are RUN.transitions and so on.")]


def _cluster(servers: str, sets: list[str] | None) -> Cluster:
    return cluster_asked(servers, sets, "gorila-topics")


@topics_app.command()
def create(
    run: _Run,
    preset: Annotated[str, typer.Option(help="Preset name or a path to a .toml file.")] = "cartpole",
    bootstrap_servers: Servers = "",
    sets: Sets = None,
) -> None:
    """Create a run: topics, version-0 weights from the run's seed, and the configuration every role obeys.

    Example: gorila topics create demo --preset cartpole --bootstrap-servers localhost:9092
    """
    from gorila.run_record import check_name, create_run
    from gorila.settings import load_config

    check_name(run)
    config = load_config(preset, sets or [])
    cluster = _cluster(bootstrap_servers, sets)
    cluster.admin().ping()
    facts = importlib.import_module("gorila.environments").describe(config)
    weights = importlib.import_module("gorila.network").initial_weights(config, facts)
    made = create_run(cluster, run, config, facts, weights)
    state = "created" if made else "exists already, with this configuration"
    typer.echo(
        f"run {run} {state}: {len(TOPOLOGY)} topics, {len(weights):,} parameters, Kafka at {cluster.bootstrap_servers}"
    )


@topics_app.command()
def describe(
    run: _Run,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    bootstrap_servers: Servers = "",
    sets: Sets = None,
) -> None:
    """Show a run's topics: partitions, records written, settings; and where its configuration comes from.

    Example: gorila topics describe demo --json
    """
    from gorila.run_record import describe_run

    found = describe_run(_cluster(bootstrap_servers, sets), run)
    config = json.loads(found.run.config)
    if as_json:
        topics = {
            name: {"partitions": facts.partitions, "ends": facts.ends, "settings": facts.settings}
            for name, facts in found.topics.items()
        }
        environment = json.loads(found.run.environment)
        typer.echo(json.dumps({"run": run, "config": config, "environment": environment, "topics": topics}, indent=2))
        return
    typer.echo(
        f"run {run}: preset {config['run']['preset']}, seed {config['run']['seed']}, environment {config['env']['id']}"
    )
    width = max(len(full_name(run, topic.name)) for topic in TOPOLOGY)
    typer.echo(f"{'topic':<{width}}  partitions  {'end offsets':>12}  settings")
    for topic in TOPOLOGY:
        name = full_name(run, topic.name)
        if name not in found.topics:
            typer.echo(f"{name:<{width}}  missing")
            continue
        facts = found.topics[name]
        settings = " ".join(f"{key}={value}" for key, value in sorted(facts.settings.items()))
        typer.echo(f"{name:<{width}}  {facts.partitions:>10}  {sum(facts.ends.values()):>12}  {settings}")


@topics_app.command()
def delete(
    run: _Run,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    bootstrap_servers: Servers = "",
    sets: Sets = None,
) -> None:
    """Delete a run's topics and consumer groups: its experience, weights and checkpoints are gone for good.

    Example: gorila topics delete demo --yes
    """
    from gorila.run_record import delete_run

    cluster = _cluster(bootstrap_servers, sets)
    if not yes:
        try:
            sure = typer.confirm(f"Delete run {run} on Kafka at {cluster.bootstrap_servers} for good?")
        except typer.Abort:
            raise UsageError("nobody answered: give --yes to delete without being asked") from None
        if not sure:
            raise UsageError(f"run {run} was not deleted")
    deleted = delete_run(cluster, run)
    typer.echo(f"run {run} deleted: {len(deleted)} topics")


class AclFormat(StrEnum):
    """What `gorila topics acls` prints."""

    KAFKA_ACLS = "kafka-acls"
    JSON = "json"
    STRIMZI = "strimzi"


@topics_app.command()
def acls(
    run: Annotated[str, typer.Option("--run", help="Name of the run; it need not exist yet.")],
    how: Annotated[
        AclFormat, typer.Option("--format", help="Commands for a shell, a JSON list, or Strimzi's KafkaUsers.")
    ] = AclFormat.KAFKA_ACLS,
    role: Annotated[list[str] | None, typer.Option(help="Only this role; may be repeated. Default: all.")] = None,
    users: Annotated[str, typer.Option(help="Name of a role's user, with {run} and {role}.")] = "{role}",
    strimzi_cluster: Annotated[str, typer.Option(help="Strimzi: name of the Kafka resource.")] = "gorila",
    apply: Annotated[bool, typer.Option("--apply", help="Tell Kafka now (needs a user who may alter ACLs).")] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take exactly these rights back.")] = False,
    bootstrap_servers: Servers = "",
    sets: Sets = None,
) -> None:
    """Print the least rights that each role needs on a run, or grant them.

    Example: gorila topics acls --run demo · gorila topics acls --run demo --apply --set kafka.client_properties=admin.properties
    """
    from gorila import acls as rights
    from gorila.run_record import check_name

    check_name(run)
    roles = tuple(role or rights.ROLES)
    unknown = [name for name in roles if name not in rights.ROLES]
    if unknown:
        raise UsageError(f"--role {unknown[0]!r} is not allowed: {', '.join(rights.ROLES)}")
    if apply and revoke:
        raise UsageError("--apply and --revoke: one of them")
    if len(roles) > 1 and "{role}" not in users:
        raise UsageError(f"--users {users!r} is not allowed: it must contain {{role}}, or every role has every right")
    wanted = rights.acls(run, roles, users)
    if apply or revoke:
        cluster = _cluster(bootstrap_servers, sets)
        admin = cluster.admin()
        admin.ping()
        count = admin.delete_acls([acl for acl in wanted if acl.name.startswith(f"{run}.")]) if revoke else len(wanted)
        if apply:
            admin.create_acls(wanted)
        what = "granted" if apply else "taken back"
        typer.echo(f"run {run}: {count} rights of {len(roles)} users {what} on Kafka at {cluster.bootstrap_servers}")
    elif how is AclFormat.JSON:
        typer.echo(rights.json_text(wanted), nl=False)
    elif how is AclFormat.STRIMZI:
        typer.echo(rights.strimzi_yaml(wanted, strimzi_cluster), nl=False)
    else:
        typer.echo(rights.kafka_acls_lines(wanted), nl=False)


def register_cat(app: typer.Typer) -> None:
    """Add `gorila cat` to the application."""

    @app.command()
    def cat(
        topic: Annotated[str, typer.Argument(help="Full topic name, such as RUN.transitions.")],
        start: Annotated[
            str,
            typer.Option(
                "--from",
                help="earliest, latest (the newest --max of each partition), an offset, or a time like 2026-01-31T12:00:00.",
            ),
        ] = "earliest",
        most: Annotated[
            int, typer.Option("--max", min=0, help="Stop after this many records; 0: at the end of the topic.")
        ] = 0,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
        bootstrap_servers: Servers = "",
        sets: Sets = None,
    ) -> None:
        """Print a topic of ours as JSON lines; payloads are summarised, what does not decode is shown with the reason.

        Example: gorila cat demo.episodes --from latest --max 5
        """
        from gorila.cat import cat as lines_of
        from gorila.codec import Schemas
        from gorila.settings import local_kafka

        cluster = _cluster(bootstrap_servers, sets)
        registry_url = local_kafka(sets or []).schema_registry_url
        schemas = Schemas()
        if registry_url:
            from gorila.registry import Registry

            schemas.lookup = Registry(registry_url).lookup
        for line in lines_of(cluster, topic, start=start, most=most, follow=follow, schemas=schemas):
            typer.echo(line)
