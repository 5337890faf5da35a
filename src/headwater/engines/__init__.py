"""Engines behind one contract (`base`). Adapters are imported only when chosen."""
