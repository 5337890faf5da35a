"""Certificates of an authority of one's own: client verbs and attached workers trust it once SSL_CERT_FILE names it."""

import asyncio
import json
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from certificates import Authority
from served_demo import call, demo_cluster

from headwater.engines.attached.http import Server, ServerAddress, Unreachable

MOCKER = ("--engine", "mocker", "--mocker-speedup", "0")


def headwater(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def attached(url: str) -> None:
    server = Server(ServerAddress.parse(url))
    try:
        await server.get("/v1/models")
    finally:
        await server.close()


def folder(run_folder: Path, name: str) -> Path:
    made = run_folder / name
    made.mkdir(mode=0o700)
    return made


@pytest.mark.usefixtures("demo_model")
def test_one_variable_trusts_an_authority_for_verbs_and_attached_workers(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with demo_cluster(folder(run_folder, "a"), *MOCKER, "--tls-cert", str(authority.issue("server"))) as url:
        assert url.startswith("https://")
        refused = headwater("status", "--url", url)
        assert refused.returncode == 1
        assert f"the certificate of {url} is not accepted" in refused.stderr
        assert "hint: SSL_CERT_FILE=" in refused.stderr
        with pytest.raises(Unreachable, match=r"is not accepted.*SSL_CERT_FILE="):
            asyncio.run(attached(url))

        monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
        status = headwater("status", "--url", url)
        assert status.returncode == 0, status.stderr
        with urllib.request.urlopen(f"{url}/v1/models", context=ssl.create_default_context()) as answer:
            model = json.load(answer)["data"][0]["id"]
        with demo_cluster(folder(run_folder, "b"), "--attach", url) as front:
            reply = call(f"{front}/v1/completions", {"model": model, "prompt": "hello", "max_tokens": 3})
            assert reply.status == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == 3
