"""Small parts of the frontend: routes, records, histograms, cached files, remote errors."""

from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import errors
from headwater.errors import (
    ConfigError,
    ContextTooLong,
    HeadwaterError,
    ModelError,
    Overloaded,
    WorkerError,
)
from headwater.frontend import policies
from headwater.frontend.artifacts import MAX_ARTIFACT_BYTES, ArtifactCache, verify
from headwater.frontend.histogram import Histogram
from headwater.frontend.http.base import HttpRequest
from headwater.frontend.http.replies import Reply
from headwater.frontend.metrics import FrontendMetrics
from headwater.frontend.policies import load_policy
from headwater.frontend.records import OpenRequests, trace_id
from headwater.frontend.remote_errors import error_from
from headwater.frontend.routes import Route, RouteTable
from headwater.protocol.cluster import Artifact
from headwater.protocol.request import ErrorInfo
from headwater.router.policy import Decision, PolicySettings, decide
from headwater.router.request import RouteRequest
from headwater.router.worker import WorkerView


def request(method: str, path: str, **headers: bytes) -> HttpRequest:
    named = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return HttpRequest(method, path, "", named, b"", "test", request_id="r")


def handler(_request: object, _responder: object) -> None:
    """Never called here."""


TABLE = RouteTable(
    [
        Route("GET", "/v1/models", handler),
        Route("GET", "/v1/models/{model}", handler),
        Route("POST", "/v1/chat", handler),
        Route("GET", "/v1/chat", handler),
        Route("GET", "/v1/models/special/{rest}", handler),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "route", "params"),
    [
        ("GET", "/v1/models", "/v1/models", {}),
        ("HEAD", "/v1/models", "/v1/models", {}),
        ("GET", "/v1/models/a", "/v1/models/{model}", {"model": "a"}),
        ("GET", "/v1/models/org/name", "/v1/models/{model}", {"model": "org/name"}),
        ("GET", "/v1/models/special/x", "/v1/models/special/{rest}", {"rest": "x"}),
        ("POST", "/v1/chat", "/v1/chat", {}),
    ],
)
def test_routes_are_found(method: str, path: str, route: str, params: dict[str, str]) -> None:
    asked = request(method, path)
    found = TABLE.find(asked)
    assert isinstance(found, Route)
    assert found.path == route
    assert asked.path_params == params


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/", 404, None),
        ("GET", "/v1/models/", 404, None),
        ("GET", "/v1/chat/", 404, None),
        ("DELETE", "/v1/chat", 405, b"GET, POST"),
        ("POST", "/v1/models/x", 405, b"GET"),
    ],
)
def test_what_is_not_there_is_said(method: str, path: str, status: int, allow: bytes | None) -> None:
    found = TABLE.find(request(method, path))
    assert isinstance(found, Reply)
    assert found.status == status
    assert dict(found.headers).get(b"allow") == allow


def test_two_handlers_for_one_route_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two handlers"):
        RouteTable([Route("GET", "/a", handler), Route("GET", "/a", handler)])


def test_records_are_unique_among_the_open_ones() -> None:
    records = OpenRequests()
    first, second = request("GET", "/"), request("GET", "/")
    assert records.begin(first, "/a").request_id == "r"
    assert records.begin(second, "/a").request_id == "r~2"
    assert second.request_id == "r~2"
    assert records.end("r") is not None
    assert records.end("r") is None
    assert records.begin(request("GET", "/"), "/a").request_id == "r"
    assert len(records) == 2


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "4bf92f3577b34da6a3ce929d0e0e4736"),
        (b"00-00000000000000000000000000000000-00f067aa0ba902b7-01", ""),
        (b"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", ""),
        (b"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", ""),
        (b"00-4bf92f-00f067aa0ba902b7-01", ""),
        (b"", ""),
    ],
)
def test_trace_ids(header: bytes, expected: str) -> None:
    assert trace_id(header) == expected


@given(values=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), max_size=50))
def test_histograms_count_cumulatively(values: list[tuple[float, int]]) -> None:
    bounds = (0.5, 1.0, 10.0)
    histogram = Histogram(bounds)
    for value, count in values:
        histogram.observe(value, count)
    buckets = dict(histogram.cumulative())
    for bound in bounds:
        assert buckets[str(bound)] == sum(count for value, count in values if value <= bound)
    assert buckets["+Inf"] == sum(count for _, count in values)
    assert histogram.sum == pytest.approx(sum(value * count for value, count in values))


def test_metrics_stay_bounded_whatever_names_come() -> None:
    metrics = FrontendMetrics()
    for number in range(5000):
        metrics.model(f"m{number}").generated_tokens += 1
        metrics.answered("/a", number, True)
    assert len(metrics.models) <= 257
    assert sum(model.generated_tokens for model in metrics.models.values()) == 5000
    assert len(metrics.answers) <= 2048


def test_cached_files_are_believed_for_their_digest_alone(tmp_path: Path) -> None:
    data = b"content"
    artifact = Artifact("tokenizer.json", sha256(data).hexdigest(), len(data))
    cache = ArtifactCache(tmp_path / "new" / "cache")
    assert cache.load(artifact) is None
    cache.store(artifact, data)
    assert cache.load(artifact) == data
    (tmp_path / "new" / "cache" / artifact.digest).write_bytes(b"tampered")
    assert cache.load(artifact) is None
    (tmp_path / "new" / "cache" / artifact.digest).write_bytes(b"CONTENT")
    assert cache.load(artifact) is None
    with pytest.raises(ModelError, match="does not match"):
        verify(artifact, b"CONTENT")
    assert [path.name for path in (tmp_path / "new" / "cache").iterdir()] == [artifact.digest]


@pytest.mark.parametrize("digest", ["", "../../../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "/"])
def test_digests_that_are_none_are_refused(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ModelError, match="digest"):
        ArtifactCache(tmp_path).load(Artifact("x", digest, 1))


def test_files_that_are_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="at most"):
        ArtifactCache(tmp_path).load(Artifact("x", "0" * 64, MAX_ARTIFACT_BYTES + 1))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    data = b"content"
    artifact = Artifact("tokenizer.json", sha256(data).hexdigest(), len(data))
    ArtifactCache(tmp_path / "file" / "below").store(artifact, data)
    ArtifactCache(None).store(artifact, data)
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        (ErrorInfo("overloaded", "full", 503, True), Overloaded),
        (ErrorInfo("context_length_exceeded", "long", 400, param="prompt"), ContextTooLong),
        (ErrorInfo("from_the_future", "new", 500), WorkerError),
    ],
)
def test_remote_errors_find_their_class(info: ErrorInfo, kind: type[HeadwaterError]) -> None:
    error = error_from(info)
    assert type(error) is kind
    assert str(error) == info.message
    assert getattr(error, "param", None) == info.param


def test_every_error_survives_the_wire() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadwaterError)]
    leaves = [kind for kind in kinds if not any(kind in other.__bases__ for other in kinds)]
    assert len(leaves) > 10
    for leaf in leaves:
        assert type(error_from(ErrorInfo.of(leaf("text")))) is leaf


class FirstWorker:
    """A routing policy as somebody else would write it."""

    name: ClassVar[str] = "first"
    uses_residency: ClassVar[bool] = False

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        return decide(self.name, request, workers[0], workers)


def test_policies_by_name() -> None:
    assert load_policy("round_robin").name == "round_robin"
    with pytest.raises(ConfigError) as caught:
        load_policy("least_loded")
    assert "least_loaded" in str(caught.value.hint)
    assert load_policy("delay", PolicySettings(decode_share=0.0)).name == "delay"
    with pytest.raises(ConfigError, match="from 0 to 1"):
        load_policy("delay", PolicySettings(decode_share=2.0))


def test_policies_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty lines of somebody's own."""

    def offered(**_: str) -> list[EntryPoint]:
        here = "headwater.router"
        return [
            EntryPoint("first", f"{FirstWorker.__module__}:FirstWorker", here),
            EntryPoint("gone", "no_such_module:Policy", here),
            EntryPoint("odd", "os:getcwd", here),
        ]

    monkeypatch.setattr(policies, "entry_points", offered)
    assert load_policy("first").name == "first"
    for name in ("gone", "odd"):
        with pytest.raises(ConfigError, match=name):
            load_policy(name)
    with pytest.raises(ConfigError) as caught:
        load_policy("fisrt")
    assert "did you mean first?" in str(caught.value.hint)
