"""The GGUF container: what is read, and that nothing in a file makes us read outside it or fail unexplained."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_fixtures import byte_level_tokens, write_vocabulary
from headwater.errors import ModelError
from headwater.weights.gguf import GgufFile, is_gguf, read_gguf


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def head(version: int = 3, tensors: int = 0, metadata: int = 0, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, metadata)


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def parse(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return read_gguf(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "v.gguf"
    metadata = {
        "some.flag": True,
        "some.count": 7,
        "some.number": 1.5,
        "some.list": [1, 2, 3],
        "some.words": ["a", "ß"],
    }
    write_vocabulary(path, metadata)
    return path


def test_values_come_back_as_written(written: Path) -> None:
    gguf = read_gguf(written)
    assert gguf.version == 3
    assert gguf.text("general.architecture") == "llama"
    assert gguf.flag("some.flag") is True
    assert gguf.integer("some.count") == 7
    assert gguf.number("some.number") == 1.5
    assert gguf.numbers("some.list") == [1.0, 2.0, 3.0]
    assert gguf.texts("some.words") == ["a", "ß"]
    assert gguf.texts("tokenizer.ggml.tokens") == byte_level_tokens()
    found = gguf.tensors["token_embd.weight"]
    assert (found.shape, found.type.name, found.num_bytes) == ((4, 32), "F32", 512)
    assert found.start + found.num_bytes <= written.stat().st_size


def test_a_value_of_another_type_is_no_value(written: Path) -> None:
    gguf = read_gguf(written)
    assert gguf.integer("some.flag") is None
    assert gguf.number("some.flag") is None
    assert gguf.text("some.count") is None
    assert gguf.texts("absent") is None


def test_the_start_of_a_file_says_whether_it_is_one(written: Path, tmp_path: Path) -> None:
    assert is_gguf(written)
    (tmp_path / "other").write_bytes(b"GG")
    assert not is_gguf(tmp_path / "other")


HOSTILE = {
    "empty": (b"", "cannot read"),
    "only the magic": (b"GGUF", "run past its end"),
    "another magic": (head(magic=b"GGML"), "does not start with GGUF"),
    "version 1": (head(version=1), "version 0x1"),
    "big-endian": (head(version=0x03000000), "version 0x3000000"),
    "metadata without end": (head(metadata=1 << 63), "too many"),
    "tensors without end": (head(tensors=1 << 63), "too many"),
    "a key longer than a name": (head(metadata=1) + struct.pack("<Q", 1 << 20) + b"x" * 2000, "a name of"),
    "a string longer than the file": (
        head(metadata=1) + string("k") + struct.pack("<IQ", 8, 1 << 62),
        "run past its end",
    ),
    "an array longer than the file": (
        head(metadata=1) + string("k") + struct.pack("<IIQ", 9, 6, 1 << 60),
        "run past its end",
    ),
    "strings without end": (head(metadata=1) + string("k") + struct.pack("<IIQ", 9, 8, 1 << 40), "array of"),
    "arrays in arrays": (head(metadata=1) + string("k") + struct.pack("<IIQ", 9, 9, 1), "unknown value type 9"),
    "an unknown type": (head(metadata=1) + string("k") + struct.pack("<I", 77), "unknown value type 77"),
    "a key twice": (head(metadata=2) + 2 * (string("k") + struct.pack("<IB", 7, 1)), "appears twice"),
    "a crooked alignment": (
        head(metadata=1) + string("general.alignment") + struct.pack("<II", 4, 33),
        "alignment 33",
    ),
    "no alignment": (head(metadata=1) + string("general.alignment") + struct.pack("<II", 4, 0), "alignment 0"),
    "a tensor twice": (head(tensors=2) + 2 * tensor("t", [4], 0, 0) + b"\0" * 64, "appears twice"),
    "a tensor beyond the end": (head(tensors=1) + tensor("t", [1024], 0, 0) + b"\0" * 64, "runs past the end"),
    "an offset beyond the end": (head(tensors=1) + tensor("t", [4], 0, 1 << 40) + b"\0" * 64, "runs past the end"),
    "a misaligned offset": (head(tensors=1) + tensor("t", [4], 0, 4) + b"\0" * 96, "misaligned"),
    "sizes that overflow": (head(tensors=1) + tensor("t", [1 << 62] * 4, 0, 0) + b"\0" * 64, "runs past the end"),
    "a dimension of nothing": (head(tensors=1) + tensor("t", [4, 0], 0, 0) + b"\0" * 64, r"shape \(4, 0\)"),
    "too many dimensions": (head(tensors=1) + tensor("t", [1] * 5, 0, 0) + b"\0" * 64, "5 dimensions"),
    "half a block": (head(tensors=1) + tensor("t", [33], 8, 0) + b"\0" * 64, "Q8_0 has shape"),
    "a type we do not read": (head(tensors=1) + tensor("t", [256], 10, 0) + b"\0" * 512, "Q2_K.*not supported.*Q4_K"),
    "a type nobody knows": (head(tensors=1) + tensor("t", [256], 999, 0) + b"\0" * 512, "number 999"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    with pytest.raises(ModelError, match=message):
        parse(tmp_path, content)


def test_a_file_cut_off_anywhere_is_refused(written: Path, tmp_path: Path) -> None:
    content = written.read_bytes()
    for length in range(0, len(content), 97):
        with pytest.raises(ModelError):
            parse(tmp_path, content[:length])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_bytes_give_a_file_or_a_reason(written: Path, data: st.DataObject) -> None:
    content = bytearray(written.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = written.with_name("damaged.gguf")
    path.write_bytes(content)
    try:
        gguf = read_gguf(path)
    except ModelError:
        return
    assert all(t.start + t.num_bytes <= len(content) for t in gguf.tensors.values())
