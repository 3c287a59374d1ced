"""A shard's log recomputed and compared with everything the run said of it at the time. Pure.

What is compared, at the version each record names:
1. ledger entries and checkpoints: state hash (weights, moments, version, handled batches, optimiser settings) and gradient offset;
2. key frames and targets: the hash of the values a reader was given;
3. deltas: the same, where the key frame and every delta since are still there; what was published follows from the weights at each of them (downlink.py).
A record that names a version the log never comes to is a mismatch too. What lies before the first checkpoint cannot be recomputed: counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from consumers.parameter_server.downlink import Downlink
from consumers.parameter_server.history import Replayed, hash_known
from gorila.config import Config
from gorila.errors import RunError
from gorila.processor import Incoming
from gorila.weights_history import Checked, Line, ShardWindow

BEFORE = "before the oldest checkpoint"
APART = "deltas whose key frame or base is gone"


class Verification:
    """Give it the gradients after `replayed`'s state, in order; then `finish`.

    Args:
        name: of a topic (`checkpoints`, `weights`, `gradients`) on the broker, for messages.
    """

    def __init__(self, config: Config, replayed: Replayed, window: ShardWindow, names: dict[str, str]) -> None:
        self._replayed, self._shard, self._names = replayed, window.shard, names
        self._downlink = Downlink(config.parameter_server, replayed.state.num_parameters)
        self._shown: tuple[int, int] | None = None
        self._due: dict[int, list[Line]] = defaultdict(list)
        self.compared: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self._first = replayed.state.version
        self._agreed = f"version {self._first} (gradient offset {replayed.state.gradient_offset})"
        for line in (*window.ledger, *window.checkpoints, *window.published):
            if line.version < self._first:
                self.skipped[BEFORE] += 1
            else:
                self._due[line.version].append(line)

    def begin(self) -> None:
        """Compare what was said of the first version. Raises RunError: the first mismatch."""
        self._compare()

    def take(self, record: Incoming) -> None:
        """The next gradient. Raises RunError: the first mismatch."""
        if self._replayed.take(record):
            self._compare()

    def finish(self) -> Checked:
        """Everything came. Raises RunError: a record names a version that the log does not give."""
        state = self._replayed.state
        if self._due:
            line = self._due[min(self._due)][0]
            raise RunError(
                f"{self._where(line)} names version {line.version}, but the gradients in the log (up to offset {state.gradient_offset})"
                f" give only version {state.version}"
            )
        return Checked(
            self._shard, self._first, state.version, self._replayed.took, dict(self.compared), dict(self.skipped)
        )

    def _compare(self) -> None:
        state = self._replayed.state
        lines = self._due.pop(state.version, [])
        if not lines:
            return
        for line in lines:
            if line.kind in ("ledger", "checkpoint"):
                self._compare_state(line)
            else:
                self._compare_published(line)
        self._agreed = f"version {state.version} (gradient offset {state.gradient_offset})"

    def _compare_state(self, line: Line) -> None:
        state = self._replayed.state
        if not hash_known(line):
            return
        if line.gradient_offset != state.gradient_offset:
            self._refuse(
                line, f"after gradient offset {line.gradient_offset}", f"after gradient offset {state.gradient_offset}"
            )
        self._equal(line, line.state_hash, self._replayed.state_hash(), "state hash")

    def _compare_published(self, line: Line) -> None:
        weights, version = self._replayed.state.weights, line.version
        if hash_known(line):
            self._equal(line, line.state_hash, self._replayed.state_hash(), "state hash")
        if line.kind == "target":
            self._equal(line, line.payload_hash, self._downlink.whole(weights)[2], "payload hash")
            return
        if line.kind == "delta" and self._shown != (line.base_version, line.key_offset):
            self.skipped[APART] += 1
            self._shown = None
            return
        if line.kind == "key":
            self._downlink.restart()
        frame = self._downlink.frame(weights, version)
        if line.kind == "key":
            self._downlink.key_frame_delivered(line.offset)
        self._shown = (version, line.offset if line.kind == "key" else line.key_offset)
        self._equal(line, line.payload_hash, frame.payload_hash, "payload hash")

    def _equal(self, line: Line, said: int, made: int, what: str) -> None:
        if said & 0xFFFFFFFF != made & 0xFFFFFFFF:
            self._refuse(line, f"{what} {said & 0xFFFFFFFF:08x}", f"{what} {made & 0xFFFFFFFF:08x}")
        self.compared[line.kind] += 1

    def _refuse(self, line: Line, said: str, made: str) -> None:
        raise RunError(
            f"shard {self._shard} version {line.version}: {self._where(line)} says {said}, the gradients in {self._names['gradients']}"
            f" give {made}; all before agreed up to {self._agreed}"
        )

    def _where(self, line: Line) -> str:
        topic = self._names["checkpoints" if line.kind in ("ledger", "checkpoint") else "weights"]
        return f"{line.kind} at {topic}/{self._shard}@{line.offset}"
