"""Nothing in the product turns data into code or files where an archive says: read from the syntax tree, not by luck of a text search."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from gorila.config import Config
from gorila.kafka.client_properties import SECRET
from gorila.settings import canonical_json, load_config

ROOT = Path(__file__).parents[2]
PRODUCT = ("gorila", "producers", "pipelines", "consumers", "schemas", "deploy", "benchmarks")
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "jsonpickle",
    "tarfile",
}
BUILTINS = {"eval", "exec", "compile"}
CALLS = {
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.load",
    "os.system",
    "os.popen",
    "shutil.unpack_archive",
    "tempfile.mktemp",
    "pandas.read_pickle",
    "pd.read_pickle",
}
METHODS = {"extractall", "read_pickle", "to_pickle"}
# The one exception is not in our code: Beam itself serialises DoFns with cloudpickle, from a pipeline to its own workers.


def files() -> list[Path]:
    return sorted(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def dangers(tree: ast.AST) -> Iterator[str]:
    """What is dangerous in a module, as it is written there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield node.module or ""
            yield from (f"{node.module}.{name.name}" for name in node.names if f"{node.module}.{name.name}" in CALLS)
        elif isinstance(node, ast.Call):
            called = dotted(node.func)
            if called in CALLS or called in BUILTINS or called.split(".")[-1] in METHODS:
                yield called
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if (keyword.arg, value) in (("allow_pickle", True), ("shell", True)):
                    yield f"{called}({keyword.arg}=True)"
            if called in ("np.load", "numpy.load") and not any(k.arg == "allow_pickle" for k in node.keywords):
                yield f"{called} without allow_pickle=False"


def test_the_product_calls_nothing_that_runs_or_unpacks_what_it_is_given() -> None:
    found = {str(path.relative_to(ROOT)): list(dangers(ast.parse(path.read_text()))) for path in files()}
    assert len(found) > 80
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "eval('1')",
        "import marshal",
        "yaml.load(text)",
        "from yaml import unsafe_load",
        "archive.extractall(folder)",
        "torch.load(path)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize("code", ["np.load(path, allow_pickle=False)", "network.eval()", "yaml.safe_load(text)"])
def test_the_search_leaves_what_is_safe(code: str) -> None:
    assert not list(dangers(ast.parse(code)))


SERVICES = ("gorila", "producers", "pipelines", "consumers")
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def test_http_endpoints_listen_on_loopback_unless_told() -> None:
    assert Config().monitor.metrics_host == "127.0.0.1"
    assert Config().monitor.metrics_port == 0
    seen = 0
    for path in (path for path in files() if path.parts[len(ROOT.parts)] in SERVICES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("create_server", "bind"):
                address = node.args[0]
                host = address.elts[0] if isinstance(address, ast.Tuple) else address
                assert not isinstance(host, ast.Constant) or host.value in LOOPBACK, f"{path}: {ast.unparse(node)}"
                seen += 1
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                every = node.args.posonlyargs + node.args.args
                pairs = [*zip(every[::-1], node.args.defaults[::-1], strict=False)]
                pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d]
                for argument, default in pairs:
                    if argument.arg == "host" and isinstance(default, ast.Constant):
                        assert default.value in LOOPBACK, f"{path}: {node.name}"
                        seen += 1
    assert seen >= 2, "the rule has something to look at"


def test_what_travels_in_a_run_s_record_has_no_key_that_holds_a_secret() -> None:
    published = canonical_json(load_config("cartpole", ["kafka.client_properties=/secret/file"], {}))
    assert "/secret/file" not in published
    assert not [key for key in published.replace('"', " ").split() if SECRET.search(key)]
