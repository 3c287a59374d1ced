"""Every setting of a run: one tree, one place, units in the names. `gorila config` prints it, docs/configuration.md is generated from it.

A run's effective configuration is published to its `run` topic and obeyed by every role; only the sections and keys marked local
(where a process runs, not what it does) may differ per process. Loading, layering and the errors are in gorila/settings.py.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a running mean: at 1 it would never move, and Adam's bias correction would divide by 0."""
NotNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Frozen, no unknown keys, defaults checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RunSection(Section):
    """What the run is."""

    preset: str = Field("cartpole", description="preset the run started from")
    seed: int = Field(0, ge=0, description="seed of everything random")
    synchronous: bool = Field(False, description="one actor, one learner, in lockstep, reproducible bit for bit")
    max_env_steps: int = Field(
        0, ge=0, description="stop after this many environment steps over all actors; 0: no limit"
    )
    max_updates: int = Field(0, ge=0, description="stop after this many updates (global version); 0: no limit")


class KafkaSection(Section):
    """Local: where Kafka is and how this process speaks to it."""

    bootstrap_servers: str = Field("", description="host:port[,host:port]; empty: the embedded broker")
    client_properties: str = Field(
        "", description="Java-style client.properties with TLS and SASL keys, passed through to every client"
    )
    schema_registry_url: str = Field(
        "", description="Confluent-compatible registry; empty: ids derived from the schemas"
    )
    max_topic_bytes: int = Field(
        4 * 1024**3, gt=0, description="no topic of ours is retained beyond this per partition"
    )
    replication_factor: Positive = Field(1, description="of every topic created")


class EnvSection(Section):
    """The environment."""

    id: str = Field(
        "CartPole-v1",
        description="Gymnasium id, `ale:GAME` for Atari through AtariVectorEnv, or `package.module:make` of your own",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    wrappers: tuple[str, ...] = Field((), description="import paths of wrappers, applied in order")
    stack: Annotated[int, Field(ge=1, le=16)] = Field(1, description="observations a state is made of")
    scale: Literal["auto", "none", "symmetric"] = Field(
        "auto", description="symmetric: uint8 frames to [-1, 1] at the network's input; auto: symmetric for uint8"
    )
    max_episode_steps: int = Field(
        0, ge=0, description="truncate by the actor's own count; 0: the environment's limit (Atari: 27,000)"
    )
    frame_size: Positive = Field(84, description="Atari: side of the grey frame, pixels")
    frame_skip: Positive = Field(4, description="Atari: action repeat")
    noop_max: int = Field(30, ge=0, description="Atari: up to this many no-ops at the start")
    repeat_action_probability: Fraction = Field(
        0.0, description="Atari: sticky actions; off in the DQN papers, .25 in Dopamine"
    )
    reward_transform: Literal["none", "sign", "clip"] = Field(
        "none", description="applied per step before the n-step sum, in the pipeline only; rewards stay raw on the wire"
    )
    observation_bytes_bound: Positive = Field(8192, description="bytes of one raw observation at most; sizes retention")


class NetworkSection(Section):
    """The Q-network."""

    factory: str = Field(
        "mlp",
        description="mlp | nature | small-conv | import path `package.module:Net` called with (state_shape, actions, **kwargs)",
    )
    hidden: tuple[Positive, ...] = Field(
        (), description="mlp: widths; conv: fully connected layers; empty: mlp 128-128, nature 512, small-conv 128"
    )
    dueling: bool = Field(False, description="dueling heads (Wang et al. 2016)")
    batch_norm: bool = Field(
        False, description="BatchNorm before each ReLU; its statistics never leave the node that made them"
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of an imported factory")


class ActorSection(Section):
    """Actors."""

    count: Positive = Field(1, description="actors; one transitions partition each")
    lanes: Positive = Field(8, description="environments per actor")
    block_steps: Annotated[int, Field(ge=1, le=256)] = Field(16, description="rows in a block")
    max_block_age_ms: PositiveFloat = Field(500.0, description="a partial block is sent after this")
    compression: Literal["none", "zstd", "lz4"] = Field("zstd", description="of observation blocks")
    refresh_s: NotNegative = Field(0.05, description="newest weights are looked for at most this often")
    max_steps_per_s: NotNegative = Field(0.0, description="per actor over its lanes; 0: as fast as the loop lets it")
    exploration: Literal["schedule", "ladder"] = Field(
        "schedule", description="schedule: one epsilon by global version; ladder: Ape-X, one per lane"
    )
    epsilon_start: Fraction = Field(1.0, description="schedule: at version 0")
    epsilon_end: Fraction = Field(0.04, description="schedule: from epsilon_versions on")
    epsilon_versions: Positive = Field(1500, description="global versions over which epsilon falls")
    ladder_base: Fraction = Field(0.4, description="ladder: epsilon of the most exploring lane")
    ladder_exponent: NotNegative = Field(
        7.0, description="ladder: epsilon of the least exploring lane is base ** (1 + exponent)"
    )
    max_lag_records: Positive = Field(
        64, description="an actor waits while replay's committed lag on its partition is above this"
    )


class ReplaySection(Section):
    """The replay pipeline."""

    capacity_rows: Positive = Field(20_000, description="rows each actor's ring holds")
    min_size_rows: Positive = Field(500, description="sampling waits below this many sampleable rows")
    n_steps: Annotated[int, Field(ge=1, le=64)] = Field(3, description="rewards in a return; fewer at an episode's end")
    discount: Fraction = Field(0.99, description="gamma")
    alpha: NotNegative = Field(0.6, description="priority exponent")
    priority_floor: PositiveFloat = Field(1e-3, description="PER's epsilon: p = (|TD error| + floor) ** alpha")
    local_fraction: Fraction = Field(
        0.7, description="share of rows drawn actor-uniformly; the rest by priority over all actors"
    )
    samples_per_insert: PositiveFloat = Field(32.0, description="rows drawn per row inserted")
    max_error_rows: PositiveFloat = Field(
        4096.0, description="replay stops reading transitions while inserts * ratio - samples is above this"
    )
    record_rows: Annotated[int, Field(ge=1, le=512)] = Field(32, description="rows in one batches record")
    new_window_fraction: Fraction = Field(0.1, description="an actor's newest rows counted as new, share of capacity")
    target_new_share: Fraction | None = Field(None, description="share of each draw from new rows; None: measured only")
    max_lag_batches: Positive = Field(
        16,
        description="replay waits while the learners' committed lag is above this many learner batches per partition",
    )
    poll_ms: PositiveFloat = Field(5.0, description="longest wait for a first record")
    commit_interval_ms: PositiveFloat = Field(200.0, description="committed offsets are at most this far behind")
    stats_interval_ms: PositiveFloat = Field(200.0, description="how often replay-stats is published")
    bundle_s: PositiveFloat = Field(1.0, description="a Beam bundle goes on for about this long")


class LearnerSection(Section):
    """Learners."""

    count: Positive = Field(1, description="partitions of batches, so the most learners that can share the work")
    batch_size: Annotated[int, Field(ge=1, le=16384)] = Field(128, description="rows of an update")
    double: bool = Field(True, description="the online network chooses the bootstrap's action; off: the target network")
    huber_delta: PositiveFloat = Field(1.0, description="|TD error| from which the loss grows linearly")
    beta_start: Fraction = Field(0.4, description="importance weights' exponent at version 0")
    beta_end: Fraction = Field(1.0, description="and from beta_versions on")
    beta_versions: Positive = Field(5000, description="global versions over which beta rises")
    clip_norm: NotNegative = Field(10.0, description="gradient norm over all shards, before compression; 0: off")
    codec: Literal["auto", "fp32", "fp16", "one-bit", "top-k"] = Field(
        "auto",
        description="of gradients; what one loses is sent with the next (error feedback); auto: fp16 with mixed precision, else fp32",
    )
    one_bit_block: Annotated[int, Field(ge=8, le=65536, multiple_of=8)] = Field(
        1024, description="one-bit: values that share two scales; small networks want small blocks"
    )
    top_k_fraction: Annotated[float, Field(gt=0, le=0.25)] = Field(
        0.001, description="top-k: share of a shard's values sent, at least 64 values"
    )
    top_k_warmup_versions: int = Field(
        1000,
        ge=0,
        description="top-k: 25 %, 6.25 %, 1.6 %, .4 %, a quarter of these global versions each; 0: no warm-up",
    )
    max_in_flight: int = Field(1, ge=0, description="gradients not yet covered by a snapshot read; 0: unbounded")
    commit_interval_ms: PositiveFloat = Field(50.0, description="committed offsets are at most this far behind")
    checkpoint_interval_s: PositiveFloat = Field(300.0, description="between two checkpoints in --run-dir")
    outlier_sigma: NotNegative = Field(
        6.0, description="batch losses this many deviations above their mean are rejected; 0: off"
    )
    outlier_warmup_batches: Positive = Field(200, description="batches seen before any is rejected as an outlier")
    conservative_weight: NotNegative = Field(0.0, description="CQL weight, for offline data")
    max_lag_records: Positive = Field(
        256, description="a learner waits while a shard's committed lag on gradients is above this"
    )
    torch_threads: Positive = Field(1, description="threads of one operation on a CPU")
    device: Literal["cpu", "cuda", "auto"] = Field("cpu", description="auto: a GPU where torch finds one")
    mixed_precision: Literal["off", "auto", "on"] = Field(
        "auto",
        description="layers in float16 on a GPU, bfloat16 on a CPU, with a loss scale; auto: on a GPU; weights stay float32",
    )


class ParameterServerSection(Section):
    """Parameter servers."""

    shards: Positive = Field(1, description="slices of the weights; a server process each, times replicas")
    replicas: Annotated[int, Field(ge=1, le=5)] = Field(
        1, description="processes that hold each shard, as a chain: what anyone has read, every one of them has"
    )
    mode: Literal["ordered", "hogwild"] = Field(
        "ordered",
        description="hogwild: threads apply dense gradients without locks, a stripe of the shard each; the same bits",
    )
    hogwild_threads: Annotated[int, Field(ge=1, le=64)] = Field(2, description="hogwild: threads of a shard")
    optimizer: Literal["adam", "adagrad", "rmsprop", "sgd"] = Field(
        "adam", description="rmsprop: centred, as DQN's; each key of another one is without effect"
    )
    learning_rate: PositiveFloat = Field(2e-3, description="of an update, after the warm-up")
    warmup_versions: int = Field(0, ge=0, description="linear learning-rate warm-up, updates of the shard")
    adam_beta1: Decay = Field(0.9, description="decay of the mean gradient")
    adam_beta2: Decay = Field(0.999, description="decay of the mean squared gradient")
    adam_epsilon: PositiveFloat = Field(1e-8, description="added outside the root, as torch does")
    adagrad_epsilon: PositiveFloat = Field(1e-10, description="added outside the root, as torch does")
    rmsprop_decay: Decay = Field(0.95, description="of the mean gradient and the mean squared gradient")
    rmsprop_epsilon: PositiveFloat = Field(0.01 / 32**2, description="inside the root, as DQN's centred RMSProp does")
    momentum: Decay = Field(0.0, description="sgd; 0: none")
    target_period_versions: Positive = Field(50, description="updates of the shard between two target weights")
    weights_codec: Literal["fp32", "fp16", "delta"] = Field(
        "fp32", description="of snapshots; delta: fp16 key frames and deltas with error feedback between them"
    )
    delta_codec: Literal["fp16", "one-bit", "top-k"] = Field(
        "one-bit", description="delta: of the changes; top-k suits top-k gradients"
    )
    delta_fraction: Annotated[float, Field(gt=0, le=0.25)] = Field(
        0.02, description="delta: share of a shard's values in a top-k delta"
    )
    key_frame_every: Annotated[int, Field(ge=2, le=128)] = Field(
        64, description="delta: one of so many snapshots is a key frame, where late readers begin"
    )
    weights_bytes_per_s: PositiveFloat = Field(20e6, description="snapshots of a shard take at most this")
    max_staleness_versions: int = Field(
        0, ge=0, description="older gradients are dropped; 0: four times learners * max_in_flight"
    )
    checkpoint_versions: Positive = Field(2000, description="updates between checkpoints: at most about 10 s of apply")
    ledger_versions: Positive = Field(4096, description="updates between two lines of the ledger, each a state hash")
    commit_interval_ms: PositiveFloat = Field(200.0, description="committed offsets are at most this far behind")

    def staleness_bound(self, learners: int, in_flight: int) -> int:
        """Updates. 0 in both configurations means unbounded."""
        if self.max_staleness_versions:
            return self.max_staleness_versions
        return 4 * learners * in_flight if in_flight else 0


class EvaluatorSection(Section):
    """The evaluator."""

    lanes: Positive = Field(20, description="environments played side by side")
    episodes: Positive = Field(20, description="episodes of a screening evaluation")
    confirm_episodes: Positive = Field(
        100, description="fresh episodes that confirm a version at or above the threshold"
    )
    epsilon: Fraction = Field(0.0, description="share of random actions while measuring")
    threshold: float | None = Field(
        475.0, description="solved: screening and confirming means at or above; None: never solved"
    )
    min_versions: int = Field(0, ge=0, description="no evaluation before this version")
    interval_s: NotNegative = Field(0.5, description="pause between screenings")
    max_episode_steps: int = Field(0, ge=0, description="0: as env.max_episode_steps")


class MonitorSection(Section):
    """Local: the monitor and the HTTP endpoints."""

    metrics_host: str = Field(
        "127.0.0.1", description="where /metrics, /healthz and /readyz listen; 0.0.0.0 in a container"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="0: none")
    health_file: str = Field(
        "", description="touched once a second while the role's loop turns, for probes without HTTP; empty: none"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events into --run-dir")


class ArchiveSection(Section):
    """Local: the archiver's folder, and when it closes a file."""

    dir: str = Field(
        "",
        description="a run's archive is DIR/RUN; empty: archive/ in the role's --run-dir. Set: `gorila train` runs an archiver too",
    )
    file_bytes: Positive = Field(
        64 * 1024**2, description="a file (one row group) is closed at this size of its columns before compression"
    )
    file_age_s: PositiveFloat = Field(
        300.0, description="and this long after its first record; commits are as far behind"
    )
    memory_bytes: Positive = Field(
        256 * 1024**2, description="buffered over all partitions at most: above it the largest file is closed early"
    )


class Config(Section):
    """The whole tree."""

    run: RunSection = RunSection()
    kafka: KafkaSection = KafkaSection()
    env: EnvSection = EnvSection()
    network: NetworkSection = NetworkSection()
    actor: ActorSection = ActorSection()
    replay: ReplaySection = ReplaySection()
    learner: LearnerSection = LearnerSection()
    parameter_server: ParameterServerSection = ParameterServerSection()
    evaluator: EvaluatorSection = EvaluatorSection()
    monitor: MonitorSection = MonitorSection()
    archive: ArchiveSection = ArchiveSection()

    @property
    def record_parts(self) -> int:
        """Records that make one learner batch."""
        return math.ceil(self.learner.batch_size / self.replay.record_rows)

    @model_validator(mode="after")
    def _keys_agree(self) -> Config:
        if self.run.synchronous and (self.actor.count > 1 or self.learner.count > 1):
            raise ValueError(
                f"run.synchronous needs actor.count = 1 and learner.count = 1, not {self.actor.count} and {self.learner.count}"
            )
        if self.replay.min_size_rows > self.actor.count * self.replay.capacity_rows:
            raise ValueError(
                f"replay.min_size_rows = {self.replay.min_size_rows} is more than all rings hold: at most"
                f" {self.actor.count * self.replay.capacity_rows} (actor.count * replay.capacity_rows)"
            )
        if self.replay.max_error_rows < 2 * self.learner.batch_size:
            raise ValueError(
                f"replay.max_error_rows = {self.replay.max_error_rows:g} must be at least {2 * self.learner.batch_size}"
                " (2 * learner.batch_size), or sampling could never start"
            )
        if self.learner.codec == "top-k" and self.parameter_server.optimizer == "adam":
            raise ValueError(
                'learner.codec = "top-k" does not learn with parameter_server.optimizer = "adam" (moments of values that are'
                " seldom sent are skipped): adagrad, rmsprop or sgd"
            )
        if self.network.batch_norm and self.learner.batch_size < 2:
            raise ValueError("network.batch_norm needs learner.batch_size of at least 2: one row has no variance")
        if self.run.synchronous and self.learner.device != "cpu":
            raise ValueError(
                f'run.synchronous needs learner.device = "cpu", not "{self.learner.device}": GPU kernels promise no equal bits'
            )
        if self.parameter_server.mode == "hogwild" and self.parameter_server.replicas > 1:
            raise ValueError(
                'parameter_server.mode = "hogwild" goes with parameter_server.replicas = 1: a replica applies in one thread'
            )
        if self.actor.epsilon_end > self.actor.epsilon_start:
            raise ValueError(
                f"actor.epsilon_end = {self.actor.epsilon_end:g} must not be above actor.epsilon_start = {self.actor.epsilon_start:g}"
            )
        return self


LOCAL_SECTIONS = frozenset({"kafka", "monitor", "archive"})
LOCAL_KEYS = frozenset(
    {
        "learner.torch_threads",
        "learner.device",
        "learner.mixed_precision",
        "evaluator.lanes",
        # Every gradient record names its codec: learners near and far share a run.
        "learner.codec",
        "learner.one_bit_block",
        "learner.top_k_fraction",
        "learner.top_k_warmup_versions",
    }
)
