"""What may be imported without what. Each case runs in a process of its own, where the forbidden cannot be imported."""

import json
import subprocess
import sys

import pytest

from headwater.cli.verbs import VERBS

BLOCK = """
import importlib, json, pkgutil, sys

class Blocked:
    def __init__(self, names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in self.names):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked(json.loads(sys.argv[1])))
for package in json.loads(sys.argv[2]):
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), package + "."):
        if not found.name.startswith("headwater.kv.connectors."):  # each needs the engine that it connects
            importlib.import_module(found.name)
print(json.dumps(sorted(sys.modules)))
"""

HEAVY = ["torch", "transformers", "numpy", "huggingface_hub", "gguf", "safetensors", "llguidance"]
SERVER = ["httptools", "uvloop", "headwater.frontend"]
ENGINES = [f"headwater.engines.{name}" for name in ("native", "mocker", "core", "engine", "loop")]


def import_all(packages: list[str], blocked: list[str]) -> set[str]:
    """Import packages and all their modules with `blocked` out of reach; what was loaded in the end."""
    command = [sys.executable, "-c", BLOCK, json.dumps(blocked), json.dumps(packages)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def roots(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_importing_headwater_imports_nothing_else() -> None:
    ours = {name for name in import_all([], []) ^ loaded_by("import headwater") if not name.startswith("_")}
    assert ours == {"headwater"}


def loaded_by(statement: str) -> set[str]:
    program = f"import importlib, json, pkgutil, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_version_is_told_without_loading_anything() -> None:
    loaded = loaded_by("from headwater.cli.main import main; main(['--version'])")
    assert not loaded & {"msgspec", "yaml", "rich", "asyncio", "argparse", "zmq", "torch"}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_of_no_verb_loads_an_engine(verb: str) -> None:
    statement = f"from headwater.cli.main import main; assert main(['{verb}', '--help']) == 0"
    assert not roots(loaded_by(statement)) & set(HEAVY)


def test_the_frontend_and_all_below_it_need_no_engine() -> None:
    packages = [
        f"headwater.{name}" for name in ("frontend", "runtime", "router", "kv", "scheduler", "protocol", "config")
    ]
    import_all(packages, [*HEAVY, *ENGINES])


@pytest.mark.parametrize(
    ("package", "more"),
    [
        ("headwater.perf", ["asyncio", "zmq"]),
        ("headwater.scheduler", ["asyncio", "zmq"]),
        ("headwater.router", ["asyncio", "zmq"]),
        ("headwater.weights", ["zmq"]),
        ("headwater.transfer", ["asyncio", "zmq", "nixl", "headwater.config", "headwater.runtime", "headwater.kv"]),
    ],
)
def test_packages_that_stand_alone(package: str, more: list[str]) -> None:
    import_all([package], [*HEAVY, *SERVER, *ENGINES, *more])


def test_the_kv_store_stands_alone_and_its_core_does_no_io() -> None:
    import_all(["headwater.kv"], [*HEAVY, *ENGINES, "httptools", "headwater.frontend", "zmq"])
    core = [f"headwater.kv.{name}" for name in ("index", "lifecycle", "policies", "admission", "pool", "resident")]
    import_all(core, [*HEAVY, *SERVER, *ENGINES, "asyncio", "zmq"])


def test_the_supervisor_and_the_command_line_need_no_engine() -> None:
    import_all(["headwater.deploy", "headwater.cli"], [*HEAVY, "headwater.engines.mocker"])


def test_blocking_works() -> None:
    with pytest.raises(AssertionError, match="is blocked"):
        import_all(["headwater.engines.native.engine"], ["torch"])
