"""Whether the SGLang that is installed is one that this was written for. SGLang is imported when an engine starts."""

import re
from importlib.metadata import PackageNotFoundError, version

from headwater.errors import ConfigError

KNOWN = (0, 5, 23)
"""The only release whose source this was checked against; `pip install 'headwater[sglang]'` brings it."""
_HINT = f"pip install 'sglang=={'.'.join(map(str, KNOWN))}', or attach a running server of any 0.5: --attach URL"


def check_installed() -> str:
    """Its version. Raises `ConfigError`."""
    try:
        found = version("sglang")
    except PackageNotFoundError as error:
        raise ConfigError("--engine sglang needs SGLang, which is not installed here", hint=_HINT) from error
    if _release(found) != KNOWN:
        known = ".".join(map(str, KNOWN))
        raise ConfigError(f"SGLang {found} is installed: --engine sglang is written for {known} alone", hint=_HINT)
    return found


def _release(found: str) -> tuple[int, ...]:
    """Its three numbers: what follows them (a post-release, a build) does not matter."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)(?!rc|a|b|\.dev)", found)
    return tuple(int(number) for number in numbers.groups()) if numbers is not None else ()
