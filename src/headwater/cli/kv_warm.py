"""`headwater kv warm --prompts FILE`: a server computes prompts, so that their blocks are there before traffic comes.

The whole file is read and checked before anything is sent: a mistake in its last line costs nothing.
"""

import json
from pathlib import Path
from typing import Any

from headwater.cli.chat import first_model
from headwater.cli.http import Server, error_message
from headwater.errors import ConfigError, StoreError

Prompts = list[tuple[int, dict[str, Any]]]
"""Number of the line, and the request in it."""


def read_prompts(path: Path) -> Prompts:
    """Raises `ConfigError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    return [(number, _request(path, number, line)) for number, line in enumerate(lines, start=1) if line.strip()]


def compute(server: Server, prompts: Prompts) -> None:
    """One after the other. Raises `StoreError` at the first that the server refuses."""
    model = first_model(server)
    for number, request in prompts:
        body = {"model": model, "max_tokens": 1, **request}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        status, answer = server.ask("POST", path, body)
        if status != 200:
            raise StoreError(f"line {number}: {server.url} answers {status}: {error_message(answer)}")


def _request(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict) or not ({"messages", "prompt"} & request.keys()):
        raise ConfigError(f"--prompts {path}: line {number} is no JSON object with `messages` or `prompt`")
    return request
