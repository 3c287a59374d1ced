"""A run under a seeded schedule of faults, and what must hold all the same. `make chaos`.

    python -m benchmarks.chaos [--faults 100] [--minutes M] [--kinds kill,pause,…] [--seed S] [--quick]

The run: CartPole with a small network, two actors, replay, learner, parameter server, evaluator, monitor and the embedded broker, each role on a "host" of its
own (a network namespace; root and iproute2, else no links are cut) and two small disks (tmpfs; root, else none is filled). What ends is started again, as an
orchestrator would. The kinds of faults are in chaos_faults.py, the invariants in chaos_audit.py.

time to healthy: from the fault's end (killed; continued; joined; room again; written) until every role says it is ready, new updates were made, every actor
wrote and its blocks were read, and all lags are within the bounds the system acts on.
lost, doubled: by the fault during which they were found; what only the comparison at the end finds stands in a row of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.chaos_audit import Audit
from benchmarks.chaos_faults import Fault, Striker, schedule
from benchmarks.chaos_injection import Injector
from benchmarks.chaos_results import AT_REST_S, Table, at_rest, verdicts
from benchmarks.fleet import BROKER_HOST, Fleet, host_names
from deploy.hosts import Hosts, missing
from gorila.config import Config
from gorila.errors import GorilaError
from gorila.settings import load_config

PATIENCE_S = 120.0
TELL_WHY_S = 5.0
BROKER_DISK, ROLE_DISK = "3g", "256m"
SETS = (
    "network.hidden=[32,32]",
    "actor.count=2",
    "actor.lanes=4",
    "actor.max_steps_per_s=40",
    # Larger than the run: at the end the rings hold every transition there is.
    "replay.capacity_rows=400000",
    "learner.checkpoint_interval_s=5",
    "parameter_server.checkpoint_versions=500",
    "parameter_server.ledger_versions=100",
    "evaluator.threshold=none",
    "evaluator.interval_s=5",
    "evaluator.episodes=5",
    "evaluator.lanes=5",
)
QUICK = ("kill", "pause", "broker kill", "cut link", "poison", "clocks")


def strike_all(fleet: Fleet, striker: Striker, audit: Audit, faults: list[Fault], minutes: float) -> Table:
    """Every fault, one after another, each once the run is healthy."""
    table, began_s = Table(), time.monotonic()
    found = audit.findings
    for number, fault in enumerate(faults, 1):
        if minutes and time.monotonic() - began_s > minutes * 60:
            print(f"{minutes:g} minutes are over")
            break
        lost, doubled = found.lost, found.doubled
        striker.strike(fault)
        took_s, sick = fleet.until_healthy(fleet.mark(), PATIENCE_S)
        fleet.live(1.0)
        table.row(fault.kind, took_s, found.lost - lost, found.doubled - doubled)
        plays = f"{fleet.recent_return():5.0f}"
        why = f"STILL SICK: {sick}" if sick else f"last: {fleet.last_sick}" if took_s > TELL_WHY_S else ""
        print(f"{number:3} {fault!s:32} {took_s:5.1f} s  {plays}  {why}".rstrip(), flush=True)
        for line in fleet.ended + found.lines:
            print(f"      {line}", flush=True)
        fleet.ended.clear()
        found.lines.clear()
        if sick:
            raise SystemExit(f"not healthy {PATIENCE_S:.0f} s after {fault}: {sick}\n{_logs(fleet)}")
    return table


def _logs(fleet: Fleet) -> str:
    return "\n".join(f"== {role.name}\n{role.last_lines(12)}" for role in fleet.roles)


def run(
    config: Config, options: argparse.Namespace, folder: Path, hosts: Hosts | None, disks: tuple[Path, Path] | None
) -> dict[str, object]:
    """The whole thing; its figures."""
    rng = random.Random(options.seed)
    state, broker_folder = disks or (folder / "state", folder / "broker-disk")
    fleet = Fleet(f"chaos-{options.seed}", config, state / "run", broker_folder / "broker", hosts)
    try:
        fleet.open()
        audit, injector = Audit(fleet.service), Injector(fleet.service, rng)
        fleet.on_turn = audit.turn
        striker = Striker(fleet, injector, audit, hosts, disks, rng, brief=options.quick)
        kinds = {
            kind: targets for kind, targets in striker.kinds().items() if not options.kinds or kind in options.kinds
        }
        took_s, sick = fleet.until_healthy(fleet.mark(), 2 * PATIENCE_S)
        if sick:
            raise SystemExit(f"the run does not begin: {sick}\n{_logs(fleet)}")
        print(f"healthy {took_s:.1f} s after its start; {', '.join(kinds)}", flush=True)
        print("fault, seconds until healthy, mean return of the actors' newest 20 episodes", flush=True)
        faults = schedule(kinds, options.faults, rng)
        table = strike_all(fleet, striker, audit, faults, options.minutes)
        lost, doubled = audit.findings.lost, audit.findings.doubled
        audit.finish(*at_rest(fleet, 4.0 if options.quick else AT_REST_S))
        table.lost["at the end"], table.doubled["at the end"] = (
            audit.findings.lost - lost,
            audit.findings.doubled - doubled,
        )
        times = [time_s for row in table.healthy_s.values() for time_s in row]
        struck = {kind for kind, row in table.healthy_s.items() if row}
        table.healthy_s["at the end"] = []
        wrong = audit.findings.lines + verdicts(fleet, injector)
        print(table)
        for line in wrong[:50]:
            print(f"WRONG: {line}")
        audit.close()
        injector.close()
    except Exception:
        print(_logs(fleet) if fleet.roles else "", file=sys.stderr)
        raise
    finally:
        fleet.close()
    return {
        "faults": len(times),
        "kinds": len(struck),
        "lost": audit.findings.lost,
        "doubled": audit.findings.doubled,
        "healthy_s_p50": round(statistics.median(times), 1),
        "healthy_s_max": round(max(times), 1),
        "wrong": len(wrong),
    }


def mounted(folder: Path, size: str) -> Path:
    """A small disk of its own."""
    folder.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)), check=True)
    return folder


def inside(config: Config, options: argparse.Namespace) -> None:
    """On the broker's host, or on this machine as it is."""
    logging.disable(logging.WARNING)  # that Kafka went away is no news here
    hosts = Hosts(host_names(config), options.tag) if options.tag else None
    with tempfile.TemporaryDirectory() as name:
        folder, made = Path(name), list[Path]()
        try:
            if hosts is not None:
                made = [mounted(folder / "state", ROLE_DISK), mounted(folder / "broker-disk", BROKER_DISK)]
            figures = run(config, options, folder, hosts, (made[0], made[1]) if made else None)
        except GorilaError as error:
            raise SystemExit(str(error)) from None
        finally:
            for disk in made:
                subprocess.run(("umount", "--lazy", str(disk)), check=False)
    print(json.dumps(figures))
    if figures["lost"] or figures["doubled"] or figures["wrong"]:
        raise SystemExit(1)


def main() -> None:
    """See the file's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=0.0, help="no new fault after this; 0: all faults")
    parser.add_argument("--kinds", default="", help="comma-separated; default: all that this machine lets be done")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help=f"once each: {', '.join(QUICK)}")
    parser.add_argument("--tag", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    words = sys.argv[1:]
    options.kinds = [kind.strip() for kind in options.kinds.split(",") if kind.strip()]
    if options.quick:
        options.kinds = options.kinds or list(QUICK)
        options.faults = len(options.kinds)
    config = load_config("cartpole", (*SETS, f"run.seed={options.seed}"), {})
    lacking = missing()
    if options.tag or lacking:
        if lacking:
            print(f"no links are cut and no disks are filled: that needs {lacking}")
        inside(config, options)
        return
    with Hosts(host_names(config)) as hosts:
        command = hosts.command_on(BROKER_HOST, sys.executable, "-m", "benchmarks.chaos", *words, "--tag", hosts.tag)
        raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    # Ended by a service manager, or started where Ctrl-C is ignored: broker, hosts and disks go all the same.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:  # everything was ended on the way here
        raise SystemExit(130) from None
