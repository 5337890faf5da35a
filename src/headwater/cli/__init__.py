"""The `headwater` command: one file per verb."""
