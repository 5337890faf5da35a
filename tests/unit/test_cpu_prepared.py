"""The prepared weight file: exact values, one conversion per host, and no trust in what lies on disk."""

import ctypes
import multiprocessing
import struct
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch
from cpu_reference import RandomCheckpoint, flat_batch, small
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engines.base import Progress
from headwater.engines.native.base import QuantisedTensor
from headwater.engines.native.cpu import panel_file
from headwater.engines.native.cpu.backend import CpuBackend, CpuOptions
from headwater.engines.native.cpu.layout import TensorPlan, model_plan
from headwater.engines.native.cpu.panel_file import PanelFile
from headwater.engines.native.cpu.panels import PanelKind, narrowest, pack, padded
from headwater.engines.native.cpu.prepared import prepare
from headwater.errors import InternalError, ModelError


def quiet(_: Progress) -> None: ...


DTYPES = {PanelKind.BF16: torch.bfloat16, PanelKind.F16: torch.float16, PanelKind.F32: torch.float32}


def read_panels(raw: torch.Tensor, kind: PanelKind, rows: int, inputs: int) -> torch.Tensor:
    """The matrix in floating-point panels, element by element where the kernels would look for it."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(inputs), indexing="ij")
    panel = row // 16 * 16 * padded(inputs)
    paired = kind is PanelKind.BF16
    inside = column // 2 * 32 + row % 16 * 2 + column % 2 if paired else column * 16 + row % 16
    return raw.view(DTYPES[kind])[panel + inside]


def unpack(weights: PanelFile, plan: TensorPlan) -> torch.Tensor:
    kind = weights.kind(plan.name)
    content = (ctypes.c_uint8 * plan.nbytes(kind)).from_address(weights.address(plan.name))
    raw = torch.from_numpy(np.ctypeslib.as_array(content).copy())
    if plan.inputs is None:
        return raw.view(torch.float32)[: plan.rows]
    return read_panels(raw, kind, plan.rows, plan.inputs).float()


def only_file(folder: Path) -> Path:
    (found,) = folder.glob("*.panels")
    return found


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, PanelKind.BF16), (torch.float16, PanelKind.F16), (torch.float32, PanelKind.F32)],
)
def test_every_value_survives(tmp_path: Path, dtype: torch.dtype, kind: PanelKind) -> None:
    config = small(intermediate_size=100, mlp_bias=True, attention_bias=True, qk_norm=True, tie_word_embeddings=False)
    checkpoint = RandomCheckpoint(config, dtype)
    weights = prepare(checkpoint, tmp_path, quiet)
    for plan in model_plan(config):
        assert torch.equal(unpack(weights, plan), plan.read(checkpoint).float()), plan.name
        assert weights.kind(plan.name) is (PanelKind.F32 if plan.inputs is None else kind)
    weights.close()


def test_float32_that_fits_16_bits_is_kept_in_16_bits(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(small(), torch.bfloat16)
    checkpoint.tensors = {name: tensor.float() for name, tensor in checkpoint.tensors.items()}
    weights = prepare(checkpoint, tmp_path, quiet)
    assert weights.kind("layers.0.qkv") is PanelKind.BF16
    weights.close()


def test_the_second_opening_reads_no_tensor(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(small())
    prepare(checkpoint, tmp_path, quiet).close()
    checkpoint.reads = 0
    reports: list[Progress] = []
    prepare(checkpoint, tmp_path, reports.append).close()
    assert checkpoint.reads == 0
    assert {report.phase for report in reports} == {"load"}
    assert reports[-1].done == reports[-1].total == only_file(tmp_path).stat().st_size


def test_a_new_layout_takes_the_place_of_the_old(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(small())
    old, other = tmp_path / f"{checkpoint.fingerprint[:40]}-v1.panels", tmp_path / f"{'0' * 40}-v1.panels"
    for path in (old, other):
        path.touch()
    prepare(checkpoint, tmp_path, quiet).close()
    assert not old.exists()
    assert other.exists()


def test_progress_of_a_conversion_counts_every_parameter(tmp_path: Path) -> None:
    checkpoint, reports = RandomCheckpoint(small()), []
    prepare(checkpoint, tmp_path, reports.append).close()
    converted = [report for report in reports if report.phase == "convert"]
    assert [report.done for report in converted] == sorted(report.done for report in converted)
    assert converted[-1].done == converted[-1].total == sum(tensor.numel() for tensor in checkpoint.tensors.values())


def flip_index(content: bytearray) -> None:
    content[-10] ^= 1


def other_version(content: bytearray) -> None:
    content[8:12] = struct.pack("<I", 9999)


def huge_index(content: bytearray) -> None:
    content[12:16] = struct.pack("<I", 0xFFFFFFFF)


def cut(content: bytearray) -> None:
    del content[len(content) // 2 :]


def cut_in_header(content: bytearray) -> None:
    del content[20:]


def grown(content: bytearray) -> None:
    content.extend(b"\0" * 4096)


@pytest.mark.parametrize("damage", [flip_index, other_version, huge_index, cut, cut_in_header, grown, bytearray.clear])
def test_a_damaged_file_is_rebuilt(tmp_path: Path, damage: Callable[[bytearray], None]) -> None:
    checkpoint = RandomCheckpoint(small())
    prepare(checkpoint, tmp_path, quiet).close()
    path = only_file(tmp_path)
    good = path.read_bytes()
    content = bytearray(good)
    damage(content)
    path.write_bytes(content)
    prepare(checkpoint, tmp_path, quiet).close()
    assert path.read_bytes() == good


@pytest.mark.parametrize(
    ("field", "value"), [("offset", 1 << 40), ("offset", -4096), ("offset", 4097), ("nbytes", 64), ("kind", 77)]
)
def test_an_index_that_points_elsewhere_is_not_followed(tmp_path: Path, field: str, value: int) -> None:
    """With a right checksum: what a hostile writer of the folder could leave."""
    from hashlib import sha256

    checkpoint = RandomCheckpoint(small())
    prepare(checkpoint, tmp_path, quiet).close()
    path = only_file(tmp_path)
    good = path.read_bytes()
    place = struct.unpack_from("<Q", good, 16)[0]
    index = msgspec.json.decode(good[place:])
    index["entries"][0][field] = value
    encoded = msgspec.json.encode(index)
    header = good[:12] + struct.pack("<IQ", len(encoded), place) + sha256(encoded).digest() + good[56:92]
    path.write_bytes(header + good[len(header) : place] + encoded)
    prepare(checkpoint, tmp_path, quiet).close()
    assert path.read_bytes() == good


@pytest.fixture
def reboot(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], None]:
    """What a file written before is to a machine that has been started again."""
    boot_id = tmp_path_factory.mktemp("proc") / "boot_id"

    def change() -> None:
        boot_id.write_text(str(uuid.uuid4()))
        monkeypatch.setattr(panel_file, "BOOT_ID_FILE", boot_id)

    return change


def damage_one_weight(path: Path) -> None:
    """Silently: sizes and index stay right."""
    content = bytearray(path.read_bytes())
    content[4096 * 3 + 100] ^= 0xFF
    path.write_bytes(content)


def test_a_crash_that_lost_pages_is_noticed_after_the_boot(tmp_path: Path, reboot: Callable[[], None]) -> None:
    checkpoint = RandomCheckpoint(small())
    prepare(checkpoint, tmp_path, quiet).close()
    path = only_file(tmp_path)
    good = path.read_bytes()
    damage_one_weight(path)
    reboot()
    prepare(checkpoint, tmp_path, quiet).close()
    assert path.read_bytes()[4096:] == good[4096:]


def test_a_whole_file_is_checked_once_per_boot_and_kept(tmp_path: Path, reboot: Callable[[], None]) -> None:
    checkpoint = RandomCheckpoint(small())
    prepare(checkpoint, tmp_path, quiet).close()
    reads, checks = checkpoint.reads, []

    def count(report: Progress) -> None:
        checks.append("checking" in report.detail)

    for expected in (True, False):
        if expected:
            reboot()
        prepare(checkpoint, tmp_path, count).close()
        assert any(checks) is expected
        checks.clear()
    only_file(tmp_path).chmod(0o444)
    tmp_path.chmod(0o555)
    reboot()
    prepare(checkpoint, tmp_path, count).close()
    assert any(checks)
    assert checkpoint.reads == reads


def build_in_child(
    folder: str, barrier: "multiprocessing.synchronize.Barrier", reads: "multiprocessing.Queue[int]"
) -> None:
    checkpoint = RandomCheckpoint(small())
    barrier.wait(30)
    prepare(checkpoint, Path(folder), quiet).close()
    reads.put(checkpoint.reads)


def test_workers_that_start_together_convert_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, reads = context.Barrier(3), context.Queue()
    children = [context.Process(target=build_in_child, args=(str(tmp_path), barrier, reads)) for _ in range(3)]
    for child in children:
        child.start()
    counts = sorted(reads.get(timeout=60) for _ in children)
    for child in children:
        child.join(30)
    assert counts[:2] == [0, 0]
    assert counts[2] == len(RandomCheckpoint(small()).tensors)
    assert {path.suffix for path in tmp_path.iterdir()} == {".panels", ".lock"}


def test_a_waiting_worker_says_so_and_goes_on_when_the_holder_dies(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(small())
    prepare(checkpoint, tmp_path, quiet).close()
    path = only_file(tmp_path)
    path.unlink()
    holder = multiprocessing.get_context("spawn").Process(target=hold_lock, args=(str(path) + ".lock",))
    holder.start()
    while not Path(str(path) + ".held").exists():
        holder.join(0.05)
    waiting = threading.Event()

    def watch(report: Progress) -> None:
        if "another worker" in report.detail and not waiting.is_set():
            waiting.set()
            holder.kill()

    prepare(checkpoint, tmp_path, watch).close()
    holder.join(10)
    assert waiting.is_set()


def hold_lock(path: str) -> None:
    import fcntl
    import time

    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(path.removesuffix(".lock") + ".held").touch()
        time.sleep(60)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(small())
    checkpoint.tensors["model.norm.weight"] = torch.ones(63)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(63,\); the configuration says \(64,\)"):
        prepare(checkpoint, tmp_path, quiet)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_without_a_writable_folder_the_weights_live_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    checkpoint = RandomCheckpoint(small(), torch.bfloat16)
    weights = prepare(checkpoint, blocked / "cache", quiet)
    plan = next(plan for plan in model_plan(checkpoint.config) if plan.name == "layers.1.gate_up")
    assert torch.equal(unpack(weights, plan), plan.read(checkpoint).float())
    assert "this process holds its own copy" in caplog.text
    weights.close()


def test_a_fingerprint_cannot_leave_the_folder(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(small())
    checkpoint.fingerprint = "../../etc/passwd"
    with pytest.raises(InternalError, match="not a hex digest"):
        prepare(checkpoint, tmp_path, quiet)


def test_two_openings_share_the_pages(tmp_path: Path) -> None:
    """File-backed and read-only: the kernel keeps one copy for all workers of the host."""
    checkpoint = RandomCheckpoint(small())
    first, second = prepare(checkpoint, tmp_path, quiet), prepare(checkpoint, tmp_path, quiet)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(only_file(tmp_path)) in line]
    assert len(maps) == 2
    assert all(line.split()[1].startswith("r--") for line in maps)
    first.close()
    second.close()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    inputs=st.integers(1, 70),
    kind=st.sampled_from([PanelKind.BF16, PanelKind.F16, PanelKind.F32]),
    seed=st.integers(0, 9),
)
def test_packing_places_every_element(rows: int, inputs: int, kind: PanelKind, seed: int) -> None:
    tensor = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(DTYPES[kind])
    expected = torch.zeros(padded(rows), padded(inputs), dtype=DTYPES[kind])
    expected[:rows, :inputs] = tensor
    raw = torch.from_numpy(pack(tensor, kind))
    assert torch.equal(read_panels(raw, kind, padded(rows), padded(inputs)), expected)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.0, -0.5, 2.0**127], PanelKind.BF16),
        ([1.0009765625, 65504.0], PanelKind.F16),
        ([1.0009765625, 65536.0], PanelKind.F32),
        ([1.00000012], PanelKind.F32),
    ],
)
def test_the_narrowest_type_is_about_values(values: list[float], kind: PanelKind) -> None:
    assert narrowest(torch.tensor(values)) is kind


class QuantisedCheckpoint(RandomCheckpoint):
    """q, k, v of unlike types; everything else dense."""

    FORMS: ClassVar[dict[str, tuple[int, int]]] = {
        "embed_tokens": (8, 32),
        "q_proj": (4, 32),
        "k_proj": (8, 32),
        "v_proj": (8, 16),
        "up_proj": (4, 32),
        "gate_proj": (4, 32),
        "down_proj": (4, 64),
    }

    def quantised(self, name: str) -> QuantisedTensor | None:
        bits, group = self.FORMS.get(name.split(".")[-2], (0, 0))
        if not bits:
            return None
        rng, (rows, inputs) = np.random.default_rng(len(name)), self.tensors[name].shape
        scale, offset = (rng.standard_normal((2, rows, inputs // group)) * 0.01).astype(np.float16).astype(np.float32)
        codes = rng.integers(0, 1 << bits, (rows, inputs), dtype=np.uint8)
        return QuantisedTensor(codes, scale, offset, group, bits)

    def tensor(self, name: str) -> torch.Tensor:
        parts = self.quantised(name)
        if parts is None:
            return super().tensor(name)
        scale, offset = (np.repeat(part, parts.group, axis=1) for part in (parts.scale, parts.offset))
        return torch.from_numpy(scale * parts.codes.astype(np.float32) + offset)


def test_quantised_matrices_stay_in_codes_and_compute_the_same_bits(tmp_path: Path) -> None:
    checkpoint = QuantisedCheckpoint(small(intermediate_size=64))
    plain = RandomCheckpoint(checkpoint.config)
    plain.tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    plain.fingerprint = "ab" * 20
    weights = prepare(checkpoint, tmp_path, quiet)
    kinds = {name: weights.kind(f"layers.0.{name}") for name in ("qkv", "gate_up", "down", "output")}
    weights.close()
    assert kinds == {
        "qkv": PanelKind.Q8_16,
        "gate_up": PanelKind.Q4,
        "down": PanelKind.F32,
        "output": PanelKind.F32,
    }
    ids = list(range(1, 90))
    outputs = []
    for source in (checkpoint, plain):
        backend = CpuBackend(source, CpuOptions(weights_cache=tmp_path))
        backend.allocate_kv(8, 16)
        outputs.append(backend.forward(flat_batch([(ids, 0)], [range(6)])).clone())
        backend.close()
    assert torch.equal(*outputs)
