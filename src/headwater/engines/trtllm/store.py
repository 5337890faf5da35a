"""The store of the host as TensorRT-LLM's KV connector, from the worker's side."""

from pathlib import Path

from headwater.engines.base import STORE_FLAGS
from headwater.engines.trtllm.installed import Installed
from headwater.errors import ConfigError
from headwater.kv.connectors.names import NameLog
from headwater.kv.connectors.naming import Naming, salt_of
from headwater.kv.connectors.trtllm_naming import Attached
from headwater.kv.pricing import ComputeRate
from headwater.runtime.owned_folder import OwnedFolder


class AttachedStore:
    """To the engine that this process starts next. Raises `ConfigError` for a release that it cannot be attached to."""

    def __init__(self, installed: Installed, socket: Path) -> None:
        if not installed.takes("cache_salt"):
            raise ConfigError(
                f"TensorRT-LLM {installed.version} takes no cache salt, without which {STORE_FLAGS} cannot keep "
                "tenants apart",
                hint="leave out the KV store's flags for these workers",
            )
        self._folder = OwnedFolder("trtllm-")
        names = self._folder.path / "names"
        self._log = NameLog(names)
        self._attached = Attached(str(socket), str(names))
        self._attached.publish()

    def check(self) -> None:
        """Once the engine runs. Raises `ConfigError` where its connector knows nothing of us."""
        if not self._attached.is_acknowledged():
            raise ConfigError(
                f"TensorRT-LLM runs where the environment of this worker does not reach: {STORE_FLAGS} cannot be "
                "attached there",
                hint="leave out --orchestrator-type, or the KV store's flags for these workers",
            )

    def salt(self, naming: Naming) -> str:
        """Of a request, which its blocks are named by from now on. Every one has a salt: by that it is known."""
        self._log.tell(naming, [naming.key()])
        return salt_of(naming.key())

    def price(self, rate: ComputeRate) -> None:
        self._log.price(rate)

    def close(self) -> None:
        self._attached.withdraw()
        self._log.close()
        self._folder.close()
