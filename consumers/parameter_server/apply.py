"""Who makes the updates: the calling thread, in order (`ordered`), or threads side by side without a lock (`hogwild`, Recht et al. 2011).

Hogwild: every update is made whole, once, by some thread, while others change the same arrays. Two updates of one weight at one moment may lose one of
them; float32 stores are whole, so no value is ever torn. What is settled before an update is handed over: that it is valid, its version, Adam's bias
correction, its learning rate. What depends on the threads: the order, and so the last bits (cosine with the ordered result above .99, tested). `settle` is
the barrier: checkpoints, targets and snapshots are taken behind it, so they hold exactly the updates they count.
Threads pay for dense gradients, where a kernel runs for a millisecond without the interpreter's lock. A sparse one is made in less time than it takes to hand it
over, so the shard makes it itself, beside the threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from gorila.config import ParameterServerSection

WAITING_PER_THREAD = 2


class Apply(Protocol):
    """Makes updates."""

    def submit(self, kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Make this update, now or before `settle` returns. Waits when many are waiting."""
        ...

    def settle(self) -> None:
        """Return when every update handed in is made. Raises what a kernel raised."""
        ...

    def close(self) -> None:
        """Settle, and end the threads."""
        ...


class ApplyNow:
    """In the calling thread."""

    def submit(self, kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """See Apply."""
        kernel(*arguments)

    def settle(self) -> None:
        """Nothing is ever waiting."""

    def close(self) -> None:
        """Nothing to end."""


class ApplyHogwild:
    """In `threads` threads, without locks between them."""

    def __init__(self, threads: int) -> None:
        self._waiting: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(
            WAITING_PER_THREAD * threads
        )
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"hogwild-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """See Apply. The arguments must not be changed by anyone but kernels until `settle`."""
        self._waiting.put((kernel, arguments))

    def settle(self) -> None:
        """See Apply."""
        self._waiting.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """See Apply."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (update := self._waiting.get()) is not None:
            kernel, arguments = update
            try:
                kernel(*arguments)
            except BaseException as error:
                self._failure = error
            finally:
                self._waiting.task_done()


def make_apply(section: ParameterServerSection) -> Apply:
    """As `parameter_server.mode` says."""
    return ApplyHogwild(section.hogwild_threads) if section.mode == "hogwild" else ApplyNow()
