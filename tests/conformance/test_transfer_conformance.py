"""All back-ends that this machine has against the contract."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headwater.transfer.agent import Agent
from headwater.transfer.backends.cuda import CudaBackend
from headwater.transfer.backends.nixl import NixlBackend
from headwater.transfer.base import Backend
from headwater.transfer.card import Access
from headwater.transfer.conformance import BLOCK, TransferConformance
from headwater.transfer.options import AgentOptions
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


class TestSealedTransfer(TestTcpTransfer):
    def options(self) -> AgentOptions:
        return dataclasses.replace(super().options(), encrypt=True)


@pytest.mark.skipif(bool(NixlBackend().unavailable()), reason="NIXL is not installed")
class TestNixlTransfer(TransferConformance):
    backend = "nixl"

    def backends(self) -> list[Backend]:
        return [NixlBackend(needs_rdma=False)]


@pytest.mark.skipif(bool(CudaBackend().unavailable()), reason="there is no CUDA device")
class TestCudaTransfer(TransferConformance):
    backend = "cuda"

    @pytest.fixture(autouse=True)
    def _tensors(self) -> None:
        self.tensors: dict[int, Any] = {}

    def remote_region(self, agent: Agent, num_bytes: int, access: Access = "both") -> Region:
        import torch

        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        region = agent.register(tensor, block_bytes=BLOCK, access=access)
        self.tensors[id(region)] = tensor
        return region

    def contents(self, region: Region) -> bytes:
        return self.tensors[id(region)].cpu().numpy().tobytes()

    def fill(self, region: Region, data: bytes) -> None:
        import torch

        self.tensors[id(region)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        torch.cuda.synchronize()

    def test_damage_is_noticed_by_checksums(self) -> None:
        pytest.skip("checksums of device memory would have to cross the bus")


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
