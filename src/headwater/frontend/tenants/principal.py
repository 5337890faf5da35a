"""Who a request speaks for, once that is known."""

from dataclasses import dataclass

from headwater.frontend.tenants.keyring import Scope


@dataclass(frozen=True, slots=True)
class Principal:
    scopes: frozenset[Scope]
    key_id: str = ""
    """Fit to be shown; empty for whoever comes without a key."""
    tenant: str = ""
    kv_group: str = ""
    """Cached prefixes are shared within a group; empty: with everybody who has none."""
    kv_share: float = 1.0

    def salt(self, given: str) -> str:
        """What the block ids are salted with: the group, and whatever the client adds. Different pairs never meet."""
        if not self.kv_group:
            return f"0::{given}" if given else ""
        return f"{len(self.kv_group)}:{self.kv_group}:{given}"


NOBODY = Principal(frozenset())
