"""The user's own code by import path, `package.module:name`: environments, wrappers, networks."""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path
from typing import Any

from gorila.errors import ConfigError

WANTED = "an import path package.module:name"


def is_import_path(text: str) -> bool:
    """Whether `text` reads as package.module:name (a Gymnasium id such as `module:Name-v0` does not)."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def import_from_path(key: str, path: str) -> Any:
    """The object an import path names.

    Modules in the working directory are found too, as `python -m` finds them.

    Args:
        key: configuration key the path came from, for the error.
        path: `package.module:name`.
    Raises:
        ConfigError: not a path, no such module, an import that fails, or no such name in it (with near ones).
    """
    if not is_import_path(path):
        raise ConfigError(key, path, WANTED)
    module_name, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(key, path, f"{WANTED}; there is no module {error.name!r}") from None
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(key, path, f"importing {module_name} failed: {type(error).__name__}: {error}") from None
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, [known for known in dir(module) if not known.startswith("_")], 3)
        hint = f"; near: {', '.join(close)}" if close else ""
        raise ConfigError(key, path, f"{module_name} has no {name!r}{hint}")
    return getattr(module, name)
