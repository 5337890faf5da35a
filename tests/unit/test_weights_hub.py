"""Models from a hub, against a real client and a hub on 127.0.0.1: what is fetched, resumed, found again, refused."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gguf_fixtures import write_vocabulary
from hub_fixture import COMMIT, FakeHub, serving

SAFETENSORS = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}).encode(),
    "generation_config.json": b'{"temperature": 0.5}',
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"template",
    "model.safetensors": b"weights" * 400_000,
    "consolidated.safetensors": b"the same again in another layout",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# model",
    "original/model.safetensors": b"not ours",
}


@pytest.fixture
def gguf_bytes(tmp_path: Path) -> bytes:
    write_vocabulary(tmp_path / "x.gguf")
    return (tmp_path / "x.gguf").read_bytes()


@pytest.fixture
def hub(gguf_bytes: bytes) -> Iterator[FakeHub]:
    repositories = {
        "Org/Model": dict(SAFETENSORS),
        "Org/One-GGUF": {"one.gguf": gguf_bytes, "README.md": b"x"},
        "Org/Many-GGUF": {"m-Q4_0.gguf": gguf_bytes, "m-Q8_0.gguf": gguf_bytes},
        "Org/Nothing": {"README.md": b"x"},
        "Org/Gated": {},
        "Qwen/Qwen3-0.6B": dict(SAFETENSORS),
    }
    with serving(FakeHub(repositories, gated={"Org/Gated"})) as hub:
        yield hub


SCRIPT = """
import json, sys
from pathlib import Path
from headwater.errors import HeadwaterError
from headwater.weights import resolve
model, options = sys.argv[1], json.loads(sys.argv[2])
seen = []
try:
    found = resolve(model, cache=Path(sys.argv[3]), progress=seen.append, **options)
except HeadwaterError as error:
    print(json.dumps({"error": error.message, "hint": error.hint}))
else:
    downloads = [p for p in seen if p.phase == "download"]
    print(json.dumps({
        "kind": found.kind, "name": found.name, "origin": found.origin, "revision": found.revision,
        "files": [f.name for f in found.weight_files], "sizes": [f.stat().st_size for f in found.weight_files],
        "template": found.chat_template, "sampling": found.default_sampling, "digest": found.weights_digest,
        "done": downloads[-1].done if downloads else 0, "total": downloads[-1].total if downloads else 0,
    }))
"""


@pytest.fixture
def find(hub: FakeHub, tmp_path: Path) -> Any:
    """Resolve in a process of its own: the client reads its settings when it is imported."""
    settings = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | settings

    def run(model: str, endpoint: str | None = None, **options: Any) -> dict[str, Any]:
        environment["HF_ENDPOINT"] = endpoint or hub.url
        command = [sys.executable, "-c", SCRIPT, model, json.dumps(options), str(tmp_path / "cache")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert "B/s" not in done.stderr, "the client draws no bars of its own"
        return dict(json.loads(done.stdout))

    return run


def test_a_model_is_fetched_once_and_pinned_to_its_commit(hub: FakeHub, find: Any) -> None:
    found = find("Org/Model")
    assert (found["kind"], found["name"], found["revision"]) == ("safetensors", "model", COMMIT)
    assert found["origin"] == f"hub Org/Model@{COMMIT[:12]}"
    assert found["files"] == ["model.safetensors"]
    assert (found["template"], found["sampling"]) == ("template", {"temperature": 0.5})
    assert sorted(set(hub.fetched())) == sorted(
        ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
    )
    assert found["done"] == found["total"] >= len(SAFETENSORS["model.safetensors"])
    hub.requests.clear()
    assert find("Org/Model@main") | {"done": 0, "total": 0} == found | {"done": 0, "total": 0}
    assert hub.fetched() == []


def test_without_the_hub_the_local_copy_serves(hub: FakeHub, find: Any) -> None:
    assert "not on this host and the hub cannot be asked (offline)" in find("Org/Model", offline=True)["error"]
    fetched = find("Org/Model")
    hub.requests.clear()
    found = find("Org/Model", offline=True)
    assert (found["revision"], found["digest"]) == (COMMIT, fetched["digest"])
    assert hub.requests == []
    hub.failing = True
    found = find("Org/Model")
    assert found["digest"] == fetched["digest"], "a hub that is down does not stop a model that is here"
    assert find("Org/Model", endpoint="http://127.0.0.1:9")["digest"] == fetched["digest"]


def test_a_failing_hub_is_explained(hub: FakeHub, find: Any) -> None:
    hub.failing = True
    refused = find("Org/Model")["error"]
    assert "Org/Model is not on this host and the hub cannot be asked" in refused
    assert "503" in refused


def test_a_broken_download_resumes(hub: FakeHub, find: Any) -> None:
    """The client writes 10 MiB at a time; what is written is not asked for again."""
    content = bytes(range(256)) * 90_000
    hub.repositories["Org/Model"]["model.safetensors"] = content
    hub.cut_after["model.safetensors"] = 15_000_000
    found = find("Org/Model")
    assert found["sizes"] == [len(content)]
    assert [r for _, path, r in hub.requests if path.endswith("model.safetensors") and r] == ["bytes=10485760-"]


def test_the_only_gguf_file_is_taken(find: Any) -> None:
    found = find("Org/One-GGUF")
    assert (found["kind"], found["files"], found["name"]) == ("gguf", ["one.gguf"], "one-gguf")


def test_of_several_gguf_files_one_is_named(hub: FakeHub, find: Any) -> None:
    refused = find("Org/Many-GGUF")
    assert "several GGUF files (there are: m-Q4_0.gguf, m-Q8_0.gguf)" in refused["error"]
    assert refused["hint"] == "Name one: Org/Many-GGUF/m-Q4_0.gguf"
    assert find("Org/Many-GGUF/m-Q8_0.gguf")["files"] == ["m-Q8_0.gguf"]
    assert set(hub.fetched()) == {"m-Q8_0.gguf"}
    assert "has no file m-Q2_K.gguf" in find("Org/Many-GGUF/m-Q2_K.gguf")["error"]


def test_a_catalogue_name_leads_to_its_hub_id(find: Any) -> None:
    assert find("QWEN3-0.6b")["origin"].startswith("hub Qwen/Qwen3-0.6B@")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Org/Absent", "the hub has no model Org/Absent"),
        ("Org/Model@v9", "Org/Model has no revision v9"),
        ("Org/Gated", "Org/Gated is gated"),
        ("Org/Nothing", "neither safetensors with a config.json nor GGUF files"),
    ],
)
def test_refusals_say_what_is_wrong(find: Any, model: str, message: str) -> None:
    assert message in find(model)["error"]


def test_an_unreachable_hub_is_explained(find: Any) -> None:
    refused = find("Org/Model", endpoint="http://127.0.0.1:9")
    assert "the hub cannot be asked ([Errno 111] Connection refused)" in refused["error"]
