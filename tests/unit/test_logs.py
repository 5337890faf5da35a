"""Log lines: fields kept, secrets masked, nothing forged."""

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from headwater.config.schema import RuntimeConfig
from headwater.logs import configure_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def configured(log_format: str, **options: object) -> io.StringIO:
    stream = io.StringIO()
    runtime = RuntimeConfig(log_format=log_format, log_level="info")  # type: ignore[arg-type]
    configure_logging(runtime, "worker-0", stream, **options)  # type: ignore[arg-type]
    return stream


def test_text_lines_carry_level_name_message_and_fields() -> None:
    stream = configured("text")
    logging.getLogger("headwater.x").warning("lost %d", 3, extra={"request_id": "req-1"})
    logging.getLogger("headwater.x").debug("unseen")
    assert stream.getvalue().endswith(" WARNING headwater.x: lost 3 request_id=req-1\n")


def test_json_lines_carry_the_same() -> None:
    stream = configured("json")
    logging.getLogger("headwater.x").info("ready", extra={"request_id": "req-1", "message_count": 2})
    entry = json.loads(stream.getvalue())
    assert (entry["level"], entry["part"], entry["logger"]) == ("info", "worker-0", "headwater.x")
    assert (entry["message"], entry["request_id"], entry["message_count"]) == ("ready", "req-1", 2)
    assert entry["time"].endswith("Z")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_secrets_are_masked_wherever_they_occur(log_format: str) -> None:
    stream = configured(log_format, secrets=['sk-"quoted"', "sk-long-key", "sk-long"])
    log = logging.getLogger("headwater.x")
    log.info("key sk-long-key and %s", 'sk-"quoted"', extra={"key": "sk-long"})
    log.info("Authorization: Bearer abc.DEF-123")
    try:
        raise ValueError("refused sk-long-key")
    except ValueError:
        log.exception("failed")
    text = stream.getvalue()
    for secret in ("sk-long", "quoted", "abc.DEF-123"):
        assert secret not in text
    assert "ValueError: refused ***" in text


def test_a_message_cannot_forge_a_line() -> None:
    stream = configured("text")
    logging.getLogger("x").info("model %s", "a\n12:00:00 ERROR   forged: \x1b[31mred\u2028x")
    assert len(stream.getvalue().splitlines()) == 1
    assert "\\x0a" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_tracebacks_keep_their_lines_in_text_and_are_one_field_in_json() -> None:
    for log_format, lines in (("text", 5), ("json", 1)):
        stream = configured(log_format)
        try:
            raise RuntimeError("broken")
        except RuntimeError:
            logging.getLogger("x").exception("failed")
        assert len(stream.getvalue().splitlines()) == lines
        assert "RuntimeError: broken" in stream.getvalue()


def test_warnings_become_log_lines() -> None:
    stream = configured("text")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "py.warnings" in stream.getvalue()
