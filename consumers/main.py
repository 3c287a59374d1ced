"""Role processes of this folder, found by name by the CLI. Imports are inside: a parameter server must not pay for torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gorila.service import Service


def run_learner(service: Service) -> None:
    """See consumers/learner_service.py."""
    from consumers.learner_service import run_learner as run

    run(service)
