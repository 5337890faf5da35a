"""What an SGLang engine was started with, as far as we depend on it: out of `/server_info` or its own arguments."""

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from headwater.types import Role

LEAST_PAGE_SIZE = 4
"""Pages smaller than this are not followed one by one: a prompt would be told of, and kept in mind, token by token."""
DISAGGREGATED: Mapping[str, Role] = {"prefill": "prefill", "decode": "decode"}


class SglangSettings(msgspec.Struct, frozen=True):
    """As SGLang names them; what is missing is as in a server that does not know it."""

    version: str = ""
    page_size: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    max_total_num_tokens: int = 0
    """KV tokens of one data-parallel rank."""
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    """Below 1: prompts are not cut."""
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int | None = None
    tokenizer_path: str | None = None
    model_path: str | None = None
    kv_events: dict[str, Any] | None = None
    max_model_len: int | None = None
    """Not SGLang's own word: the longest context, from where it is told."""

    @classmethod
    def read(cls, found: Mapping[str, Any], max_model_len: int | None) -> Self:
        """Raises `msgspec.ValidationError` when the words mean something else by now."""
        return msgspec.convert({**found, "max_model_len": max_model_len}, cls)

    @property
    def block_size(self) -> int | None:
        """Tokens of a block that events name; None: too small to be followed, or unknown."""
        told = self.kv_events.get("block_size") if self.kv_events else None
        size = told if isinstance(told, int) else self.page_size
        return size if size is not None and size >= LEAST_PAGE_SIZE else None

    @property
    def role(self) -> Role | None:
        """The only one it can have; None: any."""
        return DISAGGREGATED.get(self.disaggregation_mode)

    @property
    def bootstrap_port(self) -> int | None:
        """Where servers that decode find this one, if it prefills for them."""
        return self.disaggregation_bootstrap_port if self.role == "prefill" else None
