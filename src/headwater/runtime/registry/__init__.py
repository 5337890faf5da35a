"""Who is alive and what they serve. `base` is the contract; `memory` and `file` implement it."""
