"""Where a node's store listens, for those who only want to find it."""

import os
import tempfile
from pathlib import Path

SOCKET_NAME = "kv.sock"


def default_socket() -> Path:
    """Where this user's store of the node listens unless told otherwise; the folder is closed to others."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"headwater-{os.geteuid()}" / SOCKET_NAME
