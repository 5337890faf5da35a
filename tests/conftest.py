"""Models for tests: the real demo model and tiny ones with random weights. torch is imported only where one is used."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from headwater.errors import ModelError
from headwater.weights import ResolvedModel, resolve

if TYPE_CHECKING:
    from model_fixtures import TinyModel
    from object_servers import ObjectServer


# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("headwater", deadline=None)
hypothesis.settings.load_profile("headwater")


@pytest.fixture(scope="session", autouse=True)
def _signals_of_a_terminal() -> None:
    """A run in the background begins with ignored signals, and would pass that on to the servers it starts."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ObjectServer]":
    from object_servers import seaweedfs

    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ObjectServer]":
    from object_servers import azurite

    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """A private folder with a short path, for sockets: pytest's own are longer than a socket's name may be."""
    with tempfile.TemporaryDirectory(prefix="hw-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def demo_model() -> ResolvedModel:
    """The demo model, found as a user would find it."""
    try:
        return resolve(None)
    except ModelError as error:
        pytest.skip(f"the demo model is neither here nor to be had: {error}")


@pytest.fixture(scope="session")
def demo_reference(demo_model: ResolvedModel) -> Any:
    """transformers' model in float32 with exactly the weights that the native engine computes with."""
    from headwater.engines.native.checkpoints import open_checkpoint
    from model_fixtures import reference_of

    return reference_of(open_checkpoint(demo_model))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> "Callable[..., TinyModel]":
    """`tiny_model(family, rope)`: built once per session."""
    from model_fixtures import build_tiny_model

    built: dict[tuple[str, str], TinyModel] = {}

    def get(family: str, rope: str = "default") -> "TinyModel":
        if (family, rope) not in built:
            built[family, rope] = build_tiny_model(tmp_path_factory.mktemp(f"{family}-{rope}"), family, rope)
        return built[family, rope]

    return get
