"""TLS on the HTTP edge: whole answers and streams through it, client certificates, renewal, silence."""

import asyncio
import contextlib
import os
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from certificates import Authority
from raw_http import RawClient, echo, get, run, until

from headwater.config.schema import FrontendConfig
from headwater.errors import ConfigError
from headwater.frontend.http import tls as tls_module
from headwater.frontend.http.base import Handler
from headwater.frontend.http.limits import HttpLimits
from headwater.frontend.http.server import HttpServer
from headwater.frontend.http.tls import Tls, open_tls


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def edge(tls: Tls, handler: Handler = echo, **limits: float) -> AsyncIterator[tuple[HttpServer, int]]:
    server = HttpServer(handler, HttpLimits(**limits), tls=tls, tick_s=0.02)  # type: ignore[arg-type]
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.stop(0.5)


async def connect(port: int, trusted: Authority, own: Path | None = None) -> RawClient:
    context = ssl.create_default_context(cafile=str(trusted.path))
    if own is not None:
        context.load_cert_chain(own)
    return RawClient(*await asyncio.open_connection("127.0.0.1", port, ssl=context))


async def ask(port: int, trusted: Authority, own: Path | None) -> None:
    client = await connect(port, trusted, own)
    await client.send(get())
    await client.read_answer()


async def shut(client: RawClient) -> None:
    client.writer.close()
    with contextlib.suppress(OSError, ssl.SSLError):
        await client.writer.wait_closed()


def test_answers_and_streams_come_through(authority: Authority) -> None:
    def stream(_request: object, responder: object) -> None:
        responder.start(200, ())  # type: ignore[attr-defined]
        for _ in range(50):
            responder.write(b"x" * 10_000)  # type: ignore[attr-defined]
        responder.finish()  # type: ignore[attr-defined]

    async def main() -> None:
        async with edge(Tls(authority.issue("server"), None, None)) as (_, port):
            client = await connect(port, authority)
            for _ in range(3):
                await client.send(get())
                assert (await client.read_answer()).status == 200
            await shut(client)
        async with edge(Tls(authority.issue("server"), None, None), stream) as (_, port):
            client = await connect(port, authority)
            await client.send(get())
            assert len((await client.read_answer()).body) == 500_000
            await shut(client)

    run(main)


def test_old_protocols_and_clear_text_are_refused(authority: Authority) -> None:
    async def main() -> None:
        async with edge(Tls(authority.issue("server"), None, None)) as (server, port):
            context = ssl.create_default_context(cafile=str(authority.path))
            with pytest.warns(DeprecationWarning, match="TLSv1_1"):
                context.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises(OSError):  # noqa: PT011 - the name of the error depends on the library
                await asyncio.open_connection("127.0.0.1", port, ssl=context)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get())
            assert b"200" not in await asyncio.wait_for(reader.read(), 5)
            writer.close()
            await until(lambda: server.num_connections == 0)

    run(main)


def test_clients_must_show_a_certificate_where_one_is_wanted(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger")
    asked: list[object] = []

    async def main() -> None:
        tls = Tls(authority.issue("server"), None, authority.path)
        async with edge(tls, lambda request, responder: asked.append(request) or echo(request, responder)) as (_, port):  # type: ignore[func-returns-value]
            client = await connect(port, authority, authority.issue("client"))
            await client.send(get())
            assert (await client.read_answer()).status == 200
            await shut(client)
            for own in (None, stranger.issue("client")):
                with pytest.raises((OSError, asyncio.IncompleteReadError)):
                    await ask(port, authority, own)
        assert len(asked) == 1, "whoever is turned away is not heard"

    run(main)


def test_a_renewed_certificate_is_shown_and_a_broken_one_is_not(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "CHECK_INTERVAL_S", 0.01)
    (tmp_path / "next").mkdir()
    successor = Authority(tmp_path / "next", "successor")

    async def main() -> None:
        path = authority.issue("server")
        async with edge(Tls(path, None, None)) as (_, port):
            standing = await connect(port, authority)
            os.replace(successor.issue("server"), path)

            async def renewed() -> bool:
                with contextlib.suppress(ssl.SSLError):
                    await shut(await connect(port, successor))
                    return True
                return False

            for _ in range(200):
                if await renewed():
                    break
                await asyncio.sleep(0.02)
            path.write_text("-----BEGIN CERTIFICATE-----\nbroken")
            await asyncio.sleep(0.2)
            assert await renewed(), "the one before is still shown"
            await standing.send(get())
            assert (await standing.read_answer()).status == 200
            await shut(standing)

    run(main)


def test_whoever_does_not_finish_the_handshake_is_dropped(authority: Authority) -> None:
    async def main() -> None:
        async with edge(Tls(authority.issue("server"), None, None), header_timeout_s=0.3) as (_, port):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
            for reader, writer in silent:
                assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()

    run(main)


def test_files_that_do_not_fit_are_refused(authority: Authority, tmp_path: Path) -> None:
    path = authority.issue("server")
    missing, other = tmp_path / "none", authority.issue("other")
    for cert, key, client_ca, complaint in (
        (missing, None, None, f"--tls-cert {missing}: No such file"),
        (authority.path, None, None, "its key, in the same file"),
        (path, authority.path, None, f"--tls-key {authority.path} cannot be read"),
        (path, missing, None, f"--tls-key {missing}: No such file"),
        (path, other, None, f"--tls-key {other} belongs to another certificate"),
        (path, None, missing, f"--tls-client-ca {missing}: No such file"),
    ):
        with pytest.raises(ConfigError, match=re.escape(complaint)):
            Tls(cert, key, client_ca)
    with pytest.raises(ConfigError, match="--tls-cert"):
        open_tls(FrontendConfig(tls_key=str(path)))
    assert open_tls(FrontendConfig()) is None
