"""--synchronous: two runs with one seed give the same states, bit for bit."""

from __future__ import annotations

from pathlib import Path

from gorila.codec import Schemas
from gorila.kafka import Cluster
from gorila.local.broker import BrokerAddress
from gorila.local.train import train
from gorila.messages import CheckpointManifest
from gorila.settings import load_config

UPDATES = 96


def _state_hashes(bootstrap_servers: str, run: str) -> list[tuple[int, int, int]]:
    consumer, schemas, where = Cluster(bootstrap_servers).consumer(ends=True), Schemas(), (f"{run}.checkpoints", 0)
    end = consumer.watermarks(*where)[1]
    consumer.assign({where: 0})
    found = []
    while (consumer.end_reached(*where) or 0) < end:
        for received in consumer.poll_many(100, 0.3):
            message = schemas.decode(received.value)
            if isinstance(message, CheckpointManifest):
                found.append((message.version, message.gradient_offset, message.state_hash))
    consumer.close()
    return found


def test_two_runs_one_seed_one_hash(broker: BrokerAddress, run_name: str, tmp_path: Path) -> None:
    hashes = []
    for number in range(2):
        sets = [
            f"kafka.bootstrap_servers={broker.bootstrap_servers}",
            "run.synchronous=true",
            f"run.max_updates={UPDATES}",
            "run.seed=5",
            "parameter_server.checkpoint_versions=32",
            "evaluator.min_versions=1000000",
        ]
        name = f"{run_name}-{number}"
        summary = train(load_config("cartpole", sets, environ={}), run=name, root=tmp_path)
        assert summary.updates == UPDATES
        assert summary.restarts == 0
        hashes.append(_state_hashes(broker.bootstrap_servers, name))
    assert [version for version, _, _ in hashes[0]] == [0, 32, 64, 96]
    assert hashes[0] == hashes[1]
    assert len({state_hash for _, _, state_hash in hashes[0]}) == len(hashes[0]), "every state is another one"
