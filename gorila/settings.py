"""How a configuration comes about: preset → TOML file → environment (GORILA__LEARNER__BATCH_SIZE) → --set learner.batch_size=64.

Later layers win. Every mistake is one line: the key, the value, what is allowed (ConfigError, exit code 2).
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import BaseModel, ValidationError

from gorila.config import LOCAL_KEYS, LOCAL_SECTIONS, Config, KafkaSection
from gorila.errors import ConfigError, RunError, UsageError
from gorila.lag_bounds import refuse_narrow

ENV_PREFIX = "GORILA__"
CREDENTIALS = re.compile(r"//[^/@]*@")
"""user:password@ in an address: never on a command line, in a log or on a screen."""
PRESETS = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of the presets that ship."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"configuration file {path}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"configuration file {path}: nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, a number of thousands of digits
        raise UsageError(f"configuration file {path}: not TOML: {error}") from None


def _preset(name: str) -> dict[str, Any]:
    """The tree of a preset; `extends = "another"` at its top says whose keys it starts from."""
    tree = _own_tree(name)
    extends = tree.pop("extends", None)
    if extends is None:
        return tree
    if not isinstance(extends, str) or Path(extends).stem == Path(name).stem:
        raise UsageError(f"preset {name}: extends = {extends!r} is not the name of another preset")
    base = _own_tree(extends)
    if "extends" in base:
        raise UsageError(f"preset {name} extends {extends}, which itself extends another: one step is enough")
    return _merge(base, tree)


def _own_tree(name: str) -> dict[str, Any]:
    if name.endswith(".toml"):
        return _read_toml(Path(name))
    if name not in preset_names():
        close = difflib.get_close_matches(name, preset_names(), 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"preset {name!r} does not exist: there are {', '.join(preset_names())}, or a path ending in .toml{hint}"
        )
    return _read_toml(PRESETS / f"{name}.toml")


def _field_type(key: str) -> Any:
    """The annotation at a dotted key; ConfigError with the nearest names when there is none."""
    model: Any = Config
    path = key.split(".")
    for depth, part in enumerate(path):
        fields = model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else None
        if fields is None or part not in fields:
            known = known_keys()
            close = (
                difflib.get_close_matches(key, known, 3)
                or sorted(k for k in known if k.startswith(".".join(path[:depth])))[:6]
            )
            raise UsageError(
                f"{key} is not a configuration key; near: {', '.join(close) or ', '.join(Config.model_fields)}"
            )
        model = fields[part].annotation
    return model


def known_keys() -> list[str]:
    """Every dotted key."""
    keys = []
    for section, info in Config.model_fields.items():
        assert isinstance(info.annotation, type)
        keys += [f"{section}.{name}" for name in info.annotation.model_fields]
    return keys


def _value(key: str, text: str) -> Any:
    """Text from the environment or the command line as the field's type wants it; pydantic judges it later."""
    kind = _field_type(key)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        raise UsageError(
            f"{key} is a section, not a key: set one of its keys, such as {key}.{next(iter(kind.model_fields))}"
        )
    arguments = typing.get_args(kind)
    if (
        typing.get_origin(kind) in (typing.Union, UnionType)
        and type(None) in arguments
        and text.lower() in ("none", "null", "")
    ):
        return None
    if typing.get_origin(kind) in (tuple, dict) or kind in (tuple, dict):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, nested too deeply
            raise ConfigError(key, text, "a JSON list or object") from None
    return text


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict) and key in Config.model_fields:
            base[key] = {**base[key], **value}
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value
    return base


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    tree.setdefault(section, {})[name] = value


def parse_sets(sets: Iterable[str]) -> dict[str, Any]:
    """`key=value` strings → {dotted key: value}. Raises UsageError, ConfigError."""
    parsed = {}
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals:
            raise UsageError(f"--set {item!r}: expected key=value, such as learner.batch_size=64")
        parsed[key.strip()] = _value(key.strip(), text.strip())
    return parsed


def environment_values(environ: Mapping[str, str]) -> dict[str, Any]:
    """{dotted key: value} from GORILA__SECTION__KEY variables."""
    found = {}
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            key = name[len(ENV_PREFIX) :].lower().replace("__", ".", 1)
            found[key] = _value(key, text)
    return found


def validate(tree: Mapping[str, Any]) -> Config:
    """A Config from nested values. Raises ConfigError for the first thing wrong."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            _field_type(key)
        message = first["msg"].removeprefix("Value error, ")
        if not key:
            raise UsageError(message) from None
        raise ConfigError(key, first["input"], message) from None


def load_config(preset: str = "cartpole", sets: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """The effective configuration of a new run. Raises UsageError, ConfigError."""
    tree = _preset(preset)
    for section, values in tree.items():
        if not isinstance(values, dict):
            _field_type(section)
            raise ConfigError(section, values, "a section, with keys of its own")
    tree.setdefault("run", {}).setdefault("preset", Path(preset).stem)
    for layer in (environment_values(os.environ if environ is None else environ), parse_sets(sets)):
        for key, value in layer.items():
            _put(tree, key, value)
    config = validate(tree)
    refuse_narrow(config)
    return config


def canonical_json(config: Config) -> str:
    """What the `run` topic carries: every key but the local sections (where a process runs, and secrets, never travel)."""
    return json.dumps(
        config.model_dump(mode="json", exclude=set(LOCAL_SECTIONS)), sort_keys=True, separators=(",", ":")
    )


def shown(config: Config) -> dict[str, Any]:
    """Every key for a person to look at, credentials in addresses masked."""
    tree = config.model_dump(mode="json")
    tree["kafka"]["schema_registry_url"] = CREDENTIALS.sub("//***@", tree["kafka"]["schema_registry_url"])
    return tree


def config_of_run(published: str, sets: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """The configuration a role obeys: the published one, with this process's local keys.

    Raises RunError naming the key when the process was told something the run contradicts.
    """
    tree = json.loads(published)
    for layer in (environment_values(os.environ if environ is None else environ), parse_sets(sets)):
        for key, value in layer.items():
            section, _, name = key.partition(".")
            if section not in LOCAL_SECTIONS and key not in LOCAL_KEYS:
                probe = _merge(json.loads(published), {section: {name: value}})
                wanted = getattr(getattr(validate(probe), section), name)
                has = getattr(getattr(validate(json.loads(published)), section), name)
                if wanted != has:
                    raise RunError(
                        f"{key} = {wanted!r} contradicts the run, which has {has!r}: start a new run to change it"
                    )
            _put(tree, key, value)
    return validate(tree)


def local_kafka(sets: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> KafkaSection:
    """Where Kafka is, before the run's configuration can be read: the `kafka` keys of environment and --set. Raises UsageError, ConfigError."""
    tree: dict[str, Any] = {"kafka": {}}
    for layer in (environment_values(os.environ if environ is None else environ), parse_sets(sets)):
        for key, value in layer.items():
            if key.startswith("kafka."):
                _put(tree, key, value)
    return validate(tree).kafka
