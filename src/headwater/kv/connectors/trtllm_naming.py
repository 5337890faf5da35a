"""The store's connector in a TensorRT-LLM of a worker of ours.

TensorRT-LLM tells a connector nothing but its own arguments, and runs it in a process that it makes itself. So where
store and names are stands in the environment, under a name that it hands on to that process (`TRTLLM_...`; the others
it drops in some set-ups). Of a request the connector sees tokens and cache salt: the salt carries the namespace, and
behind it the worker tells model and tenant (`names`). The connector leaves a mark beside the names, so that the worker
knows that it has found them.
"""

import os
from pathlib import Path
from typing import Any, Self

import msgspec

MODULE = "headwater.kv.connectors.trtllm"
_VARIABLE = "TRTLLM_HEADWATER_STORE"


class Attached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By a worker, to the engine that it starts."""

    socket: str
    names: str

    @classmethod
    def found(cls) -> Self | None:
        """None where an engine was started by somebody else. Raises `msgspec.ValidationError`."""
        said = os.environ.get(_VARIABLE)
        return msgspec.json.decode(said, type=cls) if said else None

    def publish(self) -> None:
        """To the engine that is started next."""
        os.environ[_VARIABLE] = msgspec.json.encode(self).decode()

    @staticmethod
    def withdraw() -> None:
        os.environ.pop(_VARIABLE, None)

    def acknowledge(self) -> None:
        """By the connector."""
        self._mark().touch()

    def is_acknowledged(self) -> bool:
        return self._mark().exists()

    def _mark(self) -> Path:
        return Path(self.names).with_suffix(".found")


def connector_config() -> dict[str, Any]:
    """As `LLM` takes it for `kv_connector_config`."""
    return {
        "connector_module": MODULE,
        "connector_scheduler_class": "HeadwaterScheduler",
        "connector_worker_class": "HeadwaterWorker",
    }
