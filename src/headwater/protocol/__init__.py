"""Structs that cross a process border. msgpack through msgspec; nothing is ever unpickled.

Rules for change: structs sent as maps may gain fields with a default; structs sent as arrays may gain
fields at the end with a default; nothing is renamed, retyped or reordered within a major version.
`PROTOCOL_VERSION` is (major, minor): peers with the same major and adjacent minors work together.
"""

PROTOCOL_VERSION = (1, 1)
