"""Warming up compiles everything: the first real record meets no compiler."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.path.insert(0, "tests/pipelines")
import numpy as np
from lane_writer import LaneWriter, config
from gorila.codec import Schemas
from gorila.messages import TransitionBlock
from pipelines import batch_assembly, nstep, ring_kernels, sampling, sum_tree
from pipelines.replay import ReplaySplit
from pipelines.warm_up import warm_up

def compiled():
    modules = (nstep, ring_kernels, sampling, sum_tree)
    found = {f"{m.__name__}.{n}": len(f.signatures) for m in modules for n, f in vars(m).items() if hasattr(f, "signatures")}
    return found

warm_up()
before = compiled()
schemas = Schemas()
for share in (None, 0.8):
    split = ReplaySplit(config(env__stack=4, target_new_share=share, capacity_rows=100), "replay-0", np.random.default_rng(0))
    split.open_ring(0, 0)
    lane = LaneWriter().episode(30).episode(30, "truncated").episode(100)
    for offset, block in enumerate(lane.all_blocks(16)):
        split.insert(0, offset, 0, schemas.expect(schemas.encode(block), TransitionBlock))
    assert split.draw(1)
entered = "add_rows finish_rows drop_rows lay_out_frames n_step_columns pack_flags set_leaves _draw".split()
assert {name.rpartition(".")[2] for name, count in before.items() if count} >= set(entered), before
assert compiled() == before, (before, compiled())
assert "torch" not in sys.modules and "apache_beam" not in sys.modules and "confluent_kafka" not in sys.modules
"""


def test_the_first_real_record_compiles_nothing_and_the_core_imports_no_heavy_package() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
