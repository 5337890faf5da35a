"""Every parser of bytes from outside: how to call it, what it may raise, and honest inputs to begin from.

Used by `tests/unit/test_fuzz_parsers.py` for a moment in every run, and by `bench/fuzz/run.py` for as long as wanted.
Whatever a target raises beyond `HeadwaterError` and `BadHead` is a bug, as is running or growing without a bound.
"""

import contextlib
import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headwater.clock import VirtualClock
from headwater.engines.attached.dialects.sglang import SglangDialect
from headwater.engines.attached.dialects.trtllm import TrtllmReader, Words
from headwater.engines.kv_feed.drained import DrainedEvents
from headwater.engines.kv_feed.translate import FeedTranslator
from headwater.engines.kv_feed.wire import ForeignBatch, decode_batch
from headwater.errors import HeadwaterError, ProtocolError
from headwater.frontend.http.head import BadHead
from headwater.frontend.http.limits import HttpLimits
from headwater.frontend.http.reader import RequestReader
from headwater.frontend.media.guard import MediaPolicy, check_url
from headwater.frontend.openai.parse import Shape, parse_body
from headwater.frontend.openai.schema import ChatRequest, CompletionRequest
from headwater.frontend.preprocess.template import ChatTemplate
from headwater.frontend.tenants.keyring import Keyring, KeySpec, TenantSpec, decode_keyring, encode_keyring
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.lifecycle import Ledger
from headwater.kv.node import wire as kv_wire_messages
from headwater.kv.policies import make_policy
from headwater.kv.reservations import Refusal
from headwater.kv.rules import Rules
from headwater.kv.shares import Shares
from headwater.kv.space import Space
from headwater.kv.stores.disk_files import DiskFiles, Manifest
from headwater.kv.stores.object.ledger import Ledger as ObjectLedger
from headwater.kv.stores.object.ledger import Owned
from headwater.kv.stores.object.runs import DamagedRun, decode_header, encode_header, run_shape
from headwater.kv.table import RECORD_BYTES, BlockTable, Record, index_bytes
from headwater.protocol import PROTOCOL_VERSION
from headwater.protocol.events import EventBatch
from headwater.protocol.frames import Abort, FrontendFrame, Hello, StepFrame, Submit, Welcome, WorkerFrame
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.runtime.cluster_keys import decode_cluster_keys, encode_cluster_keys, new_cluster, split_key
from headwater.runtime.events import wire as events_wire
from headwater.runtime.wire import join_frames
from headwater.transfer import wire as transfer_wire
from headwater.transfer.backends.tcp import _checked
from headwater.transfer.card import AgentCard, decode_card, encode_card
from headwater.transfer.regions import RegionTable
from headwater.weights.gguf import read_gguf

EXPECTED = (HeadwaterError, BadHead, msgspec.DecodeError)


@dataclass(frozen=True)
class FuzzTarget:
    call: Callable[[bytes], object]
    seeds: list[bytes] = field(default_factory=list)

    def run(self, data: bytes) -> None:
        """Raises what is not expected."""
        try:
            self.call(data)
        except EXPECTED:
            return


def http_head_and_body(data: bytes) -> None:
    piece = data[0] % 64 + 1 if data else 1
    reader = RequestReader(HttpLimits(max_body_bytes=10_000), lambda request, keep_alive, http10: None)
    for at in range(1, len(data), piece):
        reader.feed(data[at : at + piece])


def frontend_frames(data: bytes) -> None:
    _frontend_frames.decode(data)


def worker_frames(data: bytes) -> None:
    _worker_frames.decode(data)


def events(data: bytes) -> None:
    for decode in (events_wire.decode_ask, events_wire.decode_answer, events_wire.decode_batch):
        try:
            decode(data)
        except msgspec.DecodeError:
            continue


def foreign_events(data: bytes) -> None:
    """Of an engine that is not ours, as far as they get here."""
    FeedTranslator("fp", "layout", 4).apply(decode_batch(data))


def sglang_answer(data: bytes) -> None:
    request = EngineRequest(1, "r", "m", bytes(4), SamplingParams(logprobs=1, ignore_eos=True, stop_token_ids=[9]))
    reader = SglangDialect().reader(request)
    for event in data.split(b"\n"):
        reader.read(event)


class _Translated:
    """A `FeedSink`."""

    def __init__(self) -> None:
        self._translator = FeedTranslator("fp", "layout", 4)

    def on_batch(self, batch: ForeignBatch) -> None:
        self._translator.apply(batch)

    def on_lost(self, reason: str) -> None:
        self._translator.clear()


def drained_events(data: bytes) -> None:
    """Of TensorRT-LLM: what cannot be read is lost, and nothing is raised."""
    documents = msgspec.json.decode(data)
    DrainedEvents(_Translated(), 4).take(documents if isinstance(documents, list) else [documents])


def trtllm_answer(data: bytes) -> None:
    reader = TrtllmReader(1, 1, Words({"a": 1}, frozenset([2])))
    for event in data.split(b"\n"):
        reader.read(event)


def transfer_messages(data: bytes) -> None:
    for decoder in (transfer_wire.GREETINGS, transfer_wire.CONTROLS, transfer_wire.DATAS):
        try:
            message = decoder.decode(data)
        except msgspec.DecodeError:
            continue
        if isinstance(message, transfer_wire.Fetch | transfer_wire.Store):
            _checked(_regions().find(1), message)


def transfer_card(data: bytes) -> None:
    decode_card(data)


def gguf_header(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        read_gguf(Path(file.name))


def safetensors_header(data: bytes) -> None:
    from headwater.engines.native.checkpoints import safetensors

    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        opened = safetensors._open(Path(file.name))
        for name in safetensors._names(opened):
            safetensors._shape(opened, name)


def chat_template(data: bytes) -> None:
    template = ChatTemplate(data.decode("utf-8", "replace"), {}, VirtualClock())
    template.render([{"role": "user", "content": "hi"}], tools=None)


def chat_body(data: bytes) -> None:
    parse_body(_chat_shape, data, strict=False)


def completion_body(data: bytes) -> None:
    parse_body(_completion_shape, data, strict=True)


def keyring(data: bytes) -> None:
    decode_keyring(data, "fuzz")


def cluster_keys(data: bytes) -> None:
    decode_cluster_keys(data, "fuzz")
    split_key(data.decode("latin-1"))


def kv_wire(data: bytes) -> None:
    for frame in kv_wire_messages.Frames().feed(data):
        for decode in (kv_wire_messages.decode_request, kv_wire_messages.decode_answer):
            try:
                decode(frame)
            except ProtocolError:
                continue


def kv_disk_index(data: bytes) -> None:
    """The records of a disk tier, read as after a crash; then the tier is used."""
    records = bytearray(_KV_RECORDS * RECORD_BYTES)
    records[: len(data)] = data[: len(records)]
    table = BlockTable(memoryview(records), memoryview(bytearray(index_bytes(_KV_RECORDS))))
    policy = make_policy("s3fifo", _KV_RECORDS, Shares.num_groups, lambda slot: 1.0)
    ledger = Ledger("disk", table, Space(64 << 10, 16 << 10), policy, Shares(), Rules(max_reserved=1.0))
    ledger.recover([_KV_FAMILY, _KV_FAMILY], {"somebody": 0.5})
    ledger.check()
    blocks = [Block(bytes([number]) * 16, ROOT, number, 0) for number in range(24)]
    ticket, slots = ledger.reserve(1, _KV_FAMILY, blocks, 0.0)
    assert any(isinstance(slot, int) or slot is Refusal.PRESENT for slot in slots), "no room, and nobody has it"
    ledger.commit(1, ticket, {slot: 1 for slot in slots if isinstance(slot, int)}, 1)
    ledger.check()
    assert sum(ledger.clear()) == 24 or ledger.table.num_blocks == 0


def kv_disk_manifest(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "manifest").write_bytes(data)
        files = DiskFiles(folder, 2 << 20, 64, direct=False)
        Space(files.sizes.data_bytes, files.sizes.chunk_bytes)
        assert files.used_bytes() <= 2 << 20
        files.close()


def kv_object(data: bytes) -> None:
    """What a bucket holds: a run's header, and the ledger of a node."""
    shape = run_shape(_KV_FAMILY, min_bytes=8192, target_bytes=8192)
    with contextlib.suppress(DamagedRun):
        decode_header(shape, data[-16:], data)
    ledger = ObjectLedger()
    ledger.merge(data)
    ledger.regroup()
    assert ledger.used_bytes == sum(owned.num_bytes for _, owned in ledger.written_before(float("inf")))


def media_url(data: bytes) -> None:
    check_url(data.decode("utf-8", "replace"), MediaPolicy(), param="url")


_chat_shape, _completion_shape = Shape.of(ChatRequest, {}), Shape.of(CompletionRequest, {})
_frontend_frames = msgspec.msgpack.Decoder(list[FrontendFrame])
_worker_frames = msgspec.msgpack.Decoder(list[WorkerFrame])


def _regions() -> RegionTable:
    """One region of 4 KiB."""
    from headwater.transfer.memory import buffer_of

    table = RegionTable("fuzz", 1)
    table.add(buffer_of(bytearray(4096)), "memory", name="r", block_bytes=64, access="both")
    return table


_KV_RECORDS = 32
_KV_FAMILY = Family("m", "l", "", 4096)


def _kv_records() -> bytes:
    records = bytearray(8 * RECORD_BYTES)
    table = BlockTable(memoryview(records), memoryview(bytearray(index_bytes(8))))
    for number in range(6):
        block = Block(bytes([number + 100]) * 16, ROOT, number, 7)
        table.insert(table.take(), Record(block, number * 4096, 4096, 5, number % 2))
    return bytes(records)


def _kv_run() -> bytes:
    blocks = [Block(bytes([1]) * 16, ROOT, 0, 7), Block(bytes([2]) * 16, bytes([1]) * 16, 1, 7)]
    return encode_header(run_shape(_KV_FAMILY, min_bytes=8192, target_bytes=8192), blocks)


def _kv_ledger() -> bytes:
    shares = Shares()
    shares.limit("acme", 0.25)
    ledger = ObjectLedger(shares)
    for number in range(4):
        ledger.add(bytes([number]) * 16, Owned(f"runs/{number % 2:032x}/2/", 8192, 5), ("", "acme")[number % 2])
    return ledger.encode()


def _frames(*frames: Any) -> bytes:
    return join_frames([msgspec.msgpack.encode(frame) for frame in frames])


def _gguf_seed() -> bytes:
    key, value = b"general.architecture", b"llama"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    name = b"token_embd.weight"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + pair + tensor
    return head + bytes(-len(head) % 32) + bytes(64)


def _safetensors_seed() -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


_REQUEST = EngineRequest(1, "r", "m", bytes(16), SamplingParams(max_tokens=3))
_CARD = AgentCard(1, "agent", 1, "boot", host="127.0.0.1", port=1, backends=["tcp"])
_RING = Keyring("headwater-keyring", 1, {"a": TenantSpec(weight=2.0)}, {"0" * 8: KeySpec("a", "0" * 64)})
_CHAT = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stream": True}

TARGETS: dict[str, FuzzTarget] = {
    "http": FuzzTarget(
        http_head_and_body,
        [
            b"\x40POST /v1/x?a=b HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabcGET / HTTP/1.0\r\n\r\n",
            b"\x07POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nt: 1\r\n\r\n",
            b"\x01GET http://a/x HTTP/1.1\r\nHost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        ],
    ),
    "foreign_events": FuzzTarget(
        foreign_events,
        [
            msgspec.msgpack.encode(
                [
                    1.5,
                    [
                        {
                            "type": "BlockStored",
                            "block_hashes": [-7, 8],
                            "parent_block_hash": None,
                            "token_ids": [*range(8)],
                            "block_size": 4,
                            "medium": "GPU",
                            "cache_salt": "hw:00",
                            "lora_name": "tuned",
                        },
                        ["BlockStored", [9], 8, [1, 2, 3, 4], 4, None],
                        {"type": "BlockRemoved", "block_hashes": [8]},
                        ["AllBlocksCleared"],
                    ],
                    0,
                ]
            )
        ],
    ),
    "drained_events": FuzzTarget(
        drained_events,
        [
            json.dumps(
                [
                    {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [4]}, "window_size": 64},
                    {
                        "event_id": 1,
                        "data": {
                            "type": "stored",
                            "parent_hash": None,
                            "blocks": [
                                {
                                    "block_hash": 7,
                                    "tokens": [{"token_id": token, "token_extra_id": 0} for token in range(4)],
                                    "cache_level": 0,
                                    "cache_salt": "s",
                                }
                            ],
                        },
                        "window_size": 64,
                    },
                    {"event_id": 2, "data": {"type": "updated", "block_hash": 7, "cache_level": {"new_value": 1}}},
                    {"event_id": 3, "data": {"type": "removed", "block_hashes": [7]}},
                ]
            ).encode()
        ],
    ),
    "trtllm_answer": FuzzTarget(
        trtllm_answer,
        [
            b'{"choices": [{"token_ids": [1], "logprobs": {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs":'
            b' [{"a": -1.0}]}}], "usage": {"prompt_tokens_details": {"cached_tokens": 4}}}\n'
            b'{"choices": [{"token_ids": [2], "finish_reason": "stop", "stop_reason": 2, "logprobs": {"tokens": ["b"],'
            b' "token_logprobs": [-1.0]}}]}\n[DONE]'
        ],
    ),
    "sglang_answer": FuzzTarget(
        sglang_answer,
        [
            b'{"output_ids":[5],"meta_info":{"output_token_logprobs":[[-0.1,5,null]],"cached_tokens":3}}\n'
            b'{"output_ids":[5,9],"meta_info":{"finish_reason":{"type":"stop","matched":9},'
            b'"output_token_logprobs":[[-0.1,5,null],[null,9,"x"]],"output_top_logprobs":[[[-0.1,5,null]],null]}}\n[DONE]',
            b'{"error":{"message":"no","code":400}}',
        ],
    ),
    "chat_body": FuzzTarget(chat_body, [json.dumps(_CHAT).encode()]),
    "completion_body": FuzzTarget(
        completion_body, [b'{"model": "m", "prompt": [1, 2], "n": 2, "logit_bias": {"5": 1}}']
    ),
    "frontend_frames": FuzzTarget(
        frontend_frames, [_frames(Hello("fe", PROTOCOL_VERSION), Submit([_REQUEST]), Abort([1]))]
    ),
    "worker_frames": FuzzTarget(
        worker_frames, [_frames(Welcome("w", PROTOCOL_VERSION), StepFrame([SequenceOutput(1, [2, 3], "stop")]))]
    ),
    "events": FuzzTarget(
        events,
        [
            msgspec.msgpack.encode(events_wire.Join()),
            msgspec.msgpack.encode(events_wire.Recall(1, 2)),
            msgspec.msgpack.encode(EventBatch("w", 1, 1, 0.0, [])),
        ],
    ),
    "transfer_messages": FuzzTarget(
        transfer_messages,
        [
            msgspec.msgpack.encode(transfer_wire.Hello(1, "a", 1, "b", 1, "data", bytes(32))),
            msgspec.msgpack.encode(transfer_wire.Fetch(1, struct.pack("<4Q", 0, 64, 128, 64))),
            msgspec.msgpack.encode(transfer_wire.Store(1, struct.pack("<2Q", 4032, 64), 64)),
            msgspec.msgpack.encode(transfer_wire.Done(b"t", b"p")),
        ],
    ),
    "transfer_card": FuzzTarget(transfer_card, [encode_card(_CARD)]),
    "gguf": FuzzTarget(gguf_header, [_gguf_seed()]),
    "safetensors": FuzzTarget(safetensors_header, [_safetensors_seed()]),
    "template": FuzzTarget(
        chat_template,
        [
            b"{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}",
            b"{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages[0].content.split('h')[-1] ~ 'x' }}",
            b"{% macro f(a, b=2) %}{% set ns = namespace(x=a) %}{{ ns.x + b }}{% endmacro %}{{ f(1) }}",
        ],
    ),
    "keyring": FuzzTarget(keyring, [encode_keyring(_RING)]),
    "cluster_keys": FuzzTarget(cluster_keys, [encode_cluster_keys(new_cluster("a"))]),
    "kv_wire": FuzzTarget(
        kv_wire,
        [
            b"".join(
                kv_wire_messages.encode(message)
                for message in (
                    kv_wire_messages.Hello(1, kv_wire_messages.VERSION, "a", follow=True),
                    kv_wire_messages.Reserve(2, kv_wire_messages.Chain(_KV_FAMILY, bytes(32), 0, ROOT)),
                    kv_wire_messages.Limit(3, "a", 0.5),
                    kv_wire_messages.Leased(4, 1, 0, [1, 2], [0, 4096], [7, 8]),
                )
            )
        ],
    ),
    "kv_disk_index": FuzzTarget(kv_disk_index, [_kv_records()]),
    "kv_disk_manifest": FuzzTarget(
        kv_disk_manifest, [msgspec.json.encode(Manifest(1, 1 << 20, [_KV_FAMILY, _KV_FAMILY], {"acme": 0.25}))]
    ),
    "kv_object": FuzzTarget(kv_object, [_kv_run(), _kv_ledger()]),
    "media_url": FuzzTarget(media_url, [b"https://user:x@example.org:443/a?b#c", b"https://[::ffff:7f00:1]/"]),
}
