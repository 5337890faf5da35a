"""The object tier against real servers: S3 on SeaweedFS, Azure Blob on Azurite."""

import itertools
from dataclasses import replace

import pytest

from headwater.kv.stores.base import TierStore
from headwater.kv.stores.conformance import PAYLOAD_BYTES, ROOM_BLOCKS, TierConformance
from headwater.kv.stores.object.options import parse_object_url
from headwater.kv.stores.object.tier import ObjectTier
from object_servers import ObjectServer
from object_tier_parts import flip_payload_bit

_RUN_BYTES = 8 * PAYLOAD_BYTES
_numbers = itertools.count()


class ServedTierConformance(TierConformance):
    server: ObjectServer

    async def open_tier(self) -> TierStore:
        options = replace(
            parse_object_url(self.server.url(f"conformance/{next(_numbers)}"), owner="node-a"),
            cap_bytes=2 * ROOM_BLOCKS * (PAYLOAD_BYTES + 128),
            min_object_bytes=_RUN_BYTES,
            target_object_bytes=_RUN_BYTES,
        )
        return ObjectTier(options)

    async def damage(self, tier: TierStore, block_id: bytes) -> None:
        assert isinstance(tier, ObjectTier)
        flip_payload_bit(tier, block_id)

    async def upkeep(self, tier: TierStore) -> None:
        assert isinstance(tier, ObjectTier)
        await tier._upkeep._look()

    def use(self, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)


class TestSeaweedFS(ServedTierConformance):
    @pytest.fixture(autouse=True)
    def _server(self, s3_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(s3_server, monkeypatch)


class TestAzurite(ServedTierConformance):
    @pytest.fixture(autouse=True)
    def _server(self, azure_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(azure_server, monkeypatch)
