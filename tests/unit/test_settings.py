"""How a configuration comes about, and what a mistake in it looks like: one line, the key, the value, what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gorila.config import Config
from gorila.errors import ConfigError, RunError, UsageError
from gorila.settings import (
    canonical_json,
    config_of_run,
    known_keys,
    load_config,
    local_kafka,
    preset_names,
    validate,
)

NOTHING: dict[str, str] = {}


def test_later_layers_win_preset_then_environment_then_set(tmp_path: Path):
    preset = tmp_path / "mine.toml"
    preset.write_text("[learner]\nbatch_size = 16\ncount = 3\nclip_norm = 1.5\n")
    config = load_config(
        str(preset),
        ["learner.batch_size=64"],
        {"GORILA__LEARNER__BATCH_SIZE": "32", "GORILA__LEARNER__COUNT": "2", "OTHER": "x"},
    )
    assert (config.learner.batch_size, config.learner.count, config.learner.clip_norm) == (64, 2, 1.5)
    assert config.run.preset == "mine"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_that_ships_is_valid_and_survives_the_run_topic(name: str):
    config = load_config(name, [], NOTHING)
    assert config.run.preset == name
    published = canonical_json(config)
    assert canonical_json(config_of_run(published, [], NOTHING)) == published


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["learner.batch_sice=64"], ["learner.batch_sice", "learner.batch_size"]),
        (["lerner.batch_size=64"], ["lerner.batch_size", "learner.batch_size"]),
        (["learner.batch_size"], ["key=value"]),
        (["learner=4"], ["section", "learner.count"]),
        (["learner.batch_size=many"], ["learner.batch_size", "'many'", "integer"]),
        (["learner.batch_size=0"], ["learner.batch_size", "'0'", "greater"]),
        (["learner.codec=zip"], ["learner.codec", "'zip'", "fp32"]),
        (["replay.discount=1.5"], ["replay.discount", "1.5", "less"]),
        (["env.kwargs={x"], ["env.kwargs", "JSON"]),
        (["parameter_server.learning_rate=nan"], ["parameter_server.learning_rate", "nan"]),
        (["actor.epsilon_start=0", "actor.epsilon_end=0.5"], ["actor.epsilon_end = 0.5", "actor.epsilon_start = 0"]),
        (["run.synchronous=true", "actor.count=2"], ["run.synchronous", "actor.count", "not 2"]),
        (["replay.min_size_rows=30000"], ["replay.min_size_rows = 30000", "20000"]),
        (["replay.max_error_rows=100"], ["replay.max_error_rows = 100", "256", "learner.batch_size"]),
        (["parameter_server.adam_beta1=1"], ["parameter_server.adam_beta1", "'1'", "less than 1"]),
        (["parameter_server.adam_beta2=1"], ["parameter_server.adam_beta2", "'1'", "less than 1"]),
        (["parameter_server.rmsprop_decay=1"], ["parameter_server.rmsprop_decay", "'1'", "less than 1"]),
    ],
)
def test_a_mistake_is_one_line_naming_the_key_the_value_and_what_is_allowed(sets: list[str], words: list[str]):
    with pytest.raises(UsageError) as caught:
        load_config("cartpole", sets, NOTHING)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    for word in words:
        assert word in message


def test_a_mistake_in_the_environment_is_named_like_one_on_the_command_line():
    with pytest.raises(ConfigError, match=r"learner\.batch_size = 'x'"):
        load_config("cartpole", [], {"GORILA__LEARNER__BATCH_SIZE": "x"})
    with pytest.raises(UsageError, match=r"learner\.batchsize is not a configuration key"):
        load_config("cartpole", [], {"GORILA__LEARNER__BATCHSIZE": "1"})


def test_an_unknown_preset_names_those_there_are_and_the_nearest():
    with pytest.raises(UsageError, match="did you mean cartpole"):
        load_config("cartpol", [], NOTHING)
    with pytest.raises(UsageError, match="No such file"):
        load_config("nowhere/mine.toml", [], NOTHING)


def test_a_preset_file_that_is_not_toml_or_has_an_unknown_key_is_one_line(tmp_path: Path):
    bad = tmp_path / "bad.toml"
    bad.write_text("learner = [")
    with pytest.raises(UsageError, match="not TOML"):
        load_config(str(bad), [], NOTHING)
    bad.write_text("[learner]\nbatchsize = 3\n")
    with pytest.raises(UsageError, match=r"learner\.batchsize"):
        load_config(str(bad), [], NOTHING)


def test_values_of_every_shape_come_from_text():
    config = load_config(
        "cartpole",
        ["network.hidden=[64, 32]", 'env.kwargs={"size": 3}', "evaluator.threshold=none", "network.dueling=true"],
        NOTHING,
    )
    assert config.network.hidden == (64, 32)
    assert config.env.kwargs == {"size": 3}
    assert config.evaluator.threshold is None
    assert config.network.dueling is True


def test_a_process_may_say_where_it_runs_but_not_what_the_run_is():
    published = canonical_json(load_config("cartpole", [], NOTHING))
    local = config_of_run(
        published, ["kafka.bootstrap_servers=k:1", "learner.torch_threads=2"], {"GORILA__MONITOR__METRICS_PORT": "9100"}
    )
    assert (local.kafka.bootstrap_servers, local.learner.torch_threads, local.monitor.metrics_port) == ("k:1", 2, 9100)
    with pytest.raises(RunError, match=r"learner\.batch_size = 7 contradicts the run, which has 128"):
        config_of_run(published, ["learner.batch_size=7"], NOTHING)
    with pytest.raises(RunError, match=r"replay\.n_steps"):
        config_of_run(published, [], {"GORILA__REPLAY__N_STEPS": "5"})


def test_a_process_may_repeat_what_the_run_says():
    published = canonical_json(load_config("cartpole", [], NOTHING))
    assert (
        config_of_run(published, ["learner.batch_size=128", "network.hidden=[128,128]"], NOTHING).learner.batch_size
        == 128
    )


def test_what_a_run_publishes_holds_no_local_keys():
    config = load_config(
        "cartpole", ["kafka.bootstrap_servers=secret-host:1", "kafka.client_properties=/secret"], NOTHING
    )
    assert "secret" not in canonical_json(config)
    assert "kafka" not in json.loads(canonical_json(config))


def test_equal_configurations_publish_equal_bytes():
    one = load_config("cartpole", ["learner.batch_size=64", "actor.lanes=4"], NOTHING)
    other = load_config("cartpole", ["actor.lanes=4", "learner.batch_size=64"], NOTHING)
    assert canonical_json(one) == canonical_json(other)


def test_where_kafka_is_can_be_read_before_the_run():
    kafka = local_kafka(
        ["kafka.bootstrap_servers=b:2", "learner.batch_size=7"], {"GORILA__KAFKA__CLIENT_PROPERTIES": "/etc/k"}
    )
    assert (kafka.bootstrap_servers, kafka.client_properties) == ("b:2", "/etc/k")


@pytest.mark.parametrize("key", known_keys())
def test_every_key_takes_its_own_default_as_text(key: str):
    section, name = key.split(".")
    value = Config().model_dump(mode="json")[section][name]
    text = json.dumps(value) if isinstance(value, (list, dict)) else "none" if value is None else str(value)
    # The preset's actors are fast: at the default commit interval they need a wider bound than the default (test_lag_bounds.py).
    loaded = load_config("cartpole", ["actor.max_lag_records=100", f"{key}={text}"], NOTHING)
    assert getattr(getattr(loaded, section), name) == getattr(getattr(Config(), section), name)


def test_validate_names_nested_keys_with_dots():
    with pytest.raises(ConfigError) as caught:
        validate({"replay": {"n_steps": 0}})
    assert caught.value.key == "replay.n_steps"


def test_a_preset_may_start_from_another(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text('extends = "catch-pixels"\n[learner]\nbatch_size = 64\n')
    mine, base = load_config(str(own), [], {}), load_config("catch-pixels", [], {})
    assert mine.learner == base.learner.model_copy(update={"batch_size": 64})
    assert (mine.env, mine.run.preset) == (base.env, "mine")


@pytest.mark.parametrize("extends", ['"nothing-like-it"', "7", '"mine"', '"catch-pixels-fp16"'])
def test_a_preset_that_starts_from_nothing_known_is_one_clear_line(extends: str, tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(f"extends = {extends}\n")
    with pytest.raises(UsageError, match=r"preset"):
        load_config(str(own), [], {})


def test_top_k_with_adam_is_refused() -> None:
    """rules.md 14."""
    with pytest.raises(UsageError, match=r"top-k.*adagrad"):
        load_config("cartpole", ["learner.codec=top-k"], {})


def test_credentials_in_an_address_are_neither_shown_nor_on_a_role_s_command_line(tmp_path: Path) -> None:
    from gorila.local.roles import role_processes
    from gorila.settings import shown

    config = load_config("cartpole", ["kafka.schema_registry_url=http://ann:pass-word@registry:8081"], {})
    assert shown(config)["kafka"]["schema_registry_url"] == "http://***@registry:8081"
    for role in role_processes("run", config, "h:1", tmp_path):
        assert "pass-word" not in " ".join(role.command)
        assert role.environ["GORILA__KAFKA__SCHEMA_REGISTRY_URL"] == "http://ann:pass-word@registry:8081"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run = 5", "run = 5 is not allowed: a section"),
        ("[[run]]\nseed = 1", "run = [{'seed': 1}] is not allowed: a section"),
        ('extends = "cartpole"\nrun = "x"', "run = 'x' is not allowed: a section"),
        ("nope = 5", "nope is not a configuration key"),
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("env.kwargs = {a = " + "9" * 6000 + "}", "not TOML"),
    ],
)
def test_a_file_of_an_odd_shape_is_one_line(text: str, said: str, tmp_path: Path):
    preset = tmp_path / "odd.toml"
    preset.write_text(text)
    with pytest.raises(UsageError) as error:
        load_config(str(preset), [], NOTHING)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[" * 3000, "[" + "9" * 5000 + "]"])
def test_json_that_python_cannot_read_is_refused_by_its_key(text: str):
    with pytest.raises(ConfigError, match=r"network\.hidden"):
        load_config("cartpole", [f"network.hidden={text}"], NOTHING)
