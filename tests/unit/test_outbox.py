"""The outbox: what survives, what a torn slot costs, whose file it is."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.outbox import HEADER, MemoryOutbox, Outbox, OutboxPort, Slot
from gorila.codec import Schemas
from gorila.errors import LocalError
from gorila.messages import Gradient

P = 1000
SCHEMAS = Schemas()


def slot(number: int, shards: int = 2, residual: bool = True) -> Slot:
    rng = np.random.default_rng(number)
    gradients = tuple(
        Gradient(shard, "learner-0", 0, number, number, 32, P // shards, "fp16", rng.bytes(2 * P // shards), 1.5, 0.25)
        for shard in range(shards)
    )
    return Slot(0, number, rng.standard_normal(P).astype(np.float32) if residual else None, gradients)


def same(one: Slot, two: Slot) -> bool:
    residuals = (
        one.residual is two.residual is None
        if one.residual is None or two.residual is None
        else np.array_equal(one.residual, two.residual)
    )
    bytes_equal = [SCHEMAS.encode(g) for g in one.gradients] == [SCHEMAS.encode(g) for g in two.gradients]
    return (
        residuals and bytes_equal and (one.batch_partition, one.batch_offset) == (two.batch_partition, two.batch_offset)
    )


def open_outbox(folder: Path, run: str = "run", parameters: int = P, shards: int = 2) -> Outbox:
    return Outbox(folder / "learner-0.outbox", run, parameters, shards, SCHEMAS)


def test_a_fresh_outbox_holds_nothing(tmp_path: Path) -> None:
    assert open_outbox(tmp_path).complete_slots() == []


@pytest.mark.parametrize("residual", [True, False])
def test_the_two_newest_slots_are_there_after_a_restart_oldest_first(tmp_path: Path, residual: bool) -> None:
    outbox = open_outbox(tmp_path)
    for number in range(1, 6):
        outbox.write(slot(number, residual=residual))
    outbox.close()
    held = open_outbox(tmp_path).complete_slots()
    assert [
        same(*pair) for pair in zip(held, [slot(4, residual=residual), slot(5, residual=residual)], strict=True)
    ] == [True, True]


def test_writing_goes_on_over_the_older_slot_after_a_restart(tmp_path: Path) -> None:
    for number in range(1, 8):
        outbox = open_outbox(tmp_path)
        outbox.write(slot(number))
        outbox.close()
    assert [held.batch_offset for held in open_outbox(tmp_path).complete_slots()] == [6, 7]


@given(st.integers(0, 2**31), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_any_flipped_byte_of_a_slot_makes_it_not_exist(where: int, flip: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        outbox = open_outbox(Path(folder))
        outbox.write(slot(1))
        outbox.write(slot(2))
        newest = 0  # sequence 2 lies in slot A
        used = HEADER.size + HEADER.unpack_from(outbox._map, newest)[3]
        outbox._map[newest + where % used] ^= flip
        assert [held.batch_offset for held in outbox.complete_slots()] == [1]
        outbox.close()


def test_a_half_written_slot_leaves_the_other_whole(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    outbox.write(slot(1))
    outbox.write(slot(2))
    half = outbox._slot_bytes // 2
    start = outbox._slot_bytes  # sequences 1 and 3 lie in slot B
    older = bytes(outbox._map[start + HEADER.size : start + half])
    outbox.write(slot(3))
    assert bytes(outbox._map[start + HEADER.size : start + half]) != older
    outbox._map[start + HEADER.size : start + half] = (
        older  # a lost machine: the header reached the disk, half the body did not
    )
    outbox.close()
    assert [one.batch_offset for one in open_outbox(tmp_path).complete_slots()] == [2]


def _write_and_die(path: str) -> None:
    outbox = Outbox(Path(path), "run", P, 2, SCHEMAS)
    outbox.write(slot(1))
    outbox.write(slot(2))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_loses_nothing_it_wrote(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_write_and_die, args=(str(tmp_path / "learner-0.outbox"),)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [same(held, slot(held.batch_offset)) for held in open_outbox(tmp_path).complete_slots()] == [True, True]


def test_a_file_of_another_run_is_never_read(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    outbox.write(slot(1))
    outbox.close()
    assert open_outbox(tmp_path, run="other").complete_slots() == []


def test_a_file_of_another_network_is_put_aside(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    outbox.write(slot(1))
    outbox.close()
    assert open_outbox(tmp_path, parameters=50 * P).complete_slots() == []
    assert (tmp_path / "learner-0.outbox.old").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="outbox"):
        open_outbox(tmp_path / "file")


def test_a_slot_that_does_not_fit_is_refused_before_anything_is_overwritten(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    outbox.write(slot(1))
    outbox.write(slot(2))
    with pytest.raises(LocalError, match="does not fit"):
        outbox.write(Slot(0, 3, None, (Gradient(0, "learner-0", 0, 3, 3, 32, P, "fp32", bytes(100_000), 1.0, 1.0),)))
    assert [held.batch_offset for held in outbox.complete_slots()] == [1, 2]


def test_the_memory_outbox_keeps_two_slots_and_its_own_residuals() -> None:
    outbox: OutboxPort = MemoryOutbox()
    residual = np.zeros(P, np.float32)
    for number in range(3):
        residual[:] = number
        outbox.write(Slot(0, number, residual, ()))
    held = outbox.complete_slots()
    assert [one.batch_offset for one in held] == [1, 2]
    assert [float(one.residual[0]) for one in held if one.residual is not None] == [1.0, 2.0]
