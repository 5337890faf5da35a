"""One configuration: file, environment and flags are three spellings of the same frozen model."""
