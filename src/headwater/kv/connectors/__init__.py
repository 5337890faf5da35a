"""The node's store attached to stock engines, one module per engine, loaded by the engine by name."""
