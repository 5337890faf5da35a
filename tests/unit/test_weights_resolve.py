"""From a MODEL argument to a resolved model: folders, GGUF files, names, refusals, fingerprints."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_fixtures import write_vocabulary
from headwater.engines.base import Progress
from headwater.errors import ConfigError, ModelError
from headwater.weights import ResolvedModel, documents, resolve
from headwater.weights.cache import file_digest, files_digest
from headwater.weights.catalogue import catalogue
from headwater.weights.hub import parse_hub_id

CONFIG = {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 10}
TOKENIZER = b'{"model": {}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least that a model folder must hold. Its weights are never parsed by the resolver."""
    made = tmp_path / "My-Model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "tokenizer.json").write_bytes(TOKENIZER)
    (made / "model.safetensors").write_bytes(b"weights")
    return made


@pytest.fixture
def find(tmp_path: Path) -> Callable[..., ResolvedModel]:
    return lambda model, **options: resolve(str(model), cache=tmp_path / "cache", offline=True, **options)


Find = Callable[..., ResolvedModel]


def test_a_folder(folder: Path, find: Find) -> None:
    model = find(folder)
    assert (model.kind, model.name) == ("safetensors", "my-model")
    assert model.weight_files == (folder / "model.safetensors",)
    assert model.config == CONFIG
    assert model.tokenizer_json == TOKENIZER
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2,))
    assert model.chat_template is None
    assert model.default_sampling == {}


def test_generation_config_overrides_end_tokens_and_gives_sampling(folder: Path, find: Find) -> None:
    generation = {
        "eos_token_id": [7, 9],
        "bos_token_id": 4,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = find(folder)
    assert (model.bos_token_id, model.eos_token_ids) == (4, (7, 9))
    assert model.default_sampling == {"temperature": 0.6, "top_k": 20.0}


def test_chat_templates_in_the_order_publishers_used(folder: Path, find: Find, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named default"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert find(folder).chat_template == "named default"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert find(folder).chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from jinja ß")
    assert find(folder).chat_template == "from jinja ß"
    (tmp_path / "own.jinja").write_text("own")
    assert find(folder, chat_template=str(tmp_path / "own.jinja")).chat_template == "own"


def test_a_tokenizer_from_elsewhere(folder: Path, find: Find, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes(b'{"other": 1}')
    (folder / "tokenizer.json").unlink()
    assert find(folder, tokenizer=str(other)).tokenizer_json == b'{"other": 1}'
    assert find(folder, tokenizer=str(other / "tokenizer.json")).tokenizer_json == b'{"other": 1}'
    with pytest.raises(ModelError, match="no tokenizer at"):
        find(folder, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        find(folder)


def test_shards_follow_the_index(folder: Path, find: Find) -> None:
    (folder / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[1], "b": names[0], "c": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / names[0]).write_bytes(b"one")
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        find(folder)
    (folder / names[1]).write_bytes(b"two")
    (folder / "consolidated.safetensors").write_bytes(b"not in the index")
    assert find(folder).weight_files == tuple(folder / name for name in names)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b.safetensors", "..", "", 7, None, "a\0b"])
def test_an_index_cannot_lead_out_of_its_folder(folder: Path, find: Find, name: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="not a plain file name"):
        find(folder)


def test_a_folder_without_weights_says_what_it_would_take(folder: Path, find: Find) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors"):
        find(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match="no safetensors") as caught:
        find(folder)
    assert "never loaded" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_configuration_is_explained(folder: Path, find: Find, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        find(folder)


def test_texts_have_a_size_limit(folder: Path, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MAX_TEMPLATE_BYTES", 10)
    (folder / "chat_template.jinja").write_text("x" * 11)
    with pytest.raises(ModelError, match="has 11 bytes, more than the 10"):
        find(folder)


def test_a_gguf_file_by_path_and_by_folder(tmp_path: Path, find: Find) -> None:
    path = tmp_path / "models" / "Tiny.Q4.gguf"
    path.parent.mkdir()
    write_vocabulary(path, {"tokenizer.chat_template": "gguf template"})
    model = find(path)
    assert (model.kind, model.name, model.config) == ("gguf", "tiny.q4", {})
    assert model.weight_files == (path,)
    assert model.chat_template == "gguf template"
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2,))
    assert json.loads(model.tokenizer_config or b"")["eos_token"] == "</s>"
    assert find(path.parent).weight_files == (path,)
    write_vocabulary(path.with_name("other.gguf"))
    with pytest.raises(ModelError, match=r"several GGUF files: Tiny\.Q4\.gguf, other\.gguf"):
        find(path.parent)


def test_other_files_are_refused(tmp_path: Path, find: Find) -> None:
    (tmp_path / "x.bin").write_bytes(b"data")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        find(tmp_path / "x.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither a config\.json nor a GGUF file"):
        find(tmp_path / "empty")


def test_the_nearest_names_are_offered(folder: Path, find: Find) -> None:
    with pytest.raises(ModelError, match=r"did you mean qwen3-0\.6b"):
        find("qwen3-0.6")
    with pytest.raises(ModelError, match="did you mean My-Model"):
        find(folder.parent / "my-modle")
    with pytest.raises(ModelError, match="neither a file, a folder, a catalogue name nor a hub id") as caught:
        find("zzzzzz")
    assert "llama-3.2-1b" in str(caught.value.hint)


@pytest.mark.parametrize("model", ["a/../b", "org//name", "org/na me", "-/x", "org/name@", "https://host/x", "a/b/c"])
def test_what_is_no_hub_id_is_not_asked_for(find: Find, model: str) -> None:
    with pytest.raises(ModelError, match="neither a file"):
        find(model)


def test_an_installed_distribution_adds_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "house_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headwater.models]\nhouse = house_models_of_a_test:NAMES\n")
    (tmp_path / "house_models_of_a_test.py").write_text("NAMES = {'House-Chat': 'house/chat@v2'}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert catalogue()["house-chat"] == "house/chat@v2"
    assert "qwen3-0.6b" in catalogue()
    (tmp_path / "house_models_of_a_test.py").write_text("NAMES = 7\n")
    monkeypatch.delitem(sys.modules, "house_models_of_a_test")
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"'house' of headwater\.models is not a mapping"):
        catalogue()


def test_every_catalogue_name_leads_to_a_hub_id() -> None:
    for name, hub_id in catalogue().items():
        assert name == name.lower()
        assert parse_hub_id(hub_id) is not None, hub_id


def test_two_revisions_are_refused(find: Find) -> None:
    with pytest.raises(ModelError, match="two revisions are given: v1 in 'org/name@v1' and v2"):
        find("org/name@v1", revision="v2")


def test_the_fingerprint_follows_content_alone(folder: Path, find: Find) -> None:
    first = find(folder)
    moved = folder.rename(folder.with_name("renamed"))
    assert find(moved).fingerprint == first.fingerprint
    (moved / "config.json").write_text(json.dumps(CONFIG | {"transformers_version": "9"}))
    assert find(moved).fingerprint == first.fingerprint, "who wrote it does not matter"
    (moved / "tokenizer.json").write_bytes(b'{"model": {"x": 1}}')
    retokenized = find(moved)
    assert retokenized.fingerprint != first.fingerprint
    assert retokenized.weights_digest == first.weights_digest
    (moved / "model.safetensors").write_bytes(b"w3ights")
    assert find(moved).weights_digest != first.weights_digest
    (moved / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 11}))
    assert find(moved).fingerprint not in {first.fingerprint, retokenized.fingerprint}


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    file, cache = tmp_path / "w", tmp_path / "cache"
    file.write_bytes(b"x" * 100_000)
    read: list[int] = []
    first = file_digest(cache, file, read.append)
    assert file_digest(cache, file, read.append) == first
    assert sum(read) == 100_000
    file.write_bytes(b"y" * 100_000)
    assert file_digest(cache, file, read.append) != first
    assert sum(read) == 200_000


def test_a_damaged_or_unwritable_cache_costs_only_time(tmp_path: Path) -> None:
    file, cache = tmp_path / "w", tmp_path / "cache"
    file.write_bytes(b"content")
    digest = file_digest(cache, file)
    (remembered,) = (cache / "digests").iterdir()
    remembered.write_bytes(b"\xffnonsense")
    assert file_digest(cache, file) == digest
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"a file where the folder should be")
    assert file_digest(blocked, file) == digest


def test_a_hub_blob_is_named_by_its_digest(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"content")
    (tmp_path / "model.safetensors").symlink_to(blob)
    assert file_digest(tmp_path / "cache", tmp_path / "model.safetensors") == "ab" * 32


def test_progress_counts_the_bytes_read(tmp_path: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 50_000)
    seen: list[Progress] = []
    resolve(str(folder), cache=tmp_path / "cache", progress=seen.append)
    assert seen[0].phase == "resolve"
    assert (seen[-1].done, seen[-1].total, seen[-1].unit) == (50_000, 50_000, "bytes")
    files_digest(tmp_path / "cache", [folder / "model.safetensors"], lambda _: pytest.fail("read again"))


def test_importing_needs_neither_torch_nor_numpy() -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'transformers', 'huggingface_hub', 'gguf', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from headwater.weights import resolve\n"
        "import headwater.weights.hub, headwater.weights.gguf_texts\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
