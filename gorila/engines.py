"""Which Beam runner carries the replay pipeline, and what refuses a choice that could not work (../shared/runners.md; docs/decisions/0013).

| word | what it is | who keeps the workers |
|---|---|---|
| fn-api | in this process: the default | – |
| prism | Beam's local portable runner, started by the command (`make prism`) | a worker pool the command starts |
| portable | any job server, at --job-endpoint | the same, or the pool at --worker-pool |
| flink | Beam's Flink runner: its job server as Beam finds it, or at --job-endpoint | the pool beside each task manager, at --worker-pool |

Never DirectRunner: it tries others, one of which it downloads, without a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from gorila.errors import UsageError

FN_API = "fn-api"
PRISM = "prism"
PORTABLE = "portable"
FLINK = "flink"
RUNNERS = (FN_API, PRISM, PORTABLE, FLINK)
_SPELLINGS = {"fnapi": FN_API, "prism": PRISM, "portable": PORTABLE, "flink": FLINK}
WORKER_PORT = 50_000
CHECKPOINTING_INTERVAL_MS = 1_000
MAX_BUNDLE_TIME_MS = 50
STATE_CACHE_MB = 64


@dataclass(frozen=True, slots=True)
class Engine:
    """A runner and its settings.

    Attributes:
        runner: one of RUNNERS.
        job_endpoint: HOST:PORT of a Beam job server; empty: prism is started here, Flink's found by Beam.
        worker_pool: HOST:PORT where the runner finds our worker pool; empty: one is started here.
        flink_master: HOST:PORT of Flink's REST address; empty: the job server knows it.
        parallelism: splits, one element of the source each; on Flink the job's parallelism.
        checkpointing_interval_ms: of Flink: offsets are committed when a checkpoint is complete.
        max_bundle_time_ms: of Flink: the floor of the latency.
        state_cache_mb: in each worker process.
    """

    runner: str = FN_API
    job_endpoint: str = ""
    worker_pool: str = ""
    flink_master: str = ""
    parallelism: int = 1
    checkpointing_interval_ms: int = CHECKPOINTING_INTERVAL_MS
    max_bundle_time_ms: int = MAX_BUNDLE_TIME_MS
    state_cache_mb: int = STATE_CACHE_MB

    @classmethod
    def asked(
        cls,
        runner: str = "",
        job_endpoint: str = "",
        worker_pool: str = "",
        flink_master: str = "",
        parallelism: int | None = None,
        checkpointing_interval_ms: int | None = None,
        max_bundle_time_ms: int | None = None,
        state_cache_mb: int | None = None,
    ) -> Engine:
        """From a command's options, None or empty where one was not given.

        Raises:
            UsageError: naming the option, its value and what is allowed.
        """
        name = runner_named(runner)
        for option, given, runners in (
            ("--job-endpoint", job_endpoint, (PORTABLE, FLINK)),
            ("--worker-pool", worker_pool, (PORTABLE, FLINK)),
            ("--flink-master", flink_master, (FLINK,)),
            ("--parallelism", parallelism, (PRISM, PORTABLE, FLINK)),
            ("--checkpointing-interval-ms", checkpointing_interval_ms, (FLINK,)),
            ("--max-bundle-time-ms", max_bundle_time_ms, (FLINK,)),
            ("--state-cache-mb", state_cache_mb, (PRISM, PORTABLE, FLINK)),
        ):
            if given not in ("", None) and name not in runners:
                raise UsageError(f"{option} goes with --runner={'|'.join(runners)}, not with {name}")
        for option, endpoint in (
            ("--job-endpoint", job_endpoint),
            ("--worker-pool", worker_pool),
            ("--flink-master", flink_master),
        ):
            _refuse_no_endpoint(option, endpoint)
        if name == PORTABLE and not job_endpoint:
            raise UsageError("--runner=portable needs --job-endpoint HOST:PORT, where the job server listens")
        if name == FLINK and not flink_master and not job_endpoint:
            raise UsageError("--runner=flink needs --flink-master HOST:PORT, or the --job-endpoint of a job server")
        engine = cls(
            name,
            job_endpoint,
            worker_pool or (f"localhost:{WORKER_PORT}" if name == FLINK else ""),
            flink_master,
            1 if parallelism is None else parallelism,
            CHECKPOINTING_INTERVAL_MS if checkpointing_interval_ms is None else checkpointing_interval_ms,
            MAX_BUNDLE_TIME_MS if max_bundle_time_ms is None else max_bundle_time_ms,
            STATE_CACHE_MB if state_cache_mb is None else state_cache_mb,
        )
        engine.refuse_impossible()
        return engine

    @classmethod
    def pool_asked(cls, runner: str, listen: str, state_cache_mb: int | None) -> tuple[str, int]:
        """(HOST:PORT, state cache) of `gorila replay worker-pool`. Raises UsageError."""
        if runner:
            raise UsageError("gorila replay worker-pool takes no --runner: it serves whichever asks")
        _refuse_no_endpoint("--listen", listen)
        engine = cls(state_cache_mb=STATE_CACHE_MB if state_cache_mb is None else state_cache_mb)
        engine.refuse_impossible()
        return listen or f"localhost:{WORKER_PORT}", engine.state_cache_mb

    def refuse_impossible(self) -> None:
        """Raises UsageError."""
        if self.checkpointing_interval_ms <= 0:
            raise UsageError(
                f"--checkpointing-interval-ms {self.checkpointing_interval_ms} is not allowed: above 0; without checkpoints Flink never"
                " says that a Beam bundle is final, no offset is committed, and actors wait for ever"
            )
        for option, value, low, high in (
            ("--parallelism", self.parallelism, 1, 4096),
            ("--max-bundle-time-ms", self.max_bundle_time_ms, 1, 1000),
            ("--state-cache-mb", self.state_cache_mb, 1, 65_536),
        ):
            if not low <= value <= high:
                raise UsageError(f"{option} {value} is not allowed: {low} to {high}")

    @property
    def is_local(self) -> bool:
        """Whether the pipeline runs in the role's own process."""
        return self.runner == FN_API

    def splits(self, index: int) -> list[str]:
        """Names of the splits of one command: as many as the parallelism, from `index` on."""
        return [f"replay-{number}" for number in range(index, index + self.parallelism)]


def runner_named(word: str) -> str:
    """One of RUNNERS by any of its spellings (`PortableRunner`, `flink`); empty: the default. Raises UsageError."""
    plain = word.lower().replace("-", "").replace("_", "").removesuffix("runner")
    if not plain:
        return FN_API
    if plain not in _SPELLINGS:
        why = ": it would choose another one silently" if plain == "direct" else ""
        raise UsageError(
            f"--runner {word} is not allowed{why}: {', '.join(RUNNERS)} (or FnApiRunner, PortableRunner …)"
        )
    return _SPELLINGS[plain]


def _refuse_no_endpoint(option: str, endpoint: str) -> None:
    host, colon, port = endpoint.rpartition(":")
    if endpoint and not (host and colon and port.isdigit() and 0 < int(port) < 65_536):
        raise UsageError(f"{option} {endpoint} is not allowed: HOST:PORT")
