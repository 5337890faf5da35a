"""Back-ends: each an adapter between `headwater.transfer.base` and one way to move bytes. None knows another."""
