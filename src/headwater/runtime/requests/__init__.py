"""The request plane: frontends submit and abort, workers send one frame per step. `base` is the contract."""
