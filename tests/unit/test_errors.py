"""Onlookers live through an absent Kafka, and through nothing else."""

from __future__ import annotations

import pytest

from gorila.errors import BrokerError, NotAllowed, RunError, while_away


def test_an_absent_kafka_is_lived_through():
    reached = False
    with while_away():
        reached = True
        raise BrokerError("Kafka is away")
    assert reached


@pytest.mark.parametrize("error", [NotAllowed("no right"), RunError("unknown run"), OSError("disk")])
def test_a_missing_right_and_all_else_are_told(error: Exception):
    with pytest.raises(type(error)), while_away():
        raise error
