"""All back-ends that this machine has against the contract."""

from pathlib import Path

import pytest

from headwater.transfer.agent import Agent
from headwater.transfer.backends.nixl import NixlBackend
from headwater.transfer.base import Backend
from headwater.transfer.card import Access
from headwater.transfer.conformance import BLOCK, TransferConformance
from headwater.transfer.regions import Region


class TestSharedTransfer(TransferConformance):
    backend = "shm"


class TestCmaTransfer(TransferConformance):
    backend = "cma"

    def remote_region(self, agent: Agent, num_bytes: int, access: Access = "both") -> Region:
        return agent.register(bytearray(num_bytes), block_bytes=BLOCK, access=access)


class TestTcpTransfer(TransferConformance):
    backend = "tcp"

    def remote_region(self, agent: Agent, num_bytes: int, access: Access = "both") -> Region:
        return agent.register(bytearray(num_bytes), block_bytes=BLOCK, access=access)


@pytest.mark.skipif(bool(NixlBackend().unavailable()), reason="NIXL is not installed")
class TestNixlTransfer(TransferConformance):
    backend = "nixl"

    def backends(self) -> list[Backend]:
        return [NixlBackend(needs_rdma=False)]


class TestFileTransfer(TransferConformance):
    backend = "file"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.files: dict[int, Path] = {}

    def remote_region(self, agent: Agent, num_bytes: int, access: Access = "both") -> Region:
        path = self.folder / f"{agent.generation}-{len(self.files)}"
        path.write_bytes(bytes(num_bytes))
        region = agent.register(path, block_bytes=BLOCK, access=access)
        self.files[id(region)] = path
        return region

    def contents(self, region: Region) -> bytes:
        return self.files[id(region)].read_bytes()

    def fill(self, region: Region, data: bytes) -> None:
        with self.files[id(region)].open("r+b") as file:
            file.write(data)
