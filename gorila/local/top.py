"""`gorila top`: a run anywhere, live, from Kafka alone."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from gorila.errors import BrokerError, while_away
from gorila.local.top_screen import TopState, screen
from gorila.run_follower import RunFollower
from gorila.run_observer import RunObserver
from gorila.service import Service

LOOK_EVERY_S = 1.0
WEIGHTS_EVERY_S = 5.0
"""A snapshot of a Nature network is 7 MB a shard: seldom."""
NEWEST = 1500
CATCH_UP_S = 5.0
ONCE_LOOKS = 3
PLAIN_COLUMNS = 80


def top(service: Service, once: bool, console: Console | None = None) -> None:
    """Until Ctrl-C; with `once` one frame. Not on a terminal it is always one frame. Raises BrokerError only before the first frame."""
    console = console or Console(file=sys.stdout, highlight=False)
    state = TopState(service.config, service.cluster.bootstrap_servers)
    follower = RunFollower(service, state.progress, state.take, newest=NEWEST)
    try:
        observer = RunObserver(service)
        _catch_up(follower)
        follower.look_at_weights()
        if once or not console.is_terminal:
            for _ in range(ONCE_LOOKS):
                state.look(observer.look(), time.monotonic())
                _follow(follower, LOOK_EVERY_S)
            state.look(observer.look(), time.monotonic())
            console.print(screen(state, console.width if console.is_terminal else PLAIN_COLUMNS))
            return
        # The alternate screen: what the terminal showed before is there again afterwards.
        with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            _watch(state, follower, observer, live, console)
    finally:
        follower.close()
        service.close()


def _catch_up(follower: RunFollower) -> None:
    """Read what is there already; a run that goes on never stops having more."""
    until_s, come = time.monotonic() + CATCH_UP_S, 0
    while time.monotonic() < until_s:
        came = follower.poll(0.5)
        come += came
        if come >= 3 * NEWEST or came < 20:
            return


def _watch(state: TopState, follower: RunFollower, observer: RunObserver, live: Live, console: Console) -> None:
    weights_due_s = time.monotonic() + WEIGHTS_EVERY_S
    while True:
        try:
            now_s = time.monotonic()
            state.look(observer.look(), now_s)
            if now_s >= weights_due_s:
                weights_due_s = now_s + WEIGHTS_EVERY_S
                follower.look_at_weights()
        except BrokerError as error:  # it comes back or not: the screen goes on saying so
            state.problem = str(error)
        live.update(screen(state, console.width), refresh=True)
        with while_away():
            _follow(follower, LOOK_EVERY_S)


def _follow(follower: RunFollower, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        follower.poll(min(left_s, 0.25))
