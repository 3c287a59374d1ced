"""Who makes the updates: the calling thread, whole (`ordered`), or threads side by side without a lock (`hogwild`, after Recht et al. 2011).

Hogwild as we have it: each thread owns a stripe of the slice and makes every update's part in it, in the order of the updates. Nobody waits for anybody, as in the
paper; but no two threads touch one weight, so no update is lost, and the bits are the ordered mode's (kernels go weight by weight). As the paper has it, any
thread anywhere, the threads pull the cache lines of moments and weights from each other: two of them were as fast as one, two stripes 1.8 times as fast
(docs/decisions/0030). `settle` is the barrier: checkpoints, targets and snapshots are taken behind it, so they hold exactly the updates they count.
Threads pay for dense gradients, where a kernel runs for a millisecond without the interpreter's lock. A sparse one is made in less time than it takes to hand it
over, so the shard makes it itself, behind the barrier.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from consumers.parameter_server.optimizers import Call
from gorila.config import ParameterServerSection

WAITING_PER_THREAD = 2
LINE = 16  # float32 in a cache line of 64 bytes


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
    """In `threads` threads, a stripe of the slice each, without locks between them."""

    def __init__(self, threads: int) -> None:
        self._waiting: list[queue.Queue[Call | None]] = [queue.Queue(WAITING_PER_THREAD) for _ in range(threads)]
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"hogwild-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """See Apply. Arrays among the arguments are 1-D and of one length, and must not be changed by anyone but kernels until `settle`."""
        for waiting in self._waiting:
            waiting.put((kernel, arguments))

    def settle(self) -> None:
        """See Apply."""
        for waiting in self._waiting:
            waiting.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """See Apply."""
        for waiting in self._waiting:
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        waiting, threads = self._waiting[number], len(self._waiting)
        ended = False
        while not ended:
            update = waiting.get()
            try:
                if update is None:
                    ended = True
                else:
                    kernel, arguments = update
                    kernel(*striped(arguments, number, threads))
            except BaseException as error:
                self._failure = error
            finally:
                waiting.task_done()


def striped(arguments: tuple[Any, ...], number: int, threads: int) -> list[Any]:
    """The arguments with every array cut to stripe `number` of `threads`, cut where cache lines are; the stripes are the whole."""
    size = next((len(argument) for argument in arguments if isinstance(argument, np.ndarray)), 0)
    start, stop = (size * edge // threads // LINE * LINE if edge < threads else size for edge in (number, number + 1))
    return [argument[start:stop] if isinstance(argument, np.ndarray) else argument for argument in arguments]


def make_apply(section: ParameterServerSection) -> Apply:
    """As `parameter_server.mode` says."""
    return ApplyHogwild(section.hogwild_threads) if section.mode == "hogwild" else ApplyNow()
