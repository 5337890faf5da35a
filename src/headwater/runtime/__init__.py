"""How processes find and talk to each other: registry, request plane, event plane. Each has an in-process twin."""
