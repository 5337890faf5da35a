"""Sizes of tiers that cannot be: refused when the store starts, in words for whoever gave them."""

from pathlib import Path

import pytest

from headwater.clock import RealClock
from headwater.errors import ConfigError
from headwater.kv.stores.disk import DiskOptions, DiskTier
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.ledgered import TierOptions


@pytest.mark.parametrize(
    ("cap_bytes", "words"), [(0, "has no room"), (4095, "has no room"), (99 << 40, "of 99.0 TiB does not fit")]
)
def test_a_host_tier_that_cannot_be_is_refused(cap_bytes: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HostTier(TierOptions(cap_bytes), RealClock())


def test_a_disk_tier_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"may take 1024\.0 TiB: .* are free"):
        DiskTier(DiskOptions(tmp_path / "kv", TierOptions(1 << 50)), RealClock())


def test_a_host_tier_of_one_page_is_one() -> None:
    tier = HostTier(TierOptions(4096), RealClock())
    assert tier.usage().cap_bytes == 4096
    tier.pool.close()
