"""What a frontend says of workers that it cannot reach."""

import asyncio
import logging

import pytest

from headwater.errors import ConfigError, HeadwaterError, WorkerLost
from headwater.frontend import connection as connections
from headwater.frontend.connection import WorkerConnection
from headwater.runtime.conformance import eventually
from headwater.runtime.registry.conformance import example_instance


class Unreachable:
    """A link that does not come about."""

    def __init__(self, error: HeadwaterError) -> None:
        self.error = error
        self.attempts = 0

    async def connect(self, *_: object) -> str:
        self.attempts += 1
        raise self.error

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (
            ConfigError("it is for members", hint="--cluster-key names the keys"),
            ["it is for members (--cluster-key names the keys)"],
        ),
        (WorkerLost("nobody listens there"), []),
    ],
)
def test_what_will_not_mend_itself_is_said_once(
    error: HeadwaterError, lines: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_FIRST_DELAY_S", 0.001)
    link = Unreachable(error)

    async def main() -> None:
        connection = WorkerConnection(example_instance(), lambda _: link, object())  # type: ignore[arg-type,return-value]
        connection.start()
        await eventually(lambda: link.attempts >= 3, "three attempts")
        await connection.close()
        assert connection.last_error == error.message

    with caplog.at_level(logging.INFO, connections.__name__):
        asyncio.run(asyncio.wait_for(main(), 10))
    assert [record.getMessage().partition("cannot be reached: ")[2] for record in caplog.records] == lines
