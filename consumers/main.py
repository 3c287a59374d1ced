"""Role processes of this folder, found by name by the CLI. Imports are inside: a parameter server must not pay for torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gorila.service import Service
    from gorila.weights_history import History, Progress


def run_learner(service: Service) -> None:
    """See consumers/learner_service.py."""
    from consumers.learner_service import run_learner as run

    run(service)


def run_parameter_server(service: Service) -> None:
    """See consumers/parameter_server/service.py."""
    from consumers.parameter_server.service import run_parameter_server as run

    run(service)


def run_evaluator(service: Service) -> None:
    """See consumers/evaluator_service.py."""
    from consumers.evaluator_service import run_evaluator_service

    run_evaluator_service(service)


def run_monitor(service: Service) -> None:
    """See consumers/monitor.py."""
    from consumers.monitor import run_monitor_service

    run_monitor_service(service)


def run_archiver(service: Service) -> None:
    """See consumers/archiver_service.py."""
    from consumers.archiver_service import run_archiver_service

    run_archiver_service(service)


def time_travel(service: Service, progress: Progress) -> History:
    """See consumers/parameter_server/time_travel.py."""
    from consumers.parameter_server.time_travel import TimeTravel

    return TimeTravel(service, progress)
