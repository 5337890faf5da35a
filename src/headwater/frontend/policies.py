"""From the name of a routing policy to the policy: built in, or an entry point in `headwater.router`."""

import difflib
from importlib.metadata import entry_points

from headwater.errors import ConfigError
from headwater.router.policies import BUILTIN
from headwater.router.policy import Policy

ENTRY_POINT_GROUP = "headwater.router"


def load_policy(name: str) -> Policy:
    """Raises `ConfigError` for a name nobody offers."""
    builtin = BUILTIN.get(name)
    if builtin is not None:
        return builtin()
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in plugins:
        policy: Policy = plugins[name].load()()
        return policy
    known = sorted({*BUILTIN, *plugins})
    near = difflib.get_close_matches(name, known, n=1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"--router-policy {name} is not known", hint=f"{suggestion}Known: {', '.join(known)}")
