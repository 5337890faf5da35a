import io
import json
import logging
import os
import shlex
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from rich.console import Console

from headwater.cli.log_writer import LogWriter
from headwater.cli.serve_display import ServeDisplay, curl_command, describe, prefix, print_ready
from headwater.config.schema import FrontendConfig, RuntimeConfig, ServeConfig
from headwater.deploy.actions import Part
from headwater.deploy.reports import FailureReport, ProgressReport, Reporter, decode_report
from headwater.engines.base import Progress
from headwater.errors import ModelError
from headwater.logs import configure_logging
from headwater.protocol.cluster import Instance, ModelCard

F0, W0 = Part("frontend", 0), Part("worker", 0)
CARD = ModelCard(
    name="m",
    served_names=["m", "alias"],
    fingerprint="f",
    architecture="LlamaForCausalLM",
    dtype="float32",
    kv_layout="k",
    max_model_len=8192,
    block_size=16,
    vocab_size=100,
)


def instance(number: int, **changes: Any) -> Instance:
    made = Instance(
        worker_id=f"w{number}",
        role="both",
        state="ready",
        card=CARD,
        request_address="",
        event_address="",
        engine="native",
        version=(1, 0),
        kv_blocks=1000,
    )
    return msgspec.structs.replace(made, **changes)


class Blockable(io.BytesIO):
    """A stream that can be held up, like a terminal after Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, data: object) -> int:
        assert self.go.wait(10)
        return super().write(data)  # type: ignore[arg-type]


def test_a_stream_that_is_held_up_costs_lines_not_time() -> None:
    stream = Blockable()
    writer = LogWriter(stream, max_pending_bytes=100)
    for number in range(50):
        writer.lines([b"line %d" % number, b"and more"])
    stream.go.set()
    writer.close()
    lines = stream.getvalue().decode().splitlines()
    dropped = int(lines[-1].split()[0].removeprefix("("))
    assert len(lines) - 1 + dropped == 100
    assert dropped >= 80
    assert lines[0] == "line 0"


def test_a_stream_that_broke_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb", buffering=0) as stream:
        writer = LogWriter(stream)  # type: ignore[arg-type]
        writer.lines([b"lost"])
        writer.close()


@pytest.fixture
def logged() -> Iterator[io.BytesIO]:
    """What the display writes, with logging set up as `serve` does."""
    before = logging.getLogger().handlers[:], logging.getLogger().level
    yield io.BytesIO()
    logging.basicConfig(handlers=before[0], level=before[1], force=True)
    logging.captureWarnings(False)


def shown(stream: io.BytesIO, runtime: RuntimeConfig) -> list[str]:
    json_logs = runtime.log_format == "json"
    writer = LogWriter(stream, b"" if json_logs else prefix("supervisor", [F0, W0]))
    configure_logging(runtime, "supervisor", writer)
    display = ServeDisplay(writer, [F0, W0], lambda: None, lambda failure: None, json_logs=json_logs, live_on=None)
    for done in (1, 2, 3):
        display.on_progress(W0, ProgressReport("download", done * 1024**3, 4 * 1024**3, "bytes", "model.gguf"))
    display.on_progress(W0, ProgressReport("warm"))
    display.on_log(W0, [b"a plain line"])
    display.on_log(F0, [b'{"part": "frontend-0"}'])
    display.on_restarting(W0, "killed by SIGKILL", 0.5)
    display.on_gave_up(W0, "boom")
    display.on_stopping("asked to stop")
    writer.close()
    return stream.getvalue().decode().splitlines()


def test_lines_carry_the_part_and_progress_is_thinned_out(logged: io.BytesIO) -> None:
    lines = shown(logged, RuntimeConfig())
    assert [line.partition(" | ")[0].rstrip() for line in lines] == [
        *("supervisor", "supervisor", "worker-0", "frontend-0", "supervisor", "supervisor", "supervisor")
    ]
    assert "worker-0: downloading 1.0 GiB of 4.0 GiB (25 %), model.gguf" in lines[0]
    assert "worker-0: warming up" in lines[1]
    assert lines[2].endswith("| a plain line")
    assert "worker-0 died: killed by SIGKILL; starting it again in 0.5 s" in lines[4]
    assert "worker-0 is given up: boom" in lines[5]


def test_json_lines_stay_json(logged: io.BytesIO) -> None:
    lines = shown(logged, RuntimeConfig(log_format="json"))
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(entries) == len(lines) - 1, "all but the plain line of a part"
    assert entries[0]["part"] == "supervisor"
    assert {entry.get("level") for entry in entries} == {"info", "warning", "error", None}


def test_on_a_terminal_progress_is_a_region_and_lines_pass_above_it() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    raw = io.BytesIO()
    writer = LogWriter(raw)
    ready = threading.Event()
    display = ServeDisplay(writer, [F0, W0], ready.set, lambda failure: None, json_logs=False, live_on=console)
    display.on_progress(W0, ProgressReport("load", 1, 2, "bytes"))
    writer.lines([b"during [bold]start-up[/]"])
    while "start-up" not in text.getvalue():
        threading.Event().wait(0.01)
    display.on_serving()
    assert ready.is_set()
    writer.lines([b"afterwards"])
    writer.close()
    assert "loading" in text.getvalue()
    assert "[bold]start-up[/]" in text.getvalue()
    assert raw.getvalue() == b"afterwards\n"


def test_the_table_and_the_command_at_the_end() -> None:
    out = io.StringIO()
    config = ServeConfig(frontend=FrontendConfig(api_key=("very-secret",)), frontends=2)
    print_ready(out, config, "http://127.0.0.1:8000", [instance(0), instance(1)], 4.2)
    text = out.getvalue()
    for part in ("ready in 4.2 s", "m, alias", "float32", "1,000 x 16 tokens", "8,192 tokens", "API key required"):
        assert part in text
    assert "very-secret" not in text


def test_the_table_leaves_out_workers_that_are_on_their_way() -> None:
    out = io.StringIO()
    card = msgspec.structs.replace(CARD, name="", served_names=[], architecture="", dtype="")
    late = instance(0, state="starting", card=card, kv_blocks=0)
    print_ready(out, ServeConfig(workers=2), "http://127.0.0.1:8000", [late, instance(1)], 4.2)
    text = out.getvalue()
    assert text.count("architecture") == 1
    assert "1 of 2 so far" in text
    assert '"model": "m"' in text


def test_the_table_counts_workers_by_their_roles_where_they_differ() -> None:
    out = io.StringIO()
    instances = [instance(0, role="prefill"), instance(1, role="decode"), instance(2, role="decode")]
    print_ready(out, ServeConfig(workers=3), "http://127.0.0.1:8000", instances, 4.2)
    assert "3 (2 decode, 1 prefill)" in out.getvalue()


def test_keys_of_a_file_are_required_as_well() -> None:
    out = io.StringIO()
    config = ServeConfig(frontend=FrontendConfig(keys="keys.json"))
    print_ready(out, config, "http://127.0.0.1:8000", [instance(0)], 4.2)
    assert "API key required" in out.getvalue()
    assert "$API_KEY" in curl_command(config, "http://127.0.0.1:8000", "m")


def test_a_part_that_was_asked_to_leave_has_not_died(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    writer = LogWriter(io.BytesIO())
    display = ServeDisplay(writer, [F0, W0], lambda: None, lambda failure: None, json_logs=False, live_on=None)
    display.on_restarting(W0, "restarted", 0.0)
    display.on_restarting(W0, "boom", 0.5)
    writer.close()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [
        ("INFO", "worker-0 has left (restarted); starting it again"),
        ("WARNING", "worker-0 died: boom; starting it again in 0.5 s"),
    ]


def test_the_command_is_what_a_shell_takes() -> None:
    command = curl_command(ServeConfig(), "http://127.0.0.1:8000", "it's")
    words = shlex.split(command)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"


def test_the_command_knows_of_certificates() -> None:
    config = ServeConfig(frontend=FrontendConfig(tls_cert="my certs/server.pem", tls_client_ca="ca.pem"))
    words = shlex.split(curl_command(config, "https://127.0.0.1:8000", "m"))
    assert words[words.index("--cacert") + 1] == "my certs/server.pem"
    assert words[words.index("--cert") + 1] == "client.pem"


def test_without_a_registry_answer_there_is_still_a_url() -> None:
    out = io.StringIO()
    print_ready(out, ServeConfig(), "http://x:1", [], 1.0)
    assert "http://x:1/v1" in out.getvalue()


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (ProgressReport("ready"), "ready"),
        (ProgressReport("load", 5, None, "tensors"), "loading 5 tensors"),
        (ProgressReport("other", 1, 4, "files", "x"), "other 1 files of 4 files (25 %), x"),
    ],
)
def test_progress_in_words(report: ProgressReport, words: str) -> None:
    assert describe(report) == words


def test_reports_are_thinned_out_but_never_the_first_or_the_last_of_a_phase() -> None:
    read_end, write_end = os.pipe()
    reporter = Reporter(write_end)
    for done in range(1000):
        reporter.progress(Progress("load", done, 999.0, "bytes"))
    reporter.progress(Progress("ready"))
    reporter.failed(ModelError("no", hint="so"))
    reporter.progress(Progress("x" * 100_000))
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        reports = [decode_report(line) for line in pipe]
    assert len(reports) < 500
    assert reports[0] == ProgressReport("load", 0, 999, "bytes")
    assert reports[-3:] == [
        ProgressReport("load", 999, 999, "bytes"),
        ProgressReport("ready"),
        FailureReport("model_error", "no", "so"),
    ]
    reporter.progress(Progress("nobody listens"))


def test_what_is_no_report_is_refused() -> None:
    for line in (b"", b"{}", b'{"type": "progress"}', b"[1]", b'{"type": "other", "phase": "x"}'):
        with pytest.raises(msgspec.MsgspecError):
            decode_report(line)
