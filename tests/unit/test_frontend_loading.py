"""Requests for a model whose tokenizer is being loaded."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from headwater.errors import ModelNotFound, Overloaded
from headwater.frontend import loading
from headwater.frontend.http.base import Handler, HttpRequest
from headwater.frontend.loading import ModelLoading, answering
from headwater.frontend.waiting import Waiting

REQUEST = HttpRequest("GET", "/v1/models/m", "", {}, b"", "")


class Answers:
    """A client that waits, until it is gone."""

    def __init__(self) -> None:
        self.disconnected = False
        self.statuses: list[int] = []

    def send(self, status: int, headers: Any, body: bytes) -> None:
        self.statuses.append(status)


def of(*outcomes: Exception | int, later: bool) -> Handler:
    """Call by call; `later`: from a coroutine, as for long bodies."""
    left = list(outcomes)

    def now(_: HttpRequest, responder: Any) -> None:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        responder.send(outcome, (), b"")

    async def on_a_thread(request: HttpRequest, responder: Any) -> None:
        now(request, responder)

    return on_a_thread if later else now


async def asked(handler: Handler, answers: Any, request: HttpRequest = REQUEST, waiting: Waiting | None = None) -> None:
    pending: Awaitable[None] | None = answering(handler, waiting or Waiting())(request, answers)
    if pending is not None:
        await pending


@pytest.fixture(params=[False, True])
def later(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_the_name_may_stand_for_another_version_when_the_wait_is_over(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LONGEST_WAIT_S", 0.01)

    async def main() -> None:
        answers = Answers()
        await asked(of(ModelLoading("not yet", asyncio.Event()), 200, later=later), answers)
        assert answers.statuses == [200]
        await asked(of(*[ModelLoading("not yet", asyncio.Event()) for _ in range(2)], later=later), answers)
        assert answers.statuses == [200, 503]

    asyncio.run(main())


def test_what_is_settled_is_asked_for_once_more_unless_the_client_has_left(later: bool) -> None:
    async def main() -> None:
        settled = asyncio.Event()
        stays, leaves, fails = Answers(), Answers(), Answers()
        asking = [
            asyncio.ensure_future(asked(of(ModelLoading("not yet", settled), outcome, later=later), answers))
            for answers, outcome in ((stays, 200), (leaves, 200), (fails, ModelNotFound("gone")))
        ]
        await asyncio.sleep(0)
        leaves.disconnected = True
        settled.set()
        await asyncio.wait_for(asyncio.gather(*asking), 10)
        assert (stays.statuses, leaves.statuses, fails.statuses) == ([200], [], [404])

    asyncio.run(main())


def test_those_who_wait_hold_so_much_memory_and_no_more(later: bool) -> None:
    async def main() -> None:
        settled, waiting = asyncio.Event(), Waiting(max_bytes=100)
        clients = [Answers() for _ in range(3)]
        asking = [
            asyncio.ensure_future(
                asked(
                    of(ModelLoading("not yet", settled), 200, later=later),
                    client,
                    HttpRequest("POST", "/tokenize", "", {}, bytes(size), ""),
                    waiting,
                )
            )
            for client, size in zip(clients, (60, 40, 1), strict=True)
        ]
        await asyncio.sleep(0.01)
        assert [client.statuses for client in clients] == [[], [], [503]]
        settled.set()
        await asyncio.wait_for(asyncio.gather(*asking), 10)
        assert [client.statuses for client in clients] == [[200], [200], [503]]
        with waiting.held(150), pytest.raises(Overloaded, match="of 150 bytes wait"), waiting.held(1):
            raise AssertionError("one alone is never too much, a second one is")

    asyncio.run(main())
