"""What `drain`, `sleep` and `wake` say when a frontend refuses."""

import json
from typing import Any

import pytest

from headwater.cli.worker_command import tell
from headwater.errors import ConfigError


class Refusing:
    """A frontend with one worker that refuses everything."""

    def ask(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        return 400, json.dumps({"error": {"message": f"{path} is refused"}}).encode()

    def get_json(self, path: str) -> Any:
        return {"workers": [{"worker_id": "w1"}]}


@pytest.mark.parametrize(("worker_id", "hint"), [("w1", None), ("nobody", "workers here: w1")])
def test_workers_are_listed_where_the_name_was_wrong(worker_id: str, hint: str | None) -> None:
    with pytest.raises(ConfigError, match="is refused") as refused:
        tell(Refusing(), "sleep", worker_id, {})  # type: ignore[arg-type]
    assert refused.value.hint == hint
